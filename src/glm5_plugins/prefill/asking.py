"""How each version of SGLang is asked for a prefill graph, and for which models its breakable graph works."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from glm5_plugins.prefill.upstream import NOTHING_COMPILES
from glm5_plugins.rules import Does, Launch, Rule

_FLAGS = "sglang/srt/server_args.py; from 0.5.14 also sglang/srt/model_executor/cuda_graph_config.py"

# What a user may have said about the prefill graph, by field of ServerArgs; it wins over every plugin.
CHOSEN_BY = (
    "cuda_graph_backend_prefill",
    "cuda_graph_config",
    "disable_prefill_cuda_graph",
    "enable_breakable_cuda_graph",
    "enforce_piecewise_cuda_graph",
    "enable_piecewise_cuda_graph",
    "disable_piecewise_cuda_graph",
    "disable_cuda_graph",
)


def chosen(launch: Launch) -> bool:
    """Whether the user has said anything about the prefill graph."""
    return any(launch.given.get(name) for name in CHOSEN_BY)


def breakable_fails(launch: Launch) -> bool:
    """Whether the breakable graph does not take the model: MLA, until SGLang 0.5.17.

    SGLang says so itself from 0.5.14 on; that it holds for 0.5.11-0.5.13 is inferred, the code being the same.
    """
    return launch.checkpoint.mla and launch.is_sglang(">=0.5.11,<0.5.17")


def _nothing_compiles(launch: Launch) -> bool:
    """Whether there is no compiled prefill graph any more: by source where the version cannot be placed."""
    return launch.env.version("sglang") is not None or NOTHING_COMPILES(launch.env) is not None


GONE = Rule(
    Does.NOT_NEEDED,
    "{sglang} has no prefill graph that torch.compile makes, so nothing asks for fullgraph",
    sglang=">=0.5.22",
    when=_nothing_compiles,
)
_NO_GPU = Rule(Does.NOT_APPLICABLE, "no GPU, so no CUDA graph", arch=("none",))
_CHOSEN = Rule(
    Does.NOT_NEEDED,
    "the prefill graph is chosen already, by the command line, the profile or another plugin; it is left alone",
    when=chosen,
)
_DEFAULT = Rule(
    Does.NOT_NEEDED,
    "the breakable graph, which needs no Dynamo, is the default of {sglang} on CUDA",
    sglang=">=0.5.15,<0.5.22",
    source=_FLAGS,
)
_ASK = (
    Rule(
        Does.ADD,
        "asks for SGLang's breakable prefill graph, which needs no Dynamo; a backend that is asked for stays on where "
        "SGLang's own rules would have turned the prefill graph off",
        sglang=">=0.5.14,<0.5.15",
        add={"cuda_graph_backend_prefill": "breakable"},
        source=_FLAGS,
    ),
    Rule(
        Does.ADD,
        "asks for SGLang's breakable prefill graph, which needs no Dynamo",
        sglang=">=0.5.11,<0.5.14",
        add={"enable_breakable_cuda_graph": True},
        source=_FLAGS,
    ),
)

BREAKABLE_RULES = {
    "auto": (
        GONE,
        _CHOSEN,
        _NO_GPU,
        _DEFAULT,
        Rule(
            Does.NOT_APPLICABLE,
            "{sglang} does not make its breakable prefill graph of a model with MLA; where it compiles the model, "
            "breaks are allowed",
            when=breakable_fails,
            source="sglang/srt/server_args.py, _disable_breakable_cudagraph_if_incompatible (0.5.14-0.5.16)",
        ),
        *_ASK,
        Rule(
            Does.NOT_APPLICABLE,
            "{sglang} has no breakable prefill graph that is known; where it compiles the model, breaks are allowed",
        ),
    ),
    "breakable": (
        Rule(
            Does.REFUSE,
            "{sglang} has no breakable prefill graph, which GLM5_NO_FULLGRAPH_MODE=breakable asks for",
            "Set GLM5_NO_FULLGRAPH_MODE=compile, or use SGLang 0.5.11 or later.",
            sglang="<0.5.11",
        ),
        Rule(
            Does.REFUSE,
            "{sglang} does not make its breakable prefill graph of a model with MLA, which "
            "GLM5_NO_FULLGRAPH_MODE=breakable asks for",
            "Set GLM5_NO_FULLGRAPH_MODE=compile, or use SGLang 0.5.17 or later.",
            when=breakable_fails,
        ),
        GONE,
        _CHOSEN,
        _NO_GPU,
        _DEFAULT,
        *_ASK,
    ),
}

COMPILE_RULES = (
    GONE,
    Rule(
        Does.NOT_APPLICABLE,
        "GLM5_NO_FULLGRAPH_MODE=compile chooses no server arguments: it is in force where SGLang compiles the model, "
        "which piecewise can ask for",
    ),
)

SIZES_FIELD = {False: "piecewise_cuda_graph_tokens", True: "cuda_graph_bs_prefill"}
"""The field for the sizes to capture, by whether SGLang is 0.5.14 or later."""


def resolved(server_args: Any) -> Any:
    """The arguments as SGLang has resolved them: the record itself, or what stands beside it (from 0.5.18)."""
    try:
        view = import_module("sglang.srt.arg_groups.overrides").resolved_view
    except (ImportError, AttributeError):
        return server_args
    return view(server_args)


def backend_of(server_args: Any) -> str:
    """What makes the prefill graph by resolved arguments.

    Returns:
        `breakable`, `tc_piecewise`, `full` or `disabled`; `unknown` as long as SGLang has not resolved them.
    """
    if hasattr(server_args, "cuda_graph_config"):  # from 0.5.14
        config = server_args.cuda_graph_config
        return str(config.prefill.backend) if hasattr(config, "prefill") else "unknown"
    asked = getattr(server_args, "enable_piecewise_cuda_graph", True)  # up to 0.5.9 it is off unless asked for
    if not asked or getattr(server_args, "disable_piecewise_cuda_graph", False):
        return "disabled"
    return "breakable" if getattr(server_args, "enable_breakable_cuda_graph", False) else "tc_piecewise"


def prefill_runner(model_runner: Any, result: Any) -> Any:
    """The runner of the prefill graph, right after its capture; None without one.

    Args:
        model_runner: SGLang's `ModelRunner`, which keeps the runner (up to 0.5.15).
        result: What the capture returned, which has it from 0.5.16 on.
    """
    kept = getattr(model_runner, "prefill_cuda_graph_runner", None)  # from 0.5.14
    kept = kept or getattr(model_runner, "piecewise_cuda_graph_runner", None)
    return getattr(result, "runner", kept)


def pass_by(runner: Any) -> bool:
    """Have SGLang run every prompt past the prefill graph, as it does with one that is too long for it.

    Returns:
        Whether the runner is one that is asked before each prompt.
    """
    for name in ("can_run_graph", "can_run"):  # from 0.5.14, and before
        if hasattr(runner, name):
            setattr(runner, name, lambda forward_batch: False)
            return True
    return False


_MEND = "Take 'piecewise' out of GLM5_PLUGINS, or start without that."
_OLD = "sglang/srt/model_executor/model_runner.py, can_run_piecewise_cuda_graph"


def _refusal(why: str, mend: str = _MEND, **row: Any) -> Rule:
    return Rule(Does.REFUSE, why, mend, **row)


def _takes_breakable(launch: Launch) -> bool:
    return not breakable_fails(launch)


def _compiled(until: str) -> tuple[Rule, ...]:
    """Ask for the graph that torch.compile makes."""
    return (
        *(
            _refusal(f"{{sglang}} makes no prefill graph with {what}", sglang="<0.5.10", source=_OLD, **row)
            for what, row in (
                ("pipeline parallelism (--pp-size {pp_size})", {"when": lambda launch: launch.get("pp_size") > 1}),
                ("--enable-torch-compile", {"given": {"enable_torch_compile": (True,)}}),
                ("--moe-a2a-backend {moe_a2a_backend}", {"given": {"moe_a2a_backend": ("deepep", "mooncake")}}),
            )
        ),
        _refusal(
            "{sglang} makes no prefill graph by torch.compile with --speculative-algorithm {speculative_algorithm}",
            sglang=f">=0.5.14,{until}",
            when=_is_eagle,
            source="sglang/srt/model_executor/model_runner.py (0.5.14), .../cuda_graph_setup.py (from 0.5.16)",
        ),
        Rule(
            Does.ADD,
            "asks for the prefill graph (--enable-piecewise-cuda-graph)",
            sglang="<0.5.10",
            add={"enable_piecewise_cuda_graph": True},
            source=_FLAGS,
        ),
        Rule(
            Does.ADD,
            "asks for the prefill graph (--enforce-piecewise-cuda-graph)",
            sglang=">=0.5.10,<0.5.14",
            add={"enforce_piecewise_cuda_graph": True},
            source=_FLAGS,
        ),
        Rule(
            Does.ADD,
            "asks for the prefill graph (--cuda-graph-backend-prefill tc_piecewise)",
            sglang=f">=0.5.14,{until}",
            add={"cuda_graph_backend_prefill": "tc_piecewise"},
            source=_FLAGS,
        ),
    )


def _is_eagle(launch: Launch) -> bool:
    return str(launch.get("speculative_algorithm") or "").upper() in ("EAGLE", "EAGLE3", "NEXTN")


_BREAKABLE = (
    Rule(
        Does.ADD,
        "asks for the breakable prefill graph (--enforce-piecewise-cuda-graph --enable-breakable-cuda-graph)",
        sglang=">=0.5.11,<0.5.14",
        when=_takes_breakable,
        add={"enforce_piecewise_cuda_graph": True, "enable_breakable_cuda_graph": True},
        source=_FLAGS,
    ),
    Rule(
        Does.ADD,
        "asks for the breakable prefill graph (--cuda-graph-backend-prefill breakable)",
        sglang=">=0.5.14",
        when=_takes_breakable,
        add={"cuda_graph_backend_prefill": "breakable"},
        source=_FLAGS,
    ),
)
_BACKEND = "Set GLM5_PIECEWISE_BACKEND=auto, or take 'piecewise' out of GLM5_PLUGINS."

PIECEWISE_RULES = {
    "auto": (_CHOSEN, _NO_GPU, *_BREAKABLE, *_compiled("<0.5.17")),
    "breakable": (
        _refusal(
            "{sglang} has no breakable prefill graph, which GLM5_PIECEWISE_BACKEND asks for", _BACKEND, sglang="<0.5.11"
        ),
        _refusal(
            "{sglang} does not make its breakable prefill graph of a model with MLA",
            _BACKEND,
            when=breakable_fails,
        ),
        _CHOSEN,
        _NO_GPU,
        *_BREAKABLE,
    ),
    "tc_piecewise": (
        _refusal(
            "{sglang} has no prefill graph by torch.compile, which GLM5_PIECEWISE_BACKEND asks for",
            _BACKEND,
            sglang=">=0.5.22",
        ),
        _CHOSEN,
        _NO_GPU,
        *_compiled("<0.5.22"),
    ),
}
