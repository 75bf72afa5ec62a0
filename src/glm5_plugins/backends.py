"""Which MoE runner and FP4 GEMM SGLang takes for an NVFP4 model of the GLM-5 family when nothing is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_plugins.rules import Launch

# Backends that run on one family of GPUs only, in every version up to 0.5.23: their kernels use instructions
# (tcgen05) that no other family has.
SM100_ONLY = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")

# (range of SGLang, family of GPUs, with an all-to-all backend or without, what `auto` becomes).
_AUTO_RUNNER = (
    (">=0.5.9", "sm100", "none", "flashinfer_trtllm"),
    (">=0.5.13", "sm120", "", "flashinfer_cutlass"),
    ("", "", "", "cutlass"),  # the runner that sgl_kernel brings
)
_AUTO_FP4_GEMM = (
    (">=0.5.8,<0.5.10", "", "flashinfer_cutlass"),
    (">=0.5.10,<0.5.13", "sm120", "flashinfer_cudnn"),
    (">=0.5.12", "sm100", "flashinfer_cutedsl"),
    (">=0.5.13", "sm90", "marlin"),
    ("", "", "flashinfer_cutlass"),
)


def is_nvfp4(launch: Launch) -> bool:
    """Whether the weights are NVFP4, by the arguments, else by the checkpoint, else by its name."""
    given = launch.get("quantization")
    if given is not None:
        return str(given) in ("modelopt_fp4", "modelopt")
    if launch.checkpoint.quantization is not None:
        return launch.checkpoint.quantization in ("NVFP4", "modelopt_fp4")
    return "nvfp4" in str(launch.get("model_path") or "").casefold()


def moe_runner(launch: Launch) -> str:
    """The MoE runner that SGLang ends up with: given, or what `auto` becomes for NVFP4.

    Mirrors `ServerArgs._handle_moe_kernel_config` and the model overrides for `GlmMoeDsaForCausalLM`.
    """
    given = str(launch.get("moe_runner_backend"))
    if given != "auto" or not launch.is_nvfp4:
        return given
    for versions, architecture, all_to_all, runner in _AUTO_RUNNER:
        if launch.is_sglang(versions) and architecture in ("", launch.architecture):
            if all_to_all and launch.get("moe_a2a_backend") != all_to_all:
                continue
            return runner
    return given


def fp4_gemm(launch: Launch) -> str:
    """The FP4 GEMM of dense layers that SGLang ends up with.

    Mirrors `sglang.srt.layers.quantization.fp4_utils`, `initialize_fp4_gemm_config`.
    """
    given = str(launch.get("fp4_gemm_runner_backend"))
    if given != "auto":
        return given
    return next(
        backend
        for versions, architecture, backend in _AUTO_FP4_GEMM
        if launch.is_sglang(versions) and architecture in ("", launch.architecture)
    )
