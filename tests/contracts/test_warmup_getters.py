"""The functions that make modules ready are FlashInfer's own, take what the runtime gives them, and keep the module."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from glm5_plugins import wheels
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.source import Definition, Missing, code, find
from glm5_plugins.warmup.needs import RULES, Rule

FLASHINFER = wheels.cached("flashinfer-python")


def lacking(rule: Rule, release: wheels.Release) -> str | None:
    """What the release lacks for the call that the rule makes."""
    try:
        getter = find(rule.getter, [release.root])
    except Missing as missing:
        return str(missing)
    given = len(rule.arguments(next(iter(rule.archs))))
    taken = getter.parameters or ()
    needed = [parameter for parameter in taken if parameter.default is None and not parameter.kind.startswith("var")]
    if not len(needed) <= given <= len(taken):
        return f"{getter} takes {len(needed)} to {len(taken)} arguments, and is given {given}"
    if not any(map(is_cached, handed_on(rule.getter, release))):
        return f"{getter} is not cached, so a module made ready would be loaded again"
    return None


def is_cached(definition: Definition) -> bool:
    return any("cache" in decorator for decorator in definition.decorators)


def handed_on(target: str, release: wheels.Release) -> Iterator[Definition]:
    """The function itself, and those of its module that it returns the result of."""
    yield find(target, [release.root])
    module = target.partition(":")[0]
    for name in re.findall(r"^\s+return (\w+)\(", code(target, [release.root]), re.M):
        with contextlib.suppress(Missing):
            yield find(f"{module}:{name}", [release.root])


@pytest.mark.skipif(not FLASHINFER, reason="no wheel is at hand: python tools/fetch_wheels.py")
@pytest.mark.parametrize("release", FLASHINFER, ids=lambda release: release.version)
def test_a_getter_is_there_in_exactly_its_window(release: wheels.Release) -> None:
    env = Environment({"flashinfer-python": release.version})
    wrong = []
    for rule in RULES:
        windows = [Window.parse(text) for text in rule.requires if text.startswith("flashinfer-python")]
        inside = all(env.place(window) is Place.INSIDE for window in windows)
        problem = lacking(rule, release)
        if inside and problem is not None:
            wrong.append(f"{rule.name} in flashinfer-python {release.version}: {problem}")
        elif not inside and problem is None:
            wrong.append(f"{rule.name} is outside {rule.requires}, yet flashinfer-python {release.version} has it")
    assert wrong == []
