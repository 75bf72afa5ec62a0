"""What a campaign is doing, on standard error: a running line on a terminal, a sign of life now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_EVERY = 30.0  # seconds between signs of life where nobody looks at a terminal


class Progress:
    """Says which step runs, for how long, and when all may be over."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._began = time.monotonic()
        self._step = ""
        self._said = 0.0

    def say(self, text: str) -> None:
        """A line of its own."""
        self._write(f"{self._clock()} {text}", end="\n")

    def step(self, text: str) -> None:
        """A step begins."""
        self._step, self._said = text, 0.0
        if self._live:
            self._write(f"{self._clock()} {text} ...", end="")

    def tick(self, elapsed: float) -> None:
        """The step still runs, for `elapsed` seconds now."""
        if self._live:
            self._write(f"{self._clock()} {self._step} ... {elapsed:.0f} s", end="")
        elif elapsed - self._said >= _EVERY:
            self._said = elapsed
            self.say(f"{self._step} ... {elapsed:.0f} s")

    def done(self, result: str) -> None:
        """The step is over."""
        self.say(f"{self._step}: {result}")

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        hours, minutes = divmod(minutes, 60)
        return f"[{hours:d}:{minutes:02d}:{seconds:02d}]"

    def _write(self, text: str, end: str) -> None:
        start = "\r\x1b[K" if self._live else ""
        print(f"{start}{text}", end=end, file=self._stream, flush=True)
