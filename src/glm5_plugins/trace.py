"""Whether the FP4 path can be traced here, without plugins and with them: each tried in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from glm5_plugins.environment import Environment
from glm5_plugins.errors import NotInForce

CURE = "fp4_custom_op"
_BREAKING = ("fp4_graph_break", "no_fullgraph")
_TIMEOUT_S = 600

Outcome = Literal["traces", "breaks", "stops", "refused", "unusable"]


@dataclass(frozen=True)
class Frame:
    """One frame of the code that was traced."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{re.sub(r'^.*/(?:site-packages|python3[.][0-9]+)/', '', self.file)}:{self.line} {self.function}"


@dataclass(frozen=True)
class Attempt:
    """What became of one set of plugins.

    Attributes:
        plugins: the set.
        outcome: `traces` as one graph; `breaks`, with the call between two graphs; `stops` with an error of Dynamo;
            `refused` by the layer; `unusable`, if the attempt says nothing about tracing.
        call: the function that SGLang's dense layers hold.
        operators: of other namespaces than PyTorch's, in the graph.
        error: what stopped it.
        frames: of the traced code, outermost first; Dynamo stops at the last.
        rows: the layer's verdicts.
    """

    plugins: tuple[str, ...]
    outcome: Outcome
    call: str = ""
    operators: tuple[str, ...] = ()
    error: str = ""
    frames: tuple[Frame, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        """Whether a server with this set would get past the FP4 call."""
        return self.outcome in ("traces", "breaks")


def attempts(requested: Sequence[str]) -> Iterator[Attempt]:
    """Try without plugins, then with those requested, then, if the last did not trace, with the cure."""
    env = Environment()
    for name in ("sglang", "flashinfer-python"):
        if env.version_text(name) is None:
            raise NotInForce(
                f"{name} is not installed for {sys.executable}, so there is nothing to trace.",
                "Run this with the Python that runs the server.",
            )
    last = attempt(())
    yield last
    if requested:
        last = attempt(requested)
        yield last
    if last.outcome in ("stops", "refused") and CURE not in requested:
        yield attempt([*(name for name in requested if name not in _BREAKING), CURE])


def attempt(plugins: Sequence[str]) -> Attempt:
    """Trace one FP4 layer in a fresh process with these plugins."""
    environment = dict(os.environ)
    environment.pop("GLM5_REPORT", None)
    environment.pop("GLM5_PLUGINS", None)
    if plugins:
        environment["GLM5_PLUGINS"] = ",".join(plugins)
    else:
        environment = {name: value for name, value in environment.items() if not name.startswith("GLM5_")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "glm5_plugins.dynamo"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Attempt(tuple(plugins), "unusable", error=f"no answer within {_TIMEOUT_S} s")
    # The layer ends a process with two lines, the last that it writes.
    refusal = re.search(r"^glm5-plugins: (.*(?:\n  .*)?)\Z", done.stderr.rstrip(), re.MULTILINE)
    if done.returncode and refusal is not None:
        return Attempt(tuple(plugins), "refused", error=refusal[1])
    try:
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        tail = " / ".join(done.stderr.strip().splitlines()[-2:])
        return Attempt(tuple(plugins), "unusable", error=f"the process ended with status {done.returncode}: {tail}")
    return Attempt(
        tuple(plugins),
        found["outcome"],
        found.get("call", ""),
        tuple(found.get("operators", ())),
        found.get("error", ""),
        tuple(Frame(**frame) for frame in found.get("frames", ())),
        tuple(found["rows"]),
    )
