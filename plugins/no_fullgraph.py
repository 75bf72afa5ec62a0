"""SGLang's torch.compile prefill graph may have graph breaks, and still answers as without a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from glm5_plugins import Environment, Patch, hookimpl
from glm5_plugins.environment import Place, Window
from glm5_plugins.prefill.compiling import COMPILATIONS, Compilation

_WINDOW = "sglang>=0.5.8,<0.5.22"
_COMPILING_RUNNERS = (
    "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner",  # up to 0.5.13
    "sglang.srt.model_executor.runner_backend.utils:TcPiecewiseCudaGraphBackend",  # 0.5.14-0.5.21
)


def _compile_whole_or_in_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install_torch_compiled(module: Any, **arguments: Any) -> Any:
        compilation = Compilation(original, module, arguments)
        COMPILATIONS.append(compilation)
        return compilation.start()

    return install_torch_compiled


def _why_not_needed(env: Environment) -> str | None:
    """Decide by symbols where the version cannot: builds from source, and forks."""
    if env.place(Window.parse(_WINDOW)) is not Place.UNKNOWN:
        return None
    from glm5_plugins import source

    if all(source.lacks(target) for target in _COMPILING_RUNNERS):
        return "this SGLang has no prefill graph that torch.compile makes, so nothing asks for fullgraph"
    return None


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Take over at the one function that all versions go through."""
    yield Patch(
        target="sglang.srt.compilation.compile:install_torch_compiled",
        using=_compile_whole_or_in_parts,
        reason="the model is compiled whole where Dynamo can, else in parts that are not captured",
        requires=_WINDOW,
        ends="the prefill graph is no longer compiled by torch.compile (from 0.5.22), so nothing asks for fullgraph",
        needs=("fullgraph", "backend_factory", "compile_config", "graph_pool"),
        unless=_why_not_needed,
        upstream="https://github.com/sgl-project/sglang/pull/10062",
        fate="delete when the oldest supported SGLang is 0.5.22",
    )
