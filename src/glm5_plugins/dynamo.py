"""One FP4 layer through SGLang's own `install_torch_compiled`, in a process of its own; prints what Dynamo did as JSON.

    python -m glm5_plugins.dynamo

Nothing is loaded, compiled or launched: tensors are on the CPU, SGLang and FlashInfer are told that the device is an
SM120, a backend that only looks at graphs stands in for SGLang's, and whoever would run a kernel ends the work. With
`GLM5_PLUGINS` set the layer is started first, as in a server. `trace` runs this and says what it means.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from glm5_plugins.fp4.sites import DENSE

ROWS, K = 8, 256

INSTALL = "sglang.srt.compilation.compile:install_torch_compiled"
BACKEND = "sglang.srt.compilation.backend"
SWITCHES = (
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph:enable_tc_piecewise_cuda_graph",
    "sglang.srt.compilation.piecewise_context_manager:enable_piecewise_cuda_graph",
    "sglang.srt.compilation.compile:set_compiled",
)
"""What switches compiled code on, newest first; a version has one or two of them."""


class Reached(BaseException):
    """A kernel would run now: what had to be traced has been. Not an `Exception`, which SGLang logs."""


def main() -> None:
    """Trace, and print one line of JSON."""
    layer = None
    if os.environ.get("GLM5_PLUGINS"):
        from glm5_plugins import bootstrap

        layer = bootstrap.start("trace")
    try:
        _pretend_sm120()
        quantize, install = _load(DENSE), _load(INSTALL)
    except (ImportError, AttributeError, OSError) as error:
        found: dict[str, Any] = {
            "outcome": "unusable",
            "error": f"SGLang cannot be imported here: {type(error).__name__}: {error}",
        }
    else:
        if layer is not None:
            layer.verify()
        found = {"call": f"{quantize.__module__}.{quantize.__name__}"} | _trace(quantize, install)
    found["rows"] = [str(row) for row in layer.rows()] if layer is not None else []
    print(json.dumps(found))


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _pretend_sm120() -> None:
    """Make SGLang choose what it chooses on SM120, and FlashInfer go to its loader; must precede their modules."""
    import torch

    torch.version.cuda = torch.version.cuda or "13.0"
    common: Any = importlib.import_module("sglang.srt.utils.common")
    if hasattr(common, "is_sm120_supported"):
        common.is_sm120_supported = lambda device=None: True
    flashinfer: Any = importlib.import_module("flashinfer")
    raw = inspect.unwrap(flashinfer.fp4_quantize)
    home: Any = sys.modules[raw.__module__]
    if raw.__module__.startswith("glm5_plugins"):  # the operator's replacement
        from glm5_plugins.fp4.calls import FP4_QUANTIZE
        from glm5_plugins.fp4.operator import Operator

        home = sys.modules[inspect.unwrap(Operator(FP4_QUANTIZE).bound.function).__module__]
    home.get_compute_capability = lambda device: (12, 0)
    home.device_support_pdl = lambda device: False
    load = home.get_fp4_quantization_module

    def get_fp4_quantization_module(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return load(*args, **kwargs)
        raise Reached

    home.get_fp4_quantization_module = get_fp4_quantization_module


def _trace(quantize: Callable[..., Any], install: Callable[..., Any]) -> dict[str, Any]:
    import torch
    from torch._dynamo.exc import TorchDynamoException

    graphs: list[list[str]] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            packed, scales = quantize(x * 2, scale)
            return packed, scales

    class Backend:
        """Has the parts of SGLang's that others rely on."""

        piecewise_graphs = ()

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            operators = sorted({name for node in graph.graph.nodes if (name := _operator(node.target))})
            graphs.append(operators)

            def run(*args: Any) -> Any:
                if operators:
                    raise Reached
                return graph.forward(*args)

            return run

    stand_in: Any = types.ModuleType(BACKEND)  # SGLang's own does not import without CUDA
    stand_in.SGLangBackend = Backend
    sys.modules[BACKEND] = stand_in
    layer = install(Layer(), dynamic_arg_dims={"x": 0}, compile_config=None, graph_pool=None, fullgraph=True)
    try:
        with _compiled_code():
            layer(torch.zeros(ROWS, K, dtype=torch.bfloat16), torch.ones(1))
    except Reached:
        pass
    except TorchDynamoException as error:
        return {"outcome": "stops", "error": _in_short(error), "frames": _frames(error)}
    if not graphs:
        return {"outcome": "unusable", "error": f"{INSTALL} ran the layer without compiling it"}
    operators = [name for names in graphs for name in names]
    return {"outcome": "traces" if operators else "breaks", "operators": operators}


@contextlib.contextmanager
def _compiled_code() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for switch in SWITCHES:
            with contextlib.suppress(ImportError, AttributeError):
                stack.enter_context(_load(switch)())
        yield


def _operator(target: Any) -> str | None:
    """The name of a torch operator that is not PyTorch's own: `glm5::fp4_quantize`."""
    import torch

    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return None
    name: str = target._qualified_op_name
    return None if name.startswith(("aten::", "prims::", "prim::")) else name


def _in_short(error: BaseException) -> str:
    """What happened and where in Dynamo's own words, without its advice."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return "; ".join([lines[0], *(line for line in lines[1:] if line.startswith("Developer debug context:"))])


def _frames(error: BaseException) -> list[dict[str, Any]]:
    """The frames that Dynamo was in, outermost first, without those of this module and of Dynamo itself."""
    hidden = (__file__, os.path.dirname(sys.modules["torch._dynamo"].__file__ or "?"))
    return [
        {"file": frame.filename, "line": frame.lineno, "function": frame.name}
        for frame in getattr(error, "real_stack", None) or ()
        if not frame.filename.startswith(hidden)
    ]


if __name__ == "__main__":
    main()
