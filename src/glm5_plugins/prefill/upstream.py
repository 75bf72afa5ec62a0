"""The rules by which SGLang leaves its prefill graph off, as facts: what a request for the graph overrides.

Each row holds for a range of versions and one backend of the prefill graph. Up to 0.5.13 the breakable graph goes by
the rules of the torch.compile graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from glm5_plugins.probes import SourceLacks
from glm5_plugins.rules import Launch

NOTHING_COMPILES = SourceLacks(
    (
        "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner",  # up to 0.5.13
        "sglang.srt.model_executor.runner_backend.utils:TcPiecewiseCudaGraphBackend",  # 0.5.14-0.5.21
    ),
    "this SGLang has no prefill graph that torch.compile makes, so nothing asks for fullgraph",
)

SOURCE = (
    "sglang/srt/server_args.py: _handle_piecewise_cuda_graph (0.5.10-0.5.13), _disable_*_cudagraph_if_incompatible "
    "(0.5.14-0.5.19); sglang/srt/arg_groups/cuda_graph_hook.py (from 0.5.20)"
)


@dataclass(frozen=True)
class OffRule:
    """One condition under which SGLang leaves the prefill graph off unless it is asked for.

    Args:
        what: The condition, for a person.
        holds: Asked of SGLang's resolved `ServerArgs`.
        tc_piecewise: Versions in which it counts for the torch.compile graph; empty for none.
        breakable: Versions in which it counts for the breakable graph, from 0.5.14 on; empty for none.
    """

    what: str
    holds: Callable[[Any], bool]
    tc_piecewise: str = ""
    breakable: str = ""


def _field(name: str, off: Any = None) -> Callable[[Any], bool]:
    """Whether a field has another value than the one that leaves its feature off."""
    return lambda args: bool((value := getattr(args, name, off)) and value != off)


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: int(getattr(args, name, 1) or 1) > 1


def _model(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(_model_config(args), name, False))


def _model_config(args: Any) -> Any:
    if hasattr(args, "get_model_config"):  # up to 0.5.18
        return args.get_model_config()
    return import_module("sglang.srt.arg_groups.model_override_base").model_config_of(args)


def _mla(args: Any) -> bool:
    return bool(args.use_mla_backend())


ALL = ">=0.5.10,<0.5.22"

OFF_RULES = (
    OffRule("the model's architecture is on SGLang's deny-list", _model("is_piecewise_cuda_graph_disabled_model"), ALL),
    OffRule("speculative decoding", _field("speculative_algorithm"), ">=0.5.10,<0.5.11"),
    OffRule("DP attention", _field("enable_dp_attention"), ALL, ">=0.5.15,<0.5.17"),
    OffRule("--enable-torch-compile", _field("enable_torch_compile"), ALL),
    OffRule("pipeline parallelism", _above_one("pp_size"), ALL),
    OffRule("a device other than CUDA", lambda args: args.device != "cuda", ALL),
    OffRule("an all-to-all backend", _field("moe_a2a_backend", "none"), ALL, ">=0.5.15,<0.5.17"),
    OffRule("LoRA", lambda args: bool(args.lora_paths or args.enable_lora), ALL, ">=0.5.15,<0.5.17"),
    OffRule("a multimodal model", _model("is_multimodal"), ALL, ">=0.5.15"),
    OffRule("GGUF weights", lambda args: "gguf" in (args.load_format, args.quantization), ALL),
    OffRule("a diffusion language model", _field("dllm_algorithm"), ALL),
    OffRule("CPU offload", lambda args: args.cpu_offload_gb > 0, ALL),
    OffRule("the hierarchical cache", _field("enable_hierarchical_cache"), ALL),
    OffRule("deterministic inference", _field("enable_deterministic_inference"), ALL),
    OffRule("disaggregated prefill", _field("disaggregation_mode", "null"), ALL),
    OffRule("symmetric memory", _field("enable_symm_mem"), ALL),
    OffRule("expert load balancing", _field("enable_eplb"), ALL),
    OffRule("recording of expert distributions", _field("expert_distribution_recorder_mode"), ALL),
    OffRule("context parallelism", _above_one("attn_cp_size"), ALL, ">=0.5.15,<0.5.23"),
    OffRule("--debug-cuda-graph", _field("debug_cuda_graph"), ">=0.5.11,<0.5.22"),
    OffRule("DSA context parallelism", _field("enable_dsa_prefill_context_parallel"), ">=0.5.13,<0.5.20"),
    OffRule("decode context parallelism", _above_one("dcp_size"), ">=0.5.16,<0.5.22", ">=0.5.16"),
    OffRule(
        "the MoE runner flashinfer_trtllm or flashinfer_mxfp4",
        lambda args: args.moe_runner_backend in ("flashinfer_trtllm", "flashinfer_mxfp4"),
        ">=0.5.10,<0.5.13",
    ),
    OffRule("MLA", _mla, breakable=">=0.5.14,<0.5.17"),
    OffRule("two-batch overlap", _field("enable_two_batch_overlap"), breakable=">=0.5.17"),
)


def overridden(launch: Launch, backend: str, server_args: Any) -> Iterator[str]:
    """The rules that would have left the graph off, each with what is to be said about it.

    Args:
        launch: The version of SGLang.
        backend: What the prefill graph is made by.
        server_args: SGLang's `ServerArgs`, resolved.
    """
    for rule in OFF_RULES:
        by_compile_rules = backend == "tc_piecewise" or launch.is_sglang("<0.5.14")
        versions = rule.tc_piecewise if by_compile_rules else rule.breakable
        if not versions or not launch.is_sglang(versions):
            continue
        try:
            if rule.holds(server_args):
                yield rule.what
        except Exception as error:  # a field that is gone, a model that does not load: say so, and go on
            yield f"{rule.what} (cannot be told here: {type(error).__name__}: {error})"
