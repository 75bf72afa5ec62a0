"""The FP4 functions of FlashInfer that SGLang calls in code that may be traced: one table.

Each row says what `operator` needs to make a torch operator of the function: the schema type of every parameter that
any FlashInfer version has, the parameters that a torch operator cannot carry (and why), the outputs, and what plain
PyTorch computes instead when that is asked for. The signature of the function that is bound decides which parameters
a given version has. Where SGLang calls each of them: `sites`.

Not here: `mm_fp4` (SGLang calls it inside its own operator in all versions), `cutlass_fused_moe` and
`trtllm_fp4_block_scale_moe` (inside SGLang's opaque MoE operator wherever a graph is traced with `fullgraph`), and
the weight shuffles (load time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from glm5_plugins.fp4 import layouts, reference, shortcuts
from glm5_plugins.fp4.layouts import LayoutError, LayoutRules, ScaleLayout, Strided

Arguments = Mapping[str, Any]
"""Every argument of one call by name, defaults filled in."""

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """One FlashInfer function as a torch operator.

    Attributes:
        name: of the operator, in the namespace of this layer.
        upstream: `module:function`; the name exists in every version of `flashinfer`.
        flashinfer: the versions whose outputs the row describes, a PEP 440 specifier.
        parameters: schema type by parameter name, for every version. The first one is the tensor to be
            quantised; if it is empty the kernel is not launched. An `int` parameter whose upstream default is
            an enumeration passes through the operator by value.
        refused: parameters that only their default may have, with the reason.
        outputs: number of tensors returned.
        plan: makes outputs of the right shapes, strides and dtypes without contents, for traced, meta and
            empty inputs.
        reference: what the arguments give in plain PyTorch; absent if there is no such code.
        shortcut: returns a callable, positional in the order of the signature, that does what the bound
            function does with less overhead; or None if it does not know this version well enough.
    """

    name: str
    upstream: str
    flashinfer: str
    parameters: Mapping[str, str]
    outputs: int
    plan: Callable[[Arguments, LayoutRules], Outputs]
    reference: Callable[[Arguments, LayoutRules], Outputs] | None = None
    shortcut: Callable[[Callable[..., Any], LayoutRules], Callable[..., Any] | None] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


class Unrepresentable(ValueError):
    """An argument that the operator cannot carry, or a combination whose outputs are not known."""


_CONFIG_OBJECT = "it is a configuration object, and only tensors, numbers and strings pass a torch operator"
_EXTRA_OUTPUT = "it adds an output, and an operator has a fixed number of outputs"
_CALLER_BUFFER = "the operator returns fresh tensors and does not write to its arguments"


def _empty(like: torch.Tensor, strided: Strided, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return like.new_empty_strided(strided.shape, strided.stride, dtype=dtype)


def _refuse_cute_dsl(arguments: Arguments, input: torch.Tensor, layout: ScaleLayout) -> None:
    """Refuse what FlashInfer's CuTe-DSL kernels lay out differently from its CUDA kernels.

    They flatten leading dimensions, do not look for column-major inputs, and pad the rows of 8x4 and linear scales by
    the size of the problem (`quantization/kernels/nvfp4_quantize.py`, 0.6.8 to 0.7.4).
    """
    if arguments.get("backend") != "cute-dsl":
        return
    if input.dim() != 2 or layouts.is_column_major(input.stride()) or layout is not ScaleLayout.SWIZZLED_128X4:
        raise Unrepresentable(
            "backend='cute-dsl' is known to return the shapes of backend='cuda' only for a row-major matrix "
            f"and 128x4 scales; got shape {tuple(input.shape)}, stride {input.stride()} and {layout.name}"
        )


def _plan_matrix(
    arguments: Arguments, rules: LayoutRules, input: torch.Tensor, layout: ScaleLayout, vector_size: int
) -> Outputs:
    plan = layouts.quantized(input.shape, input.stride(), vector_size=vector_size, layout=layout, rules=rules)
    _refuse_cute_dsl(arguments, input, layout)
    return _empty(input, plan.packed), _empty(input, plan.scales)


def _plan_fp4_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    layout = ScaleLayout.from_flags(arguments["is_sf_swizzled_layout"], arguments["is_sf_8x4_layout"])
    return _plan_matrix(arguments, rules, arguments["input"], layout, arguments["sf_vec_size"])


def _reference_fp4_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    _refuse_other_kernels(arguments)
    return reference.fp4_quantize(
        arguments["input"],
        arguments["global_scale"],
        arguments["sf_vec_size"],
        arguments["sf_use_ue8m0"],
        arguments["is_sf_swizzled_layout"],
        arguments["is_sf_8x4_layout"],
        arguments.get("is_global_scale_inversed", False),
        rules=rules,
    )


def _refuse_other_kernels(arguments: Arguments) -> None:
    """Refuse kernels whose arithmetic the reference does not have; `enable_pdl` only concerns launching."""
    if arguments.get("backend", "cuda") not in ("cuda", "auto") or arguments.get("batch_invariant", False):
        raise Unrepresentable(
            "the reference computes what backend='cuda' computes; "
            f"got backend={arguments.get('backend')!r}, "
            f"batch_invariant={arguments.get('batch_invariant', False)}"
        )


_NVFP4_LAYOUTS = {0: ScaleLayout.SWIZZLED_128X4, 1: ScaleLayout.SWIZZLED_8X4, 2: ScaleLayout.LINEAR}
"""FlashInfer's `SfLayout` by value (`flashinfer/tllm_enums.py`)."""


