"""Builds modules once on a node: one process compiles, the others wait, and nobody loads what is half-written.

FlashInfer locks each module while it builds, but says nothing meanwhile, has no time-out, and leaves compilers
running when its process is killed; those go on writing into the folder that the next process builds in. Here one lock
covers the whole cache folder, compilers end with the process that started them, and whoever takes the lock after a
killed builder first ends what that builder left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from glm5_plugins.errors import NotInForce
from glm5_plugins.warmup import guard
from glm5_plugins.warmup.specs import Artifact, State
from glm5_plugins.warmup.toolkit import Toolkit

if TYPE_CHECKING:
    from filelock import FileLock

Say = Callable[[str], None]

_MARK = "_GLM5_WARMUP_BUILD"  # in the environment of everything a builder starts
_MEMORY_PER_COMPILER = 3 << 30
_EVERY_S = 10.0


@dataclass(frozen=True)
class Failure:
    """A module that could not be built."""

    module: str
    why: str
    log: str
    at: float

    def error(self) -> NotInForce:
        """The failure as two lines."""
        mend = _mend_for(self.why) or f"The whole output is in {self.log}."
        return NotInForce(f"The module {self.module} was not built: {self.why}", mend)


@dataclass
class Journal:
    """What the processes of a cache folder tell each other, in a file beside the lock.

    Args:
        path: The file.
    """

    path: Path
    building: dict[str, Any] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read the journal; one that is absent or cannot be read says nothing."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, dict(found["building"]), list(found["failed"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path)

    def write(self) -> None:
        """Write the journal whole or not at all."""
        text = json.dumps({"building": self.building, "failed": self.failed})
        descriptor, name = tempfile.mkstemp(prefix=".journal.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    def __str__(self) -> str:
        if not self.building:
            return "another process"
        names = ", ".join(self.building["modules"])
        return f"process {self.building['pid']} on {self.building['host']}, which builds {names}"


@dataclass
class Compiler:
    """One running compilation.

    Args:
        artifact: What is built.
        process: The guard above ninja, leader of a session.
        log: Where the output is kept, as far as the disk allows.
        lock: FlashInfer's own lock of the module, held while it is built.
    """

    artifact: Artifact
    process: subprocess.Popen[str]
    log: Path
    lock: FileLock
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    step: int = 0
    steps: int = 0
    _reader: threading.Thread | None = None

    def follow(self) -> None:
        """Read the output from now on; the compiler never waits for a reader or a disk."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        with contextlib.ExitStack() as stack:
            descriptor = -1
            with contextlib.suppress(OSError):
                descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                stack.callback(os.close, descriptor)
            for line in output:
                self.lines.append(line.rstrip())
                if step := re.match(r"\[(\d+)/(\d+)\]", line):
                    self.step, self.steps = int(step[1]), int(step[2])
                with contextlib.suppress(OSError):  # a full disk must not stop the reading
                    os.write(descriptor, line.encode(errors="replace"))

    def __str__(self) -> str:
        return f"{self.artifact.name} ({self.step} of {self.steps} steps)" if self.steps else self.artifact.name

    def finish(self) -> None:
        """After its end: take the rest of the output, and let others at the module."""
        if self._reader is not None:
            self._reader.join(5)
        self.lock.release()

    def why(self) -> str:
        """The line of the output that says most about a failure."""
        lines = [line.strip() for line in self.lines if line.strip()]
        for mark in ("No space left on device", "fatal error", "error:", "FAILED", "Error"):
            for line in lines:
                if mark in line and len(line) < 600:
                    return line[:300]
        return lines[-1][:300] if lines else f"the compiler ended with status {self.process.returncode}"

    def end(self) -> None:
        """End the compiler and everything below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)  # ninja passes it on, and deletes unfinished objects
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.finish()


class Builder:
    """Makes modules ready in one cache folder.

    Args:
        folder: FlashInfer's cache folder for one version and architecture.
        say: Takes a line of progress.
        timeout_s: Seconds for everything, waiting included.
        jobs: How many compilers may run at once; 0 for as many as processors and memory allow.
        on_progress: Called several times a second with the number of modules done and in all, and for each one
            that is being built its name, steps done and steps in all (0 where not known yet).
    """

    def __init__(
        self,
        folder: Path,
        say: Say,
        *,
        timeout_s: float,
        jobs: int = 0,
        on_progress: Callable[[int, int, Sequence[tuple[str, int, int]]], None] | None = None,
    ) -> None:
        self.folder = folder / "glm5-warmup"
        self._say = say
        self._timeout_s = timeout_s
        self._jobs = jobs or default_jobs()
        self._on_progress = on_progress
        self._began = time.time()
        self._deadline = time.monotonic() + timeout_s

    def make_ready(self, artifacts: Sequence[Artifact]) -> dict[str, str]:
        """Build what is missing, here or in another process, and return what became of each module by name.

        Raises:
            NotInForce: A module cannot be built, time ran out, or the cache folder cannot be used.
        """
        outcome = {artifact.name: "prebuilt" for artifact in artifacts if artifact.prebuilt}
        for artifact in artifacts:
            if artifact.prebuilt and artifact.state() is State.BROKEN:
                raise NotInForce(
                    f"The prebuilt module {artifact.library} is half-written.", "Install the package it is from again."
                )
        wanted = [artifact for artifact in artifacts if not artifact.prebuilt]
        if not wanted:
            return outcome
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as waited:
                return outcome | self._build_missing(wanted, waited)
        except OSError as error:
            raise _disk_error(error, self.folder) from error

    # --- the lock --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[float]:
        """Hold the lock of the cache folder; yields the seconds waited for it."""
        from filelock import FileLock

        lock = FileLock(str(self.folder / "lock"), thread_local=False)
        began = time.monotonic()
        self._acquire(lock, lambda: str(Journal.read(self.folder / "journal.json")))
        try:
            yield time.monotonic() - began
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, whom: Callable[[], str]) -> None:
        """Wait for a lock until time is up, and say now and then for whom."""
        from filelock import Timeout

        began = time.monotonic()
        while True:
            left = self._deadline - time.monotonic()
            try:
                lock.acquire(timeout=max(0.0, min(_EVERY_S, left)), poll_interval=0.05)
                return
            except Timeout:
                waited = time.monotonic() - began
                if left <= _EVERY_S:
                    raise NotInForce(
                        f"Waited {waited:.0f} s for {whom()} in {self.folder.parent}, and time is up.",
                        "See whether it is alive; raise GLM5_FP4_WARMUP_TIMEOUT_S, or warm up beforehand: "
                        "`glm5-plugins warmup`.",
                    ) from None
                self._say(f"waits for {whom()} ({waited:.0f} s)")

    # --- building, with the lock held ------------------------------------------------------------------------

    def _build_missing(self, wanted: Sequence[Artifact], waited: float) -> dict[str, str]:
        journal = Journal.read(self.folder / "journal.json")
        for entry in journal.failed:
            if entry["at"] >= self._began and any(entry["module"] == one.name for one in wanted):
                raise Failure(**entry).error()  # another process tried it while this one waited
        if journal.building:
            self._end_leftovers(journal)
        for artifact in wanted:
            for path in artifact.discard_broken():
                self._say(f"{path.name} was half-written, and is made again")
        missing = [artifact for artifact in wanted if not artifact.state().ready]
        if missing:
            self._compile(missing, journal)
        found = "cached" if waited < 1 else f"built by another process, {waited:.0f} s waited"
        return {artifact.name: "built here" if artifact in missing else found for artifact in wanted}

    def _end_leftovers(self, journal: Journal) -> None:
        """End what a killed builder left running: it still writes into the folder."""
        if journal.building["host"] != socket.gethostname():
            self._say(f"{journal} ended half way, on another machine; its work is taken up")
            return
        pids = _marked(journal.building["id"])
        self._say(f"{journal} ended half way; its work is taken up, {len(pids)} processes of it are ended")
        _kill(pids)

    def _compile(self, missing: Sequence[Artifact], journal: Journal) -> None:
        mark = uuid.uuid4().hex
        # Not FlashInfer's build_jit_specs: its one ninja for all modules keeps its log in another folder, and the first
        # load of each module would compile it again.
        journal.building = {
            "id": mark,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "modules": [artifact.name for artifact in missing],
        }
        journal.failed = []
        journal.write()
        waiting, running, done = deque(missing), list[Compiler](), list[Artifact]()
        at_once = min(len(missing), self._jobs)
        began = said = time.monotonic()
        self._say(f"builds {', '.join(a.name for a in missing)}, {at_once} at once, {self._jobs} compilers in all")
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(self._start(waiting.popleft(), mark, max(1, self._jobs // at_once)))
                time.sleep(0.1)
                now = time.monotonic()
                if self._on_progress is not None:
                    steps = [(one.artifact.name, one.step, one.steps) for one in running]
                    self._on_progress(len(done), len(missing), steps)
                for one in [one for one in running if one.process.poll() is not None]:
                    one.finish()
                    if one.process.returncode != 0 or not one.artifact.state().ready:
                        raise self._failed(journal, one, _ended(one))
                    running.remove(one)
                    done.append(one.artifact)
                    self._say(f"{one.artifact.name} is built: {len(done)} of {len(missing)}, {now - began:.0f} s")
                if now > self._deadline and running:
                    raise self._failed(journal, running[0], f"time is up after {self._timeout_s:.0f} s")
                if now - said >= _EVERY_S:
                    said = now
                    text = ", ".join(map(str, running))
                    self._say(f"builds {text}: {len(done)} of {len(missing)} done, {now - began:.0f} s")
        finally:
            for one in running:
                one.end()
            _kill(_marked(mark))
            journal.building = {}
            with contextlib.suppress(OSError):
                journal.write()

    def _start(self, artifact: Artifact, mark: str, jobs: int) -> Compiler:
        from filelock import FileLock

        lock = FileLock(str(artifact.spec.lock_path), thread_local=False)
        self._acquire(lock, lambda: f"a process without this plugin, which builds {artifact.name},")
        try:
            artifact.spec.write_ninja()
            process = subprocess.Popen(
                [sys.executable, "-IS", guard.__file__, *artifact.ninja("-v", "-j", str(jobs))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                env={**os.environ, **Toolkit.here().to_build_with(self.folder / "lib"), _MARK: mark},
            )
        except BaseException:
            lock.release()
            raise
        compiler = Compiler(artifact, process, self.folder / f"{artifact.name}.log", lock)
        compiler.follow()
        return compiler

    def _failed(self, journal: Journal, compiler: Compiler, how: str) -> NotInForce:
        why = compiler.why()
        failure = Failure(compiler.artifact.name, f"{how}: {why}" if how else why, str(compiler.log), time.time())
        journal.failed = [failure.__dict__]
        return failure.error()


def _ended(compiler: Compiler) -> str:
    code = compiler.process.returncode
    if code == 0:
        return f"it was built, and is {compiler.artifact.state().value}"
    return "" if code > 0 else f"the compiler was ended by {signal.Signals(-code).name}"


def default_jobs() -> int:
    """As many compilers as MAX_JOBS says, or as processors and memory allow."""
    given = os.environ.get("MAX_JOBS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    available = _EVERYTHING
    with contextlib.suppress(OSError, IndexError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        available = int(text.partition("MemAvailable:")[2].split()[0]) << 10
    return max(1, min(len(os.sched_getaffinity(0)), available // _MEMORY_PER_COMPILER))


_EVERYTHING = 1 << 62


def _marked(mark: str) -> list[int]:
    """The processes that a builder started, wherever they have gone since."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _kill(pids: Sequence[int]) -> None:
    """End processes for good, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while time.monotonic() < until and any(_alive(pid) for pid in pids):
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _mend_for(why: str) -> str:
    if "No space left on device" in why:
        return _SPACE
    if "time is up" in why:
        return "Raise GLM5_FP4_WARMUP_TIMEOUT_S, or warm up beforehand: `glm5-plugins warmup`."
    return ""


_SPACE = "Free space on the disks of the cache folder and of TMPDIR, or set FLASHINFER_WORKSPACE_BASE to another disk."


def _disk_error(error: OSError, folder: Path) -> NotInForce:
    what = f"The cache folder {folder} cannot be used: {error.strerror}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotInForce(what, _SPACE)
    return NotInForce(what, "Set FLASHINFER_WORKSPACE_BASE to a folder that can be written.")
