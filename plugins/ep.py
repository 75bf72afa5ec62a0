"""Expert parallelism: sets `--ep-size`, or refuses a size that this SGLang cannot run.

SGLang finds out late, or never: `flashinfer_cutlass` asserts on the size after minutes, an all-to-all backend silently
makes it the tensor parallel size, and up to 0.5.20 a size that does not divide the tensor parallel size is not checked
at all. Here the size is checked before anything starts, the user's own `--ep-size` included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from glm5_plugins.settings.model import read
from pydantic import PositiveInt

from glm5_plugins import Environment, Outcome, PluginSettings, hookimpl
from glm5_plugins.rules import Choice, Does, Launch, Rule, decide

MOE = "sglang/srt/server_args.py, _handle_moe_kernel_config (<= 0.5.18); arg_groups/moe_hook.py (>= 0.5.19)"
A2A = "sglang/srt/server_args.py, _handle_a2a_moe (<= 0.5.18); arg_groups/overrides.py, _a2a_ep_size (>= 0.5.19)"

# All-to-all backends of any version that make the expert parallel size the tensor parallel size.
SPANNING = (
    *("deepep", "deepep_v2", "mooncake", "nixl", "mori", "pplx", "megamoe"),
    *("flashinfer", "flashinfer_megamoe", "ascend_fuseep"),
)


class Options(PluginSettings, plugin="ep"):
    """What can be set."""

    size: Literal["auto"] | PositiveInt = "auto"
    """Ranks that share the experts; `auto` for as many as there are: tensor parallel size over MoE data parallel."""


def _whole(launch: Launch) -> int:
    return max(1, int(launch.get("tp_size")) // int(launch.get("moe_dp_size")))


def _is_partial(launch: Launch) -> bool:
    return launch.get("ep_size") not in (1, launch.get("tp_size"))


SPANS = Rule(
    Does.REFUSE,
    "{moe_a2a_backend} makes the expert parallel size the tensor parallel size, {tp_size}, in {sglang}",
    "Make it {tp_size}, by --ep-size or by GLM5_EP_SIZE=auto.",
    given={"moe_a2a_backend": SPANNING},
    when=lambda launch: launch.get("ep_size") != launch.get("tp_size"),
    source=A2A,
)
UNCHECKED = Rule(
    Does.REFUSE,
    "the MoE runner triton_kernel takes no expert parallelism, which {sglang} checks for GPT-OSS alone",
    "Give another --moe-runner-backend, or take 'ep' out of GLM5_PLUGINS.",
    given={"moe_runner_backend": ("triton_kernel",)},
    when=lambda launch: launch.get("ep_size") != 1,
    source="sglang/srt/server_args.py, _handle_model_specific_adjustments; arg_groups/model_hook.py (>= 0.5.19)",
)
# What SGLang cannot start with, sooner or later, whoever gave the size.
STOPPING = (
    Rule(
        Does.REFUSE,
        "an expert parallel size of {ep_size} does not divide the tensor parallel size {tp_size}",
        "Choose a divisor of {tp_size}.",
        when=lambda launch: launch.get("tp_size") % launch.get("ep_size") != 0,
        source="sglang/srt/distributed/parallel_state.py, initialize_model_parallel: moe_tp = tp // ep // moe_dp, "
        "unchecked up to 0.5.20; then runtime_context.py, in each process",
    ),
    Rule(
        Does.REFUSE,
        "with --moe-dp-size {moe_dp_size} and --tp-size {tp_size} the expert parallel size must be "
        "their quotient or 1, not {ep_size}",
        "Choose one of these.",
        when=lambda launch: (
            launch.get("moe_dp_size") > 1
            and launch.get("ep_size") > 1
            and launch.get("ep_size") * launch.get("moe_dp_size") != launch.get("tp_size")
        ),
        source="sglang/srt/server_args.py, _handle_context_parallelism; arg_groups/parallel_hook.py",
    ),
    Rule(
        Does.REFUSE,
        "the MoE runner flashinfer_cutlass of {sglang} takes an expert parallel size of 1 or {tp_size}, not {ep_size}",
        "Choose one of these, or give another --moe-runner-backend.",
        when=lambda launch: launch.runner == "flashinfer_cutlass" and _is_partial(launch),
        source=MOE,
    ),
    Rule(
        Does.REFUSE,
        "the MoE runner flashinfer_cutedsl of {sglang} takes an expert parallel size of 1 or {tp_size}, not {ep_size}",
        "Choose one of these, or give another --moe-runner-backend.",
        sglang=">=0.5.11",
        when=lambda launch: launch.runner == "flashinfer_cutedsl" and _is_partial(launch),
        source=MOE,
    ),
    Rule(
        Does.REFUSE,
        "the checkpoint's experts cannot be shared out evenly among {ep_size} ranks",
        "Choose a divisor of the number of experts (n_routed_experts in config.json).",
        when=lambda launch: (launch.checkpoint.experts or 0) % launch.get("ep_size") != 0,
        source="sglang/srt/layers/moe/fused_moe_triton/layer.py, FusedMoE: an assertion while the model is made",
    ),
)
RULES = (SPANS, *STOPPING, UNCHECKED)


def _decide(launch: Launch, size: Literal["auto"] | int) -> Any:
    """Judge the size that will be in force, whoever gave it."""
    own = launch.given.get("ep_size") is None
    wanted = launch.having(ep_size=_whole(launch) if size == "auto" else size) if own else launch
    if not own:
        last = Rule(Does.NOT_NEEDED, "--ep-size {ep_size} was given, and it fits")
    elif wanted.get("ep_size") == 1:
        last = Rule(Does.NOT_NEEDED, "one rank holds all experts: the expert parallel size stays 1")
    else:
        last = Rule(Does.ADD, "{ep_size} of {tp_size} ranks share the experts", add={"ep_size": wanted.get("ep_size")})
    return decide((*RULES, last), wanted)


_choice = Choice("ep")


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the size where none was given."""
    return _choice.make(_decide(Launch(env, given), read(Options).size))


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say which size was added, or why none."""
    return _choice.outcome
