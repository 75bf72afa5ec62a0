"""Verdict rows of one process: as lines for SGLang's log, and as JSON for `GLM5_REPORT`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_plugins.patching import Verdict

logger = logging.getLogger("glm5_plugins")

HOST = socket.gethostname()

_LOCK_TRIES = 200  # of 10 ms


@dataclass(frozen=True)
class Row:
    """One thing a plugin does in this process, and what became of it."""

    plugin: str
    target: str
    verdict: Verdict
    summary: str
    reason: str
    when: str = ""
    rebound: int = 0
    fired: int | None = None
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        fired = "" if self.fired is None else f", fired {self.fired}"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.plugin}: {self.summary}{fired}: {self.target}: {self.reason}{notes}"


@dataclass
class Report:
    """Keeps what is to be said until SGLang's log is up, and writes the JSON.

    Args:
        path: A folder, a file that ends in `.jsonl`, or None for no JSON.
    """

    path: Path | None
    started: float = field(default_factory=time.time)
    _logging_up: bool = False
    _pending: list[tuple[int, str]] = field(default_factory=list)
    _write_failed: bool = False
    _said: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)

    def say(self, level: int, text: str) -> None:
        """Log a line, now or as soon as SGLang has configured logging."""
        if self._logging_up:
            logger.log(level, "glm5-plugins: %s", text)
        else:
            self._pending.append((level, text))

    def flush(self) -> None:
        """Say what was kept; called once logging is configured."""
        self._logging_up = True
        pending, self._pending = self._pending, []
        for level, text in pending:
            self.say(level, text)

    def forked(self) -> None:
        """Begin anew in a forked child: its parent says what was pending."""
        self.started = time.time()
        self._pending.clear()
        self._said.clear()

    def rows(self, rows: Iterable[Row]) -> None:
        """Say one line for each row that is new, has another verdict, or has fired for the first time."""
        for row in rows:
            key, state = (row.plugin, row.target), (row.verdict.value, bool(row.fired))
            if self._said.get(key) == state:
                continue
            self._said[key] = state
            self.say(logging.ERROR if row.verdict.bad else logging.INFO, str(row))

    def write(self, role: str, server: int, document: dict[str, Any]) -> None:
        """Write this process's JSON; a failure is logged once and does not stop the server.

        Args:
            role: What this process does.
            server: The pid of the server's main process.
            document: Plain values to add to those of the process.
        """
        if self.path is None:
            return
        process = {"pid": os.getpid(), "parent": os.getppid(), "server": server, "role": role, "host": HOST}
        times = {"started": self.started, "written": time.time()}
        text = json.dumps({"process": process | times, **document}, default=str)
        try:
            if self.path.suffix == ".jsonl":
                _append(self.path, text)
            else:
                _replace(self.path / f"glm5-{_in_a_name(HOST)}-{role}-{os.getpid()}.json", text)
        except OSError as error:
            if not self._write_failed:
                self.say(logging.WARNING, f"GLM5_REPORT={self.path} cannot be written: {error}")
            self._write_failed = True


def row_as_json(row: Row) -> dict[str, Any]:
    """The row as plain values."""
    return asdict(row) | {"verdict": row.verdict.value}


def _in_a_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in text)


def _append(path: Path, text: str) -> None:
    """Add a whole line or nothing."""
    _make_folder(path.parent)
    # Not through a link, and not waiting for the reader of a pipe.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EPERM, "not a regular file of its own", str(path))
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        # A process that was killed while it wrote has left a line without an end.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            _write_all(descriptor, ("\n" * torn + text + "\n").encode())
        except OSError:
            os.ftruncate(descriptor, size)  # the disk is full: no half line for the next one to run into
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Wait a moment for the processes that write at the same time; the kernel unlocks for one that is killed."""
    for _ in range(_LOCK_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
    raise OSError(errno.EAGAIN, "another process keeps it locked")


def _replace(path: Path, text: str) -> None:
    """Write a whole file or nothing: another process never reads half of it.

    A kill leaves no half behind, at worst a whole file under its hidden name; a network file system may keep a part.
    """
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)  # it has no name yet
        nameless = True
    except OSError:  # network file systems
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        nameless = False
    try:
        _write_all(descriptor, (text + "\n").encode())
        if nameless:
            # Only with a src_dir_fd does Python follow the link of /proc; an absolute path makes no other use of it.
            os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor, follow_symlinks=True)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
