"""`moe_autotune`: the patch up to 0.5.12, not needed after, and its two options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from glm5_plugins.plugins import moe_autotune

from glm5_plugins import Environment
from glm5_plugins.patching import Registry, Verdict
from tests.unit.choosing.conftest import NVFP4, VERSIONS, Ask

CUTLASS = {**NVFP4, "moe_runner_backend": "flashinfer_cutlass"}


@pytest.mark.parametrize("version", VERSIONS)
def test_table(ask: Ask, version: str) -> None:
    early = VERSIONS.index(version) < VERSIONS.index("0.5.13")
    answer = ask("moe_autotune", version, **CUTLASS)
    assert answer.added == {}
    assert answer.said.startswith("applied" if early else "not needed")
    (patch,) = moe_autotune.glm5_patches()
    verdict, reason = Registry(Environment({"sglang": version})).judge(patch)
    assert verdict is (Verdict.WAITING if early else Verdict.NOT_NEEDED)
    assert early or "by itself from 0.5.13" in reason


@pytest.mark.parametrize("version", VERSIONS)
def test_the_off_switch(ask: Ask, version: str) -> None:
    assert ask("moe_autotune", version, _ENABLED="false").added == {"disable_flashinfer_autotune": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_operators_to_skip(ask: Ask, version: str) -> None:
    answer = ask("moe_autotune", version, _SKIP_OPS="fp4_gemm, trtllm_moe,")
    if VERSIONS.index(version) < VERSIONS.index("0.5.17"):
        assert "GLM5_MOE_AUTOTUNE_SKIP_OPS=fp4_gemm,trtllm_moe needs SGLang 0.5.17" in answer.refused
    else:
        assert answer.added == {"flashinfer_autotune_skip_ops": ["fp4_gemm", "trtllm_moe"]}


def test_wanted_and_switched_off(ask: Ask) -> None:
    assert (
        "--disable-flashinfer-autotune was given"
        in ask("moe_autotune", "0.5.12", disable_flashinfer_autotune=True).refused
    )


def should_run(self: SimpleNamespace) -> bool:
    """As in SGLang up to 0.5.12: flashinfer_cutlass is not in the list."""
    arguments = self.server_args
    return not arguments.disable_flashinfer_autotune and arguments.moe_runner_backend in ("flashinfer_trtllm",)


@pytest.mark.parametrize(
    ("runner", "off", "tuned"),
    [
        ("flashinfer_cutlass", False, True),
        ("flashinfer_cutlass", True, False),
        ("flashinfer_trtllm", False, True),
        ("triton", False, False),
    ],
)
def test_the_patched_question(runner: str, off: bool, tuned: bool) -> None:
    arguments = SimpleNamespace(moe_runner_backend=runner, disable_flashinfer_autotune=off)
    assert moe_autotune._also_cutlass(should_run)(SimpleNamespace(server_args=arguments)) is tuned
    assert arguments.moe_runner_backend == runner


def test_an_error_of_sglang_leaves_the_arguments_as_they_were() -> None:
    def fails(self: SimpleNamespace) -> bool:
        raise RuntimeError("no device")

    arguments = SimpleNamespace(moe_runner_backend="flashinfer_cutlass")
    with pytest.raises(RuntimeError, match="no device"):
        moe_autotune._also_cutlass(fails)(SimpleNamespace(server_args=arguments))
    assert arguments.moe_runner_backend == "flashinfer_cutlass"
