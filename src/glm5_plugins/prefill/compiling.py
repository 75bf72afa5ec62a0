"""Compiles a model for SGLang's prefill graph whole where Dynamo can, else in parts that no CUDA graph captures.

SGLang's capture of a compiled model is right under one assumption: one Dynamo graph holds the whole forward. Its
inputs then lie in the runner's static buffers, its parameters belong to it alone, and nothing but the code after
the forward reads its output. A graph break takes all of that away: parts read each other's outputs, which SGLang
has turned into weak references; code between the parts hands over tensors at new addresses, while a captured graph
reads, and writes in place, at the old ones; one graph can serve several layers, whose parameters are inputs then.

So the forward is traced with `fullgraph=True` first, as SGLang itself does, and what comes of it is captured. Where
Dynamo meets a break it refuses before anything has run; the forward is then compiled again with breaks allowed, and
its parts run compiled, none of them captured. The same holds for a graph made after the first, at run time.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from glm5_plugins.errors import NotInForce

COMPILATIONS: list[Compilation] = []
"""Every compilation of this process, in order."""


@dataclass
class Graph:
    """One graph that Dynamo made, as SGLang has split it at attention.

    Args:
        split: The graph module that calls the pieces in turn; SGLang puts its own object in place of each.
        may_capture: Whether SGLang may capture the pieces of this graph.
        released: How many pieces were taken out of SGLang's hands.
    """

    split: Any
    may_capture: bool
    released: int = 0

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """The pieces that SGLang captures, by name: objects of `CUDAPiecewiseBackend` or its like."""
        for name, value in list(vars(self.split).items()):
            if callable(getattr(value, "compiled_graph_for_general_shape", None)):
                yield name, value

    def release(self) -> None:
        """Let every piece run as compiled for any size: no capture from now on, no replay of what is captured."""
        self.may_capture = False
        for name, piece in self.pieces():
            vars(self.split)[name] = piece.compiled_graph_for_general_shape
            self.released += 1

    def captured(self) -> tuple[int, int]:
        """How many pieces have been captured at least once, and how many CUDA graphs they are together."""
        graphs = [
            sum(entry.cudagraph is not None for entry in piece.concrete_size_entries.values())
            for _, piece in self.pieces()
        ]
        return sum(count > 0 for count in graphs), sum(graphs)


@dataclass
class Compilation:
    """One model that SGLang compiles, and the graphs that come of it.

    Args:
        install: SGLang's `install_torch_compiled`.
        module: The model; its `forward` is replaced.
        arguments: What SGLang calls `install` with, by name.
    """

    install: Callable[..., Any]
    module: Any
    arguments: dict[str, Any]
    graphs: list[Graph] = field(default_factory=list)
    break_reason: str = ""
    """Why the model could not be traced whole; empty while it can."""

    def start(self) -> Any:
        """Make the model compile when it is first called in a prefill graph."""
        code = type(self.module).forward.__code__
        made = self._install(fullgraph=True)

        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return self._run(*args, **kwargs)
            except _refusals() as error:
                if self.break_reason or _was_running(code, error):
                    raise
                self._allow_breaks(error)
                return self._run(*args, **kwargs)

        self.module.forward = types.MethodType(forward, self.module)
        return made

    def _install(self, fullgraph: bool) -> Any:
        made = self.install(self.module, **{**self.arguments, "fullgraph": fullgraph, "backend_factory": self.backend})
        self._run = self.module.forward
        return made

    def _allow_breaks(self, error: BaseException) -> None:
        self.break_reason = str(error).strip()
        for graph in self.graphs:
            graph.release()
        outer = self.module.forward
        self._install(fullgraph=False)
        self.module.forward = outer

    def backend(self, graph: Any, example_inputs: list[Any]) -> Any:
        """Split and compile one Dynamo graph as SGLang does, and decide whether it may be captured."""
        from sglang.srt.compilation.backend import SGLangBackend

        backend = SGLangBackend(self.arguments["compile_config"], self.arguments["graph_pool"])
        made = Graph(backend(graph, example_inputs), may_capture=not self.break_reason and not self.graphs)
        compiled = sum(not item.is_splitting_graph for item in backend.piecewise_graphs)
        if len(list(made.pieces())) != compiled:
            raise NotInForce(
                f"The plugin 'no_fullgraph' finds {len(list(made.pieces()))} of the {compiled} pieces that SGLang made "
                "of a graph, so it cannot keep the others from being captured.",
                "Take it out of GLM5_PLUGINS, and report the version of SGLang.",
            )
        if not made.may_capture:
            made.release()
        self.graphs.append(made)
        return made.split


def _refusals() -> tuple[type[BaseException], ...]:
    """What Dynamo raises where `fullgraph=True` cannot be kept."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.FailOnRecompileLimitHit)


def _was_running(code: types.CodeType, error: BaseException) -> bool:
    """Whether an error came up while the forward ran, not while it was traced: it must not run twice then.

    The code that Dynamo makes has the file and name of the code it was made of.
    """
    trace = error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_code
        if (running.co_filename, running.co_name) == (code.co_filename, code.co_name):
            return True
        trace = trace.tb_next
    return False
