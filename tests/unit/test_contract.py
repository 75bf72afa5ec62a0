"""Contracts against made-up releases: each way to break one, and each way to be outside a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_plugins.contract import Contract, check, contracts, of_patch
from glm5_plugins.environment import Environment
from glm5_plugins.manager import BUNDLED
from glm5_plugins.patching import Patch
from glm5_plugins.probes import SourceHas, SourceLacks
from glm5_plugins.seams import RELIED_ON, SEAMS

THERE = "def capture(runner, kind): ...\n"
USED = "from sglang.graphs import capture\ncapture(1, kind=2)\n"


@pytest.fixture
def release(tmp_path: Path) -> Callable[..., Environment]:
    """An SGLang of one version with a module `sglang.graphs` and one that uses it."""

    def make(version: str | None, graphs: str = THERE, start: str = USED) -> Environment:
        (tmp_path / "sglang").mkdir()
        for name, text in {"__init__": "", "graphs": graphs, "start": start}.items():
            (tmp_path / "sglang" / f"{name}.py").write_text(text)
        return Environment({"sglang": version, "flashinfer-python": None}, roots=(tmp_path,))

    return make


def contract(requires: str = "sglang>=0.5.9,<0.5.22", **more: object) -> Contract:
    patch = Patch("sglang.graphs:capture", lambda old: old, "why", requires=requires, ends="it went", **more)  # type: ignore[arg-type]
    return of_patch("plugin 'acme'", patch)


def problems(env: Environment, *every: Contract) -> list[str]:
    return [str(breach) for breach in check(every, env)]


def test_it_holds(release) -> None:
    assert problems(release("0.5.12"), contract(needs=("kind",))) == []


@pytest.mark.parametrize(
    ("graphs", "text"),
    [
        ("def captured(runner): ...\n", "has no `capture`; did you mean `captured`?"),
        ("def capture(runner): ...\n", "does not take `kind`"),
        ("class Graphs:\n    def capture(self): ...\n", "; `capture` is defined in sglang/graphs.py:2"),
        ("from compiled import *\n", "has no `capture` that its source shows"),
    ],
)
def test_what_is_not_there_is_named_with_plugin_target_and_version(release, graphs: str, text: str) -> None:
    (problem,) = problems(release("0.5.12", graphs), contract(needs=("kind",)))
    assert problem.startswith("plugin 'acme': sglang.graphs:capture in sglang 0.5.12: ")
    assert text in problem


def test_what_nothing_uses_is_a_breach(release) -> None:
    (problem,) = problems(release("0.5.12", start="# capture()\n"), contract())
    assert problem.endswith(": nothing uses it")


@pytest.mark.parametrize("version", ["0.5.8", "0.5.22"])
def test_a_window_that_is_too_narrow_is_a_breach(release, version: str) -> None:
    (problem,) = problems(release(version), contract())
    assert f"sglang {version}: is outside sglang>=0.5.9,<0.5.22, yet everything relied on is there" in problem


@pytest.mark.parametrize(
    ("graphs", "start", "more"),
    [
        ("", USED, {}),
        ("def capture(runner): ...\n", USED, {"needs": ("kind",)}),
        (THERE, "", {}),
        (THERE, USED, {"outside": SourceLacks(("sglang.graphs:Backend",), "no backend")}),
        (THERE, USED, {"unless": SourceHas("sglang.graphs:capture", "cured")}),
    ],
    ids=["target gone", "parameter gone", "unused", "outside says so", "cured"],
)
def test_the_end_of_a_window_is_shown(release, graphs: str, start: str, more: dict[str, object]) -> None:
    assert problems(release("0.5.22", graphs, start), contract(**more)) == []


def test_outside_may_say_nothing_inside(release) -> None:
    (problem,) = problems(release("0.5.12"), contract(outside=SourceHas("sglang.graphs:capture", "it changed")))
    assert problem.endswith("is inside its windows, but `outside` says: it changed")


def test_what_is_cured_inside_needs_no_target(release) -> None:
    assert problems(release("0.5.12", ""), contract(unless=SourceLacks(("sglang.graphs:capture",), "cured"))) == []


def test_a_contract_on_what_is_not_at_hand_is_passed_over(release) -> None:
    assert problems(release(None), contract()) == []


def test_every_bundled_plugin_and_every_seam_is_a_contract(release) -> None:
    owners = {one.owner for one in contracts(release("0.5.12"))}
    assert owners <= {"the layer", *(f"plugin {name!r}" for name in BUNDLED)}
    assert "plugin 'cuda_version'" in owners
    assert sum(one.owner == "the layer" for one in contracts(release_like())) == len(SEAMS) + len(RELIED_ON)


def release_like() -> Environment:
    return Environment({"sglang": "0.5.12", "flashinfer-python": "0.6.3"}, roots=())


def test_probes_say_what_they_look_for() -> None:
    assert str(SourceHas("a:b", "text")) == "`a:b` exists"
    assert str(SourceLacks(("a:b", "c:d"), "text")) == "nothing of `a:b`, `c:d` exists"
    assert SourceHas("a:b", "text") == SourceHas("a:b", "text")
