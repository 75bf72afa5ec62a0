"""SGLang's prefill graph does without `fullgraph`: a model that torch.compile cannot trace whole still answers right.

`GLM5_NO_FULLGRAPH_MODE` says how. `breakable` asks for SGLang's own breakable prefill graph, which needs no Dynamo
(0.5.11-0.5.21). `compile` lets SGLang compile the model with graph breaks; what has a break in it is not captured. Its
parts gain nothing over the model as written, so prompts go past such a graph: they are answered as without one, as
fast. `fp4_custom_op`, which takes away the breaks of SGLang's own raw FP4 calls, is faster. `auto`, the default, is
`breakable` where SGLang has it for the model, and `compile` elsewhere.

Shown on CPU with the compilation code of SGLang 0.5.9, 0.5.12, 0.5.14 and 0.5.19 (`tests/prefill`), CUDA graphs being
stood in for, and on an H200 with SGLang 0.5.11 and 0.5.14 (`benchmarks/prefill_h200.md`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal

from glm5_plugins.settings.model import read

from glm5_plugins import Environment, Outcome, Patch, PluginSettings, Verdict, hookimpl
from glm5_plugins.prefill import checking
from glm5_plugins.prefill.asking import BREAKABLE_RULES, COMPILE_RULES, GONE, pass_by, prefill_runner
from glm5_plugins.prefill.compiling import COMPILATIONS, Compilation
from glm5_plugins.prefill.upstream import NOTHING_COMPILES
from glm5_plugins.rules import Choice, Launch, decide

_BETTER = (
    "use fp4_custom_op where SGLang's own raw FP4 calls make the breaks (0.4-0.7 of the time without a graph on an "
    "H200), or the breakable graph (from SGLang 0.5.11)"
)


class Options(PluginSettings, plugin="no_fullgraph"):
    """How the prefill graph does without `fullgraph`."""

    mode: Literal["auto", "breakable", "compile"] = "auto"
    """`breakable`: SGLang's own breakable graph; `compile`: torch.compile with breaks; `auto`: the first that works."""
    check: bool = True
    """Before serving, run prompts through the compiled model and the model as written; stop if tokens differ."""
    tolerance: float | None = None
    """How far any logit may be off in that check; unset: any, as long as the most likely tokens are the same."""


_choice = Choice("no_fullgraph")
_found: list[Outcome] = []


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ask for the breakable graph where it is to be had."""
    rules = COMPILE_RULES if read(Options).mode == "compile" else BREAKABLE_RULES[read(Options).mode]
    return _choice.make(decide(rules, Launch(env, given)))


def _compile_whole_or_in_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install_torch_compiled(module: Any, **arguments: Any) -> Any:
        compilation = Compilation(original, module, arguments)
        COMPILATIONS.append(compilation)
        return compilation.start()

    return install_torch_compiled


def _why_not_needed(env: Environment) -> str | None:
    """GLM5_NO_FULLGRAPH_MODE=breakable is set."""
    if read(Options).mode == "breakable":
        return "GLM5_NO_FULLGRAPH_MODE=breakable: SGLang's breakable prefill graph is made without torch.compile"
    return None


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Take over at the one function that all versions go through."""
    yield Patch(
        target="sglang.srt.compilation.compile:install_torch_compiled",
        using=_compile_whole_or_in_parts,
        reason="a model is compiled whole where Dynamo can, else in parts that are not captured",
        requires="sglang>=0.5.8,<0.5.22",
        ends="the prefill graph is no longer compiled by torch.compile (from 0.5.22), so nothing asks for fullgraph",
        outside=NOTHING_COMPILES,
        needs=("fullgraph", "backend_factory", "compile_config", "graph_pool"),
        unless=_why_not_needed,
        upstream="https://github.com/sgl-project/sglang/pull/10062",
        fate="delete when the oldest supported SGLang is 0.5.22",
    )


@hookimpl(wrapper=True)
def glm5_graph_capture(model_runner: Any, kind: str) -> Generator[None, Any, Any]:
    """See what became of the prefill graph, and check its answers before anything is served."""
    if kind != "prefill":
        return (yield)
    known, before = len(COMPILATIONS), _reserved()
    result = yield
    for one in COMPILATIONS[known:]:
        one.seal()
    memory = f", {(_reserved() - before) / 2**30:.2f} GiB of device memory" if before else ""
    made = [_judge(model_runner, result[0], one, memory) for one in COMPILATIONS[known:]]
    _found.extend(made or [Outcome(Verdict.NOT_APPLICABLE, "SGLang compiled no model for a prefill graph here")])
    return result


def _judge(model_runner: Any, result: Any, compilation: Compilation, memory: str) -> Outcome:
    if not compilation.graphs:
        name = type(compilation.module).__name__
        mend = "Use GLM5_NO_FULLGRAPH_MODE=breakable, or start without the prefill graph; please report it."
        return Outcome(Verdict.DEAD, f"SGLang captured its prefill graph and never had {name} compiled", mend)
    said = compilation.describe() + memory
    runner = prefill_runner(model_runner, result)
    if not any(graph.captured()[0] for graph in compilation.graphs):
        # Dynamo's parts, run one by one by SGLang's `eager` compiler, only cost time; inductor's may be worth theirs.
        if compilation.arguments["compile_config"].compiler == "eager" and pass_by(runner):
            return Outcome(Verdict.APPLIED, f"{said}; so prompts go past it, as without a prefill graph; {_BETTER}")
        said += f"; prefill is no faster than without a graph; {_BETTER}"
    options = read(Options)
    if not options.check:
        return Outcome(Verdict.APPLIED, f"{said}; unchecked (GLM5_NO_FULLGRAPH_CHECK is off)")
    sizes = compilation.arguments["compile_config"].get_capture_sizes()
    finding = checking.check(model_runner, runner, compilation, sizes, options.tolerance)
    if finding.wrong:
        mend = "Use GLM5_NO_FULLGRAPH_MODE=breakable, or start without the prefill graph; please report it."
        return Outcome(Verdict.FAILED, f"wrong answers: {finding.text} ({said})", mend)
    return Outcome(Verdict.APPLIED, f"{said}; {'checked' if finding.ran else 'NOT checked'}: {finding.text}")


def _reserved() -> int:
    """Bytes of device memory that this process holds, 0 without a device; other processes may fill it meanwhile."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.memory_reserved()) if torch is not None and torch.cuda.is_available() else 0


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """In the main process what was asked for; in a scheduler what came of it."""
    order = (Verdict.FAILED, Verdict.DEAD, Verdict.APPLIED, Verdict.NOT_APPLICABLE)
    chosen = _choice.outcome if env.is_child else _choice.foreseen((GONE,), env)
    return min(_found, key=lambda outcome: order.index(outcome.verdict), default=chosen)
