"""A launch command as people type it: variables in front, quotes, comments, several lines, docker, `sglang serve`."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from glm5_plugins.errors import Glm5Error
from glm5_plugins.findings import Finding

# What starts a server, behind a python or alone.
MODULES = ("sglang.launch_server", "dynamo.sglang", "sglang", "serve")
LAYER = "glm5_plugins.launch"
LARGEST = 256 * 1024
"""Characters of the longest command that is read."""

_ASSIGNMENT = re.compile(r"(?:-e|--env=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VERSION = re.compile(r"sglang(?:\[\w+\])?(?::v?|==)(\d+\.\d+\.\d+(?:\.post\d+)?)")
# Those that take `-e NAME=VALUE`, and what they do with a container.
_DOCKERS = ("docker", "podman", "nerdctl")
_STARTING = ("run", "create", "exec")


class CommandError(Glm5Error):
    """What was typed is no launch of a server, or none that can be run."""


@dataclass(frozen=True)
class Command:
    """A launch, taken apart.

    Args:
        environment: Variables that are set in front of it, or handed into a container.
        front: The words up to the server's flags, such as `CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server`.
        flags: The words after.
        findings: What looks like a slip of the hand.
        spelled: How words stand in the text that was typed, where it was one text: quotes and variables as they were.
        before: The text up to it.
        after: The text behind it, and redirections.
        shell: The first thing in the text that takes a shell to run.
        inside: The word that holds it, as that of `bash -c`; else empty.
    """

    environment: dict[str, str]
    front: tuple[str, ...]
    flags: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    shell: str = ""
    inside: str = ""

    @property
    def version(self) -> str | None:
        """The SGLang version that a container image or a pip command in front names."""
        found = _VERSION.findall(" ".join([self.before, *self.front]))
        return found[-1] if found else None

    @property
    def leading(self) -> dict[str, str]:
        """The variables in front of the program."""
        return dict(word.split("=", 1) for word in self.front[: self._program_at])

    @property
    def program(self) -> list[str]:
        """What to run: all words but the variables in front."""
        return [*self.front[self._program_at :], *self.flags]

    @property
    def _program_at(self) -> int:
        plain = (i for i, word in enumerate(self.front) if word[:1] == "-" or not _ASSIGNMENT.fullmatch(word))
        return next(plain, len(self.front))

    @property
    def in_container(self) -> bool:
        """Whether docker or the like starts it."""
        return any(_name(word) in (*_DOCKERS, "kubectl") for word in self.front)

    @property
    def module(self) -> str:
        """What starts the server: a module, or `sglang serve`; empty when only flags were typed."""
        words = [word for word in self.front if _name(word) in (*MODULES, "launch_server.py")]
        return " ".join(words[-2:] if words[-1:] == ["serve"] else words[-1:])

    @property
    def is_serve(self) -> bool:
        """Whether `sglang serve` starts it, which looks at its words before SGLang's parser does."""
        return self.module.endswith("serve")

    @property
    def text(self) -> str:
        """It whole, to be pasted into a shell."""
        words = (self.spelled.get(word) or _quoted(word) for word in (*self.front, *self.flags))
        return self.before + " ".join(words) + self.after

    def with_layer(self) -> Command:
        """The same, with the layer in front: SGLang up to 0.5.10 has no other way in that needs no set-up."""
        found = self.with_program()
        if found.front[-2:] == ("-m", "sglang.launch_server"):
            found = replace(found, front=(*found.front[:-1], LAYER, "sglang.launch_server"))
        return found

    def with_program(self) -> Command:
        """The same, with SGLang's own program where only flags were typed."""
        if self.front:
            return self
        front = (sys.executable, "-m", "sglang.launch_server")
        return replace(self, front=front, spelled={**self.spelled, sys.executable: "python"})

    def setting(self, variables: Mapping[str, str]) -> Command:
        """The same, with variables set where the server sees them: in front, or by `-e` in a container.

        Raises:
            CommandError: What starts the container takes no variables.
        """
        words = [f"{name}={value}" for name, value in variables.items()]
        at = self._program_at
        if words and self.in_container:
            docker = next((i for i, word in enumerate(self.front) if _name(word) in _DOCKERS), len(self.front))
            at = next((i + 1 for i, word in enumerate(self.front) if i > docker and word in _STARTING), 0)
            if not at:
                names = ", ".join(variables)
                what = f"{names} cannot be handed into the container by {self.front[self._program_at]!r}."
                raise CommandError(what, f"Use {' or '.join(_DOCKERS)}, or set them where the container is defined.")
            words = [word for assignment in words for word in ("-e", assignment)]
        return replace(self, front=(*self.front[:at], *words, *self.front[at:]))

    def adding(self, flags: Sequence[str]) -> Command:
        """The same, with more flags behind."""
        return replace(self, flags=(*self.flags, *flags))


