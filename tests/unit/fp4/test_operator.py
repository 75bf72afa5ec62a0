"""Eager behaviour on CPU and in `opcheck`: the fake agrees with the reference in every layout."""

import enum
import itertools
from dataclasses import replace

import pytest
import torch

from glm5_plugins.fp4 import reference
from glm5_plugins.fp4.calls import (
    BLOCK_SCALE_INTERLEAVE,
    FP4_QUANTIZE,
    NVFP4_KV_QUANTIZE,
    NVFP4_QUANTIZE,
    SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE,
    Unrepresentable,
)
from glm5_plugins.fp4.layouts import LayoutError
from glm5_plugins.fp4.operator import NoKernel
from tests.unit.fp4 import upstream

LAYOUTS = list(itertools.product([True, False], [True, False]))
FORMATS = [(16, False), (32, True)]


def values(*shape, column_major=False):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return made.transpose(-2, -1).contiguous().transpose(-2, -1) if column_major else made


def test_cpu_refuses_unless_the_reference_was_asked_for(new_operator):
    operator = new_operator(reference=False)
    with pytest.raises(NoKernel, match=r"called with CPU tensors; flashinfer:fp4_quantize runs on CUDA only"):
        operator.replacement(values(4, 64), torch.ones(1))
    operator.allow_reference()
    operator.replacement(values(4, 64), torch.ones(1))
    operator.allow_reference(False)
    with pytest.raises(NoKernel):
        operator.replacement(values(4, 64), torch.ones(1))


def test_a_row_without_reference_says_so(new_operator):
    def silu(a, mask, a_global_sf):
        raise AssertionError

    operator = new_operator(call=SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE, function=silu, reference=False)
    with pytest.raises(NoKernel, match="has no PyTorch reference"):
        operator.allow_reference()


@pytest.mark.parametrize("version", ["0.6.3", "0.7.4"])
@pytest.mark.parametrize(("swizzled", "small"), LAYOUTS)
@pytest.mark.parametrize(("vector", "ue8m0"), FORMATS)
@pytest.mark.parametrize("shape", [(5, 128), (130, 128), (2, 3, 128), (0, 128)])
def test_opcheck_in_every_layout(new_operator, version, swizzled, small, vector, ue8m0, shape):
    operator = new_operator(version)
    torch.library.opcheck(operator.overload, (values(*shape), torch.ones(1), vector, ue8m0, swizzled, small))


@pytest.mark.parametrize(("swizzled", "small"), LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 5), (2, 128, 5)])
def test_opcheck_column_major(new_operator, swizzled, small, shape):
    operator = new_operator()
    input = values(*shape, column_major=True)
    assert input.stride(-2) == 1
    torch.library.opcheck(operator.overload, (input, torch.ones(1), 16, False, swizzled, small))


def test_opcheck_notices_a_fake_with_the_linear_shape(new_operator):
    call = FP4_QUANTIZE

    def linear(arguments, rules):
        return call.plan({**arguments, "is_sf_swizzled_layout": False}, rules)

    operator = new_operator(call=replace(call, plan=linear))
    with pytest.raises(Exception, match=r"[Ss]hape|sizes"):
        torch.library.opcheck(operator.overload, (values(5, 128), torch.ones(1)))


