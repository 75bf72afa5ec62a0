"""FlashInfer's autotuner also covers the CUTLASS MoE runner, which SGLang up to 0.5.12 leaves out.

From 0.5.13 SGLang tunes it by itself and this plugin has nothing to change. Before, the runner is commented out in
SGLang's list because tuning it gave compilation errors with the FlashInfer of the day: if that happens, FlashInfer's
own error is what you see. `GLM5_MOE_AUTOTUNE_ENABLED=false` switches all of SGLang's FlashInfer tuning off, in any
version, and with it the minutes that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from glm5_plugins.settings.model import read, split_at_commas
from pydantic import field_validator
from pydantic_settings import NoDecode

from glm5_plugins import Environment, Outcome, Patch, PluginSettings, hookimpl
from glm5_plugins.probes import AnyOf, SourceSays
from glm5_plugins.rules import Choice, Does, Launch, Rule, decide

_EXECUTOR = "sglang.srt.model_executor"
_ASKED = f"{_EXECUTOR}.model_runner:ModelRunner._should_run_flashinfer_autotune"
_ASKED_LATER = (
    f"{_EXECUTOR}.runner.base_runner:BaseRunner._should_run_flashinfer_autotune",  # 0.5.14
    f"{_EXECUTOR}.runner.flashinfer_autotune:should_run_flashinfer_autotune",  # from 0.5.15
)
_TUNES = "SGLang tunes flashinfer_cutlass by itself"
TUNER = "sglang/srt/model_executor/model_runner.py, _should_run_flashinfer_autotune"


class Options(PluginSettings, plugin="moe_autotune"):
    """What can be set."""

    enabled: bool = True
    """False switches FlashInfer's autotuning off altogether."""
    skip_ops: Annotated[tuple[str, ...], NoDecode] = ()
    """FlashInfer operators not to tune, separated by commas; SGLang 0.5.17 and newer."""

    _split = field_validator("skip_ops", mode="before")(split_at_commas)


def _rules(options: Options) -> tuple[Rule, ...]:
    if not options.enabled:
        return (
            Rule(
                Does.ADD,
                "FlashInfer's autotuning is off (GLM5_MOE_AUTOTUNE_ENABLED=false)",
                add={"disable_flashinfer_autotune": True},
            ),
        )
    skip = ",".join(options.skip_ops)
    rules = [
        Rule(
            Does.REFUSE,
            "autotuning is wanted, and --disable-flashinfer-autotune was given",
            "Take one of them out.",
            given={"disable_flashinfer_autotune": (True,)},
        )
    ]
    if skip:
        rules += [
            Rule(
                Does.REFUSE,
                f"GLM5_MOE_AUTOTUNE_SKIP_OPS={skip} needs SGLang 0.5.17 or newer, and this is {{sglang}}",
                "Unset it.",
                sglang="<0.5.17",
                source="sglang/srt/server_args.py, flashinfer_autotune_skip_ops",
            ),
            Rule(
                Does.ADD,
                f"{{sglang}} tunes the runner by itself, without {skip}",
                add={"flashinfer_autotune_skip_ops": list(options.skip_ops)},
            ),
        ]
    return (
        *rules,
        Rule(
            Does.NOT_APPLICABLE,
            "the MoE runner is {runner}; the patch is about flashinfer_cutlass",
            sglang="<0.5.13",
            when=lambda launch: launch.runner != "flashinfer_cutlass",
            source=TUNER,
        ),
        Rule(Does.ADD, "flashinfer_cutlass is tuned too", sglang="<0.5.13", source=TUNER),
        Rule(Does.NOT_NEEDED, f"{_TUNES} from 0.5.13", source=TUNER),
    )


def _also_cutlass(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def should_run(self: Any) -> bool:
        arguments = self.server_args
        if arguments.moe_runner_backend != "flashinfer_cutlass":
            return original(self)
        # Everything else SGLang decides on: the same question, asked of a runner that it does tune.
        arguments.moe_runner_backend = "flashinfer_trtllm"
        try:
            return original(self)
        finally:
            arguments.moe_runner_backend = "flashinfer_cutlass"

    return should_run


def _switched_off(env: Environment) -> str | None:
    """GLM5_MOE_AUTOTUNE_ENABLED is false."""
    return None if read(Options).enabled else "GLM5_MOE_AUTOTUNE_ENABLED=false"


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Answer yes for flashinfer_cutlass where SGLang would for another FlashInfer runner."""
    yield Patch(
        target=_ASKED,
        using=_also_cutlass,
        reason="the CUTLASS MoE runner is autotuned like FlashInfer's other runners",
        requires="sglang>=0.5.8,<0.5.13",
        ends=f"{_TUNES} from 0.5.13",
        outside=AnyOf(tuple(SourceSays(where, "'flashinfer_cutlass'", _TUNES) for where in (_ASKED, *_ASKED_LATER))),
        unless=_switched_off,
        upstream=TUNER,
        fate="delete when the oldest supported SGLang is 0.5.13",
    )


_choice = Choice("moe_autotune")


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the off switch or the list of operators to skip."""
    return _choice.make(decide(_rules(read(Options)), Launch(env, given)))


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say whether and how tuning is changed; on most versions that is plain before there is a launch."""
    return None if env.is_child else _choice.foreseen(_rules(read(Options)), env)