def _plan_nvfp4_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    layout = _NVFP4_LAYOUTS[arguments["sfLayout"]]
    return _plan_matrix(arguments, rules, arguments["a"], layout, arguments["sf_vec_size"])


def _reference_nvfp4_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    _refuse_other_kernels(arguments)
    layout = _NVFP4_LAYOUTS[arguments["sfLayout"]]
    return reference.fp4_quantize(
        arguments["a"],
        arguments["a_global_sf"],
        arguments["sf_vec_size"],
        False,
        layout is not ScaleLayout.LINEAR,
        layout is ScaleLayout.SWIZZLED_8X4,
        rules=rules,
    )


def _plan_block_scale_interleave(arguments: Arguments, rules: LayoutRules) -> Outputs:
    scales: torch.Tensor = arguments["unswizzled_sf"]
    return (_empty(scales, layouts.interleaved(scales.shape), scales.dtype),)


def _reference_block_scale_interleave(arguments: Arguments, rules: LayoutRules) -> Outputs:
    return (reference.block_scale_interleave(arguments["unswizzled_sf"]),)


def _plan_nvfp4_kv_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    input: torch.Tensor = arguments["input"]
    if input.dim() != 2:
        raise LayoutError(f"nvfp4_kv_quantize needs 2 dimensions, got shape {tuple(input.shape)}")
    rows_first = layouts.contiguous(input.shape).stride
    plan = layouts.quantized(input.shape, rows_first, vector_size=16, layout=ScaleLayout.LINEAR, rules=rules)
    return _empty(input, plan.packed), _empty(input, plan.scales)


def _plan_grouped(a: torch.Tensor, k: int) -> Outputs:
    if a.dim() != 3:
        raise LayoutError(f"grouped NVFP4 quantisation needs 3 dimensions, got shape {tuple(a.shape)}")
    plan = layouts.grouped(a.shape[0], a.shape[1], k)
    return _empty(a, plan.packed), _empty(a, plan.scales, torch.float8_e4m3fn)


def _plan_scaled_fp4_grouped_quantize(arguments: Arguments, rules: LayoutRules) -> Outputs:
    return _plan_grouped(arguments["a"], arguments["a"].shape[-1])


