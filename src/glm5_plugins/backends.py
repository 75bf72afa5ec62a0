"""Which MoE runner and FP4 GEMM SGLang takes for an NVFP4 model of the GLM-5 family when nothing is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_plugins.rules import Launch

# Backends that run on one family of GPUs only, in every version up to 0.5.23: their kernels use instructions
# (tcgen05) that no other family has.
SM100_ONLY = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")

# Up to here SGLang calls the NVFP4 of a checkpoint `modelopt` on SM100, a name that no FlashInfer runner takes.
CALLS_IT_MODELOPT = "<0.5.10"


# What `--quantization` may be: where SGLang goes by the argument alone, where it reads the checkpoint too, and else.
_NAMED: tuple[str | None, ...] = ("modelopt_fp4",)
_READ: tuple[str | None, ...] = (*_NAMED, None)
_ANY: tuple[str | None, ...] = (*_READ, "modelopt")


@dataclass(frozen=True)
class _Auto:
    """A row of what `--moe-runner-backend auto` becomes.

    Args:
        runner: The runner.
        sglang: A range of versions.
        arch: A family of GPUs.
        to_all: The all-to-all backend; empty for any.
        quantization: What may be given as `--quantization`; None where the checkpoint alone says it.
    """

    runner: str
    sglang: str = ""
    arch: str = ""
    to_all: str = ""
    quantization: tuple[str | None, ...] = _NAMED


_AUTO_RUNNER = (
    _Auto("flashinfer_trtllm", f">=0.5.9,{CALLS_IT_MODELOPT}", "sm100", "none"),
    _Auto("flashinfer_trtllm", ">=0.5.10", "sm100", "none", _READ),
    _Auto("flashinfer_cutlass", ">=0.5.13", "sm120"),
    _Auto("flashinfer_cutlass", ">=0.5.22", "sm110"),
    # What the layer of NVFP4 experts takes where the arguments leave it open.
    _Auto("marlin", ">=0.5.13", "sm90", quantization=_ANY),
    _Auto("cutlass", quantization=_ANY),
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
    return next(
        auto.runner
        for auto in _AUTO_RUNNER
        if launch.is_sglang(auto.sglang)
        and auto.arch in ("", launch.architecture)
        and auto.to_all in ("", launch.get("moe_a2a_backend"))
        and launch.get("quantization") in auto.quantization
    )


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
