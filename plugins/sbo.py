"""Single batch overlap: sets `--enable-single-batch-overlap`, and says when nothing will come of it.

SGLang's parser accepts the flag everywhere; from 0.5.13 every rank refuses it on SM90, once the processes are up. What
overlaps is another matter: communication with the down projection only for the runners flashinfer_cutedsl and, before
Blackwell, deep_gemm; and only where there is an all-to-all to overlap.
A launch that it accepts and that gains nothing is started, under the verdict "in force, no effect expected".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5_plugins import Environment, Outcome, hookimpl
from glm5_plugins.rules import Choice, Does, Launch, Rule, decide

FLAGS = "sglang/srt/batch_overlap/single_batch_overlap.py, SboFlags (the same from 0.5.8 to 0.5.23)"
BLACKWELL = ("sm100", "sm110", "sm120")
SBO = {"enable_single_batch_overlap": True}

ON_THIS_GPU = (
    Rule(
        Does.REFUSE,
        "{sglang} has no single batch overlap for {arch}: its DeepGEMM cannot do it there any more",
        "Take 'sbo' out of GLM5_PLUGINS, and --enable-single-batch-overlap out of the command.",
        sglang=">=0.5.13",
        arch=("sm90",),
        source="sglang/srt/layers/moe/utils.py, initialize_moe_config: an error in every rank",
    ),
)

RULES = (
    *ON_THIS_GPU,
    Rule(
        Does.REFUSE,
        "{sglang} has no single batch overlap for --moe-a2a-backend deepep_v2",
        "Take 'sbo' out of GLM5_PLUGINS, or use --moe-a2a-backend deepep.",
        sglang=">=0.5.19",
        given={"moe_a2a_backend": ("deepep_v2",)},
        source="sglang/srt/arg_groups/moe_hook.py, handle_a2a_moe",
    ),
    Rule(
        Does.REFUSE,
        "{sglang} has no single batch overlap for --moe-a2a-backend megamoe",
        "Take 'sbo' out of GLM5_PLUGINS, or use --moe-a2a-backend deepep.",
        sglang=">=0.5.21",
        given={"moe_a2a_backend": ("megamoe",)},
        source="sglang/srt/arg_groups/mega_moe_hook.py, check_mega_moe_compat",
    ),
    Rule(
        Does.NO_EFFECT,
        "no GPU, so nothing overlaps",
        arch=("none",),
        add=SBO,
    ),
    Rule(
        Does.NO_EFFECT,
        "without an all-to-all backend (--moe-a2a-backend none) decoding overlaps the shared experts already, "
        "and nothing else is there to overlap",
        given={"moe_a2a_backend": ("none",)},
        add=SBO,
        source="sglang/srt/models/deepseek_v2.py, forward_normal_dual_stream",
    ),
    Rule(
        Does.NO_EFFECT,
        "on {arch} the down projection overlaps with the runner flashinfer_cutedsl alone, not with {runner}; "
        "what is left are the shared experts on a second stream",
        arch=BLACKWELL,
        when=lambda launch: launch.runner != "flashinfer_cutedsl",
        add=SBO,
        source=FLAGS,
    ),
    Rule(
        Does.NO_EFFECT,
        "on {arch} the down projection overlaps with the runners flashinfer_cutedsl and deep_gemm, not with {runner}",
        arch=("sm90",),
        when=lambda launch: launch.runner not in ("flashinfer_cutedsl", "deep_gemm"),
        add=SBO,
        source=FLAGS,
    ),
    Rule(Does.NOT_NEEDED, "--enable-single-batch-overlap was given", given={"enable_single_batch_overlap": (True,)}),
    Rule(
        Does.ADD,
        "the down projection of the experts overlaps with combining their results ({moe_a2a_backend}, {runner})",
        add=SBO,
        source=FLAGS,
    ),
)

_choice = Choice("sbo")


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the flag where SGLang accepts it."""
    return _choice.make(decide(RULES, Launch(env, given)))


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say whether an effect can be expected."""
    return None if env.is_child else _choice.foreseen(ON_THIS_GPU, env)
