"""Which modules a launch uses, and under which keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from glm5_plugins.plugins.fp4_warmup import Options
from glm5_plugins.settings.model import read as read_settings

from glm5_plugins.environment import Environment, Window
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.warmup import launches, needs
from glm5_plugins.warmup.needs import Launch


def env(sglang: str = "0.5.23", flashinfer: str = "0.6.18") -> Environment:
    return Environment({"sglang": sglang, "flashinfer-python": flashinfer})


def modules(launch: Launch, sglang: str = "0.5.23", flashinfer: str = "0.6.18") -> list[str]:
    return [str(module) for module in needs.modules_for(launch, env(sglang, flashinfer))]


@pytest.mark.parametrize(
    ("launch", "sglang", "found"),
    [
        (Launch((12, 0), fp4_gemm="flashinfer_cudnn"), "0.5.12", ["fp4_quantization('120')"]),
        (
            Launch((12, 0), moe_runner="flashinfer_cutlass", fp4_gemm="flashinfer_cutlass"),
            "0.5.13",
            ["fp4_quantization('120')", "cutlass_fp4_gemm(12, 0)", "cutlass_fused_moe('120')"],
        ),
        (Launch((12, 1), fp4_gemm="marlin"), "0.5.23", ["fp4_quantization('121')"]),
        (Launch((10, 0), fp4_gemm="flashinfer_cutedsl", moe_runner=""), "0.5.12", []),
        (Launch((10, 0), fp4_gemm="flashinfer_cudnn", moe_runner=""), "0.5.11", ["fp4_quantization('100')"]),
        (
            Launch((10, 3), fp4_gemm="flashinfer_cutedsl", moe_runner="flashinfer_trtllm"),
            "0.5.23",
            ["fp4_quantization('103')", "trtllm_fused_moe()"],
        ),
        (Launch((9, 0), fp4_gemm="marlin", moe_runner="marlin"), "0.5.23", []),
        (
            Launch((12, 0), fp4_gemm="marlin", attention=frozenset({"flashinfer_sparse_mla"})),
            "0.5.19",
            ["fp4_quantization('120')", "sparse_mla()"],
        ),
    ],
)
def test_the_table(launch: Launch, sglang: str, found: list[str]) -> None:
    assert modules(launch, sglang) == found


def test_the_key_is_the_one_the_runtime_uses() -> None:
    """FlashInfer makes "120f" of it below its cache: asking for "120f" would load the module a second time."""
    (module, *_) = needs.modules_for(Launch((12, 0)), env())
    assert module.arguments == ("120",)


def test_the_gemm_getter_took_one_argument_before_0_6_3() -> None:
    launch = Launch((12, 0), fp4_gemm="auto")
    assert "cutlass_fp4_gemm(12)" in modules(launch, flashinfer="0.6.2")
    assert "cutlass_fp4_gemm(12, 0)" in modules(launch, flashinfer="0.6.3")


def test_a_model_that_is_not_fp4_needs_nothing() -> None:
    assert modules(Launch((12, 0), quantization="fp8", moe_runner="flashinfer_cutlass")) == []


@pytest.mark.parametrize(
    ("given", "what", "mend"),
    [
        ({"moe_runner": "flashinfer_cutlas"}, "--moe-runner-backend 'flashinfer_cutlas'", "'flashinfer_cutlass'?"),
        ({"fp4_gemm": "flashinfer-cudn"}, "--fp4-gemm-backend 'flashinfer-cudn'", "'flashinfer_cudnn'?"),
        ({"attention": "sparse_mla"}, "--attention-backend 'sparse_mla'", "Did you mean "),
        ({"fp4_gemm": "zzzz"}, "--fp4-gemm-backend 'zzzz'", "Known: auto, cutlass, "),
    ],
)
def test_a_backend_that_no_sglang_has(given: dict[str, str], what: str, mend: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        launches.of_flags((12, 0), env(), **{"moe_runner": "auto", "fp4_gemm": "auto", **given})
    assert refused.value.what == f"{what} is a value of no SGLang from 0.5.8 on."
    assert mend in refused.value.mend


def test_every_backend_of_the_table_is_one_that_may_be_given() -> None:
    for rule in needs.RULES:
        for moe_runner in rule.moe_runner or {"auto"}:
            for fp4_gemm in rule.fp4_gemm or {"auto"}:
                for attention in rule.attention or {""}:
                    launches.of_flags((12, 0), env(), moe_runner=moe_runner, fp4_gemm=fp4_gemm, attention=attention)


@pytest.mark.parametrize("rule", needs.RULES, ids=lambda rule: rule.name)
def test_a_window_with_an_end_says_what_ends_it(rule: needs.Rule) -> None:
    assert rule.ends or not any(Window.parse(text).has_end for text in rule.requires)


@pytest.mark.parametrize(
    ("arch", "sglang", "value"),
    [
        ((12, 0), "0.5.9", "auto"),
        ((12, 0), "0.5.10.post1", "flashinfer_cudnn"),
        ((12, 0), "0.5.12", "flashinfer_cudnn"),
        ((12, 0), "0.5.13", "flashinfer_cutlass"),
        ((10, 0), "0.5.12", "flashinfer_cutedsl"),
        ((9, 0), "0.5.23", "marlin"),
    ],
)
def test_what_sglang_makes_of_auto(arch: tuple[int, int], sglang: str, value: str) -> None:
    assert needs.fp4_gemm_default(arch, env(sglang)) == value


@pytest.mark.parametrize("text", ["12.0f", "12.0", "120", "120f", "sm_120", "SM120a"])
def test_an_architecture_in_any_spelling(text: str) -> None:
    assert needs.parse_arch(text) == (12, 0)


@pytest.mark.parametrize("text", ["", "blackwell", "12.x", "f"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--arch"):
        needs.parse_arch(text)


@pytest.mark.parametrize(("flashinfer", "text"), [("0.6.3", "12.0a"), ("0.6.6", "12.0a"), ("0.6.18", "12.0f")])
def test_the_architecture_as_this_flashinfer_finds_it_on_a_gpu(flashinfer: str, text: str) -> None:
    """FlashInfer names its cache folder after it; another spelling is another folder, which no server looks into."""
    assert needs.arch_text((12, 0), env(flashinfer=flashinfer)) == text


def test_an_unknown_module_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="'fp4_quantization'"):
        needs.modules_named(["fp4_quantisation"], (12, 0), env())
    with pytest.raises(ConfigurationError, match=r"9\.0"):
        needs.modules_named(["sparse_mla"], (9, 0), env())


def test_sm90_has_the_quantisation_module_only_for_who_names_it() -> None:
    """FlashInfer builds it there, and no launch of SGLang uses it."""
    assert [str(module) for module in needs.modules_named(["fp4_quantization"], (9, 0), env())] == [
        "fp4_quantization('90')"
    ]
    launch = Launch((9, 0), moe_runner="flashinfer_cutlass", fp4_gemm="flashinfer_cutlass", allreduce_fusion=True)
    assert "fp4_quantization('90')" not in modules(launch)


def test_a_wrong_name_is_told_by_what_it_was_given_by() -> None:
    with pytest.raises(ConfigurationError, match=r"^GLM5_FP4_WARMUP_MODULES names an unknown module 'fp4'"):
        needs.modules_named(["fp4"], (12, 0), env(), "GLM5_FP4_WARMUP_MODULES")


def test_the_plugin_takes_modules_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5_FP4_WARMUP_MODULES", "fp4_quantization, cutlass_fused_moe")
    assert read_settings(Options).modules == ("fp4_quantization", "cutlass_fused_moe")
    monkeypatch.delenv("GLM5_FP4_WARMUP_MODULES")
    assert read_settings(Options).modules == ()


# --- launches read from a model's folder ---------------------------------------------------------------------

GLM5 = {"architectures": ["GlmMoeDsaForCausalLM"], "n_routed_experts": 256}


def model(folder: Path, config: dict[str, object], modelopt: dict[str, object] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    return folder


def read(folder: Path) -> Launch:
    return launches.of_model(folder, (12, 0), env(), moe_runner="flashinfer_cutlass", fp4_gemm="auto")


def test_glm5_of_modelopt(tmp_path: Path) -> None:
    launch = read(model(tmp_path, GLM5, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}))
    assert launch == Launch((12, 0), "modelopt_fp4", "flashinfer_cutlass", "flashinfer_cutlass")


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt"}}
    assert read(model(tmp_path, config)).moe_runner == ""


@pytest.mark.parametrize(("form", "fp4"), [("nvfp4-pack-quantized", True), ("float-quantized", False)])
def test_compressed_tensors_may_or_may_not_be_fp4(tmp_path: Path, form: str, fp4: bool) -> None:
    config = {**GLM5, "quantization_config": {"quant_method": "compressed-tensors", "format": form}}
    assert (read(model(tmp_path, config)).quantization in needs.FP4) is fp4


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--model-path .* holds no model: config.json"):
        read(tmp_path)
