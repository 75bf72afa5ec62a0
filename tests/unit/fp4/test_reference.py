"""The reference quantiser against an element-by-element one, and against what dequantising must give."""

import math

import pytest
import torch

from glm5_plugins.fp4 import layouts, reference
from glm5_plugins.fp4.layouts import LAYOUT_RULES, LayoutError, ScaleLayout


def matrix(rows, k, dtype=torch.bfloat16, seed=0):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def global_scale(values):
    return (448 * 6 / values.float().abs().max()).reshape(1)


def f32(value):
    return torch.tensor(value, dtype=torch.float32)


def vector_by_hand(values, g, ue8m0):
    """One vector of half-precision values: its scale byte and its codes, with scalar arithmetic and torch's
    own types."""
    largest = f32(max(abs(value) for value in values))
    sixth = largest * f32(1 / 6)
    if ue8m0:
        exponent = math.ceil(math.log2(sixth.item()))
        byte, factor = exponent + 127, f32(2.0**-exponent)
    else:
        narrow = (g * sixth).clamp(max=448).to(torch.float8_e4m3fn)
        byte, factor = narrow.view(torch.uint8).item(), 1 / (narrow.to(torch.float32) * (1 / g))
    grid = [*reference.E2M1_VALUES]
    codes = []
    for value in values:
        product = (f32(value) * factor).item()
        distances = [(abs(abs(product) - magnitude), code % 2, code) for code, magnitude in enumerate(grid)]
        codes.append(min(distances)[2] + (8 if math.copysign(1, product) < 0 else 0))
    return byte, codes


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte_is_where_and_what_it_should_be(layout, vector, ue8m0, dtype):
    rows, k = 9, 96
    values = matrix(rows, k, dtype)
    g = global_scale(values)
    packed, scales = reference.fp4_quantize(
        values,
        g,
        vector,
        ue8m0,
        is_sf_swizzled_layout=layout is not ScaleLayout.LINEAR,
        is_sf_8x4_layout=layout is ScaleLayout.SWIZZLED_8X4,
    )
    expected_packed = torch.zeros(rows, k // 2, dtype=torch.uint8)
    expected_scales = torch.zeros(scales.numel(), dtype=torch.uint8)
    for row in range(rows):
        for column in range(k // vector):
            part = values[row, column * vector : (column + 1) * vector].tolist()
            byte, codes = vector_by_hand(part, g[0], ue8m0)
            expected_scales[layouts.offset(row, column, k // vector, layout)] = byte
            for i, code in enumerate(codes):
                expected_packed[row, (column * vector + i) // 2] |= code << (4 * (i % 2))
    assert torch.equal(packed, expected_packed)
    assert torch.equal(scales.reshape(-1), expected_scales)


@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_dequantising_is_within_half_a_step(vector, ue8m0, layout):
    values = matrix(40, 256)
    g = global_scale(values)
    flags = {
        "is_sf_swizzled_layout": layout is not ScaleLayout.LINEAR,
        "is_sf_8x4_layout": layout is ScaleLayout.SWIZZLED_8X4,
    }
    packed, scales = reference.fp4_quantize(values, g, vector, ue8m0, **flags)
    back = reference.dequantize(packed, scales, None if ue8m0 else g, vector_size=vector, ue8m0=ue8m0, layout=layout)
    largest = values.float().reshape(40, -1, vector).abs().amax(-1, keepdim=True)
    error = (back - values.float()).reshape(40, -1, vector).abs()
    # The widest gap of E2M1 is 2 (4 to 6); a scale rounded down by 1/16 may also cut the largest element.
    assert (error <= largest / 6 * (2 if ue8m0 else 1.1)).all()


def test_values_that_fit_come_back_exactly():
    row = torch.tensor([*reference.E2M1_VALUES, *(-value for value in reference.E2M1_VALUES)]).to(torch.bfloat16)
    packed, scales = reference.fp4_quantize(row.repeat(3, 4), torch.ones(1))
    assert torch.equal(reference.dequantize(packed, scales, torch.ones(1)), row.repeat(3, 4).float())


def test_torch_reads_the_packed_values_in_the_same_order():
    packed, _ = reference.fp4_quantize(matrix(4, 64), torch.ones(1))
    viewed = packed.view(torch.float4_e2m1fn_x2)
    assert viewed.shape == packed.shape
    assert torch.equal(viewed.view(torch.uint8), packed)


@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
def test_zero_vectors_get_zero_scales_and_keep_signs(vector, ue8m0):
    values = torch.zeros(1, 64, dtype=torch.bfloat16)
    values[0, 1] = -0.0
    packed, scales = reference.fp4_quantize(values, torch.ones(1), vector, ue8m0)
    assert packed.flatten().tolist() == [0x80] + [0] * 31
    assert not scales.any()


def test_nvfp4_vectors_too_small_for_e4m3_become_zero():
    packed, scales = reference.fp4_quantize(torch.full((1, 16), 1e-6, dtype=torch.bfloat16), torch.ones(1))
    assert not packed.any()
    assert not scales.any()


def test_subnormal_products_are_flushed_by_nvfp4_and_kept_by_mxfp4():
    tiny = torch.full((1, 32), 2.0**-124, dtype=torch.bfloat16)
    tiny[0, 1] = 2.0**-130
    _, scales = reference.fp4_quantize(tiny, torch.full((1,), 2.0**126))
    assert not scales.any()
    packed, scales = reference.fp4_quantize(tiny, None, 32, True)
    assert scales[0, 0] == 127 - 126
    assert packed[0, 0] == 0x06


def test_infinities_and_nan_in_nvfp4():
    values = torch.ones(1, 32, dtype=torch.bfloat16)
    values[0, 0], values[0, 1], values[0, 2] = math.inf, -math.inf, math.nan
    values[0, 16:] = math.nan
    packed, scales = reference.fp4_quantize(values, torch.ones(1), is_sf_swizzled_layout=False)
    assert scales.tolist() == [[0x7E, 0x7F]]
    assert packed[0, :2].tolist() == [0xF7, 0x07]
    assert packed[0, 8:].unique().tolist() == [0x77]


def test_infinities_and_nan_in_mxfp4():
    values = torch.ones(2, 32, dtype=torch.bfloat16)
    values[0, 0], values[0, 1] = -math.inf, math.nan
    values[1] = math.nan
    packed, scales = reference.fp4_quantize(values, None, 32, True, is_sf_swizzled_layout=False)
    assert scales.tolist() == [[254], [255]]
    assert packed[0].unique().tolist() == [0, 0x77]
    assert packed[1].unique().tolist() == [0x77]


@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
def test_fp8_input_is_scaled_through_half_precision(vector, ue8m0):
    values = matrix(5, 64).float().clamp(-3, 3).to(torch.float8_e4m3fn)
    g = torch.full((1,), 8.0)
    packed, scales = reference.fp4_quantize(values, g, vector, ue8m0, is_sf_swizzled_layout=False)
    halves = (values.float() * (6 / g)).half().float()
    back = reference.dequantize(packed, scales, g, vector_size=vector, ue8m0=ue8m0, layout=ScaleLayout.LINEAR)
    largest = halves.reshape(5, -1, vector).abs().amax(-1, keepdim=True)
    assert ((back - halves).reshape(5, -1, vector).abs() <= largest / 6 * (2 if ue8m0 else 1.1)).all()


def test_column_major_is_the_transpose_of_row_major():
    values = matrix(5, 64)
    g = global_scale(values)
    packed, scales = reference.fp4_quantize(values, g)
    turned_packed, turned_scales = reference.fp4_quantize(values.t(), g)
    assert torch.equal(turned_packed.t(), packed)
    assert torch.equal(turned_scales.t(), scales)
    assert turned_packed.stride() == (1, 32)
    assert turned_scales.stride() == (1, 4)


@pytest.mark.parametrize("rules", LAYOUT_RULES)
@pytest.mark.parametrize("shape", [(0, 64), (2, 3, 64), (2, 0, 64), (130, 32)])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_shapes_and_strides_are_the_planned_ones(shape, rules, layout):
    values = torch.zeros(shape, dtype=torch.float16)
    plan = layouts.quantized(shape, values.stride(), vector_size=16, layout=layout, rules=rules)
    outputs = reference.fp4_quantize(
        values,
        torch.ones(1),
        is_sf_swizzled_layout=layout is not ScaleLayout.LINEAR,
        is_sf_8x4_layout=layout is ScaleLayout.SWIZZLED_8X4,
        rules=rules,
    )
    assert tuple((tuple(output.shape), output.stride()) for output in outputs) == plan


def test_inverse_and_row_wise_global_scales():
    values = matrix(4, 64)
    g = torch.tensor([1.0, 2.0, 4.0, 8.0])
    packed, scales = reference.fp4_quantize(values, g, is_sf_swizzled_layout=False)
    inverse = reference.fp4_quantize(values, 1 / g, is_sf_swizzled_layout=False, is_global_scale_inversed=True)
    assert torch.equal(packed, inverse[0])
    assert torch.equal(scales, inverse[1])
    for row in range(4):
        alone = reference.fp4_quantize(values[row : row + 1], g[row : row + 1], is_sf_swizzled_layout=False)
        assert torch.equal(packed[row : row + 1], alone[0])
        assert torch.equal(scales[row : row + 1], alone[1])


def test_what_the_kernels_refuse_is_refused():
    values = matrix(4, 64)
    with pytest.raises(ValueError, match="NVFP4 needs a global_scale"):
        reference.fp4_quantize(values)
    with pytest.raises(ValueError, match=r"one for each of the 4 rows, got 3"):
        reference.fp4_quantize(values, torch.ones(3))
    with pytest.raises(TypeError, match=r"got torch\.float32"):
        reference.fp4_quantize(values.float(), torch.ones(1))
    with pytest.raises(LayoutError, match="sf_use_ue8m0=True goes with sf_vec_size=32, got 16"):
        reference.fp4_quantize(values, None, 16, True)


@pytest.mark.parametrize("shape", [(3, 5), (2, 130, 6), (0, 8, 4)])
def test_interleaving_puts_every_scale_at_its_offset(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    *experts, rows, columns = shape
    size = layouts.swizzled_size(rows, columns, ScaleLayout.SWIZZLED_128X4)
    expected = torch.zeros(*(experts or [1]), size, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            place = layouts.offset(row, column, columns, ScaleLayout.SWIZZLED_128X4)
            expected[:, place] = scales.reshape(-1, rows, columns)[:, row, column]
    assert torch.equal(reference.block_scale_interleave(scales), expected.flatten())


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_unswizzling_undoes_swizzling(layout):
    scales = torch.arange(130 * 5, dtype=torch.int32).reshape(130, 5)
    assert torch.equal(reference.unswizzle(reference.swizzle(scales, layout), 130, 5, layout), scales)
