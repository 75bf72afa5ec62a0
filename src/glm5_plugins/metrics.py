"""The gauge `glm5:plugin_in_force`, among the metrics that SGLang serves with `--enable-metrics`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from glm5_plugins.patching import Verdict
from glm5_plugins.report import Row

NAME = "glm5:plugin_in_force"

_IN_FORCE = (Verdict.APPLIED, Verdict.NOT_NEEDED)
# Of a plugin's rows the worst speaks for it; a patch that waits for its module says nothing while another is in force.
_WORST_FIRST = (
    *(Verdict.FAILED, Verdict.DRIFTED, Verdict.DEAD, Verdict.CONFLICT),
    *(Verdict.SKIPPED, Verdict.APPLIED, Verdict.NOT_NEEDED, Verdict.WAITING, Verdict.NOT_APPLICABLE),
)


def verdicts(rows: Iterable[Row]) -> dict[str, Verdict]:
    """One verdict for each plugin: the worst of its rows."""
    worst: dict[str, Verdict] = {}
    for row in rows:
        known = worst.get(row.plugin, row.verdict)
        worst[row.plugin] = min(known, row.verdict, key=_WORST_FIRST.index)
    return worst


def publish(rows: Iterable[Row], role: str) -> str | None:
    """Set the gauge of every plugin in this process: 1 in force, 0 not.

    A plugin whose patches all wait for modules that this process has not imported, or that has nothing to do here, has
    no gauge: an alert on 0 means what it says.

    Returns:
        Why nothing was published, or None.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return "SGLang has not chosen PROMETHEUS_MULTIPROC_DIR in this process"
    try:
        gauge = _gauge()
    except ImportError as error:
        return str(error)
    for plugin, verdict in verdicts(rows).items():
        if verdict in (Verdict.WAITING, Verdict.NOT_APPLICABLE):
            continue
        for labels in _said.setdefault((plugin, role), []):
            gauge.labels(**labels).set(0)  # a series of this process that no longer holds
        labels = {"plugin": plugin, "process": role, "verdict": verdict.value}
        gauge.labels(**labels).set(1 if verdict in _IN_FORCE else 0)
        if labels not in _said[plugin, role]:
            _said[plugin, role].append(labels)
    return None


_said: dict[tuple[str, str], list[Mapping[str, str]]] = {}


@cache
def _gauge() -> Any:
    text = "Whether a plugin of glm5-plugins is in force in a process: 1 yes, 0 no; the verdict says why."
    # Of several ranks with one verdict, any speaks for all.
    gauge = import_module("prometheus_client").Gauge  # what SGLang brings
    return gauge(NAME, text, ("plugin", "process", "verdict"), multiprocess_mode="max")
