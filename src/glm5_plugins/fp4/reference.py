"""NVFP4 and MXFP4 quantisation in plain PyTorch, with the arithmetic of FlashInfer's CUDA kernels.

It exists so that the operator can be checked, and traced, on machines that have no FP4 conversion; it is never chosen
silently. All arithmetic is float32, one rounding an operation, with subnormal operands and results of a
multiplication or reciprocal flushed to zero where the kernels do so (they are built with fast math; MXFP4 from half
precision keeps them from 0.7.4 on).

Let v be the vector of 16 or 32 elements that share a scale, g the global scale (`448 * 6 / max|x|`; 1 if absent) and
r6 the float32 nearest to 1/6.

    NVFP4   s = e4m3(g * (max|v| * r6))           o = 1 / (s * (1 / g))       o = 0 if s = 0
    MXFP4   s = ue8m0_up(max|v| * r6)             o = 1 / s                   o = 0 if the byte of s is 0
    code    q = e2m1(v * o)

    FP8 input first becomes half precision, h = half(x * (6 * (1 / g))), and then
            s = e4m3(g * (max|h| * r6)) or ue8m0_up of the same product, o = g * (1 / s), q = e2m1(h * o)

`e2m1` and `e4m3` round to nearest, ties to even, and saturate at 6 and 448. `ue8m0_up` rounds up to a power of two
(byte = exponent + 127, saturating at 254).

What is not finite: the maximum of a vector ignores NaN unless all its elements are NaN; a NaN product becomes the
code of +6; a vector of only NaN gets a NaN scale. An infinity gives NVFP4 a scale of 448 and saturates; it gives
MXFP4 the largest scale, 2**127, whose inverse is flushed to 0, so infinities (of either sign) become +6 and all else
0.

Where this cannot be the kernel's very bits: `rcp.approx.ftz` may be off by one unit in the last place, which moves a
value only when it lies that close to a rounding boundary. Up to FlashInfer 0.7.2 a vector that is not zero but whose
E4M3 scale rounds to zero gets saturated codes (the reciprocal of zero); its value is zero either way. This file
follows 0.7.4, which writes zeros. The "4over6" candidate search is not implemented.

Mirrors `cvt_warp_fp16_to_fp4`, `cvt_warp_fp8_to_fp4` and `get_sf_out_offset_*` in
`nv_internal/tensorrt_llm/kernels/quantization_utils.cuh`, the padding rules in `quantization.cuh` next to it, and
`block_scale_interleave_kernel` in `nv_internal/cpp/kernels/quantization.cu` (FlashInfer 0.6.3 to 0.7.4).
"""

from __future__ import annotations

import torch

from glm5_plugins.fp4.layouts import (
    LAYOUT_RULES,
    TILE_COLUMNS,
    VECTOR_SIZES,
    LayoutError,
    LayoutRules,
    ScaleLayout,
    is_column_major,
    quantized,
    round_up,
)

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code; bit 3 of a code is the sign."""

E4M3_MAX = 448.0
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)

_E2M1_MAX = E2M1_VALUES[-1]
_MIN_NORMAL = 2.0**-126
_R6 = float(torch.tensor(1 / 6, dtype=torch.float32))


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values to E2M1 codes, ties to even, saturating; NaN becomes +6.

    Args:
        values: float32, any shape.

    Returns:
        uint8 codes 0 to 15 of the same shape.
    """
    magnitudes = _round(values, mantissa_bits=1, minimum_exponent=0).clamp(max=_E2M1_MAX)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=values.device)
    codes = torch.bucketize(magnitudes, grid).to(torch.uint8)
    signed = codes | (torch.signbit(values).to(torch.uint8) << 3)
    return torch.where(torch.isnan(values), torch.full_like(signed, len(E2M1_VALUES) - 1), signed)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values that are not negative to E4M3, ties to even, saturating at 448; NaN stays.

    Returns:
        float32 of the same shape, every value exact in E4M3.
    """
    rounded = _round(values, mantissa_bits=3, minimum_exponent=-6).clamp(max=E4M3_MAX)
    return torch.where(torch.isnan(values), values, rounded)


def e4m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """Encode values that `round_to_e4m3` gave as uint8."""
    _, exponents = torch.frexp(values)
    exponents = (exponents - 1).clamp(min=-6)
    steps = torch.ldexp(values, 3 - exponents).nan_to_num(0.0, 0.0).to(torch.int32)
    normal = steps >= 8
    codes = torch.where(normal, ((exponents + 7) << 3) | (steps & 7), steps)
    return torch.where(torch.isnan(values), torch.full_like(codes, 0x7F), codes).to(torch.uint8)


def ue8m0_bytes(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values that are not negative up to a power of two and encode it as uint8 (exponent + 127).

    Zero gives 0, infinity 254 and NaN 255.
    """
    fractions, exponents = torch.frexp(values)
    exponents = torch.where(fractions == 0.5, exponents - 1, exponents)
    codes = (exponents + 127).clamp(0, 254)
    codes = torch.where(values == 0, torch.zeros_like(codes), codes)
    codes = torch.where(torch.isinf(values), torch.full_like(codes, 254), codes)
    return torch.where(torch.isnan(values), torch.full_like(codes, 255), codes).to(torch.uint8)


