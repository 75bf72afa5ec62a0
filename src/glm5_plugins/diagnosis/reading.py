"""Reading a server's log: which failure came first, and what the catalogue knows about it.

What counts is the first cause, not the last symptom. A chained traceback prints its root first; a rank that fails
takes the others down after it; a server that became ready left its start-up behind. Where the first failure is one that
the catalogue does not have, the answer is "unknown", even if something known follows. So it is where a log tells of no
failure, but does not show that the server became ready either.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from glm5_plugins.diagnosis.signatures import CATALOGUE, Frame, Signature

Verdict = Literal["known", "unknown", "no failure"]

_START = 4096  # bytes by which a text is told from what is none
_PACKED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9]1AY)|(?P<xz>\xfd7zXZ)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<zip>PK\x03\x04)"
)
_ODD = re.compile("[\x01-\x08\x0e-\x1a\x1c-\x1f\ufffd]")  # controls that no log has, and what is no UTF-8
_LONGEST = 4000  # characters of a line that are looked at; only the server arguments are longer
_BEHIND, _AHEAD = 200, 100
_MOST_EVENTS = 200

_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ISO_TIME = rf"\d{{4}}-\d\d-\d\d[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?"
# Put before each line, and before one another, by docker logs -t, containerd, journalctl and ts; by kubectl logs
# --prefix; by docker compose and services; by torchrun, srun and Ray. SGLang's own `[2026-05-22 02:11:00 TP0]` is none.
_PREFIX = re.compile(
    r"^(?:"
    rf"(?:{_ISO_TIME}|[A-Z][a-z]{{2}} (?:[ \d]\d {_TIME}|{_ISO_TIME} [A-Z]{{3,5}}))(?: |$)"
    r"(?:(?:stdout|stderr) [FP](?: |$)|[\w.-]{1,64} [\w./@+-]{1,64}(?:(?<=kernel)|\[\d+\]):(?: |$))?|"
    rf"\[\d{{4}}-\d\d-\d\dT[\d:.,]{{8,18}}(?:Z|[+-]\d\d:?\d\d)?\](?: |$)|"
    r"\[pod/[\w./-]{1,400}\](?: |$)|"
    r"[\w.@-]{1,120} +\| ?|"
    r"\[(?:rank|default)\d+\]: ?|"
    r" {0,3}\d{1,4}:(?: |$)|"
    r"\([\w:]+ pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"){1,5}"
)
# Where every line begins with such a stamp, and one goes on as SGLang's own lines do not, another program put it there.
_STAMP_OF_ANOTHER = re.compile(rf"^\[\d{{4}}-\d\d-\d\d {_TIME}\](?: |$)")
_NOT_OF_SGLANG = re.compile(r"^(?:\s+\S|\[\d{4}-)")
_HEAD = 50  # lines that are looked at for it
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAMP = re.compile(r"^\[(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?P<process>(?: [A-Z]+\d+)*)\]")
_NOISE = (
    *("Decode batch", "Prefill batch", "HTTP/1.1", "Ignore import error when loading", "server_args=", "Warning:"),
    *("To silence this warning", "[Autotuner]: "),
)
_READY = "The server is fired up and ready to roll"
_SERVES = (_READY, "Decode batch")  # the latter alone where a log was cut off in front
_STARTS = re.compile(r"server_args=(?:ServerArgs\(|\{)")
_STAGES = (
    "Init torch distributed begin",
    "Init parallel begin",
    "Load weight begin",
    "Load weight end",
    "KV Cache is allocated",
    "Capture cuda graph begin",
    "Capture piecewise CUDA graph begin",
    "Capture decode",
    "Capture prefill",
    "Capture cuda graph end",
    _READY,
)

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FATAL_HEAD = re.compile(r"hit an exception: |^Process \S+:$|crashed with")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_MACHINERY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/torch/_dynamo/")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


@dataclass(frozen=True)
class Diagnosis:
    """What a log says about the first failure in it."""

    verdict: Verdict
    name: str
    cause: str
    cure: str
    link: str = ""
    line: int = 0
    """Line of the log, counted from 1; 0 where there is none to show."""
    evidence: str = ""
    """That line, as it stands."""
    frame: str = ""
    """The source line that decided: where the error was raised, or the last line that Dynamo traced."""
    process: str = ""
    """The process that failed, as SGLang labels it, such as `TP3`."""
    stage: str = ""
    """The last stage of the start that the log tells of before the failure."""
    later: tuple[str, ...] = ()
    """Names of other failures after this one, which may follow from it."""

    def __str__(self) -> str:
        where = f" (line {self.line}{', ' + self.process if self.process else ''})" if self.line else ""
        return f"{self.name}{where}: {self.cause}"


@dataclass(frozen=True)
class _Line:
    number: int
    text: str
    process: str


@dataclass
class _Event:
    """A line that a signature may know, or an exception that none knows."""

    line: _Line
    stage: str
    candidates: list[tuple[Signature, dict[str, str]]]
    raised: bool
    fatal: bool
    failure: int
    """Number of the failure that it is part of: a chain of tracebacks with the text of its exceptions is one."""
    behind: list[_Line]
    ahead: list[_Line] = field(default_factory=list)

    def known(self) -> tuple[Signature, dict[str, str]] | None:
        """The first signature whose surroundings are there."""
        around = (*self.behind, self.line, *self.ahead)
        for signature, groups in self.candidates:
            if not signature.near or any(re.search(signature.near, line.text) for line in around):
                return signature, groups
        return None

    def frame(self, wanted: Frame = "raised") -> str:
        """Where the error was raised, or the last line of the code that Dynamo traced."""
        if wanted == "user code" and (found := _last_frame_of_user_code(self.ahead)):
            return found
        for line in reversed(self.behind):
            if _TRACEBACK in line.text:
                break
            if match := _FRAME.match(line.text):
                return _show(match)
        return ""


class NotText(OSError):
    """What was given as a log is none; `mend` says what to do."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what)
        self.mend = mend


