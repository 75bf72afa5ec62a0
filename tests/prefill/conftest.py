"""SGLang's real compilation code on CPU tensors, with stand-ins for what only a GPU has."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import pytest
from packaging.version import Version

from glm5_plugins.prefill import compiling
from tests.support.server import STANDINS

try:
    INSTALLED: str | None = metadata.version("sglang")
except metadata.PackageNotFoundError:
    INSTALLED = None
    collect_ignore_glob = ["test_*.py"]

# From 0.5.22 on no prefill graph is compiled by torch.compile: there is nothing to test.
if INSTALLED is not None and Version(INSTALLED) >= Version("0.5.22"):
    collect_ignore_glob = ["test_*.py"]

SIZES = [16, 8, 4]

# Where a version keeps the switches of its runner: (in a prefill graph, compile only, capture on this stream).
_SWITCHES = (
    (
        "sglang.srt.compilation.piecewise_context_manager",  # up to 0.5.13
        "enable_piecewise_cuda_graph",
        "enable_piecewise_cuda_graph_compile",
        "set_pcg_capture_stream",
    ),
    (
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph",  # from 0.5.14
        "enable_tc_piecewise_cuda_graph",
        "sglang.srt.compilation.compile_phase:enable_torch_compile_warmup",
        "sglang.srt.compilation.compile_phase:set_pcg_capture_stream",
    ),
)


@dataclass
class Runner:
    """What SGLang's prefill runner does around a model, in the version that is installed.

    Args:
        install: SGLang's `install_torch_compiled`, or what the plugin makes of it.
    """

    install: Callable[..., Any]
    pool: Any
    _graph: Callable[[], AbstractContextManager[Any]]
    _compile_only: Callable[[], AbstractContextManager[Any]]
    _on_stream: Callable[[Any], AbstractContextManager[Any]]

    def prepare(self, model: Any, compiler: str = "eager") -> None:
        """Have the model compiled for every size."""
        import torch
        from sglang.srt.compilation.compilation_config import CompilationConfig

        config = CompilationConfig(SIZES, compiler, False)
        config.add_split_op("glm5_test.attention")
        self.static = torch.zeros(SIZES[0], model.width)
        self.model = model
        self.install(model, fullgraph=True, dynamic_arg_dims=None, compile_config=config, graph_pool=self.pool)
        with self.inside(), self._compile_only():
            for size in SIZES:
                model(self.static[:size])

    def capture(self) -> None:
        """Run each size twice on a capture stream; SGLang captures at the second."""
        with self.inside(), self._on_stream(object()):
            for size in SIZES:
                for _ in range(2):
                    self.model(self.static[:size])
        for compilation in compiling.COMPILATIONS:
            compilation.seal()  # as the plugin does when SGLang's capture is over

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The model runs compiled."""
        import torch

        with torch.no_grad(), self._graph():
            yield

    def serve(self, x: Any) -> Any:
        """Run one prompt through the graph, from the runner's static buffer."""
        size = next(size for size in reversed(SIZES) if size >= len(x))
        self.static[: len(x)].copy_(x)
        self.static[len(x) : size].zero_()
        with self.inside():
            return self.model(self.static[:size])[: len(x)].clone()

    def without_graph(self, x: Any) -> Any:
        """Run the same prompt, padded alike, through the model as it is written."""
        import torch

        size = next(size for size in reversed(SIZES) if size >= len(x))
        with torch.no_grad():
            padding = torch.zeros(size - len(x), self.model.width)
            return type(self.model).forward(self.model, torch.cat([x, padding]))[: len(x)].clone()


@pytest.fixture(autouse=True)
def _no_compilations() -> Iterator[None]:
    from glm5_plugins.prefill.compiling import COMPILATIONS

    COMPILATIONS.clear()
    yield
    COMPILATIONS.clear()


@pytest.fixture(scope="session")
def _sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make SGLang's compilation code importable and runnable without a GPU."""
    import torch

    from tests.support import recorded_graph

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDINS))
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("SGLANG_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        weak = types.ModuleType("sglang.srt.compilation.weak_ref_tensor")
        weak.weak_ref_tensors = recorded_graph.weak_ref_tensors  # type: ignore[attr-defined]
        patch.setitem(sys.modules, weak.__name__, weak)
        patch.setattr(torch.cuda, "CUDAGraph", recorded_graph.CUDAGraph)
        patch.setattr(torch.cuda, "graph", recorded_graph.graph)
        patch.setattr(torch.distributed, "get_rank", lambda *_: 0)
        yield


@pytest.fixture
def runner(_sglang: None) -> Iterator[Callable[..., Runner]]:
    """Make a `Runner` of an `install_torch_compiled`; without one, of SGLang's own."""
    import torch
    from torch._dynamo.utils import counters

    from tests.support import recorded_graph

    torch._dynamo.reset()
    counters.clear()

    def make(wrap: Callable[[Any], Any] = lambda install: install) -> Runner:
        compile_module = import_module("sglang.srt.compilation.compile")
        names = next(names for names in _SWITCHES if _exists(names[0]))
        inside, only, stream = (_find(names[0], name) for name in names[1:])
        set_compiled = getattr(compile_module, "set_compiled", None)  # 0.5.8 and 0.5.9

        @contextmanager
        def graph() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(inside())
                if set_compiled is not None:
                    stack.enter_context(set_compiled(True))
                yield

        return Runner(wrap(compile_module.install_torch_compiled), recorded_graph.Pool(), graph, only, stream)

    yield make
    torch._dynamo.reset()


def _exists(module: str) -> bool:
    try:
        import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def _find(module: str, name: str) -> Any:
    if ":" in name:
        module, name = name.split(":")
    return getattr(import_module(module), name)
