"""Which arms pay: ratios to the baseline from paired runs, their intervals, and what may be said of them.

The unit is the server start. Within a round each arm is started once, and all arms answer the same prompts, so the
logarithm of arm over baseline of one round is one observation, free of what drifts between rounds. Their mean gives the
ratio, and Student's t its interval. With the handful of rounds that a campaign can afford, a bootstrap of them would be
too narrow, and so claim too much.

A campaign makes many comparisons. The intervals share out the error (Bonferroni), so that under no difference at all
not one of them misses, with the confidence asked for; "pays" is said only where an interval lies above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from glm5_plugins.campaign.journal import Run
from glm5_plugins.campaign.plan import Cell, Plan

Verdict = Literal["pays", "does not", "cannot tell"]

DECIDES = "output_throughput"
"""The figure that decides, in tokens per second: more is better."""
MANY_ROUNDS = 100
"""More than anybody runs."""
_FEWEST = 3  # rounds below which nothing is said: two can agree by accident


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval it lies in; all three are ratios, or all have the figure's unit."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline, at one shape and concurrency."""

    arm: str
    cell: Cell
    pairs: int
    """Rounds in which both have figures."""
    ratio: Interval | None
    """Throughput over the baseline's; above 1 is faster."""
    verdict: Verdict
    why: str
    rounds_to_tell: int | None = None
    """How many rounds it would take, about, to see the gain found, or the smallest gain worth having; `MANY_ROUNDS`
    and one where it would take more."""


@dataclass(frozen=True)
class Side:
    """A figure that does not decide, as a ratio to the baseline."""

    arm: str
    cell: Cell
    metric: str
    ratio: Interval


def compare(plan: Plan, runs: Sequence[Run], doubts: Mapping[str, str] | None = None) -> list[Comparison]:
    """Compare each arm with the baseline in each cell.

    Args:
        plan: says how many comparisons there are, which sets how wide each interval has to be.
        runs: all runs; failed ones do not count.
        doubts: reasons why an arm cannot be said to pay, however fast it was.

    Returns:
        One row per arm and cell, also for those that were never measured.
    """
    decisions = len(plan.challengers) * len(plan.cells)
    level = 1 - (1 - plan.decision.confidence) / decisions
    rows = []
    for arm in plan.challengers:
        for cell in plan.cells:
            logs = log_ratios(runs, plan.base.name, arm.name, cell, DECIDES)
            row = decide(arm.name, cell, logs, level, plan.decision.worth_percent / 100)
            doubt = (doubts or {}).get(arm.name)
            if doubt and row.verdict == "pays":
                row = replace(row, verdict="cannot tell", why=doubt)
            rows.append(row)
    return rows


def side_effects(plan: Plan, runs: Sequence[Run], metrics: Sequence[str]) -> list[Side]:
    """Ratios of other figures, with the same intervals; they inform and decide nothing."""
    level = 1 - (1 - plan.decision.confidence) / (len(plan.challengers) * len(plan.cells))
    rows = []
    for arm in plan.challengers:
        for cell in plan.cells:
            for metric in metrics:
                logs = log_ratios(runs, plan.base.name, arm.name, cell, metric)
                if len(logs) >= _FEWEST:
                    rows.append(Side(arm.name, cell, metric, _exponential(mean_interval(logs, level))))
    return rows


def decide(arm: str, cell: Cell, logs: Sequence[float], level: float, worth: float) -> Comparison:
    """Say what the logarithms of one comparison's ratios allow.

    Args:
        arm: name of the arm.
        cell: what was measured.
        logs: natural logarithms of arm over baseline, one per round.
        level: confidence of this one interval.
        worth: the smallest gain worth having, as a fraction.
    """
    if len(logs) < _FEWEST:
        return Comparison(arm, cell, len(logs), None, "cannot tell", _too_few(len(logs)))
    around = mean_interval(logs, level)
    ratio = _exponential(around)
    gain = f"{ratio.value - 1:+.1%}"
    if ratio.high < 1:
        return Comparison(arm, cell, len(logs), ratio, "does not", f"slower, {gain}")
    if ratio.high < 1 + worth:
        return Comparison(arm, cell, len(logs), ratio, "does not", f"gains less than {worth:.1%}, if anything")
    if ratio.low > 1:
        return Comparison(arm, cell, len(logs), ratio, "pays", f"faster, {gain}")
    needed = _rounds_to_tell(logs, level, max(abs(around.value), math.log1p(worth)))
    return Comparison(arm, cell, len(logs), ratio, "cannot tell", "the interval holds both", needed)