def diagnose_file(path: Path) -> Diagnosis:
    """Read a log file; its encoding does not matter.

    Raises:
        NotText: The file is packed, or no log at all.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return diagnose_stream(file)


def diagnose_stream(stream: BufferedReader) -> Diagnosis:
    """Read a log from a stream that need not be seekable, as `diagnose_file` does."""
    _check_that_it_is_text(stream.peek(_START)[:_START])
    text = TextIOWrapper(stream, encoding="utf-8", errors="replace", newline=None)
    try:
        return diagnose(_records(text))
    finally:
        text.detach()  # the stream is the caller's to close


def diagnose(lines: Iterable[str]) -> Diagnosis:
    """Name the first failure in the lines of a log."""
    following = iter(lines)
    head = list(islice(following, _HEAD))
    reader = _Reader(_stamped_by_another(head))
    for line in chain(head, following):
        reader.read(line)
    return reader.conclude()


def _check_that_it_is_text(start: bytes) -> None:
    if packed := _PACKED.match(start):
        tool = "unzip -p" if packed.lastgroup == "zip" else f"{packed.lastgroup} -dc"
        raise NotText(f"is packed by {packed.lastgroup}", f"Unpack it: `{tool} LOG | glm5-plugins diagnose -`.")
    text = start.replace(b"\0", b"").decode("utf-8", "replace")  # a log emptied while it is written to begins with NULs
    if len(_ODD.findall(text)) > max(20, len(text) // 3):
        raise NotText("is no text", "Give what the server printed to standard output and standard error.")


def _records(file: IO[str]) -> Iterator[str]:
    """Lines of bounded length: a log without line ends must not fill the memory."""
    while text := file.readline(_LONGEST * 50):
        yield text


def _bare(raw: str) -> str:
    """A line without colours, and without what others put before it."""
    return _PREFIX.sub("", _COLOUR.sub("", raw[:_LONGEST]))


def _stamped_by_another(head: Iterable[str]) -> bool:
    lines = [line for line in (_bare(raw.rstrip("\r\n")) for raw in head) if line.strip()]
    return all(_STAMP_OF_ANOTHER.match(line) for line in lines) and any(
        _NOT_OF_SGLANG.match(_bare(_STAMP_OF_ANOTHER.sub("", line))) for line in lines
    )


class _Reader:
    """Goes through a log once and keeps the failures since the server was last ready."""

    def __init__(self, stamped_by_another: bool) -> None:
        self._stamped_by_another = stamped_by_another
        self._behind: deque[_Line] = deque(maxlen=_BEHIND)
        self._events: list[_Event] = []
        self._open: deque[_Event] = deque()
        self._seen_before: set[str] = set()
        self._number = 0
        self._failures = 0
        self._failure = 0  # the one that is being printed, or 0
        self._fatal = False
        self._in_frames = False
        self._ready = False
        self._traceback: _Line | None = None  # where the first one begins
        self._stage = self._process = self._last = ""

    def read(self, raw: str) -> None:
        """Take one line, or what a progress bar wrote over itself."""
        self._number += 1
        for signature in CATALOGUE:
            if signature.before and signature.name not in self._seen_before and re.search(signature.before, raw):
                self._seen_before.add(signature.name)
        for part in raw.rstrip("\r\n").split("\r"):
            text = _bare(part)
            self._take(_bare(_STAMP_OF_ANOTHER.sub("", text)) if self._stamped_by_another else text)

    def _take(self, text: str) -> None:
        if stamp := _STAMP.match(text):
            self._process = stamp["process"].strip()
            self._failure, self._in_frames = 0, False
        line = _Line(self._number, text, self._process)
        for event in self._open:
            event.ahead.append(line)
        while self._open and len(self._open[0].ahead) >= _AHEAD:
            self._open.popleft()
        self._examine(line)
        self._behind.append(line)
        self._last = text.strip() or self._last

    def _examine(self, line: _Line) -> None:
        text = line.text
        self._ready = any(sign in text for sign in _SERVES) or (self._ready and not _STARTS.search(text))
        if any(noise in text for noise in _NOISE):
            return
        self._stage = next((stage for stage in _STAGES if stage in text), self._stage)
        if _READY in text:  # whatever happened before did not keep the server from getting here
            self._events.clear()
            self._open.clear()
            self._traceback = None
        if _TRACEBACK in text:
            self._traceback = self._traceback or line
            self._begin_traceback(text)
            return
        raised = self._in_frames and _RAISED.match(text) is not None
        if raised:
            self._in_frames = False
        if (candidates := self._candidates(text)) or raised:
            self._note(line, candidates, raised)

    def _begin_traceback(self, text: str) -> None:
        above = next((line.text for line in reversed(self._behind) if line.text.strip()), "")
        if not (self._failure and any(chained in above for chained in _CHAINED)):
            self._failures += 1
            self._failure = self._failures
            self._fatal = any(_FATAL_HEAD.search(head) for head in (text, above))
        self._in_frames = True

    def _candidates(self, text: str) -> list[tuple[Signature, dict[str, str]]]:
        if _FRAME.match(text):
            return []
        found = []
        for signature in CATALOGUE:
            if signature.before and signature.name not in self._seen_before:
                continue
            if match := re.search(signature.pattern, text):
                found.append((signature, {key: value or "" for key, value in match.groupdict().items()}))
        return found

    def _note(self, line: _Line, candidates: list[tuple[Signature, dict[str, str]]], raised: bool) -> None:
        if not self._failure:
            self._failures += 1
        number = self._failure or self._failures
        event = _Event(line, self._stage, candidates, raised, self._fatal, number, list(self._behind))
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
            self._open.append(event)

    def conclude(self) -> Diagnosis:
        """Choose the first failure that counts."""
        failures: dict[int, list[_Event]] = {}
        for event in self._events:
            failures.setdefault(event.failure, []).append(event)
        known: list[tuple[_Event, Signature, dict[str, str]]] = []
        strange: list[_Event] = []
        symptoms: list[tuple[_Event, Signature]] = []
        for events in failures.values():
            found = [(event, *answer) for event in events if (answer := event.known())]
            causes = [one for one in found if not one[1].symptom]
            if causes:
                known.append(next((one for one in causes if not one[1].general), causes[0]))
            elif found:
                symptoms.append(found[0][:2])
            elif raised := [event for event in events if event.raised]:
                strange.append(raised[0])
        # A log also holds exceptions that were dealt with, so one that nobody knows counts where its process ended by
        # it; and where nothing else is there to count, the last one does.
        counts = [event for event in strange if event.fatal] or ([] if known else strange[-1:])
        if counts and (not known or counts[0].line.number < known[0][0].line.number):
            return _unknown(counts[0], [signature.name for _, signature, _ in known])
        if known:
            root = next((event for event in failures[known[0][0].failure] if event.raised), known[0][0])
            return _known(*known[0], root, [signature.name for _, signature, _ in known[1:]])
        if symptoms:
            return _symptom(*symptoms[0])
        if self._traceback:
            return _unread(self._traceback, self._stage)
        last = f"Its last line: {self._last[:300]}"
        if self._ready:
            return Diagnosis("no failure", "no failure", f"The log tells of no failure. {last}", "", stage=self._stage)
        cause = f"The log tells of no failure, and ends before the server was ready. {last}"
        return _unfinished(cause if self._last else "The log is empty.", self._stage)


def _known(
    event: _Event, signature: Signature, groups: dict[str, str], root: _Event, later: Iterable[str]
) -> Diagnosis:
    following = next((line.text.strip() for line in event.ahead if line.text.strip()), "")
    values = _Groups(groups, next=following)
    return Diagnosis(
        "known",
        signature.name,
        _fill(signature.cause, values),
        _fill(signature.cure, values),
        signature.link,
        frame=(event if signature.frame == "user code" else root).frame(signature.frame),
        later=tuple(name for name in dict.fromkeys(later) if name != signature.name),
        **_place(event),
    )


def _unknown(event: _Event, later: Iterable[str]) -> Diagnosis:
    names = tuple(dict.fromkeys(later))
    cure = "Read the traceback that ends on the line shown"
    return Diagnosis(
        "unknown",
        "unknown",
        "The first failure in this log is none that the catalogue knows.",
        f"{cure}; what is named as later came after it and may follow from it." if names else f"{cure}.",
        frame=event.frame(),
        later=names,
        **_place(event),
    )


def _symptom(event: _Event, signature: Signature) -> Diagnosis:
    cause = f"The log shows a consequence only ({signature.name}). {signature.cause}"
    return Diagnosis("unknown", "unknown", cause, signature.cure, **_place(event))


def _unread(head: _Line, stage: str) -> Diagnosis:
    """A traceback, and not the exception at its end."""
    return Diagnosis(
        "unknown",
        "unknown",
        "A traceback begins on the line shown, and the exception at its end is missing or cannot be read.",
        "Read on from that line; what stands before each line, or lines of others in between, may hide the exception.",
        line=head.number,
        evidence=head.text.strip()[:500],
        process=head.process,
        stage=stage,
    )


def _unfinished(cause: str, stage: str) -> Diagnosis:
    cure = (
        "While the server still starts, diagnose its log again later (only the first node's ever says that it is "
        "ready). Where it has ended, why is not in this log: write standard error into it, too (2>&1)."
    )
    return Diagnosis("unknown", "unknown", cause, cure, stage=stage)


def _place(event: _Event) -> dict[str, Any]:
    return {
        "line": event.line.number,
        "evidence": event.line.text.strip()[:500],
        "process": event.line.process,
        "stage": event.stage,
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Put what the pattern caught into a sentence, and drop the punctuation around what it did not catch."""
    return " ".join(text.format_map(values).split()).removesuffix(":").replace(" ()", "")


class _Groups(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def _last_frame_of_user_code(lines: Iterable[_Line]) -> str:
    """The last frame below `from user code:` that is neither Python's own library nor Dynamo, or the last one."""
    inside, last, last_of_a_package = False, "", ""
    for line in lines:
        if "from user code:" in line.text:
            inside = True
        elif inside and (match := _FRAME.match(line.text)):
            last = _show(match)
            if not _MACHINERY.search(match["file"]):
                last_of_a_package = last
        elif inside and line.text.strip() and not line.text.startswith(" "):
            break
    return last_of_a_package or last


def _show(match: re.Match[str]) -> str:
    return f"{match['file']}:{match['line']} in {match['function']}"
