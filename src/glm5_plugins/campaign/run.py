"""A campaign from begin to end: every round starts every arm, drives it, ends it, and writes down what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from glm5_plugins.campaign import bench, surroundings
from glm5_plugins.campaign.interrupts import terminable, undisturbed
from glm5_plugins.campaign.journal import InForce, Journal, Run, Start
from glm5_plugins.campaign.plan import Arm, Cell, Plan
from glm5_plugins.campaign.progress import Progress
from glm5_plugins.campaign.server import NotServing, Server, end_left_over
from glm5_plugins.diagnosis.reading import Diagnosis, diagnose_file
from glm5_plugins.errors import ConfigurationError, Glm5Error
from glm5_plugins.patching import Verdict


class Stopped(Glm5Error):
    """The campaign cannot go on."""


class Campaign:
    """One campaign in its folder.

    The folder holds `campaign.json` (plan, versions, machine), `runs.jsonl` (see `journal`), and below `starts/` one
    folder for each server start, with its log, the benchmark's logs and the layer's reports.

    Args:
        plan: what to measure.
        folder: where to keep it; made if it is not there. A folder of the same plan is gone on with.
        retry_failed: whether arms that failed to start, and runs that failed, are tried again.
        progress: what tells how it goes.
    """

    def __init__(
        self, plan: Plan, folder: Path, *, retry_failed: bool = False, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.folder = folder
        self._retry = retry_failed
        self._progress = progress or Progress()
        self._durations: list[float] = []

    def run(self) -> Journal:
        """Do what is not yet done, and return the whole journal.

        Raises:
            ConfigurationError: The folder cannot be written, or belongs to another plan, other versions, or a campaign
                that is running.
            Stopped: The baseline's server does not start, so that nothing can be compared.
        """
        with self._alone(), terminable():
            self._check_in()
            if count := end_left_over(self._note):
                self._progress.say(f"ended {count} processes that an interrupted campaign had left")
            journal = Journal(self.folder / "runs.jsonl")
            given_up = set() if self._retry else set(journal.given_up)
            todo = [
                (number, arm, cells)
                for number in range(self.plan.rounds)
                for arm in self.plan.order(number)
                if (cells := self._missing(journal, number, arm))
            ]
            for index, (number, arm, cells) in enumerate(todo):
                if arm.name in given_up:
                    continue
                left = [one for one in todo[index:] if one[1].name not in given_up]
                if not self._arm(journal, number, arm, cells, len(left)):
                    given_up.add(arm.name)
                    if arm is self.plan.base:
                        raise self._no_baseline(journal)
            return journal

    # --- one start of one arm ---

    def _arm(self, journal: Journal, number: int, arm: Arm, cells: list[tuple[Cell, int]], left: int) -> bool:
        """Start an arm's server and drive it; return whether it started."""
        began = time.monotonic()
        where = self._new_folder(number, arm)
        label = f"round {number + 1}/{self.plan.rounds}, arm {arm.name}"
        if self._durations:
            minutes = sum(self._durations) / len(self._durations) * left / 60
            label += f" (about {minutes:.0f} min left)"
        server = Server(self._command(arm), self._environment(arm, where), where / "server.log", self._note)
        try:
            self._progress.step(f"{label}: start the server")
            ready = time.monotonic()
            try:
                server.start()
                seconds = server.wait_ready(self.plan.server.start_timeout_s, self._progress.tick)
                self._check_layer(arm, where)
            except NotServing as error:
                server.stop()
                self._failed_start(journal, number, arm, where, str(error), time.monotonic() - ready)
                return False
            self._progress.done(f"ready after {seconds:.0f} s")
            journal.add(
                Start(number, arm.name, True, round(seconds, 2), self._short(where / "server.log"), when=_now())
            )
            for cell, repetition in cells:
                if not self._drive(journal, number, arm, cell, repetition, server, where, label):
                    break
        finally:
            with undisturbed():
                server.stop()
        journal.add(InForce(number, arm.name, list(summarise_reports(where / "reports"))))
        self._durations.append(time.monotonic() - began)
        return True

    def _failed_start(self, journal: Journal, number: int, arm: Arm, where: Path, reason: str, seconds: float) -> None:
        diagnosis = _diagnose(where / "server.log")
        log = self._short(where / "server.log")
        journal.add(
            Start(
                number,
                arm.name,
                False,
                round(seconds, 2),
                log,
                reason,
                asdict(diagnosis) if diagnosis else None,
                _now(),
            )
        )
        self._progress.done(f"FAILED: {reason}")
        if diagnosis and diagnosis.verdict != "no failure":
            self._progress.say(f"    {diagnosis}")
        self._progress.say(f"    log: {self.folder / log}; the arm is left out from here on")

    def _drive(
        self,
        journal: Journal,
        number: int,
        arm: Arm,
        cell: Cell,
        repetition: int,
        server: Server,
        where: Path,
        label: str,
    ) -> bool:
        """Run the benchmark once; return whether the server is still there."""
        stem = f"bench-{cell.shape}-{cell.concurrency}-{repetition + 1}"
        output, log = where / f"{stem}.jsonl", where / f"{stem}.log"
        began = time.monotonic()
        self._progress.step(f"{label}: {cell}, run {repetition + 1}/{self.plan.bench.repetitions}")
        metrics: dict[str, float] = {}
        reason = ""
        try:
            metrics = bench.run(
                bench.command(self.plan, cell, server.port, _seed(number, cell, repetition), output),
                self._base_environment(),
                log,
                output,
                self.plan.bench.requests(cell.concurrency),
                self.plan.bench.timeout_s,
                self._progress.tick,
            )
            self._progress.done(f"{metrics['output_throughput']:.4g} tokens/s")
        except bench.RunFailed as error:
            reason = str(error)
            if not server.alive:
                diagnosis = _diagnose(where / "server.log")
                reason = f"the server ended with {server.exit} during the run" + (f": {diagnosis}" if diagnosis else "")
            self._progress.done(f"FAILED: {reason}")
        output.unlink(missing_ok=True)  # it holds the server's whole configuration, keys included
        journal.add(
            Run(
                number,
                arm.name,
                cell.shape,
                cell.concurrency,
                repetition,
                not reason,
                round(time.monotonic() - began, 2),
                metrics,
                reason,
                self._short(log),
                _now(),
            )
        )
        return server.alive

    def _missing(self, journal: Journal, number: int, arm: Arm) -> list[tuple[Cell, int]]:
        done = {
            (run.cell, run.repetition)
            for run in journal.runs
            if run.round == number and run.arm == arm.name and (run.ok or not self._retry)
        }
        every = [(cell, repetition) for cell in self.plan.cells for repetition in range(self.plan.bench.repetitions)]
        return [one for one in every if one not in done]

    def _no_baseline(self, journal: Journal) -> Stopped:
        start = next(start for start in reversed(journal.starts) if start.arm == self.plan.base.name)
        diagnosis = start.diagnosis or {}
        cause = f": {diagnosis['cause']}" if diagnosis.get("verdict") == "known" else ""
        mend = diagnosis.get("cure") or "Mend it and run the campaign again."
        return Stopped(
            f"The baseline {self.plan.base.name!r} does not start, {start.reason}{cause}",
            f"{mend} Then add --retry-failed. Its log: {self.folder / start.log}",
        )

    # --- command lines and environments ---

    def _command(self, arm: Arm) -> list[str]:
        server = self.plan.server
        return [server.python, *server.launcher, "--model-path", server.model, *server.args, *arm.args]

    def _base_environment(self) -> dict[str, str]:
        """The caller's environment without its `GLM5_*` variables: the plan alone says what an arm is."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLM5_")}
        for name in ("NO_PROXY", "no_proxy"):  # SGLang warms itself up over HTTP
            inherited[name] = ",".join(filter(None, [inherited.get(name), "127.0.0.1"]))
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.plan.server.env}

    def _environment(self, arm: Arm, where: Path) -> dict[str, str]:
        layer = {}
        if arm.uses_layer:
            (where / "reports").mkdir()
            layer["GLM5_REPORT"] = str(where / "reports")
        if arm.plugins:
            layer["GLM5_PLUGINS"] = ",".join(arm.plugins)
        if arm.profile:
            layer["GLM5_PROFILE"] = arm.profile
        return {**self._base_environment(), **arm.env, **layer}

    def _check_layer(self, arm: Arm, where: Path) -> None:
        if arm.uses_layer and not list((where / "reports").glob("*.json")):
            raise NotServing(
                "the server answers, but no process of it reports plugins: the layer did not get in "
                '(before SGLang 0.5.11 set launcher = "-m glm5_plugins.launch sglang.launch_server" in [server])'
            )

    # --- the folder ---

    @property
    def _note(self) -> Path:
        return self.folder / "running.json"

    def _new_folder(self, number: int, arm: Arm) -> Path:
        for attempt in range(1, 1000):
            name = f"round-{number + 1}-{arm.name}" + (f"-again-{attempt - 1}" if attempt > 1 else "")
            with suppress(FileExistsError):
                (self.folder / "starts" / name).mkdir(parents=True)
                return (self.folder / "starts" / name).resolve()
        raise Stopped(f"There are too many starts of {arm.name!r} in {self.folder}.", "Give another --out.")

    def _short(self, path: Path) -> str:
        return os.path.relpath(path, self.folder.resolve())

    def _check_in(self) -> None:
        """Write down the plan and what it runs on, or compare with what is written there."""
        now = {
            "plan": self.plan.model_dump(mode="json"),
            "versions": surroundings.versions(self.plan.server.python, self._base_environment()),
            "machine": surroundings.machine(),
        }
        path = self.folder / "campaign.json"
        if not path.exists():
            path.write_text(json.dumps({**now, "begun": _now()}, indent=2) + "\n", encoding="utf-8")
            return
        try:
            then = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}.", "Give another --out.") from None
        if changes := list(_differences(then, now)):
            raise ConfigurationError(
                f"{self.folder} was begun with something else: {'; '.join(changes[:3])}.",
                "Give another --out. (Adding rounds after a look at the result would bend the statistics.)",
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise ConfigurationError(
                f"The folder {self.folder} cannot be written: {error.strerror or error}.", "Give another --out."
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    f"Another campaign is running in {self.folder}.", "Wait for it, or give another --out."
                ) from None
            yield


def summarise_reports(folder: Path) -> Iterator[dict[str, Any]]:
    """One row per plugin and target from the reports of all processes: the verdict that counts, and calls in all."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                key = (str(row["plugin"]), str(row["target"]))
                kept = rows.setdefault(
                    key, {"plugin": key[0], "target": key[1], "verdict": row["verdict"], "fired": None}
                )
                kept["verdict"] = min(kept["verdict"], row["verdict"], key=_weight)
                if row.get("fired") is not None:
                    kept["fired"] = int(kept["fired"] or 0) + int(row["fired"])
    yield from rows.values()


def _weight(verdict: str) -> int:
    """What is bad in one process counts for all; what is applied in one is in force."""
    if Verdict(verdict).bad:
        return 0
    return 1 if verdict in (Verdict.APPLIED, Verdict.WAITING) else 2


def _seed(number: int, cell: Cell, repetition: int) -> int:
    """The same for all arms of a round, another one for each run: no prompt is answered from the cache of another."""
    return zlib.crc32(f"{number}/{cell}/{repetition}".encode()) & 0x7FFFFFFF


def _diagnose(log: Path) -> Diagnosis | None:
    with suppress(OSError):
        return diagnose_file(log)
    return None


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in now:
        old, new = then.get(key), now[key]
        here = f"{at}.{key}" if at else key
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, here)
        elif old != new:
            yield f"{here} was {_brief(old)}, is {_brief(new)}"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