def _plan_silu_and_mul(arguments: Arguments, rules: LayoutRules) -> Outputs:
    return _plan_grouped(arguments["a"], arguments["a"].shape[-1] // 2)


FP4_QUANTIZE = Call(
    name="fp4_quantize",
    upstream="flashinfer:fp4_quantize",
    flashinfer=">=0.6.1",
    parameters={
        "input": "Tensor",
        "global_scale": "Tensor?",
        "sf_vec_size": "int",
        "sf_use_ue8m0": "bool",
        "is_sf_swizzled_layout": "bool",
        "is_sf_8x4_layout": "bool",
        "is_global_scale_inversed": "bool",
        "enable_pdl": "bool?",
        "backend": "str",
        "batch_invariant": "bool",
    },
    refused={"nvfp4_4over6": _CONFIG_OBJECT},
    outputs=2,
    plan=_plan_fp4_quantize,
    reference=_reference_fp4_quantize,
    shortcut=shortcuts.fp4_quantize,
)

NVFP4_QUANTIZE = Call(
    name="nvfp4_quantize",
    upstream="flashinfer:nvfp4_quantize",
    # 0.6.3 quantised the linear layout as 128x4; SGLang calls it in a forward pass from 0.5.13 (0.6.11) on.
    flashinfer=">=0.6.8",
    parameters={
        "a": "Tensor",
        "a_global_sf": "Tensor",
        "sfLayout": "int",
        "sf_vec_size": "int",
        "enable_pdl": "bool?",
        "backend": "str",
        "batch_invariant": "bool",
    },
    refused={
        "do_shuffle": "it is for weights at load time, and shuffles by an index tensor made on the host",
        "per_token_activation": _EXTRA_OUTPUT,
        "expanded_idx_to_permuted_idx": "it goes with per_token_activation",
        "out_scale": _CALLER_BUFFER,
        "nvfp4_4over6": _CONFIG_OBJECT,
    },
    outputs=2,
    plan=_plan_nvfp4_quantize,
    reference=_reference_nvfp4_quantize,
)

BLOCK_SCALE_INTERLEAVE = Call(
    name="block_scale_interleave",
    upstream="flashinfer:block_scale_interleave",
    flashinfer=">=0.6.1",
    parameters={"unswizzled_sf": "Tensor"},
    refused={"out": _CALLER_BUFFER},
    outputs=1,
    plan=_plan_block_scale_interleave,
    reference=_reference_block_scale_interleave,
)

NVFP4_KV_QUANTIZE = Call(
    name="nvfp4_kv_quantize",
    upstream="flashinfer:nvfp4_kv_quantize",
    flashinfer=">=0.6.7",
    parameters={"input": "Tensor", "global_scale": "Tensor"},
    outputs=2,
    plan=_plan_nvfp4_kv_quantize,
)

SCALED_FP4_GROUPED_QUANTIZE = Call(
    name="scaled_fp4_grouped_quantize",
    upstream="flashinfer:scaled_fp4_grouped_quantize",
    flashinfer=">=0.6.1",
    parameters={"a": "Tensor", "mask": "Tensor", "a_global_sf": "Tensor"},
    refused={"nvfp4_4over6": _CONFIG_OBJECT},
    outputs=2,
    plan=_plan_scaled_fp4_grouped_quantize,
)

SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE = Call(
    name="silu_and_mul_scaled_nvfp4_experts_quantize",
    upstream="flashinfer:silu_and_mul_scaled_nvfp4_experts_quantize",
    flashinfer=">=0.6.1",
    parameters={"a": "Tensor", "mask": "Tensor", "a_global_sf": "Tensor"},
    refused={"nvfp4_4over6": _CONFIG_OBJECT},
    outputs=2,
    plan=_plan_silu_and_mul,
)

CALLS = (
    FP4_QUANTIZE,
    NVFP4_QUANTIZE,
    BLOCK_SCALE_INTERLEAVE,
    NVFP4_KV_QUANTIZE,
    SCALED_FP4_GROUPED_QUANTIZE,
    SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE,
)
"""Every row."""
