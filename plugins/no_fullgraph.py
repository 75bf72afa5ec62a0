"""SGLang's piecewise prefill graph is compiled with `fullgraph=False`, so that graph breaks are allowed.

On a CUDA device this is refused: capture across graph breaks was measured on an H200 with SGLang 0.5.11 to crash
(illegal memory access) or, worse, to answer with wrong tokens. What works there is to have no break: `fp4_custom_op`,
or SGLang's own breakable prefill graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from glm5_plugins import Environment, Patch, hookimpl
from glm5_plugins.probes import SourceLacks

_NOTHING_COMPILES = SourceLacks(
    (
        "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner",  # up to 0.5.13
        "sglang.srt.model_executor.runner_backend.utils:TcPiecewiseCudaGraphBackend",  # 0.5.14-0.5.21
    ),
    "this SGLang has no prefill graph that torch.compile makes, so nothing asks for fullgraph",
)


def _allow_breaks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install_torch_compiled(*args: Any, **kwargs: Any) -> Any:
        # Up to 0.5.13 the caller passes fullgraph=True, later it leaves it out: a changed default would not do.
        return original(*args, **{**kwargs, "fullgraph": False})

    return install_torch_compiled


def _where_it_corrupts(env: Environment) -> str | None:
    """A CUDA device replays what was captured across a break."""
    if env.cuda_devices == 0:
        return None
    return (
        "with a CUDA device, graphs captured across breaks crash or give wrong tokens (SGLang 0.5.11, H200); "
        "use the breakable prefill graph: --enable-breakable-cuda-graph on 0.5.11-0.5.13, "
        "--cuda-graph-backend-prefill breakable from 0.5.14"
    )


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Force the argument at the one function that all versions go through."""
    yield Patch(
        target="sglang.srt.compilation.compile:install_torch_compiled",
        using=_allow_breaks,
        reason="graph breaks are allowed; SGLang compiles with fullgraph=True",
        requires="sglang>=0.5.8,<0.5.22",
        ends="the prefill graph is no longer compiled by torch.compile (from 0.5.22), so nothing asks for fullgraph",
        outside=_NOTHING_COMPILES,
        needs=("fullgraph",),
        refuse=_where_it_corrupts,
        upstream="https://github.com/sgl-project/sglang/pull/10062",
        fate="delete when the oldest supported SGLang is 0.5.22",
    )
