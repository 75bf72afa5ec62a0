"""`torch.compile` leaves FlashInfer's `fp4_quantize` out: the graph breaks there, and the function runs as it is.

`fullgraph=True` makes a break an error by design, so this needs `no_fullgraph`, and that is refused on a CUDA device:
graphs captured across breaks crash or give wrong tokens there. What works on a GPU is `fp4_custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from glm5_plugins import Patch, hookimpl
from glm5_plugins.fp4.sites import RAW

requires = ("no_fullgraph",)
conflicts = ("fp4_custom_op",)


def _out_of_the_graph(original: Callable[..., Any]) -> Any:
    import torch

    disable: Callable[..., Any] = torch.compiler.disable
    return disable(original)


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Mark the raw function wherever SGLang holds it."""
    raw = RAW[0]
    yield Patch(
        target=raw.target,
        using=_out_of_the_graph,
        reason="the graph breaks around FlashInfer's loader",
        requires=raw.requires,
        ends=raw.ends,
        unless=raw.not_needed,
        keep=raw.keep,
        upstream="https://github.com/flashinfer-ai/flashinfer/issues/2999",
        fate="delete when graphs captured across breaks are right, or with no_fullgraph",
    )
