"""Compiles a model for SGLang's prefill graph whole where Dynamo can, else in parts that no CUDA graph captures.

SGLang's capture of a compiled model is right under one assumption: one Dynamo graph holds the whole forward. Its
inputs then lie in the runner's static buffers, its parameters belong to it alone, and nothing but the code after
the forward reads its output. A graph break takes all of that away: parts read each other's outputs, which SGLang
has turned into weak references; code between the parts hands over tensors at new addresses, while a captured graph
reads, and writes in place, at the old ones; one graph can serve several layers, whose parameters are inputs then.

So the forward is traced with `fullgraph=True` first, as SGLang itself does, and what comes of it is captured. Where
Dynamo meets a break it refuses before anything has run; the forward is then compiled again with breaks allowed, and
its parts run compiled, none of them captured. A whole graph that Dynamo makes again before the capture has ended is
SGLang's own business; one made later, at run time, is not captured.
"""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from glm5_plugins.errors import NotInForce

logger = logging.getLogger("glm5_plugins")

COMPILATIONS: list[Compilation] = []
"""Every compilation of this process, in order."""


@dataclass
class Graph:
    """One graph that Dynamo made, as SGLang has split it at attention.

    Args:
        split: The graph module that calls the pieces in turn; SGLang puts its own object in place of each.
        released: How many pieces were taken out of SGLang's hands.
    """

    split: Any
    released: int = 0

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """The pieces that SGLang captures, by name: objects of `CUDAPiecewiseBackend` or its like."""
        for name, value in list(vars(self.split).items()):
            if callable(getattr(value, "compiled_graph_for_general_shape", None)):
                yield name, value

    def release(self) -> None:
        """Let every piece run as compiled for any size: no capture from now on, no replay of what is captured."""
        for name, piece in self.pieces():
            vars(self.split)[name] = piece.compiled_graph_for_general_shape
            self.released += 1

    def close(self) -> None:
        """Let the sizes that are not captured run as compiled: SGLang would try to capture them while it serves."""
        for _, piece in self.pieces():
            for size, entry in list(piece.concrete_size_entries.items()):
                if entry.cudagraph is None:
                    del piece.concrete_size_entries[size]

    def captured(self) -> tuple[int, int]:
        """How many pieces have been captured, and how many CUDA graphs they are together."""
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
    sealed: bool = False
    """Whether SGLang has done its capture: a graph made from now on is not captured."""
    as_written: bool = False
    """Whether calls run the model as it is written, for comparison."""
    _breaks_before: int = 0

    def start(self) -> Any:
        """Make the model compile when it is first called in a prefill graph."""
        written = type(self.module).forward
        code = written.__code__
        made = self._install(fullgraph=True)

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.as_written:
                return written(module, *args, **kwargs)
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
        self.break_reason = _reason(error)
        self._breaks_before = _counted("graph_break")
        logger.warning(
            "glm5-plugins: no_fullgraph: %s cannot be traced whole (%s): compiling it again, with breaks, and without "
            "CUDA graphs",
            type(self.module).__name__,
            self.break_reason,
        )
        for graph in self.graphs:
            graph.release()
        outer = self.module.forward
        self._install(fullgraph=False)
        self.module.forward = outer

    def seal(self) -> None:
        """SGLang has done its capture: nothing more is captured from now on."""
        self.sealed = True
        for graph in self.graphs:
            graph.close()

    def backend(self, graph: Any, example_inputs: list[Any]) -> Any:
        """Split and compile one Dynamo graph as SGLang does, and decide whether it may be captured."""
        backend = import_module("sglang.srt.compilation.backend").SGLangBackend(
            self.arguments["compile_config"], self.arguments["graph_pool"]
        )
        made = Graph(backend(graph, example_inputs))
        compiled = sum(not item.is_splitting_graph for item in backend.piecewise_graphs)
        if len(list(made.pieces())) != compiled:
            raise NotInForce(
                f"The plugin 'no_fullgraph' finds {len(list(made.pieces()))} of the {compiled} pieces that SGLang made "
                "of a graph, so it cannot keep the others from being captured.",
                "Take it out of GLM5_PLUGINS, and report the version of SGLang.",
            )
        if self.break_reason or self.sealed:
            made.release()
        self.graphs.append(made)
        return made.split

    @property
    def breaks(self) -> int:
        """How many graph breaks Dynamo has counted in this process since they were allowed."""
        return _counted("graph_break") - self._breaks_before if self.break_reason else 0

    @property
    def limit_hit(self) -> bool:
        """Whether Dynamo has hit its recompile limit: what it compiles no more runs as written."""
        return _counted("unimplemented", _LIMIT) + _counted("graph_break", _LIMIT) > 0

    def describe(self) -> str:
        """Say in a sentence how the model was compiled, and what is captured of it."""
        graphs = f"{_number(len(self.graphs), 'Dynamo graph')}"
        found = [graph.captured() for graph in self.graphs]
        captured, cuda_graphs = sum(pieces for pieces, _ in found), sum(graphs for _, graphs in found)
        released = sum(graph.released for graph in self.graphs)
        pieces = f"{captured} pieces captured in {_number(cuda_graphs, 'CUDA graph')}, {released} uncaptured"
        if self.break_reason:
            pieces = f"{_number(self.breaks, 'graph break')} (the first: {self.break_reason}), {pieces}"
        limit = ", and Dynamo has hit its recompile limit: some of it runs as written" if self.limit_hit else ""
        return f"{type(self.module).__name__}: {graphs}, {pieces}{limit}"


_LIMIT = re.compile("(cache|recompile)[ _](size[ _])?limit")


def _counted(section: str, pattern: re.Pattern[str] | None = None) -> int:
    """What Dynamo has counted in this process under the names that match."""
    from torch._dynamo.utils import counters

    return sum(count for name, count in counters[section].items() if pattern is None or pattern.search(name))


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _refusals() -> tuple[type[BaseException], ...]:
    """What Dynamo raises where `fullgraph=True` cannot be kept."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.FailOnRecompileLimitHit)


def _reason(error: BaseException) -> str:
    """Why Dynamo refused, in one line, with the innermost place in the model's code."""
    from torch._dynamo import exc

    if isinstance(error, exc.FailOnRecompileLimitHit):
        return "Dynamo's recompile limit was hit"
    what = str(error).strip().partition("\n")[0]
    stack = getattr(error, "real_stack", None)
    return f"{what}, {Path(stack[-1].filename).name}:{stack[-1].lineno}: {stack[-1].line}" if stack else what


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
