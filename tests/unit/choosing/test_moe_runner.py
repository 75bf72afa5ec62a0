"""The table of `moe_runner`: version x GPU x flags -> runner and FP4 GEMM."""

from __future__ import annotations

import pytest

from tests.unit.choosing.conftest import NVFP4, VERSIONS, Ask


def before(version: str, bound: str) -> bool:
    return VERSIONS.index(version) < VERSIONS.index(bound)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120", "unknown"])
def test_table(ask: Ask, version: str, arch: str) -> None:
    expected = {}
    if arch == "sm120" and before(version, "0.5.13"):
        expected["moe_runner_backend"] = "flashinfer_cutlass"
    if arch == "sm120" and version == "0.5.9":
        expected["fp4_gemm_runner_backend"] = "flashinfer_cudnn"
    answer = ask("moe_runner", version, arch, tp_size=8, **NVFP4)
    assert answer.added == expected
    if arch in ("sm100", "sm120") and not expected:
        assert answer.said.startswith("not needed: ")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_alone_on_sm120(ask: Ask, version: str) -> None:
    """SGLang chooses the FlashInfer runner for a typed --quantization alone; this plugin for the checkpoint too."""
    answer = ask("moe_runner", version, "sm120", tp_size=8, model_path="x/GLM-5.2-NVFP4")
    assert answer.added is not None
    assert answer.added["moe_runner_backend"] == "flashinfer_cutlass"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_alone_on_sm100(ask: Ask, version: str) -> None:
    model = {"model_path": "x/GLM-5-NVFP4"}
    answer = ask("moe_runner", version, "sm100", tp_size=8, **model)
    assert answer.added == {}
    early = before(version, "0.5.10")
    assert ("beware: without --quantization" in answer.said) == early
    assert ("chooses the MoE runner " + ("cutlass" if early else "flashinfer_trtllm")) in answer.said
    given = ask("moe_runner", version, "sm100", tp_size=8, moe_runner_backend="flashinfer_cutlass", **model)
    assert ("refuses the MoE runner flashinfer_cutlass" in given.refused) == early


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("arch", ["sm100", "sm120"])
@pytest.mark.parametrize("runner", ["auto", "flashinfer_cutlass"])
def test_modelopt_is_a_name_that_flashinfer_runners_do_not_take(ask: Ask, version: str, arch: str, runner: str) -> None:
    answer = ask("moe_runner", version, arch, quantization="modelopt", moe_runner_backend=runner)
    assert "Give --quantization modelopt_fp4." in answer.refused


@pytest.mark.parametrize("version", VERSIONS)
def test_the_routed_runner_takes_nvfp4_from_0_5_11(ask: Ask, version: str) -> None:
    answer = ask("moe_runner", version, "sm100", **NVFP4, moe_runner_backend="flashinfer_trtllm_routed")
    assert ("takes no NVFP4" in answer.refused) == before(version, "0.5.11")


@pytest.mark.parametrize("version", VERSIONS)
def test_over_flashinfers_all_to_all_on_sm100(ask: Ask, version: str) -> None:
    answer = ask("moe_runner", version, "sm100", **NVFP4, moe_a2a_backend="flashinfer")
    assert answer.added == {"moe_runner_backend": "flashinfer_cutlass"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("arch", ["sm100", "sm120"])
def test_what_the_user_gave_stays(ask: Ask, version: str, arch: str) -> None:
    flags = {"moe_runner_backend": "triton", "fp4_gemm_runner_backend": "flashinfer_cudnn"}
    assert ask("moe_runner", version, arch, tp_size=8, **NVFP4, **flags).added == {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("runner", ["flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl"])
def test_runners_without_kernels_for_sm120(ask: Ask, version: str, runner: str) -> None:
    for source in ({"moe_runner_backend": runner}, {"_RUNNER": runner}):
        answer = ask("moe_runner", version, "sm120", **NVFP4, **source)
        assert f"{runner} has kernels for SM100 alone, and this GPU is SM120" in answer.refused
    if runner != "flashinfer_trtllm_routed" or not before(version, "0.5.11"):
        assert not ask("moe_runner", version, "sm100", **NVFP4, moe_runner_backend=runner).refused


@pytest.mark.parametrize("version", VERSIONS)
def test_over_deepep_on_sm100(ask: Ask, version: str) -> None:
    answer = ask("moe_runner", version, "sm100", **NVFP4, moe_a2a_backend="deepep")
    assert answer.added == {"moe_runner_backend": "flashinfer_cutedsl"}


@pytest.mark.parametrize("version", VERSIONS)
def test_cutlass_gemm_is_gone_from_0_5_16(ask: Ask, version: str) -> None:
    answer = ask("moe_runner", version, **NVFP4, fp4_gemm_runner_backend="cutlass")
    assert bool(answer.refused) is not before(version, "0.5.16")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_gemm_that_gives_nan(ask: Ask, version: str) -> None:
    answer = ask("moe_runner", version, **NVFP4, fp4_gemm_runner_backend="flashinfer_cutlass")
    assert ("NaN" in answer.said) == before(version, "0.5.13")


def test_another_quantization_is_left_alone(ask: Ask) -> None:
    answer = ask("moe_runner", "0.5.9", quantization="fp8")
    assert (answer.added, answer.said.partition(":")[0]) == ({}, "not applicable")


def test_the_options_are_flags(ask: Ask) -> None:
    answer = ask("moe_runner", "0.5.23", **NVFP4, _RUNNER="triton", _FP4_GEMM="flashinfer_cudnn")
    assert answer.added == {"moe_runner_backend": "triton", "fp4_gemm_runner_backend": "flashinfer_cudnn"}
