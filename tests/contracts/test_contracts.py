"""Every patch of every bundled plugin, and every seam, against every release at hand."""

from __future__ import annotations

import pytest

from glm5_plugins import doctor, seams, source, wheels
from glm5_plugins.contract import check, contracts, patches
from glm5_plugins.environment import Environment
from glm5_plugins.manager import BUNDLED
from tests.contracts.conftest import ENVIRONMENTS, in_force


@pytest.mark.skipif(not ENVIRONMENTS, reason="no wheel is at hand: python tools/fetch_wheels.py")
def test_there_are_releases_to_check():
    assert {"sglang", "flashinfer-python"} <= {name for name in wheels.OLDEST if wheels.cached(name)}


def test_every_contract_holds(env: Environment) -> None:
    assert [str(breach) for breach in check(contracts(env), env)] == []


def test_every_step_has_as_many_seams_as_in_the_oldest_release(sglang_env: Environment) -> None:
    oldest = Environment({"sglang": str(wheels.OLDEST["sglang"])})
    counted = [sorted(seam.step for seam in seams.here(env)) for env in (sglang_env, oldest)]
    assert counted[0] == counted[1]


def test_a_build_from_source_is_judged_as_its_release(sglang_env: Environment) -> None:
    """Case 10 of the field: where the version says nothing, the source decides, and decides alike."""
    build = Environment({**sglang_env.versions, "sglang": "0.0.0.dev1+gbfefdc52d"}, roots=sglang_env.roots)
    assert list(seams.here(build)) == list(seams.here(sglang_env))
    sglang_env.cuda_devices = build.cuda_devices = 0
    for name in BUNDLED:
        known, unknown = doctor.examine_plugin(name, sglang_env), doctor.examine_plugin(name, build)
        assert [(row.target, row.verdict == "ready") for row in unknown.patches] == [
            (row.target, row.verdict == "ready") for row in known.patches
        ]
        assert (name, unknown.in_force, unknown.stops_a_launch) == (name, known.in_force, known.stops_a_launch)


@pytest.mark.parametrize("target", seams.RELIED_ON_IN_INSTANCES)
def test_what_the_layer_reads_from_instances_is_set_on_them(sglang_env: Environment, target: str) -> None:
    assert "it is set on instances by `GroupCoordinator.__init__`" in str(source.lacks(target, (), sglang_env.roots))


def test_every_patch_keeps_copies_that_exist_in_some_release() -> None:
    kept: dict[tuple[str, str], set[str]] = {}
    for env in ENVIRONMENTS:
        for name in BUNDLED:
            for patch in patches(name, env):
                if patch.keep:
                    found = kept.setdefault((name, patch.target), set())
                    found.update(copy for copy in patch.keep if source.lacks(copy, roots=env.roots) is None)
    assert [key for key, found in kept.items() if not found] == []


def test_every_patch_is_in_force_somewhere_or_says_why_nowhere() -> None:
    every = {(one.owner, one.target): one for env in ENVIRONMENTS for one in contracts(env)}
    somewhere = {(one.owner, one.target) for env in ENVIRONMENTS for one in in_force(env)}
    nowhere = [one for key, one in every.items() if key not in somewhere]
    assert [one for one in nowhere if one.unless is None or not one.unless(ENVIRONMENTS[0])] == []