def test_the_operator_returns_what_the_reference_returns(new_operator):
    input, scale = values(9, 96), torch.full((1,), 3.0)
    got = new_operator().replacement(input, scale, is_sf_8x4_layout=True)
    expected = reference.fp4_quantize(input, scale, is_sf_8x4_layout=True)
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zero_rows_give_empty_outputs(new_operator, device):
    packed, scales = new_operator().replacement(values(0, 64).to(device), torch.ones(1, device=device))
    assert (packed.shape, scales.shape) == ((0, 32), (0, 4))
    assert (packed.dtype, scales.dtype) == (torch.uint8, torch.uint8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_odd_columns_are_refused_clearly(new_operator, device):
    with pytest.raises(LayoutError, match=r"positive multiple of sf_vec_size=16.*\(4, 40\) has K=40"):
        new_operator().replacement(values(4, 40).to(device), torch.ones(1, device=device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_column_major_strides(new_operator, device):
    input = values(64, 3, column_major=True)
    input = torch.empty_strided(input.shape, input.stride(), device=device, dtype=input.dtype)
    packed, scales = new_operator().replacement(input, torch.ones(1, device=device))
    assert (packed.shape, packed.stride()) == ((32, 3), (1, 32))
    assert (scales.shape, scales.stride()) == ((4, 128), (1, 4))


def test_a_recipe_object_is_refused_whatever_it_says(new_operator):
    operator = new_operator("0.7.2")
    for recipe in (None, object()):
        with pytest.raises(Unrepresentable, match=r"cannot carry nvfp4_4over6=.*configuration object"):
            operator.replacement(values(4, 64), torch.ones(1), nvfp4_4over6=recipe)
    operator.replacement(values(4, 64), torch.ones(1), nvfp4_4over6=upstream.UNSET)


@pytest.mark.parametrize(
    ("input", "options"),
    [
        (values(2, 3, 64), {}),
        (values(64, 3, column_major=True), {}),
        (values(3, 64), {"is_sf_swizzled_layout": False}),
        (values(3, 64), {"is_sf_8x4_layout": True}),
    ],
)
def test_cute_dsl_where_its_shapes_differ_is_refused(new_operator, input, options):
    meta = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    with pytest.raises(Unrepresentable, match="backend='cute-dsl' is known"):
        new_operator().replacement(meta, torch.ones(1, device="meta"), backend="cute-dsl", **options)


def test_cute_dsl_for_a_matrix_with_128x4_scales_is_planned(new_operator):
    meta = values(3, 64).to("meta")
    _, scales = new_operator().replacement(meta, torch.ones(1, device="meta"), backend="cute-dsl")
    assert scales.shape == (128, 4)


@pytest.mark.parametrize("options", [{"backend": "cute-dsl"}, {"batch_invariant": True}])
def test_the_reference_does_not_stand_in_for_other_kernels(new_operator, options):
    with pytest.raises(Unrepresentable, match="the reference computes what backend='cuda' computes"):
        new_operator().replacement(values(4, 64), torch.ones(1), **options)


def test_fired_and_traced_are_counted(new_operator):
    operator = new_operator()
    operator.replacement(values(4, 64), torch.ones(1))
    operator.replacement(values(4, 64).to("meta"), torch.ones(1, device="meta"))
    assert (operator.fired, operator.traced) == (1, 1)


class Layout(enum.Enum):
    """Values of FlashInfer's SfLayout."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def nvfp4_quantize(
    a,
    a_global_sf,
    sfLayout=Layout.layout_128x4,
    do_shuffle=False,
    sf_vec_size=16,
    enable_pdl=None,
    backend="cuda",
):
    upstream.calls.append(dict(locals()))
    return a, a


@pytest.mark.parametrize("layout", list(Layout))
def test_an_enumeration_passes_by_value(new_operator, layout):
    operator = new_operator("0.6.8", call=NVFP4_QUANTIZE, function=nvfp4_quantize)
    assert "int sfLayout=0" in operator.bound.schema
    torch.library.opcheck(operator.overload, (values(9, 64), torch.ones(1), layout.value))
    got = operator.replacement(values(9, 64), torch.ones(1), layout)
    expected = reference.fp4_quantize(
        values(9, 64),
        torch.ones(1),
        is_sf_swizzled_layout=layout is not Layout.layout_linear,
        is_sf_8x4_layout=layout is Layout.layout_8x4,
    )
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    operator.bound.on_cuda(values(9, 64), torch.ones(1), layout.value)
    assert upstream.calls[-1]["sfLayout"] is layout
    with pytest.raises(Unrepresentable, match="do_shuffle=True"):
        operator.replacement(values(9, 64), torch.ones(1), do_shuffle=True)


@pytest.mark.parametrize("shape", [(3, 5), (2, 130, 6), (0, 8, 4)])
def test_interleave_is_an_operator_of_one_output(new_operator, shape):
    operator = new_operator(call=BLOCK_SCALE_INTERLEAVE, function=lambda unswizzled_sf, *, out=None: unswizzled_sf)
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    torch.library.opcheck(operator.overload, (scales,))
    assert torch.equal(operator.replacement(scales), reference.block_scale_interleave(scales))
    with pytest.raises(Unrepresentable, match="does not write to its arguments"):
        operator.replacement(scales, out=scales)


def test_grouped_and_kv_shapes(new_operator):
    grouped = new_operator(
        call=SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE, function=lambda a, mask, a_global_sf: None, reference=False
    )
    meta = {"device": "meta"}
    packed, scales = grouped.replacement(torch.empty(2, 130, 192, **meta), torch.ones(2, **meta), torch.ones(2, **meta))
    assert (packed.shape, packed.stride()) == ((130, 48, 2), (48, 1, 130 * 48))
    assert (scales.shape, scales.dtype) == ((32, 4, 2, 4, 2, 2), torch.float8_e4m3fn)
    kv = new_operator(call=NVFP4_KV_QUANTIZE, function=lambda input, global_scale: None, reference=False)
    packed, scales = kv.replacement(torch.empty(7, 64, **meta), torch.ones(1, **meta))
    assert (packed.shape, scales.shape) == ((7, 32), (7, 4))
