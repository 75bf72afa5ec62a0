"""The table of `ep`: version x all-to-all x runner x size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_plugins import Environment
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.manager import PluginManager
from tests.unit.choosing.conftest import NVFP4, VERSIONS, Ask

# plugin option, tensor parallel size, further flags -> size added; None for nothing, text for a refusal.
TABLE = [
    ("auto", 8, {}, 8),
    ("auto", 1, {}, None),
    ("auto", 8, {"moe_dp_size": 2}, 4),
    ("1", 8, {}, None),
    ("4", 8, {}, 4),
    ("8", 8, {}, 8),
    ("3", 8, {}, "does not divide"),
    ("16", 8, {}, "does not divide"),
    ("2", 8, {"moe_runner_backend": "flashinfer_cutlass"}, "takes an expert parallel size of 1 or 8, not 2"),
    ("auto", 8, {"moe_runner_backend": "flashinfer_cutlass"}, 8),
    ("2", 8, {"moe_runner_backend": "triton_kernel"}, "triton_kernel takes no expert parallelism"),
    ("4", 8, {"moe_a2a_backend": "deepep"}, "makes the expert parallel size the tensor parallel size"),
    ("auto", 8, {"moe_a2a_backend": "deepep"}, 8),
    ("8", 8, {"moe_dp_size": 2}, "must be their quotient or 1"),
    ("auto", 8, {"ep_size": 4}, None),
    ("auto", 8, {"ep_size": 3}, "does not divide"),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("size", "tp", "flags", "expected"), TABLE)
def test_table(ask: Ask, version: str, size: str, tp: int, flags: dict[str, object], expected: object) -> None:
    answer = ask("ep", version, _SIZE=size, tp_size=tp, **flags)
    if isinstance(expected, str):
        assert expected in answer.refused
        assert "\n" in answer.refused
    else:
        assert answer.added == ({} if expected is None else {"ep_size": expected})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("arch", "refused_from"), [("sm120", "0.5.13"), ("sm100", None)])
def test_the_runner_that_sglang_would_choose_counts(ask: Ask, version: str, arch: str, refused_from: str) -> None:
    """On SM120 from 0.5.13 `auto` is flashinfer_cutlass, which takes no size in between."""
    answer = ask("ep", version, arch, _SIZE=2, tp_size=8, **NVFP4)
    expected = refused_from is not None and VERSIONS.index(version) >= VERSIONS.index(refused_from)
    assert bool(answer.refused) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_cutedsl_is_as_strict_from_the_version_that_checks(ask: Ask, version: str) -> None:
    answer = ask("ep", version, "sm100", _SIZE=2, tp_size=8, moe_runner_backend="flashinfer_cutedsl")
    assert bool(answer.refused) == (VERSIONS.index(version) >= VERSIONS.index("0.5.11"))


def test_the_users_own_size_is_judged_too(ask: Ask) -> None:
    """Case 9: ep 2 of tp 8 with flashinfer_cutlass is an assertion minutes later."""
    answer = ask("ep", "0.5.12", tp_size=8, ep_size=2, moe_runner_backend="flashinfer_cutlass")
    assert "SGLang 0.5.12" in answer.refused
    assert "not 2" in answer.refused


def test_the_checkpoint_is_asked_for_its_experts(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"n_routed_experts": 154}))
    assert "154" not in ask("ep", "0.5.23", _SIZE=2, tp_size=4, model_path=str(tmp_path)).refused
    assert "evenly" in ask("ep", "0.5.23", _SIZE=4, tp_size=4, model_path=str(tmp_path)).refused


@pytest.mark.parametrize("text", ["", "[]", "{", '{"n_routed_experts": "many"}'])
def test_a_config_that_says_nothing_is_no_obstacle(ask: Ask, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert ask("ep", "0.5.23", _SIZE=4, tp_size=4, model_path=str(tmp_path)).added == {"ep_size": 4}


@pytest.mark.parametrize("size", ["0", "-2", "half", ""])
def test_a_size_that_is_none_is_named(ask: Ask, size: str) -> None:
    assert f"GLM5_EP_SIZE='{size}' is not valid" in ask("ep", "0.5.23", _SIZE=size, tp_size=8).refused


@pytest.mark.parametrize("version", VERSIONS)
def test_the_runner_that_another_plugin_adds_counts(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5_EP_SIZE", "2")
    given = {"tp_size": 8, "model_path": "x/GLM-5-NVFP4"}
    env = Environment({"sglang": version}, (12, 0), elsewhere=True)
    for order in (["ep", "moe_runner"], ["moe_runner", "ep"]):
        manager = PluginManager()
        manager.load(order)
        with pytest.raises(ConfigurationError, match=r"flashinfer_cutlass of SGLang .* 1 or 8, not 2"):
            manager.server_args(env, given)
    alone = PluginManager()
    alone.load(["ep"])
    assert alone.server_args(env, given).keys() == {"ep_size"}
