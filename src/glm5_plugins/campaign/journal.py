"""The journal of a campaign: one JSON line for each server start and each benchmark run, in the order they ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_plugins.campaign.plan import Cell


@dataclass(frozen=True)
class Start:
    """One start of an arm's server."""

    round: int
    arm: str
    ok: bool
    seconds: float
    """Until it answered, or until it was given up."""
    log: str
    """The server's log, from the campaign's folder."""
    reason: str = ""
    """Why it counts as failed."""
    diagnosis: Mapping[str, Any] | None = None
    """What the log says, where it failed."""
    when: str = ""
    kind: str = "start"


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    round: int
    arm: str
    shape: str
    concurrency: int
    repetition: int
    ok: bool
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of `sglang.bench_serving` under its own names: tokens per second, milliseconds."""
    reason: str = ""
    log: str = ""
    when: str = ""
    kind: str = "run"

    @property
    def cell(self) -> Cell:
        """What it measured."""
        return Cell(shape=self.shape, concurrency=self.concurrency)


@dataclass(frozen=True)
class InForce:
    """What the layer reported of one start, collected when its server had ended."""

    round: int
    arm: str
    rows: Sequence[Mapping[str, Any]]
    """Per plugin and target: verdict, and how often it fired in all processes."""
    kind: str = "in force"


Record = Start | Run | InForce
_KINDS: dict[str, type[Start] | type[Run] | type[InForce]] = {"start": Start, "run": Run, "in force": InForce}


class Journal:
    """Reads and extends `runs.jsonl`; each line is on the disk before the campaign goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: list[Record] = list(_read(path)) if path.exists() else []

    def add(self, record: Record) -> None:
        """Append one record."""
        text = json.dumps(asdict(record), default=str)
        with self._path.open("ab+") as file:
            if file.tell():  # a line that was cut off by a power failure must not swallow this one
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    @property
    def starts(self) -> list[Start]:
        """All starts."""
        return [record for record in self.records if isinstance(record, Start)]

    @property
    def given_up(self) -> frozenset[str]:
        """Arms whose last start failed: they are left out from then on."""
        last = {start.arm: start.ok for start in self.starts}
        return frozenset(arm for arm, ok in last.items() if not ok)

    @property
    def runs(self) -> list[Run]:
        """All benchmark runs."""
        return [record for record in self.records if isinstance(record, Run)]

    @property
    def in_force(self) -> list[InForce]:
        """All reports of the layer."""
        return [record for record in self.records if isinstance(record, InForce)]


def _read(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            yield _KINDS[values["kind"]](**values)
        except (ValueError, KeyError, TypeError):  # the line that an interrupt cut off: its run is done again
            continue
