"""A stand-in for CUDA graphs on a CPU: it records operators with the addresses they used, and replays by address.

What it keeps of the real thing is what a careless capture trips over:

- replay reads and writes the addresses seen at capture, whatever tensors the caller passes now;
- memory made during a capture comes from the graph's pool, and goes back to it when the last tensor that owns it
  dies; the next capture into the same pool may get it, and replays of both then share it;
- a weak reference is a tensor on the same memory that owns nothing.

Memory from outside the pool that a capture used is kept alive, as CUDA's allocator keeps it mapped: a replay that
reads it sees what was there, not a crash.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


class Pool:
    """A graph's private memory: blocks of which none is ever given back to the system."""

    def __init__(self) -> None:
        self.blocks: list[ctypes.Array[ctypes.c_char]] = []
        self.free: list[ctypes.Array[ctypes.c_char]] = []

    def tensor_like(self, value: torch.Tensor) -> torch.Tensor:
        """Memory of the pool with the shape and strides of `value`, and its contents."""
        needed = max(1, value.untyped_storage().nbytes())
        fitting = [block for block in self.free if ctypes.sizeof(block) >= needed]
        if fitting:
            block = min(fitting, key=ctypes.sizeof)
            self.free.remove(block)
        else:
            block = (ctypes.c_char * needed)()
            self.blocks.append(block)
        memory = torch.frombuffer(block, dtype=torch.uint8)
        # A storage object in Python lives as long as any tensor on it.
        weakref.finalize(memory.untyped_storage(), self.free.append, block)
        made = torch.empty(0, dtype=value.dtype).set_(
            memory.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )
        return made.copy_(value)


@dataclass(frozen=True)
class Place:
    """A tensor as a CUDA kernel sees it: an address with a shape."""

    address: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor:
        """A tensor on this memory that owns nothing."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        count = last + 1
        raw = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(raw, dtype=self.dtype).as_strided(self.size, self.stride)


def weak_ref_tensors(value: Any) -> Any:
    """Stand-in for the function of `sglang.srt.compilation.weak_ref_tensor`."""
    return tree_map_only(torch.Tensor, lambda tensor: Place.of(tensor).tensor(), value)


class CUDAGraph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.kept: list[torch.Tensor] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for step in self.steps:
                step()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph, pool: Pool) -> None:
        super().__init__()
        self.graph = graph
        self.pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        places = tree_map_only(torch.Tensor, Place.of, (args, kwargs))
        for tensor in inputs:
            self._keep(tensor)
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        outputs, shape = tree_flatten(result)
        fresh: dict[int, Place] = {}
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in known:
                outputs[index] = self.pool.tensor_like(output)
                fresh[index] = Place.of(outputs[index])
        if fresh or func._schema.is_mutable:
            self.graph.steps.append(_step(func, places, fresh))
        return tree_unflatten(outputs, shape)

    def _keep(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        inside = any(
            ctypes.addressof(block) <= address < ctypes.addressof(block) + ctypes.sizeof(block)
            for block in self.pool.blocks
        )
        if not inside:
            self.graph.kept.append(tensor)


def _step(func: Any, places: Any, fresh: dict[int, Place]) -> Callable[[], None]:
    def run() -> None:
        args, kwargs = tree_map_only(Place, Place.tensor, places)
        outputs = tree_flatten(func(*args, **kwargs))[0]
        for index, place in fresh.items():
            place.tensor().copy_(outputs[index])

    return run


class graph:
    """Stand-in for the context manager `torch.cuda.graph`."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Pool, stream: Any = None, **_: Any) -> None:
        self._recorder = _Recorder(cuda_graph, pool)

    def __enter__(self) -> None:
        self._recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)