def read(words: Sequence[str]) -> Command:
    """Take a command apart.

    Args:
        words: As a shell hands them over; or one text with everything, as copied from a page.

    Raises:
        CommandError: There is no launch of SGLang in it, or a quote is not closed.
    """
    if len(words) == 1 and (" " in words[0] or "\n" in words[0]):
        return _read_text(words[0])
    slips = [word for word in words if word and word.strip() in ("", "\\")]
    kept = [word for word in words if word not in slips]
    found = next(filter(None, (reader(kept) for reader in _READERS)), None)
    if found is None:
        raise _no_launch(words)
    found = _settled(found, {})
    return replace(found, findings=(*found.findings, _SLIP)) if slips else found


def _plain(words: Sequence[str]) -> Command | None:
    start = _start(words)
    return None if start is None else Command(_assigned(words[:start]), tuple(words[:start]), tuple(words[start:]))


def _flags_alone(words: Sequence[str]) -> Command | None:
    return Command({}, (), tuple(words[words[0] == "--" :])) if words and words[0].startswith("--") else None


def _inside_a_word(words: Sequence[str]) -> Command | None:
    for word in words:
        if "sglang" in word and len(word.split()) > 1 and len(words) > 1:
            with contextlib.suppress(CommandError):
                found = _read_text(word)
                if found.front:
                    environment = {**_assigned(words), **found.environment}
                    return replace(found, environment=environment, front=(*words, *found.front), inside=word)
    return None


# In this order.
_READERS = (_plain, _flags_alone, _inside_a_word)


def _start(words: Sequence[str]) -> int | None:
    """Index of the first flag of the server."""
    for index, word in enumerate(words):
        behind = words[index - 1] if index else ""
        if word in ("sglang.launch_server", "dynamo.sglang") and behind in ("-m", LAYER):
            return index + 1
        if (word == "serve" and _name(behind) == "sglang") or word.endswith("sglang/launch_server.py"):
            return index + 1
    return None


def _settled(found: Command, exported: Mapping[str, str]) -> Command:
    """With the variables that reach the server, and a word on those of the layer that do not."""
    reaching = {**exported, **found.environment}
    if not found.in_container:
        return replace(found, environment=reaching)
    outside = {**exported, **found.leading}
    handed = {*_assigned(found.front[found._program_at :]), *found.front}
    lost = {name: value for name, value in outside.items() if name not in handed}
    findings = [
        Finding("error", f"{name} is set outside of the container.", f"Hand it in: -e {name}={shlex.quote(value)}")
        for name, value in lost.items()
        if name.startswith("GLM5_")
    ]
    kept = {name: value for name, value in reaching.items() if name not in lost}
    return replace(found, environment=kept, findings=(*found.findings, *findings))


def _no_launch(words: Sequence[str]) -> CommandError:
    what = " ".join(words)[:60] or "nothing"
    mend = "Give it whole: glm5-plugins check -- python -m sglang.launch_server --model-path …"
    return CommandError(f"There is no launch of SGLang in {what!r}.", mend)


def _assigned(words: Sequence[str]) -> dict[str, str]:
    return {match[1]: match[2] for match in map(_ASSIGNMENT.fullmatch, words) if match is not None}


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def is_filled_in(word: str) -> bool:
    """Whether a shell puts something in place of a part of a word, or a person has to."""
    return re.search(r"\$[\w({@*#?!$-]|`|<[A-Za-z_][\w./:-]*>", word) is not None


def _quoted(word: str) -> str:
    name, is_set, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if is_set and name.isidentifier() else shlex.quote(word)


# --- the text of a shell -------------------------------------------------------------------------------------

# shlex knows neither lines, nor comments at the start of words only, nor `$(…)`.
_PART = r"""
    \\ (?: \r?\n | (?! [^\S\n]* (?: \n | \Z ) ) . )             # escaped; with a line break, nothing
    | ' [^']* '
    | " (?: [^"\\] | \\. )* "
    | \$ \( (?: [^()] | \( (?: [^()] | \( [^()]* \) )* \) )* \)   # what a command prints
    | ` [^`]* `
    | \$ \{ (?: [^{}] | \{ [^{}]* \} )* \}
    | < [A-Za-z_] [\w./:-]* >                                   # a gap that a page leaves to its reader
    | [^\s'"\\`;&|<>()]
"""
_PARTS = re.compile(_PART, re.DOTALL | re.VERBOSE)
_TOKENS = re.compile(
    rf"""
    (?P<blank> (?: [^\S\n] | \\ \r?\n | \\ \s* \Z )+ )
    | (?P<slip> \\ [^\S\n]+ \n )
    | (?P<comment> \# [^\n]* )
    | (?P<redirection> (?! < [A-Za-z_] [\w./:-]* > ) \d* (?: &>>? | [<>]& | >\| | >>? | <{{1,3}} ) )
    | (?P<word> (?: {_PART} )+ )
    | (?P<end> \n | && | \|\|? | ;;? | [&()] )
    """,
    re.DOTALL | re.VERBOSE,
)
# Words after which another command begins.
_RESERVED = ("if", "then", "else", "elif", "while", "until", "do", "{")

