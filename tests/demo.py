"""`tox -e demo`: a tiny model, a real SGLang server on this machine's CPU, two plugins, and what came of them.

Ends with a status other than 0 if the server doesn't start, doesn't answer, or a process holds back its report
or reports a plugin that isn't in force.

    python -m tests.demo FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.server import ServerError, ServerProcess
from tests.support.tiny_model import write_tiny_model

PLUGINS = ("fp4_warmup", "no_fullgraph")
ROLES = {"main", "scheduler", "detokenizer"}
BAD = {"drifted", "conflict", "failed", "dead"}


class Progress:
    """One line per step. A terminal sees the seconds run; a log gets a sign of life every ten."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._live = sys.stdout.isatty()
        self._last = 0.0
        self._step = ""

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show a step from its begin to its end, and whether it went well."""
        self._step, self._last = what, 0.0
        began = time.monotonic()
        self._write("..." if self._live else None)
        try:
            yield
        except BaseException:
            self._line("FAILED", time.monotonic() - began)
            raise
        self._line("done", time.monotonic() - began)

    def tick(self, elapsed: float) -> None:
        """The step still runs."""
        if self._live:
            self._write(f"{elapsed:4.0f} s")
        elif elapsed - self._last >= 10:
            self._last = elapsed
            self._line("...", elapsed)

    def _write(self, mark: str | None) -> None:
        if mark is not None:
            print(f"\r\033[K[{self._total():4.0f} s] {self._step} {mark}", end="", flush=True)

    def _line(self, mark: str, elapsed: float) -> None:
        start = "\r\033[K" if self._live else ""
        print(f"{start}[{self._total():4.0f} s] {self._step} {mark} ({elapsed:.1f} s)", flush=True)

    def _total(self) -> float:
        return time.monotonic() - self.began


def main(folder: Path) -> int:
    """Run the demo in `folder` and return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    progress = Progress()
    shutil.rmtree(folder / "reports", ignore_errors=True)
    print(f"SGLang {metadata.version('sglang')}, unmodified, with GLM5_PLUGINS={','.join(PLUGINS)}\n")

    with progress.step("write a Llama of 2 layers, with made-up weights"):
        model = write_tiny_model(folder / "model")
    server = ServerProcess(
        model,
        folder / "server.log",
        env={"GLM5_PLUGINS": ",".join(PLUGINS), "GLM5_REPORT": str(folder / "reports")},
        progress=progress.tick,
    )
    prompt = "hello"
    try:
        with progress.step("start the server"):
            server.start()
            server.wait_ready()
        with progress.step("ask it something"):
            answer = server.generate(prompt)
        running = {process.pid for process in server.processes()}
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        with progress.step("stop the server"):
            server.stop()

    print(f"\n{prompt!r} -> tokens {answer['output_ids']}\n")
    problems = verdicts(folder / "reports", running)
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    print(f"{'failed' if problems else 'all in order'}, {time.monotonic() - progress.began:.0f} s in all")
    print(f"the server's log: {os.path.relpath(server.log)}")
    return 1 if problems else 0


def verdicts(folder: Path, running: set[int]) -> list[str]:
    """Print what each process reports about each plugin, and return what is wrong with it."""
    problems: list[str] = []
    missing = set(ROLES)
    for path in sorted(folder.glob("*.json")):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        role, pid = report["process"]["role"], report["process"]["pid"]
        if pid in running:
            missing.discard(role)
        print(f"{role} (pid {pid}), by {report['layer']['way']}")
        for row in report["rows"]:
            print(f"  {row['plugin']}: {row['summary']}: {row['reason']}")
            if row["verdict"] in BAD:
                problems.append(f"{row['plugin']} is {row['verdict']} in {role}")
        for note in report["notes"]:
            print(f"  {note}")
        if silent := set(PLUGINS) - {row["plugin"] for row in report["rows"]}:
            problems.append(f"{role} says nothing about {', '.join(sorted(silent))}")
        print()
    return problems + [f"no report of the {role} process" for role in sorted(missing)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
