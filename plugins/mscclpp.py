"""MSCCL++ all-reduce for small messages: sets `--enable-mscclpp`, or says why it could not be in force.

SGLang takes the flag anywhere and goes on with NCCL where it cannot follow it: for another number of ranks with a
warning, without the package `mscclpp` (from 0.5.14) without a word until 0.5.21. Here such a launch is refused before
anything starts, and once the ranks are up each one is asked whether its communicator is there.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from glm5_plugins import Environment, Outcome, Verdict, hookimpl
from glm5_plugins.rules import Choice, Does, Launch, Rule, decide

COMMUNICATOR = "sglang/srt/distributed/device_communicators/pymscclpp.py, PyMscclppCommunicator"
DISPATCH = "sglang/srt/distributed/parallel_state.py, GroupCoordinator.all_reduce"


def _other_size(versions: str, *sizes: int) -> Rule:
    words = ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}"
    return Rule(
        Does.REFUSE,
        f"{{sglang}} uses MSCCL++ among {words} ranks, not among {{tp_size}} (--tp-size)",
        "Choose another --tp-size, or do without MSCCL++.",
        sglang=versions,
        when=lambda launch: launch.get("tp_size") not in sizes,
        source=f"{COMMUNICATOR}: _SUPPORTED_WORLD_SIZES",
    )


NO_GPU = Rule(
    Does.REFUSE,
    "MSCCL++ runs on GPUs, and this machine has none",
    "Take 'mscclpp' out of GLM5_PLUGINS.",
    arch=("none",),
)
NO_PACKAGE = Rule(
    Does.REFUSE,
    "{sglang} takes MSCCL++ from the Python package 'mscclpp', which is not installed",
    "Install it (pip install mscclpp), or take 'mscclpp' out of GLM5_PLUGINS.",
    sglang=">=0.5.14",
    when=lambda launch: not launch.env.elsewhere and find_spec("mscclpp") is None,
    source=f"{COMMUNICATOR}: importlib.import_module",
)

SIZES = (
    _other_size("<0.5.14", 8, 16),
    _other_size(">=0.5.14,<0.5.21", 8, 16, 32),
    _other_size(">=0.5.21", 4, 8, 16, 32, 64),
)

RULES = (
    NO_GPU,
    *SIZES,
    NO_PACKAGE,
    Rule(
        Does.NO_EFFECT,
        "{sglang} uses MSCCL++ inside CUDA graphs alone, and those are switched off",
        when=lambda launch: (launch.get("disable_cuda_graph") or launch.get("cuda_graph_backend_decode") == "disabled"),
        add={"enable_mscclpp": True},
        source="sglang/srt/distributed/parallel_state.py, GroupCoordinator.graph_capture",
    ),
    Rule(
        Does.WARN,
        "{sglang} asks its own custom all-reduce first, so MSCCL++ gets only what that one declines "
        "(on GPUs without NVLink, everything)",
        "Give --disable-custom-all-reduce to have MSCCL++ take the small messages.",
        sglang="<0.5.14",
        when=lambda launch: not launch.get("disable_custom_all_reduce"),
        source=DISPATCH,
    ),
    Rule(
        Does.NOT_NEEDED,
        "--enable-mscclpp was given, and it fits",
        given={"enable_mscclpp": (True,)},
    ),
    Rule(
        Does.ADD,
        "MSCCL++ reduces small messages among {tp_size} ranks, inside CUDA graphs",
        add={"enable_mscclpp": True},
    ),
)

_choice = Choice("mscclpp")
_in_rank: Outcome | None = None


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the flag where MSCCL++ can be used."""
    return _choice.make(decide(RULES, Launch(env, given)))


@hookimpl(wrapper=True)
def glm5_model_load(model_runner: Any) -> Generator[None, Any, Any]:
    """Ask this rank whether SGLang has made the communicator; the process groups are up by now."""
    global _in_rank
    _in_rank = _look(model_runner)
    return (yield)


def _look(model_runner: Any) -> Outcome:
    group = import_module("sglang.srt.distributed").get_tp_group()
    communicator = getattr(group, "pymscclpp_comm", None)
    if _is_made(communicator):
        return Outcome(Verdict.APPLIED, "this rank has its MSCCL++ communicator")
    return Outcome(
        Verdict.FAILED,
        "SGLang made no MSCCL++ communicator in this rank and would go on with NCCL",
        "Its log says why (PyMscclpp); take 'mscclpp' out of GLM5_PLUGINS to start without it.",
    )


def _is_made(communicator: Any) -> bool:
    """Whether the constructor came to its end; `disabled` is true in any case, outside the capture of a graph."""
    if hasattr(communicator, "available"):  # from 0.5.21
        return bool(communicator.available)
    # From 0.5.14, and before.
    return any(getattr(communicator, handle, None) is not None for handle in ("comm", "_context"))


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say what was added in the main process, and what each rank has."""
    return _in_rank if env.is_child else _choice.foreseen((NO_GPU, NO_PACKAGE), env)
