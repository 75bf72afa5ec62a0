"""`torch.compile` leaves FlashInfer's `fp4_quantize` out: the graph breaks there, and the function runs as it is.

`fullgraph=True` makes a break an error by design, so this needs `no_fullgraph`, under which a model with breaks is
compiled in parts that no CUDA graph captures: right answers, and no gain. `fp4_custom_op` leaves no break, and gains.
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
        outside=raw.outside,
        unless=raw.not_needed,
        keep=raw.keep,
        upstream="https://github.com/flashinfer-ai/flashinfer/issues/2999",
        fate="delete when graphs captured across breaks are right, or with no_fullgraph",
    )
