"""The installed FlashInfer, made to believe in an SM120 device, so that its Python runs on CPU tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from glm5_plugins.fp4.calls import FP4_QUANTIZE, Call
from glm5_plugins.fp4.operator import Operator

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def sm120(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Answer questions about the device as an SM120 would; return the module that holds `fp4_quantize`."""
    import flashinfer

    module = sys.modules[inspect.unwrap(flashinfer.fp4_quantize).__module__]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    for holder in (module, sys.modules["flashinfer.activation"]):
        monkeypatch.setattr(holder, "get_compute_capability", lambda device: (12, 0), raising=False)
        monkeypatch.setattr(holder, "device_support_pdl", lambda device: False, raising=False)
    if hasattr(module, "_check_block_scale_quantization_support"):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(module, "_check_block_scale_quantization_support", lambda device, name: None)
    return module


@pytest.fixture
def without_kernels(sm120: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let FlashInfer load kernels that do nothing; return the names of those it called, in order."""
    launched: list[str] = []

    class Kernels:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: launched.append(name)

    spec = types.SimpleNamespace(build_and_load=Kernels)
    for name in dir(sm120):
        if name.startswith("gen_fp4_quantization_sm"):
            monkeypatch.setattr(sm120, name, lambda: spec)
    sm120.get_fp4_quantization_module.cache_clear()
    yield launched
    sm120.get_fp4_quantization_module.cache_clear()


@pytest.fixture
def new_operator() -> Callable[..., Operator]:
    """Bind an operator of a namespace of its own to the installed FlashInfer."""

    def make(call: Call = FP4_QUANTIZE, reference: bool = False) -> Operator:
        operator = Operator(call, namespace=f"glm5_flashinfer_{next(_numbers)}")
        operator.bind(upstream(call))
        operator.allow_reference(reference)
        return operator

    return make


def upstream(call: Call) -> Any:
    module, _, name = call.upstream.partition(":")
    return functools.reduce(getattr, name.split("."), __import__(module))
