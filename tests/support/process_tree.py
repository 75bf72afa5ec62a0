"""The processes below one that we started, from /proc: nothing else is ever signalled."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process. A reused pid is another process: it has another start time."""

    pid: int
    started: int
    command: str = field(compare=False)

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie doesn't."""
        found = self._stat()
        return found is not None and found.state != "Z"

    @property
    def cpu_seconds(self) -> float:
        """The processor time that it has used, 0 once it is gone."""
        found = self._stat()
        return found.cpu_ticks / os.sysconf("SC_CLK_TCK") if found is not None else 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process ended and its pid may be somebody else's."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _stat(self) -> _Stat | None:
        found = _stat(self.pid)
        return found if found is not None and found.started == self.started else None


def tree(root: int) -> list[Process]:
    """The process `root` and everything below it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))):
            children.setdefault(found.parent, []).append(int(entry.name))
    result: list[Process] = []
    queue = [root]
    while queue:
        pid = queue.pop(0)
        if found := _stat(pid):
            result.append(Process(pid, found.started, _command(pid)))
            queue += sorted(children.get(pid, []))
    return result


def wait_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Wait until none is alive, and return those that still are when time is up."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    started: int
    cpu_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command before it may hold spaces and brackets
    return _Stat(
        state=fields[0], parent=int(fields[1]), started=int(fields[19]), cpu_ticks=sum(map(int, fields[11:13]))
    )


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()