def swizzle(scales: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Lay scale factors out in tiles, padding rows and columns with zeros.

    Args:
        scales: `(rows, columns)`, any dtype.
        layout: the tiles to use; `LINEAR` changes nothing.

    Returns:
        A flat contiguous tensor of the padded size (see `layouts.offset` for the order).
    """
    if layout is ScaleLayout.LINEAR:
        return scales.reshape(-1)
    rows, columns = scales.shape
    padded_rows, padded_columns = round_up(rows, layout.value), round_up(columns, TILE_COLUMNS)
    padded = torch.nn.functional.pad(scales, (0, padded_columns - columns, 0, padded_rows - rows))
    if layout is ScaleLayout.SWIZZLED_8X4:
        tiles = padded.view(padded_rows // 8, 8, padded_columns // TILE_COLUMNS, TILE_COLUMNS).permute(0, 2, 1, 3)
    else:
        tiles = padded.view(padded_rows // 128, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
        tiles = tiles.permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


def unswizzle(scales: torch.Tensor, rows: int, columns: int, layout: ScaleLayout) -> torch.Tensor:
    """Undo `swizzle` and drop the padding: a flat buffer becomes `(rows, columns)`."""
    if layout is ScaleLayout.LINEAR:
        return scales.reshape(rows, columns)
    row_tiles, column_tiles = -(-rows // layout.value), -(-columns // TILE_COLUMNS)
    if layout is ScaleLayout.SWIZZLED_8X4:
        tiles = scales.reshape(row_tiles, column_tiles, 8, TILE_COLUMNS).permute(0, 2, 1, 3)
    else:
        tiles = scales.reshape(row_tiles, column_tiles, 32, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * layout.value, column_tiles * TILE_COLUMNS)[:rows, :columns]


def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    *,
    rules: LayoutRules = LAYOUT_RULES[-1],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP4 with the arguments, shapes and strides of FlashInfer's `fp4_quantize`.

    Args:
        input: `(..., K)` float16, bfloat16 or float8_e4m3fn; column-major `(..., K, M)` if `stride(-2) == 1`.
        global_scale: float32, one element, or one for each row (FlashInfer 0.6.11 and later); required for
            NVFP4.
        sf_vec_size: 16 with E4M3 scales, 32 with UE8M0 scales.
        sf_use_ue8m0: MXFP4 instead of NVFP4.
        is_sf_swizzled_layout: swizzle the scales; otherwise row-major.
        is_sf_8x4_layout: swizzle in 8x4 tiles instead of 128x4.
        is_global_scale_inversed: `global_scale` holds 1/g.
        rules: the row of `layouts.LAYOUT_RULES` whose shapes to return.

    Returns:
        Packed values and scale factors, both uint8, as `layouts.quantized` describes.

    Raises:
        LayoutError: see `layouts.quantized`; also a scale format that does not go with the vector size.
        TypeError: an input dtype the kernels do not take.
        ValueError: NVFP4 without a global scale, or one of the wrong size.
    """
    if input.dtype not in INPUT_DTYPES:
        raise TypeError(f"fp4_quantize takes {', '.join(map(str, INPUT_DTYPES))}, got {input.dtype}")
    layout = ScaleLayout.from_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    plan = quantized(input.shape, input.stride(), vector_size=sf_vec_size, layout=layout, rules=rules)
    fitting = VECTOR_SIZES[sf_use_ue8m0]
    if sf_vec_size != fitting:
        raise LayoutError(f"sf_use_ue8m0={sf_use_ue8m0} goes with sf_vec_size={fitting}, got {sf_vec_size}")
    column_major = is_column_major(input.stride())
    rows_first = input.transpose(-2, -1) if column_major else input
    matrix = rows_first.reshape(-1, rows_first.shape[-1])
    scale = _scale(global_scale, matrix, sf_use_ue8m0, is_global_scale_inversed)
    packed, scales = _quantize_matrix(matrix, scale, sf_vec_size, sf_use_ue8m0)
    packed = packed.view(*rows_first.shape[:-1], packed.shape[-1])
    if column_major:
        packed = packed.transpose(-2, -1)
    buffer = swizzle(scales, layout)
    return packed, buffer.as_strided(plan.scales.shape, plan.scales.stride)


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    *,
    vector_size: int = 16,
    ue8m0: bool = False,
    layout: ScaleLayout = ScaleLayout.SWIZZLED_128X4,
) -> torch.Tensor:
    """Turn FP4 back into float32: `e2m1(code) * scale / g`.

    Args:
        packed: `(M, K / 2)` uint8, row-major.
        scales: uint8 buffer in `layout`, any shape.
        global_scale: the g that was used for quantisation, float32, one element or one for each row; 1 if
            absent.
        vector_size: elements for one scale.
        ue8m0: scales are powers of two instead of E4M3.
        layout: of the scales.

    Returns:
        float32 `(M, K)`.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2 // vector_size
    grid = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(rows, columns, vector_size)
    bytes_ = unswizzle(scales.reshape(-1), rows, columns, layout)
    factors = bytes_.view(torch.float8_e8m0fnu if ue8m0 else torch.float8_e4m3fn).to(torch.float32)
    if global_scale is not None:
        factors = factors / global_scale.reshape(-1, 1)
    return (grid[codes.long()] * factors.unsqueeze(-1)).reshape(rows, -1)


def block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """Swizzle scale factors into 128x4 tiles, with the contract of FlashInfer's `block_scale_interleave`.

    Args:
        unswizzled_sf: uint8 or bfloat16, `(rows, columns)` or `(experts, rows, columns)`.

    Returns:
        A flat tensor of the same dtype; the padded experts follow each other.

    Raises:
        LayoutError: neither two nor three dimensions.
        TypeError: another dtype.
    """
    if unswizzled_sf.dtype not in (torch.uint8, torch.bfloat16):
        raise TypeError(f"block_scale_interleave takes torch.uint8 or torch.bfloat16, got {unswizzled_sf.dtype}")
    if unswizzled_sf.dim() not in (2, 3):
        raise LayoutError(f"block_scale_interleave needs 2 or 3 dimensions, got shape {tuple(unswizzled_sf.shape)}")
    experts = unswizzled_sf.unsqueeze(0) if unswizzled_sf.dim() == 2 else unswizzled_sf
    swizzled = [swizzle(expert, ScaleLayout.SWIZZLED_128X4) for expert in experts]
    return torch.cat(swizzled) if swizzled else unswizzled_sf.new_empty((0,))


def _scale(global_scale: torch.Tensor | None, matrix: torch.Tensor, ue8m0: bool, inversed: bool) -> torch.Tensor:
    """Return g as float32 `(1, 1)` or `(rows, 1)`."""
    if global_scale is None:
        if not ue8m0:
            raise ValueError("NVFP4 needs a global_scale; only MXFP4 (sf_use_ue8m0=True) does without")
        return torch.ones((1, 1), dtype=torch.float32, device=matrix.device)
    rows, elements = matrix.shape[0], global_scale.numel()
    if elements not in (1, rows):
        raise ValueError(f"global_scale has one element or one for each of the {rows} rows, got {elements}")
    scale = global_scale.to(device=matrix.device, dtype=torch.float32).reshape(-1, 1)
    return _reciprocal(scale) if inversed else scale


def _quantize_matrix(
    matrix: torch.Tensor, g: torch.Tensor, vector_size: int, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `(M, K)`; return packed `(M, K / 2)` and linear scales `(M, K / vector)`, both uint8."""
    rows, k = matrix.shape
    vectors = matrix.to(torch.float32).reshape(rows, k // vector_size, vector_size)
    from_fp8 = matrix.dtype is torch.float8_e4m3fn
    if from_fp8:
        to_half = _multiply(torch.full_like(g, _E2M1_MAX), _reciprocal(g)).unsqueeze(-1)
        vectors = _multiply(vectors, to_half).to(torch.float16).to(torch.float32)
    maxima = _maximum_but_nan(vectors)

    if from_fp8:
        wanted = _multiply(g, _multiply(maxima, _R6))
        if ue8m0:
            scales = ue8m0_bytes(wanted)
            rounded = scales.view(torch.float8_e8m0fnu).to(torch.float32)
        else:
            rounded = round_to_e4m3(wanted)
            scales = e4m3_bytes(rounded)
        factors = torch.where(wanted == 0, wanted, _multiply(g, _reciprocal(rounded)))
        products = _multiply(vectors, factors.unsqueeze(-1))
    elif ue8m0:
        scales = ue8m0_bytes(maxima * _R6)
        exponents = 127 - scales.to(torch.int32)
        kept = (scales > 0) & (scales < 254)
        factors = torch.where(kept, torch.ldexp(torch.ones_like(maxima), exponents), torch.zeros_like(maxima))
        products = vectors * factors.unsqueeze(-1)
    else:
        rounded = round_to_e4m3(_multiply(g, _multiply(maxima, _R6)))
        scales = e4m3_bytes(rounded)
        factors = torch.where(rounded == 0, rounded, _reciprocal(_multiply(rounded, _reciprocal(g))))
        products = _multiply(vectors, factors.unsqueeze(-1))

    codes = round_to_e2m1(products).reshape(rows, k)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def _maximum_but_nan(vectors: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each vector, ignoring NaN unless there is nothing else."""
    magnitudes = vectors.abs()
    maxima = torch.where(torch.isnan(magnitudes), -torch.ones_like(magnitudes), magnitudes).amax(dim=-1)
    return torch.where(maxima < 0, torch.full_like(maxima, torch.nan), maxima)


def _multiply(left: torch.Tensor, right: torch.Tensor | float) -> torch.Tensor:
    """Multiply in float32, flushing subnormal operands and results, as fast math does."""
    return _flush(_flush(left) * (_flush(right) if isinstance(right, torch.Tensor) else right))


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    """Return 1/x in float32 with subnormals flushed; 1/0 is infinite."""
    return _flush(_flush(values).reciprocal())


def _round(values: torch.Tensor, *, mantissa_bits: int, minimum_exponent: int) -> torch.Tensor:
    """Round magnitudes to a binary floating-point grid, ties to even, without an upper bound; NaN and inf stay."""
    magnitudes = values.abs()
    _, exponents = torch.frexp(magnitudes)
    shifts = mantissa_bits - (exponents - 1).clamp(min=minimum_exponent)
    rounded = torch.ldexp(torch.round(torch.ldexp(magnitudes, shifts)), -shifts)
    return torch.where(torch.isfinite(magnitudes), rounded, magnitudes)


def _flush(values: torch.Tensor) -> torch.Tensor:
    """Replace float32 subnormals by zeros of their sign."""
    return torch.where(values.abs() < _MIN_NORMAL, values * 0.0, values)