_SLIP = Finding(
    "error", "A backslash has something behind it: the line does not go on there.", "Take away what is behind it."
)


@dataclass
class _Simple:
    """One command of a text: its words by what they mean and as they stand there, and where it is."""

    words: list[str] = field(default_factory=list)
    spelled: list[str] = field(default_factory=list)
    start: int = 0
    end: int = 0
    redirections: dict[int, str] = field(default_factory=dict)
    closed: str = ""


def _read_text(text: str) -> Command:
    if len(text) > LARGEST:
        raise CommandError(f"The command is longer than {LARGEST} characters.", "Give the launch command alone.")
    findings: list[Finding] = []
    commands = list(_commands(text, findings))
    index, found = next(
        (
            (at, launch)
            for reader in _READERS
            for at, one in enumerate(commands)
            if (launch := reader(one.words)) is not None
        ),
        (0, None),
    )
    if found is None:
        raise _no_launch([word for one in commands for word in one.words])
    one = commands[index]
    exported = [word for other in commands[:index] if other.words[0] == "export" for word in other.words]
    between = [raw for at, raw in one.redirections.items() if one.start < at < one.end]
    later = commands[index + 1 :]
    if one.closed == "\n" and later and later[0].words[0].startswith("--"):
        what = f"The line that begins with {later[0].words[0]!r} is no part of the command, which ends before it."
        findings.append(Finding("warning", what, "End the line before it in a backslash."))
    found = _settled(found, _assigned(exported))
    return replace(
        found,
        findings=(*findings, *found.findings),
        spelled=dict(zip(one.words, one.spelled, strict=True)),
        before=text[: one.start],
        after=" ".join(["", *between]) + text[one.end :].rstrip(),
        shell=_shell(commands, index),
    )


def _commands(text: str, findings: list[Finding]) -> Iterator[_Simple]:
    """The commands of a text that have words."""
    one, at, redirecting = _Simple(), 0, ""
    while at < len(text):
        token = _TOKENS.match(text, at)
        if token is None:
            raise CommandError("The command cannot be taken apart: a quote is not closed.", "Close it.")
        kind, raw, at = str(token.lastgroup), token[0], token.end()
        if kind == "slip":
            findings.append(_SLIP)
        elif kind == "redirection":
            redirecting = raw
        elif kind == "word" and redirecting:
            one.redirections[token.start()] = redirecting + raw
            redirecting = ""
        elif kind == "word" and (one.words or raw not in _RESERVED):
            one.start = token.start() if not one.words else one.start
            one.end = at
            one.words.append(_meant(raw))
            one.spelled.append(re.sub(r"\\\r?\n", "", raw))
        elif kind == "end":
            redirecting = ""
            if one.words:
                one.closed = raw
                yield one
                one = _Simple()
    if one.words:
        yield one


def _meant(raw: str) -> str:
    """A word without its quotes; what a shell would fill in stays."""
    return "".join(map(_unquoted, _PARTS.findall(raw)))


def _unquoted(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    if part[0] == '"':
        return re.sub(r'\\(?:\r?\n|([\\"$`]))', r"\1", part[1:-1])
    if part[0] == "\\":
        return "" if part[-1] == "\n" else part[1:]
    return part


def _shell(commands: Sequence[_Simple], index: int) -> str:
    """The first thing that takes a shell: another command, a redirection, a word to fill in."""
    one = commands[index]
    others = [" ".join(other.spelled) for at, other in enumerate(commands) if at != index]
    needed = [
        *others,
        *one.redirections.values(),
        *filter(_takes_shell, one.spelled),
        *(["&"] if one.closed == "&" else []),
    ]
    return needed[0][:60] if needed else ""


def _takes_shell(raw: str) -> bool:
    """Whether a shell would put something else in place of a word as it stands."""
    parts = _PARTS.findall(raw)
    return raw[0] == "~" or any(
        part[0] in "$`<*?" or (part[0] == '"' and is_filled_in(re.sub(r"\\.", "", part))) for part in parts
    )
