"""FlashInfer's FP4 functions become torch operators, which `torch.compile` can trace.

SGLang's piecewise prefill graph compiles the whole forward pass with `fullgraph=True`. FlashInfer loads its kernels
inside the call, so Dynamo walks into the loader and stops: `Attempted to call function marked as skipped`. Warming up
does not help, and FlashInfer's own operator decorators do nothing.

Here an operator `glm5::…` takes the place of each function that SGLang calls raw in code that may be traced. On CUDA
it calls that function and changes nothing. `glm5_plugins.fp4.sites` names every call, version by version. SGLang
0.5.12 and later have an operator of their own around `fp4_quantize`; it is left alone, with its choice of kernel.
FlashInfer's defect is https://github.com/flashinfer-ai/flashinfer/issues/2999.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from glm5_plugins.settings.model import read

from glm5_plugins import Environment, NotApplicable, Patch, PluginSettings, hookimpl
from glm5_plugins.fp4.sites import DENSE, OWN_OPERATOR, RAW

UPSTREAM = "https://github.com/sgl-project/sglang/pull/23745"


class Options(PluginSettings, plugin="fp4_custom_op"):
    """Variables of this plugin."""

    reference: bool = False
    """Compute CPU tensors with the PyTorch reference, for tests; without it the operators refuse them."""


@dataclass(frozen=True)
class _Replacement:
    """Makes the operator of one function from the function."""

    function: str

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        operator = self._operator
        operator.bind(original)
        if operator.call.reference is not None:
            operator.allow_reference(read(Options).reference)
        replacement: Callable[..., Any] = operator.replacement
        return replacement

    def fired(self) -> int:
        if "glm5_plugins.fp4.operator" not in sys.modules:  # nothing was called; and there may be no torch to import
            return 0
        operator = self._operator
        return operator.fired if operator.is_bound else 0

    @property
    def _operator(self) -> Any:
        from glm5_plugins.fp4 import calls, operator  # these import torch

        return operator.Operator(next(call for call in calls.CALLS if call.name == self.function))


def _in_dense_layers(held: Any) -> Any:
    home = getattr(held, "__module__", "")
    if home.startswith(("flashinfer", "glm5_plugins.fp4")):
        return _REPLACEMENTS["fp4_quantize"](held)
    name = f"{home}.{held.__name__}" if hasattr(held, "__name__") else repr(held)
    raise NotApplicable(f"dense layers hold {name} here, which is not FlashInfer's; they hold that on SM120 only")


_REPLACEMENTS = {raw.function: _Replacement(raw.function) for raw in RAW}


@hookimpl
def glm5_patches(env: Environment) -> Iterator[Patch]:
    """One patch for each function; and one that says what SGLang's dense layers hold."""
    how = "as a torch operator" + (", and on CPU the PyTorch reference" if read(Options).reference else "")
    for raw in RAW:
        yield Patch(
            target=raw.target,
            using=_REPLACEMENTS[raw.function],
            reason=f"{how} ({raw.where(env) or 'not called by this SGLang'})",
            requires=raw.requires,
            ends=raw.ends,
            outside=raw.outside,
            unless=raw.not_needed,
            needs=raw.parameters[:1],
            knows=raw.parameters,
            keep=raw.keep,
            counter=_REPLACEMENTS[raw.function].fired,
            upstream=UPSTREAM,
            fate="delete when the oldest supported SGLang is 0.5.22",
        )
    yield Patch(
        target=DENSE,
        using=_in_dense_layers,
        reason=f"{how}, in the dense layers of SM120",
        requires="sglang>=0.5.8,<0.5.12",
        ends="SGLang has its own operator here, sglang::flashinfer_fp4_quantize (from 0.5.12)",
        outside=OWN_OPERATOR,
        counter=_REPLACEMENTS["fp4_quantize"].fired,
        upstream=UPSTREAM,
        fate="delete when the oldest supported SGLang is 0.5.12",
    )
