"""Merging: the reports of all processes, ranks and nodes of a server, read from a folder or a file, as one table."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glm5_plugins.agreement import Difference, differences, standing
from glm5_plugins.patching import Verdict

MOST_BYTES = 64 * 1024 * 1024
"""A larger file is not read: reports of a thousand processes are smaller."""


@dataclass(frozen=True)
class Process:
    """What one process has reported last."""

    host: str
    pid: int
    role: str
    server: int
    """The pid of the server's main process."""
    started: float
    """Seconds since 1970, by the clock of that host."""
    written: float
    stage: str
    plugins: Sequence[str]
    versions: Mapping[str, str]
    agreement: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @classmethod
    def of(cls, document: Any) -> Process:
        """Read a report.

        Raises:
            ValueError: It is none.
        """
        try:
            process, layer, told = document["process"], document["layer"], document["versions"]
            versions = {"glm5-plugins": str(layer["version"])} | {str(k): str(v or "absent") for k, v in told.items()}
            return cls(
                host=str(process["host"]),
                pid=int(process["pid"]),
                role=str(process["role"]),
                server=int(process.get("server", process["parent"])),
                started=float(process["started"]),
                written=float(process["written"]),
                stage=str(document["stage"]),
                plugins=tuple(map(str, layer["plugins"])),
                versions=versions,
                agreement=dict(document.get("agreement") or {}),
                rows=tuple(_checked_row(row) for row in document["rows"]),
                notes=tuple(map(str, document.get("notes") or ())),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"no report of glm5-plugins ({type(error).__name__}: {error})") from error

    @property
    def rank(self) -> int | None:
        """The rank among the schedulers of its server, where there is one."""
        rank = self.agreement.get("rank")
        return rank if isinstance(rank, int) else None

    @cached_property
    def facts(self) -> dict[str, str]:
        """What must be the same in all processes of a server."""
        return {f"the version of {name}": text for name, text in self.versions.items()} | {
            "GLM5_PLUGINS": ",".join(self.plugins)
        }

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{self.role}{rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Line:
    """One line of the table: what became of one thing in those processes where the same became of it."""

    plugin: str
    target: str
    verdict: Verdict
    reason: str
    fired: int | None
    processes: Sequence[Process]
    differs: bool

    @property
    def where(self) -> str:
        """The processes by role, with their ranks: `main, scheduler 0-7`."""
        by_role: dict[str, list[Process]] = {}
        for process in self.processes:
            by_role.setdefault(process.role, []).append(process)
        return ", ".join(_role_and_ranks(role, found) for role, found in by_role.items())


@dataclass(frozen=True)
class Launch:
    """One start of a server: its processes on all nodes."""

    processes: Sequence[Process]

    @property
    def started(self) -> float:
        """When its first process started, by that host's clock."""
        return min(process.started for process in self.processes)

    @cached_property
    def differences(self) -> list[Difference]:
        """What is not the same everywhere: versions and plugins in all processes, verdicts in all ranks."""
        ranks = [process for process in self.processes if process.role == "scheduler"]
        return [*differences(self.processes), *differences([_Verdicts(process) for process in ranks])]

    @cached_property
    def lines(self) -> list[Line]:
        """The table: what differs between ranks first, then what is bad, then the rest in the order of plugins."""
        differing = {difference.name for difference in self.differences}
        groups: dict[tuple[str, str, str], list[tuple[Process, Mapping[str, Any]]]] = {}
        for process in self.processes:
            for row in process.rows:
                groups.setdefault((row["plugin"], row["target"], row["verdict"]), []).append((process, row))
        lines = []
        for (plugin, target, verdict), found in groups.items():
            counts = [row["fired"] for _, row in found if isinstance(row.get("fired"), int)]
            differs = _fact(plugin, target) in differing
            fired = sum(counts) if counts else None
            processes = [process for process, _ in found]
            lines.append(Line(plugin, target, Verdict(verdict), found[0][1]["reason"], fired, processes, differs))
        order = list(dict.fromkeys((line.plugin, line.target) for line in lines))
        return sorted(
            lines,
            key=lambda line: (
                not line.differs,
                not line.verdict.bad,
                order.index((line.plugin, line.target)),
                line.verdict is Verdict.WAITING,
            ),
        )

    @property
    def healthy(self) -> bool:
        """Whether its processes agree, and no verdict is bad."""
        return not self.differences and not any(line.verdict.bad for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """The launch as plain values."""
        return {
            "healthy": self.healthy,
            "processes": [_process_as_json(process) for process in self.processes],
            "differences": [
                {"name": d.name, "values": [{"value": value, "at": [str(one) for one in at]} for value, at in d.values]}
                for d in self.differences
            ],
            "rows": [
                {
                    "plugin": line.plugin,
                    "target": line.target,
                    "verdict": line.verdict.value,
                    "differs": line.differs,
                    "fired": line.fired,
                    "reason": line.reason,
                    "at": [str(process) for process in line.processes],
                }
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class _Verdicts:
    """A rank, with its verdicts for facts."""

    process: Process

    @property
    def facts(self) -> Mapping[str, str]:
        facts: dict[str, str] = {}
        for row in self.process.rows:
            name = _fact(row["plugin"], row["target"])
            facts[name] = ", ".join(filter(None, (facts.get(name), standing(row["target"], row["verdict"]))))
        return facts

    def __str__(self) -> str:
        return str(self.process)


def read(path: Path) -> tuple[list[Launch], list[str]]:
    """Read the reports below a folder, or in a `.jsonl` file.

    Returns:
        The launches, the newest by its clock first, and a sentence about each thing that could not be read.

    Raises:
        OSError: `path` itself cannot be read.
    """
    documents: list[Any] = []
    problems: list[str] = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if path.is_dir() and (file.suffix not in (".json", ".jsonl") or file.name.startswith(".")):
            continue
        try:
            text = _text_of(file)
        except (OSError, ValueError) as error:
            if file is path:
                raise OSError(str(error)) from error
            problems.append(f"{file.name}: {error}")
            continue
        for number, line in enumerate(text.splitlines() if file.suffix == ".jsonl" else [text], 1):
            where = f"{file.name} line {number}" if file.suffix == ".jsonl" else file.name
            try:
                documents.append(Process.of(json.loads(line)))
            except (ValueError, RecursionError) as error:
                problems.append(f"{where}: {error}")
    return launches(documents), problems


def launches(processes: Iterable[Process]) -> list[Launch]:
    """Put the processes of one server together: children of one main process, and ranks that have compared.

    Of a process that reported several times the last report counts.
    """
    last: dict[tuple[str, int, str], Process] = {}
    for process in processes:
        last[process.host, process.pid, process.role] = process
    groups: list[tuple[set[tuple[str, int]], list[Process]]] = []
    for process in last.values():
        keys = {(process.host, process.server), (process.host, process.pid)}
        ranks = process.agreement.get("ranks")
        for one in ranks if isinstance(ranks, list) else ():
            if isinstance(one, Mapping) and isinstance(one.get("pid"), int):
                keys.add((str(one.get("host")), one["pid"]))
        members = [process]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members = group[1] + members
        groups.append((keys, members))
    found = [Launch(sorted(members, key=_place)) for _, members in groups]
    return sorted(found, key=lambda launch: launch.started, reverse=True)


def _place(process: Process) -> tuple[bool, int, str, str, int]:
    rank = -1 if process.rank is None else process.rank
    return (process.role != "main", rank, process.role, process.host, process.pid)


def _text_of(file: Path) -> str:
    # Not waiting for the writer of a pipe.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        return stream.read(MOST_BYTES).decode(errors="replace")


def _checked_row(row: Any) -> Mapping[str, Any]:
    checked = {key: str(row[key]) for key in ("plugin", "target", "verdict", "reason")}
    Verdict(checked["verdict"])
    return {**row, **checked}


def _fact(plugin: str, target: str) -> str:
    return f"the verdict of {plugin} on {target}"


def _process_as_json(process: Process) -> dict[str, Any]:
    return {
        "host": process.host,
        "pid": process.pid,
        "role": process.role,
        "rank": process.rank,
        "stage": process.stage,
        "versions": dict(process.versions),
        "plugins": list(process.plugins),
        "agreement": process.agreement.get("state"),
        "notes": list(process.notes),
    }


def _role_and_ranks(role: str, processes: Sequence[Process]) -> str:
    ranks = sorted(process.rank for process in processes if process.rank is not None)
    if not ranks or len(ranks) < len(processes):
        return role if len(processes) == 1 else f"{role} (of {len(processes)} processes)"
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return f"{role} " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
