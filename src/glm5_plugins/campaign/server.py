"""One real server of a campaign: started, waited for, and ended together with what it started, and nothing else."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from glm5_plugins.campaign.interrupts import undisturbed
from glm5_plugins.errors import Glm5Error

_GRPC_OFFSET = 10000  # 0.5.12 and later derive a gRPC port, and refuse to start if that is above 65535


class NotServing(Glm5Error):
    """The server ended, or did not answer in time."""


class Server:
    """A process tree that listens on a free port of 127.0.0.1.

    Args:
        command: interpreter, launcher and server arguments, without host and port.
        env: its whole environment.
        log: takes all it writes.
        note: remembers its processes, so that a campaign that was killed finds them again.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, note: Path) -> None:
        self.port = _free_port()
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._env = dict(env)
        self._log = log
        self._note = note
        self._popen: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._seen: dict[int, Any] = {}

    def start(self) -> None:
        """Start it and return at once.

        Raises:
            NotServing: There is no such program.
        """
        self._file = self._log.open("wb")
        try:
            with undisturbed():  # or nobody knows of it
                self._popen = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the campaign, which ends the server in order
                )
        except OSError as error:
            self._file.close()
            raise NotServing(
                f"{self._command[0]} cannot be run: {error.strerror}.", "Correct python = ... of [server]."
            ) from None
        self._look()

    def wait_ready(self, timeout: float, progress: Callable[[float], None]) -> float:
        """Wait until /health answers, and return how many seconds that took.

        Raises:
            NotServing: It ended first, or the time ran out.
        """
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < timeout:
            self._look()
            if not self.alive:
                raise NotServing(f"the server ended with {self.exit} after {elapsed:.0f} s")
            if self._healthy():
                return time.monotonic() - began
            progress(elapsed)
            time.sleep(0.5)
        raise NotServing(f"the server did not answer within {timeout:.0f} s")

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit(self) -> str:
        """How its first process ended."""
        code = self._popen.poll() if self._popen else None
        if code is None:
            return "no status yet"
        return f"status {code}" if code >= 0 else signal.Signals(-code).name

    def stop(self, grace: float = 30) -> None:
        """Ask it to end; what is left of its processes after that is killed, by pid."""
        if self._popen is None:
            return
        self._look()
        if self._popen.poll() is None:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace)
        _end(self._seen.values(), grace=3)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)
        if self._file:
            self._file.close()
        self._note.unlink(missing_ok=True)

    def _look(self) -> None:
        """Remember its processes while their parents live: later nothing tells that they are its."""
        if self._popen is None or self._popen.poll() is not None:
            return
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._popen.pid)
            found = {process.pid: process for process in (root, *root.children(recursive=True))}
            if found.keys() - self._seen.keys():
                self._seen.update(found)
                _remember(self._note, self._seen.values())

    def _healthy(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, ValueError):  # URLError and time-outs are OSErrors; ValueError: no HTTP there
            return False


def end_left_over(note: Path) -> int:
    """End what a killed campaign left running, and return how many processes that were.

    Only processes that the campaign itself started are touched: pid and start time both have to be the ones noted.
    """
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    alive = []
    for pid, started in noted:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _started(pid) == started and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _end(alive, grace=20)
    note.unlink(missing_ok=True)
    return len(alive)


def _end(processes: Iterable[Any], grace: float) -> None:
    _, left = psutil.wait_procs(list(processes), timeout=grace)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()  # psutil looks first whether the pid still is that process
    psutil.wait_procs(left, timeout=10)


def _remember(note: Path, processes: Iterable[Any]) -> None:
    stamps = [(process, _started(process.pid)) for process in processes]
    # One that has ended meanwhile may have left its pid to somebody else, whose start this would be.
    rows = [(process.pid, started) for process, started in stamps if started is not None and process.is_running()]
    new = note.with_suffix(".new")
    new.write_text(json.dumps(rows), encoding="utf-8")
    os.replace(new, note)


def _started(pid: int) -> str | None:
    """When a process started, None if there is none: after which boot, and how many ticks after it.

    psutil makes a time of day of the ticks, and another one as soon as the clock of the machine is set.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    ticks = text.rpartition(")")[2].split()[19]  # the command before it may hold spaces and brackets
    return f"{boot} {ticks}"


def _free_port() -> int:
    """A port that is free together with its gRPC port; both below what the kernel hands out to clients."""
    while True:
        port = random.randrange(20000, 22000)
        with suppress(OSError), socket.socket() as http, socket.socket() as grpc:
            http.bind(("127.0.0.1", port))
            grpc.bind(("127.0.0.1", port + _GRPC_OFFSET))
            return port
