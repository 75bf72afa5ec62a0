"""MoE runner and FP4 GEMM for NVFP4 checkpoints: what suits the GPU and this SGLang, where SGLang would choose badly.

Newer versions mostly choose well by themselves, and then nothing is added. On SM120 (RTX PRO 6000) `auto` is not the
FlashInfer runner up to 0.5.12, nor later unless `--quantization modelopt_fp4` is typed; on 0.5.9 the default FP4 GEMM
gives NaN. A backend whose kernels do not exist for the GPU is refused before the weights are loaded, also when the user
gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5_plugins.settings.model import read

from glm5_plugins import Environment, Outcome, PluginSettings, hookimpl
from glm5_plugins.backends import CALLS_IT_MODELOPT, SM100_ONLY
from glm5_plugins.rules import Choice, Decision, Does, Launch, Rule, decide

NAN = "https://github.com/sgl-project/sglang/issues/20043"
QUANT = "sglang/srt/server_args.py, _handle_moe_kernel_config; arg_groups/overrides.py (>= 0.5.15)"
A2A = "sglang/srt/server_args.py, _handle_a2a_moe (<= 0.5.18); arg_groups/moe_hook.py, handle_a2a_moe (>= 0.5.19)"
FP4 = "sglang/srt/layers/quantization/fp4_utils.py, initialize_fp4_gemm_config"


class Options(PluginSettings, plugin="moe_runner"):
    """What can be set."""

    runner: str = "auto"
    """A value of --moe-runner-backend; `auto` for the one that suits GPU and version."""
    fp4_gemm: str = "auto"
    """A value of --fp4-gemm-backend; `auto` for the one that suits GPU and version."""


REFUSALS = (
    Rule(
        Does.NOT_APPLICABLE,
        "the launch is not of an NVFP4 checkpoint (--quantization {quantization})",
        when=lambda launch: not launch.is_nvfp4 and launch.get("quantization") is not None,
    ),
    Rule(
        Does.REFUSE,
        "the MoE runner {moe_runner_backend} has kernels for SM100 alone, and this GPU is {arch}",
        "Give --moe-runner-backend flashinfer_cutlass, or leave it out.",
        arch=("sm90", "sm110", "sm120"),
        given={"moe_runner_backend": SM100_ONLY},
        source=QUANT,
    ),
    Rule(
        Does.REFUSE,
        "the FP4 GEMM {fp4_gemm_runner_backend} has kernels for SM100 alone, and this GPU is {arch}",
        "Leave --fp4-gemm-backend out.",
        arch=("sm90", "sm120"),
        given={"fp4_gemm_runner_backend": ("flashinfer_trtllm",)},
        source="flashinfer/gemm, trtllm FP4 GEMM: SM100 and SM103",
    ),
    Rule(
        Does.REFUSE,
        "the MoE runner flashinfer_trtllm_routed of {sglang} takes no NVFP4",
        "Give --moe-runner-backend flashinfer_trtllm.",
        sglang="<0.5.11",
        given={"moe_runner_backend": ("flashinfer_trtllm_routed",)},
        source=QUANT,
    ),
    Rule(
        Does.REFUSE,
        "{sglang} has no --fp4-gemm-backend cutlass any more",
        "Give --fp4-gemm-backend flashinfer_cutlass.",
        sglang=">=0.5.16",
        given={"fp4_gemm_runner_backend": ("cutlass",)},
        source="sglang/srt/server_args.py, FP4_GEMM_RUNNER_BACKEND_CHOICES",
    ),
    Rule(
        Does.REFUSE,
        "with --quantization modelopt {sglang} takes none of FlashInfer's MoE runners",
        "Give --quantization modelopt_fp4.",
        arch=("sm100", "sm110", "sm120"),
        given={"quantization": ("modelopt",)},
        source=QUANT,
    ),
    Rule(
        Does.REFUSE,
        "without --quantization {sglang} calls this checkpoint 'modelopt' on {arch}, "
        "and refuses the MoE runner {moe_runner_backend} for it",
        "Give --quantization modelopt_fp4.",
        sglang=CALLS_IT_MODELOPT,
        arch=("sm100",),
        when=lambda launch: launch.get("quantization") is None and launch.runner.startswith("flashinfer_"),
        source=QUANT,
    ),
    Rule(
        Does.WARN,
        "without --quantization {sglang} calls this checkpoint 'modelopt' on {arch}, "
        "and leaves it to the runner {runner}",
        "Give --quantization modelopt_fp4 to have flashinfer_trtllm.",
        sglang=CALLS_IT_MODELOPT,
        arch=("sm100",),
        given={"moe_a2a_backend": ("none",)},
        when=lambda launch: launch.get("quantization") is None,
        source=QUANT,
    ),
    Rule(
        Does.WARN,
        "with {sglang} on SM120 the FP4 GEMM flashinfer_cutlass gives NaN in dense layers of mixed batches",
        "Give --fp4-gemm-backend flashinfer_cudnn.",
        sglang=">=0.5.9,<0.5.13",
        arch=("sm120",),
        given={"fp4_gemm_runner_backend": ("flashinfer_cutlass",)},
        source=NAN,
    ),
)

RUNNER = (
    Rule(Does.NOT_NEEDED, "the MoE runner is given: {moe_runner_backend}", when=lambda launch: _gave(launch, "moe")),
    Rule(Does.NOT_APPLICABLE, "no GPU, so no runner suits it", arch=("none", "unknown")),
    Rule(
        Does.ADD,
        "{sglang} leaves SM120 to the cutlass runner of sgl_kernel; from 0.5.13 it takes flashinfer_cutlass itself",
        sglang=">=0.5.9,<0.5.13",
        arch=("sm120",),
        given={"moe_a2a_backend": ("none", "flashinfer")},
        add={"moe_runner_backend": "flashinfer_cutlass"},
        source=QUANT,
    ),
    Rule(
        Does.ADD,
        "{sglang} takes flashinfer_cutlass on SM120 where --quantization modelopt_fp4 is given, and without it leaves "
        "the checkpoint to the cutlass runner of sgl_kernel",
        sglang=">=0.5.13",
        arch=("sm120",),
        when=lambda launch: launch.runner == "cutlass",
        add={"moe_runner_backend": "flashinfer_cutlass"},
        source=QUANT,
    ),
    Rule(
        Does.ADD,
        "NVFP4 over FlashInfer's all-to-all has no runner that {sglang} would choose itself on {arch}",
        arch=("sm100",),
        given={"moe_a2a_backend": ("flashinfer",)},
        add={"moe_runner_backend": "flashinfer_cutlass"},
        source=A2A,
    ),
    Rule(
        Does.ADD,
        "NVFP4 over DeepEP has one runner, and {sglang} does not choose it itself",
        arch=("sm100",),
        given={"moe_a2a_backend": ("deepep",)},
        add={"moe_runner_backend": "flashinfer_cutedsl"},
        source="sglang/srt/layers/quantization/modelopt_quant.py, ModelOptNvFp4FusedMoEMethod",
    ),
    Rule(Does.NOT_NEEDED, "{sglang} chooses the MoE runner {runner} by itself"),
)

FP4_GEMM = (
    Rule(
        Does.NOT_NEEDED,
        "the FP4 GEMM is given: {fp4_gemm_runner_backend}",
        when=lambda launch: _gave(launch, "fp4"),
    ),
    Rule(
        Does.ADD,
        "the default of {sglang}, flashinfer_cutlass, gives NaN on SM120 in dense layers of mixed batches",
        sglang=">=0.5.9,<0.5.10",
        arch=("sm120",),
        add={"fp4_gemm_runner_backend": "flashinfer_cudnn"},
        source=NAN,
    ),
    Rule(Does.NOT_NEEDED, "{sglang} chooses the FP4 GEMM {fp4_gemm} by itself", source=FP4),
)


def _gave(launch: Launch, which: str) -> bool:
    field = "moe_runner_backend" if which == "moe" else "fp4_gemm_runner_backend"
    return launch.given.get(field) not in (None, "auto")


def _decide(launch: Launch, options: Options) -> Decision:
    """Put the options in, judge what will be in force, then choose what is still open."""
    chosen = {
        field: value
        for field, value in (("moe_runner_backend", options.runner), ("fp4_gemm_runner_backend", options.fp4_gemm))
        if value != "auto" and launch.given.get(field) is None
    }
    launch = launch.having(**chosen)
    first = decide((*REFUSALS, Rule(Does.ADD, "")), launch)
    if first.does is not Does.ADD:
        return first
    parts = [decide(RUNNER, launch), decide(FP4_GEMM, launch)]
    added = {**chosen, **{name: value for part in parts for name, value in part.add.items()}}
    if all(part.does is Does.NOT_APPLICABLE for part in parts[:1]) and not added:
        return parts[0]
    does = Does.ADD if added else Does.NOT_NEEDED
    return Decision(does, "; ".join(part.why for part in parts), add=added, warnings=first.warnings)


_choice = Choice("moe_runner")


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the backends where none were given."""
    return _choice.make(_decide(Launch(env, given), read(Options)))


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say which backends were added, or why none."""
    return _choice.outcome
