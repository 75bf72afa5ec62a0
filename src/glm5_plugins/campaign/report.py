"""What a campaign found, as tables: built once from the journal, rendered as Markdown and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_plugins.campaign.journal import Journal, Start
from glm5_plugins.campaign.plan import Arm, Plan
from glm5_plugins.campaign.verdicts import MANY_ROUNDS, Comparison, Interval, compare, level_of_arm, side_effects
from glm5_plugins.errors import ConfigurationError

_WORDS = {
    "pays": ("pays", "pays everywhere"),
    "does not": ("does not pay", "pays nowhere"),
    "cannot tell": ("is undecided", "is undecided everywhere"),
}
FIRED = "Calls are those that a process had reported; one that is killed reports no last ones."
"""What the figure in the column `fired` is."""
_IDLE = ("not needed", "not applicable", "skipped")

LATENCIES = {"median_ttft_ms": "TTFT", "median_itl_ms": "ITL"}
"""Medians, in milliseconds: until the first token, and between tokens."""


@dataclass(frozen=True)
class Table:
    """Rows of text under heads. A column of figures is set to the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Failure:
    """A start that failed, and why."""

    title: str
    reason: str
    cause: str
    cure: str
    link: str
    evidence: str
    log: str


@dataclass(frozen=True)
class Result:
    """All that a campaign's folder holds."""

    folder: Path
    plan: Plan
    journal: Journal
    about: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every arm that starts has every run."""
        done = {(run.round, run.arm, run.cell, run.repetition) for run in self.journal.runs}
        return all(
            (number, arm.name, cell, repetition) in done
            for number in range(self.plan.rounds)
            for arm in self.plan.arms
            if arm.name not in self.journal.given_up
            for cell in self.plan.cells
            for repetition in range(self.plan.bench.repetitions)
        )


def load(folder: Path) -> Result:
    """Read a campaign's folder.

    Raises:
        ConfigurationError: It is none, or its plan is of another version of this package.
    """
    path = folder / "campaign.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        plan = Plan.model_validate(about["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{folder} is no folder of a campaign: {path.name}: {type(error).__name__}.",
            "Give the folder that `glm5-plugins campaign` named at its end.",
        ) from None
    return Result(folder, plan, Journal(folder / "runs.jsonl"), about)


@dataclass(frozen=True)
class Report:
    """The findings in the order they are read."""

    title: str
    summary: tuple[str, ...]
    decisions: Table
    failures: tuple[Failure, ...]
    figures: Table
    latencies: Table
    in_force: Table
    troubles: tuple[str, ...]
    method: str
    about: Table


def build(result: Result) -> Report:
    """Work out all that is reported."""
    plan, journal = result.plan, result.journal
    comparisons = compare(plan, journal.runs, doubts(result))
    failures = tuple(_failure(start) for start in _last_failures(journal).values())
    return Report(
        title=f"Campaign {plan.name}",
        summary=tuple(_summary(result, comparisons)),
        decisions=_decisions(comparisons, journal),
        failures=failures,
        figures=_figures(plan, journal),
        latencies=_latencies(plan, journal),
        in_force=_in_force(journal),
        troubles=tuple(_troubles(result)),
        method=_method(plan),
        about=_about(result),
    )


def _summary(result: Result, comparisons: Sequence[Comparison]) -> Iterable[str]:
    for arm in result.plan.challengers:
        rows = [row for row in comparisons if row.arm == arm.name]
        if failed := _last_failures(result.journal).get(arm.name):
            name = (failed.diagnosis or {}).get("name", "")
            known = f": {name}" if name and name not in ("unknown", "no failure") else ""
            yield f"**{arm.name}** did not start{known}."
            continue
        parts = [
            everywhere if len(cells) == len(rows) else f"{here} at {_list(cells)}"
            for verdict, (here, everywhere) in _WORDS.items()
            if (cells := [str(row.cell) for row in rows if row.verdict == verdict])
        ]
        yield f"**{arm.name}** {'; '.join(parts)}."
    if not result.complete:
        yield "The campaign is not complete: run it again to go on. What stands here may change."


def _decisions(comparisons: Sequence[Comparison], journal: Journal) -> Table:
    never = journal.given_up - {row.arm for row in comparisons if row.pairs}
    rows: list[tuple[str, ...]] = []
    for row in comparisons:
        if row.arm in never:
            continue
        why = [row.why]
        if row.rounds_to_tell:
            most = row.rounds_to_tell > MANY_ROUNDS
            why.append(f"{f'more than {MANY_ROUNDS}' if most else f'about {row.rounds_to_tell}'} rounds would tell")
        if row.arm in journal.given_up:
            why.append("later its server did not start")
        ratio = (_ratio(row.ratio.value), span(row.ratio)) if row.ratio else ("-", "-")
        rows.append((row.arm, str(row.cell), *ratio, str(row.pairs), row.verdict, "; ".join(why)))
    rows += [(arm, "all", "-", "-", "0", "did not start", "see below") for arm in sorted(never)]
    heads = ("arm", "shape x concurrency", "ratio", "interval", "rounds", "verdict", "why")
    return Table(heads, tuple(rows), frozenset({2, 3, 4}))


def _figures(plan: Plan, journal: Journal) -> Table:
    metrics = ("output_throughput", *LATENCIES)
    rows = []
    for cell in plan.cells:
        for arm in plan.arms:
            levels = [level_of_arm(journal.runs, arm.name, cell, m, plan.decision.confidence) for m in metrics]
            if any(levels):
                rows.append((str(cell), arm.name, *(figure_text(level.value) if level else "-" for level in levels)))
    heads = ("shape x concurrency", "arm", "output tokens/s", *(f"{name}, ms" for name in LATENCIES.values()))
    return Table(heads, tuple(rows), frozenset({2, 3, 4}))


def _latencies(plan: Plan, journal: Journal) -> Table:
    rows = [
        (side.arm, str(side.cell), LATENCIES[side.metric], _ratio(side.ratio.value), span(side.ratio))
        for side in side_effects(plan, journal.runs, tuple(LATENCIES))
    ]
    return Table(("arm", "shape x concurrency", "median", "ratio", "interval"), tuple(rows), frozenset({3, 4}))


def _in_force(journal: Journal) -> Table:
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in journal.in_force:
        for row in record.rows:
            found = kept.setdefault((record.arm, row["plugin"], row["target"]), {"verdicts": {}, "fired": None})
            found["verdicts"][row["verdict"]] = None
            if row["fired"] is not None:
                found["fired"] = max(found["fired"] or 0, row["fired"])
    rows = [
        (arm, plugin, ", ".join(found["verdicts"]), "-" if found["fired"] is None else str(found["fired"]), target)
        for (arm, plugin, target), found in kept.items()
    ]
    return Table(("arm", "plugin", "verdict", "fired", "target"), tuple(rows), frozenset({3}))


def _failure(start: Start) -> Failure:
    found = start.diagnosis or {}
    cause = found.get("cause", "")
    if not found.get("line"):  # no failure was found
        stage = f" It came as far as: {found['stage']}." if found.get("stage") else ""
        cause = f"{cause}{stage}"
    return Failure(
        title=f"{start.arm}, round {start.round + 1}",
        reason=f"{start.reason[:1].upper()}{start.reason[1:]}.",
        cause=f"{found.get('name', 'unknown')}: {cause}" if found.get("verdict") == "known" else cause,
        cure=found.get("cure", ""),
        link=found.get("link", ""),
        evidence=found.get("evidence", ""),
        log=start.log + (f":{found['line']}" if found.get("line") else ""),
    )


def _last_failures(journal: Journal) -> dict[str, Start]:
    """The last start of each arm that was given up."""
    return {start.arm: start for start in journal.starts if start.arm in journal.given_up}


def _troubles(result: Result) -> Iterable[str]:
    for run in result.journal.runs:
        if not run.ok:
            yield f"{run.arm}, round {run.round + 1}, {run.cell}: {run.reason} ({run.log})"
    for arm, doubt in doubts(result).items():
        yield f"{arm}: {doubt}"


def doubts(result: Result) -> dict[str, str]:
    """Arms whose speed is no argument for them, and why: they cannot be said to pay."""
    found = {}
    for arm in result.plan.challengers:
        rows = [row for record in result.journal.in_force if record.arm == arm.name for row in record.rows]
        others = arm.args or arm.profile or [name for name in arm.env if not name.startswith("GLM5_")]
        if arm.plugins and rows and not others and all(row["verdict"] in _IDLE for row in rows):
            verdicts = ", ".join(dict.fromkeys(f"{row['plugin']}: {row['verdict']}" for row in rows))
            found[arm.name] = f"nothing of it was in force ({verdicts}), so that a difference is not its doing"
        elif _did_other_work(result, arm.name):
            found[arm.name] = (
                "its answers had another number of tokens than the baseline's, so that speeds do not compare"
            )
    return found


def _did_other_work(result: Result, arm: str) -> bool:
    """Whether the benchmark got another number of tokens from this arm than from the baseline, in any run of both."""
    tokens: dict[str, dict[object, float]] = {arm: {}, result.plan.base.name: {}}
    for run in result.journal.runs:
        if run.ok and run.arm in tokens and "total_output_tokens" in run.metrics:
            tokens[run.arm][run.round, run.cell, run.repetition] = run.metrics["total_output_tokens"]
    ours, theirs = tokens[arm], tokens[result.plan.base.name]
    return any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys())


def _method(plan: Plan) -> str:
    count = len(plan.challengers) * len(plan.cells)
    return (
        f"Each of {plan.rounds} rounds starts every arm once, in turning order, and drives it with "
        f"`sglang.bench_serving`; arms of a round answer the same prompts. The ratio is output throughput over the "
        f"baseline's ({plan.base.name}), paired by round, as a geometric mean; the interval is Student's on the "
        f"logarithms. "
        f"It is widened so that with {plan.decision.confidence:.0%} confidence none of the {count} intervals misses "
        f"(Bonferroni). An arm pays where its interval lies above 1, and does not where it ends below "
        f"{1 + plan.decision.worth_percent / 100:.3f}; else the campaign cannot tell. Latencies inform and decide "
        f"nothing."
    )


def _about(result: Result) -> Table:
    rows = [(name, str(value)) for name, value in result.about.get("versions", {}).items()]
    rows += [(name, str(value)) for name, value in result.about.get("machine", {}).items()]
    rows.append(("begun", str(result.about.get("begun", ""))))
    rows.append(("model", result.plan.server.model))
    rows.append(("server arguments", " ".join(result.plan.server.args)))
    rows += [(f"arm {arm.name}", describe(arm)) for arm in result.plan.arms]
    return Table(("", ""), tuple(rows))


def describe(arm: Arm) -> str:
    """What makes an arm what it is."""
    parts = []
    if arm.plugins:
        parts.append(f"plugins {', '.join(arm.plugins)}")
    if arm.profile:
        parts.append(f"profile {arm.profile}")
    parts += [*([" ".join(arm.args)] if arm.args else []), *(f"{name}={value}" for name, value in arm.env.items())]
    return "; ".join(parts) or "nothing added"


def span(interval: Interval) -> str:
    """An interval of ratios as text."""
    return f"{_ratio(interval.low)} to {_ratio(interval.high)}"


def _ratio(value: float) -> str:
    """Three decimals where they mean something."""
    if 0.1 <= value < 10:
        return f"{value:.3f}"
    return f"{value:.2g}" if 0.01 <= value < 100 else "<0.01" if value < 1 else ">100"


def figure_text(value: float) -> str:
    """Three or more digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- Markdown ---


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [f"# {report.title}", *(f"- {line}" for line in report.summary)]
    parts = [parts[0], "\n".join(parts[1:]), "## What pays", markdown_of(report.decisions), report.method]
    if report.failures:
        parts.append("## What did not start")
        for failure in report.failures:
            lines = [f"### {failure.title}", failure.reason]
            lines += [f"- {head}: {text}" for head, text in _of_failure(failure) if text]
            parts.append("\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]))
    if report.troubles:
        parts += ["## What to mind", "\n".join(f"- {line}" for line in report.troubles)]
    parts += ["## Figures", markdown_of(report.figures)]
    if report.latencies.rows:
        parts += ["## Latency against the baseline", "Below 1 is faster.", markdown_of(report.latencies)]
    if report.in_force.rows:
        parts += ["## What was in force", markdown_of(report.in_force), FIRED]
    parts += ["## What it ran on", markdown_of(report.about)]
    return "\n\n".join(parts) + "\n"


def _of_failure(failure: Failure) -> list[tuple[str, str]]:
    evidence = f"`{failure.evidence.replace('`', chr(39))}`" if failure.evidence else ""
    return [
        ("cause", failure.cause),
        ("cure", failure.cure),
        ("see", failure.link),
        ("the log says", evidence),
        ("log", f"`{failure.log}`"),
    ]


def markdown_of(of: Table) -> str:
    """A Markdown table."""
    if not of.rows:
        return "None."
    rows = [of.heads, tuple("--:" if i in of.figures else "---" for i in range(len(of.heads))), *of.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
