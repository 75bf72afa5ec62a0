"""Turns SGLang's prefill CUDA graph on where SGLang leaves it off, in the way of the version that runs.

It says which of SGLang's own rules would have left the graph off, for they have reasons: a launch that one of them is
about may crash in the capture or answer wrong, and the server's log will not say why.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Annotated, Any, Literal

from glm5_plugins.settings.model import read, split_at_commas
from pydantic import PositiveInt, field_validator
from pydantic_settings import NoDecode

from glm5_plugins import Environment, Outcome, PluginSettings, Verdict, hookimpl
from glm5_plugins.prefill.asking import PIECEWISE_RULES, SIZES_FIELD, backend_of, prefill_runner, resolved
from glm5_plugins.prefill.upstream import overridden
from glm5_plugins.rules import Choice, Decision, Launch, decide


class Options(PluginSettings, plugin="piecewise"):
    """Which prefill graph, and for which sizes."""

    backend: Literal["auto", "breakable", "tc_piecewise"] = "auto"
    """What makes the graph: SGLang's `breakable`, or torch.compile; `auto`: `breakable` where it takes the model."""
    tokens: Annotated[tuple[PositiveInt, ...], NoDecode] = ()
    """Numbers of tokens to capture, separated by commas; unset: SGLang's own list."""

    _split = field_validator("tokens", mode="before")(split_at_commas)

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))  # SGLang looks sizes up by bisection


_choice = Choice("piecewise")
_overridden: list[str] = []
_seen: list[Outcome] = []


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ask for the graph, and for the sizes."""
    launch, options = Launch(env, given), read(Options)
    decision = decide(PIECEWISE_RULES[options.backend], launch)
    if decision.add and options.tokens:
        field = SIZES_FIELD[launch.is_sglang(">=0.5.14")]
        decision = Decision(
            decision.does,
            f"{decision.why}, for {', '.join(map(str, options.tokens))} tokens",
            decision.mend,
            {**decision.add, field: list(options.tokens)},
            decision.warnings,
        )
    return _choice.make(decision)


@hookimpl(wrapper=True)
def glm5_startup(server_args: Any) -> Generator[None, Any, Any]:
    """See what the request comes to, and which of SGLang's rules it overrides, on the arguments SGLang has resolved."""
    if _choice.outcome is not None and _choice.outcome.verdict is Verdict.APPLIED:
        arguments = resolved(server_args)
        backend = backend_of(arguments)
        if backend == "disabled":
            _seen.append(_nothing_of_it("SGLang has turned the prefill graph off all the same"))
        elif backend != "unknown":
            _overridden[:] = overridden(Launch(Environment(), {}), backend, arguments)
    return (yield)


@hookimpl(wrapper=True)
def glm5_graph_capture(model_runner: Any, kind: str) -> Generator[None, Any, Any]:
    """See whether SGLang has made the graph."""
    result = yield
    if kind == "prefill" and not getattr(model_runner, "is_draft_worker", False):
        backend = backend_of(resolved(model_runner.server_args))
        runner = type(prefill_runner(model_runner, result[0])).__name__
        if runner.endswith("CudaGraphRunner"):
            _seen.append(Outcome(Verdict.APPLIED, f"the prefill graph is made ({backend})"))
        elif backend in ("disabled", "unknown") or Environment().cuda_devices == 0:
            _seen.append(Outcome(Verdict.NOT_APPLICABLE, "no prefill graph here: it is turned off, or there is no GPU"))
        else:
            _seen.append(_nothing_of_it(f"SGLang has made no prefill graph ({backend} was asked for)"))
    return result


def _nothing_of_it(why: str) -> Outcome:
    return Outcome(Verdict.FAILED, why, "The log of the server says why; or take 'piecewise' out of GLM5_PLUGINS.")


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """What was asked for and what that overrides; in a scheduler, whether there is a graph."""
    outcome = _seen[0] if _seen else _choice.outcome
    if outcome is None or not _overridden:
        return outcome
    rules = ", ".join(_overridden)
    return Outcome(outcome.verdict, f"{outcome.reason}; SGLang's own rules would have left it off for: {rules}")
