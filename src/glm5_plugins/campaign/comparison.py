"""Two campaigns against each other: the same arms before and after an upgrade, or on two machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from glm5_plugins.campaign.report import Result, Table, markdown_of, span
from glm5_plugins.campaign.verdicts import Change, compare_campaigns
from glm5_plugins.errors import ConfigurationError


@dataclass(frozen=True)
class Both:
    """All that is said about two campaigns."""

    changes: tuple[Change, ...]
    differs: tuple[tuple[str, str, str], ...]
    """What differs around the arms: key, in the first, in the second."""
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    """Arms that only the first has, and only the second."""


def compare(first: Result, second: Result) -> Both:
    """Compare two campaigns.

    Raises:
        ConfigurationError: They have no arm, or no shape at the same concurrency, in common.
    """
    names = [{arm.name for arm in result.plan.arms} for result in (first, second)]
    if not names[0] & names[1]:
        raise ConfigurationError(
            f"{first.folder} and {second.folder} have no arm of the same name.",
            f"They have {', '.join(sorted(names[0]))}, and {', '.join(sorted(names[1]))}.",
        )
    if not set(first.plan.cells) & set(second.plan.cells):
        raise ConfigurationError(
            f"{first.folder} and {second.folder} have no shape at the same concurrency.",
            "Campaigns compare where name of the shape and concurrency are the same.",
        )
    confidence = min(first.plan.decision.confidence, second.plan.decision.confidence)
    rows = compare_campaigns((first.plan, first.journal.runs), (second.plan, second.journal.runs), confidence)
    return Both(
        tuple(rows),
        tuple(_differences(first, second)),
        (tuple(sorted(names[0] - names[1])), tuple(sorted(names[1] - names[0]))),
    )


def _differences(first: Result, second: Result) -> Iterable[tuple[str, str, str]]:
    for part in ("versions", "machine"):
        before, after = first.about.get(part, {}), second.about.get(part, {})
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                yield key, str(before.get(key, "-")), str(after.get(key, "-"))
    plans = [result.plan.model_dump(mode="json") for result in (first, second)]
    for part in ("server", "bench"):
        for key, before in plans[0][part].items():
            if before != plans[1][part][key]:
                yield f"{part}.{key}", json.dumps(before), json.dumps(plans[1][part][key])
    arms = [{arm["name"]: arm for arm in plan["arms"]} for plan in plans]
    for name in arms[0]:
        if name in arms[1] and arms[0][name] != arms[1][name]:
            yield f"arm {name}", json.dumps(arms[0][name]), json.dumps(arms[1][name])


def markdown(both: Both, first: str, second: str) -> str:
    """The comparison as Markdown."""
    rows = tuple(
        (
            change.arm,
            str(change.cell),
            f"{change.ratio.value:.3f}" if change.ratio else "-",
            span(change.ratio) if change.ratio else "-",
            f"{change.rounds[0]}, {change.rounds[1]}",
            change.verdict,
        )
        for change in both.changes
    )
    heads = ("arm", "shape x concurrency", "ratio", "interval", "rounds", "the second is")
    parts = [
        f"# {second} against {first}",
        markdown_of(Table(heads, rows, frozenset({2, 3, 4}))),
        "Output throughput of the second over the first (Welch on the logarithms, intervals widened for the number of "
        "rows). The two were not run side by side: whatever else differs between them is in the ratio.",
    ]
    if both.differs:
        parts += ["## What else differs", markdown_of(Table(("", first, second), both.differs))]
    for name, only in zip((first, second), both.only_in, strict=True):
        if only:
            parts.append(f"Only in {name}: {', '.join(only)}.")
    return "\n\n".join(parts) + "\n"
