"""Verdict rows of one process: as lines for SGLang's log, and as JSON for `GLM5_REPORT`."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_plugins.patching import Verdict

logger = logging.getLogger("glm5_plugins")


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

    def write(self, role: str, document: dict[str, Any]) -> None:
        """Write this process's JSON; a failure is logged once and does not stop the server."""
        if self.path is None:
            return
        process = {"pid": os.getpid(), "parent": os.getppid(), "role": role, "host": socket.gethostname()}
        times = {"started": self.started, "written": time.time()}
        text = json.dumps({"process": process | times, **document}, default=str)
        try:
            if self.path.suffix == ".jsonl":
                _append(self.path, text)
            else:
                _replace(self.path / f"glm5-{role}-{os.getpid()}.json", text)
        except OSError as error:
            if not self._write_failed:
                self.say(logging.WARNING, f"GLM5_REPORT={self.path} cannot be written: {error}")
            self._write_failed = True


def row_as_json(row: Row) -> dict[str, Any]:
    """The row as plain values."""
    return asdict(row) | {"verdict": row.verdict.value}


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, (text + "\n").encode())
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Write a whole file or nothing: another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