def log_ratios(runs: Sequence[Run], base: str, arm: str, cell: Cell, metric: str) -> list[float]:
    """Natural logarithms of arm over baseline, one for each round that has both."""
    ours, theirs = by_round(runs, arm, cell, metric), by_round(runs, base, cell, metric)
    return [ours[number] - theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def by_round(runs: Sequence[Run], arm: str, cell: Cell, metric: str) -> Mapping[int, float]:
    """The mean logarithm of a figure over the repetitions of each round."""
    logs: dict[int, list[float]] = {}
    for run in runs:
        if run.ok and run.arm == arm and run.cell == cell and run.metrics.get(metric, 0) > 0:
            logs.setdefault(run.round, []).append(math.log(run.metrics[metric]))
    return {number: sum(values) / len(values) for number, values in logs.items()}


def level_of_arm(runs: Sequence[Run], arm: str, cell: Cell, metric: str, confidence: float) -> Interval | None:
    """The typical figure of one arm over its rounds (geometric mean), in the figure's unit; not a comparison."""
    logs = list(by_round(runs, arm, cell, metric).values())
    if not logs:
        return None
    if len(logs) < 2:
        value = math.exp(logs[0])
        return Interval(value, value, value)
    return _exponential(mean_interval(logs, confidence))


def mean_interval(values: Sequence[float], level: float) -> Interval:
    """The mean of at least two values and Student's interval around it."""
    mean = sum(values) / len(values)
    half = _quantile(level, len(values) - 1) * _deviation(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def _rounds_to_tell(logs: Sequence[float], level: float, effect: float) -> int | None:
    deviation = _deviation(logs)
    if not effect:
        return None
    for count in range(len(logs) + 1, MANY_ROUNDS + 1):
        if _quantile(level, count - 1) * deviation / math.sqrt(count) < effect:
            return count
    return MANY_ROUNDS + 1


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


@lru_cache(maxsize=4096)
def _quantile(level: float, freedom: float) -> float:
    from scipy.stats import t  # of the extra `campaign`; SGLang brings it, too

    return float(t.ppf((1 + level) / 2, freedom))


def _exponential(interval: Interval) -> Interval:
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high))


def _too_few(pairs: int) -> str:
    if pairs == 0:
        return "no round has figures of both"
    return f"{pairs} of at least {_FEWEST} rounds"


# --- two campaigns ---


@dataclass(frozen=True)
class Change:
    """An arm in one campaign against the same arm in another."""

    arm: str
    cell: Cell
    rounds: tuple[int, int]
    ratio: Interval | None
    """Throughput of the second over the first."""
    verdict: Literal["faster", "slower", "cannot tell"]


def compare_campaigns(
    first: tuple[Plan, Sequence[Run]], second: tuple[Plan, Sequence[Run]], confidence: float
) -> list[Change]:
    """Compare arms of the same name in cells of the same name.

    Their rounds were not run side by side, so they are no pairs: Welch's interval over the server starts, shared out
    over all rows. What changed between the two campaigns besides the arm (machine, temperature, neighbours) is in it.
    """
    names = [arm.name for arm in first[0].arms if arm.name in {other.name for other in second[0].arms}]
    cells = [cell for cell in first[0].cells if cell in second[0].cells]
    level = 1 - (1 - confidence) / max(1, len(names) * len(cells))
    rows = []
    for name in names:
        for cell in cells:
            before = list(by_round(first[1], name, cell, DECIDES).values())
            after = list(by_round(second[1], name, cell, DECIDES).values())
            rows.append(_change(name, cell, before, after, level))
    return rows


def _change(name: str, cell: Cell, before: Sequence[float], after: Sequence[float], level: float) -> Change:
    rounds = (len(before), len(after))
    if min(rounds) < _FEWEST:
        return Change(name, cell, rounds, None, "cannot tell")
    difference = sum(after) / len(after) - sum(before) / len(before)
    parts = [_deviation(values) ** 2 / len(values) for values in (before, after)]
    error = math.sqrt(sum(parts))
    half = 0.0
    if error:
        freedom = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, rounds, strict=True))
        half = _quantile(level, freedom) * error
    ratio = _exponential(Interval(difference, difference - half, difference + half))
    verdict: Literal["faster", "slower", "cannot tell"] = "cannot tell"
    if ratio.low > 1:
        verdict = "faster"
    elif ratio.high < 1:
        verdict = "slower"
    return Change(name, cell, rounds, ratio, verdict)
