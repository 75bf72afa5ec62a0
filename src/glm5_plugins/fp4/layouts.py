"""Shapes and strides of FP4 outputs: packed values and scale factors, in every layout.

Nothing here imports torch. Sizes may be plain integers or symbolic ones: the arithmetic is `+ - * // %` and
comparisons, and no comparison is made on the number of rows unless a shape really depends on it, so a compiled graph
keeps serving any number of rows.

Mirrors `fp4_quantize`, `block_scale_interleave` and the grouped quantisers of FlashInfer
(`flashinfer/quantization/fp4_quantization.py`; `flashinfer/fp4_quantization.py` up to 0.6.6), and the offsets in
`nv_internal/tensorrt_llm/kernels/quantization_utils.cuh`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

VALUES_PER_BYTE = 2
"""E2M1 values packed in one byte, the even column in the low half."""

VECTOR_SIZES = (16, 32)
"""Elements that share one scale factor: 16 for NVFP4 (E4M3 scales), 32 for MXFP4 (UE8M0 scales)."""

TILE_COLUMNS = 4
"""Scale columns of one swizzled tile; swizzled buffers pad their columns to a multiple of it."""


class ScaleLayout(enum.Enum):
    """How scale factors lie in memory; the value is the number of rows of one tile.

    `LINEAR` is row-major without padding. The swizzled layouts pad rows to the tile and columns to `TILE_COLUMNS`.
    """

    SWIZZLED_128X4 = 128
    SWIZZLED_8X4 = 8
    LINEAR = 1

    @classmethod
    def from_flags(cls, is_sf_swizzled_layout: bool, is_sf_8x4_layout: bool) -> ScaleLayout:
        """Return the layout that FlashInfer picks for its two flags; linear wins over 8x4."""
        if not is_sf_swizzled_layout:
            return cls.LINEAR
        return cls.SWIZZLED_8X4 if is_sf_8x4_layout else cls.SWIZZLED_128X4


@dataclass(frozen=True)
class LayoutRules:
    """What one window of FlashInfer versions does with the shape of swizzled scale factors.

    The buffer is the same in all versions; only its two-dimensional view differs.

    Attributes:
        flashinfer: the window, a PEP 440 specifier.
        pads_scale_columns: the view has `round_up(K / vector, 4)` columns; else it has `K / vector` columns
            and as many rows as the padded buffer fills.
        marker: a parameter of `fp4_quantize` that exists in this window and later ones only; it decides for
            development builds, whose version says nothing. Empty for the first window.
        reason: where this was read.
    """

    flashinfer: str
    pads_scale_columns: bool
    marker: str
    reason: str


LAYOUT_RULES = (
    LayoutRules(
        flashinfer="<0.6.8",
        pads_scale_columns=False,
        marker="",
        reason="every scale buffer is reshaped to (-1, K / vector): fp4_quantization.py:686 (0.6.1)",
    ),
    LayoutRules(
        flashinfer=">=0.6.8",
        pads_scale_columns=True,
        marker="backend",
        reason="the swizzled view keeps its column padding: quantization/fp4_quantization.py:739 (0.6.8)",
    ),
)
"""All that this package knows about FlashInfer versions and shapes. Add a row; do not add an `if`."""


class LayoutError(ValueError):
    """The input cannot be quantised in the requested layout; the message says why and what would fit."""


class Strided(NamedTuple):
    """The shape and the strides (in elements) of one output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Quantized(NamedTuple):
    """The outputs of one quantisation, both uint8.

    Attributes:
        packed: two E2M1 values a byte.
        scales: one E4M3 or UE8M0 scale factor a byte.
    """

    packed: Strided
    scales: Strided


def rules_for(version: str, parameters: Sequence[str] = ()) -> LayoutRules:
    """Pick the row of `LAYOUT_RULES` for a FlashInfer build.

    Local labels (`0.6.16+cu130`), post and pre-releases count as the release they belong to. A version that carries
    no release (`0.0.0.dev1`, `unknown`) is decided by the parameters of its `fp4_quantize`.

    Args:
        version: the version string of the installed FlashInfer.
        parameters: the parameter names of its `fp4_quantize`.

    Raises:
        LayoutError: the version says nothing and no parameters were given.
    """
    released = release(version)
    if released is not None:
        return next(rules for rules in LAYOUT_RULES if released in SpecifierSet(rules.flashinfer))
    if not parameters:
        raise LayoutError(f"FlashInfer {version!r} has no release number, and no parameters to decide by were given")
    return next(rules for rules in reversed(LAYOUT_RULES) if not rules.marker or rules.marker in parameters)


def release(version: str) -> str | None:
    """Return the release a version belongs to, or None if it names none (`0.0.0.dev1`, `unknown`)."""
    try:
        released = Version(version)
    except InvalidVersion:
        return None
    return released.base_version if any(released.release) else None


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return (value + multiple - 1) // multiple * multiple


def contiguous(shape: Sequence[int]) -> Strided:
    """Return the shape with row-major strides; a dimension of size 0 counts as 1, as torch does.

    A size is compared with 1 only after the dimensions behind it, so symbolic rows stay symbolic.
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape[1:]):
        strides.append(step)
        step = step * max(size, 1)
    strides.append(step)
    return Strided(tuple(shape), tuple(reversed(strides)))


def transposed(strided: Strided) -> Strided:
    """Swap the last two dimensions, as a view."""
    *shape, rows, columns = strided.shape
    *stride, row_step, column_step = strided.stride
    return Strided((*shape, columns, rows), (*stride, column_step, row_step))


def is_column_major(stride: Sequence[int]) -> bool:
    """Tell whether FlashInfer will treat the input as transposed: its one test is `stride(-2) == 1`."""
    return stride[-2] == 1


def quantized(
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    vector_size: int,
    layout: ScaleLayout,
    rules: LayoutRules,
) -> Quantized:
    """Return the outputs of `fp4_quantize` for an input of this shape and stride.

    For a row-major input `(..., K)` with M rows in all: packed `(..., K / 2)`; scales, swizzled,
    `(round_up(M, tile), round_up(K / vector, 4))`, and linear, `(M, K / vector)`. A column-major input `(..., K, M)` is
    quantised as its transpose and both outputs are transposed back, so they are views with a unit stride in the
    second-last dimension. Zero rows give empty outputs.

    Args:
        shape: of the input, at least two dimensions.
        stride: of the input, in elements.
        vector_size: elements for one scale factor, 16 or 32.
        layout: of the scale factors.
        rules: the row of `LAYOUT_RULES` in force.

    Raises:
        LayoutError: fewer than two dimensions, no columns, K not a multiple of the vector size, or (before
            0.6.8) a padded scale buffer that cannot be viewed with `K / vector` columns.
    """
    if len(shape) < 2:
        raise LayoutError(f"fp4_quantize needs at least 2 dimensions, got shape {tuple(shape)}")
    if vector_size not in VECTOR_SIZES:
        raise LayoutError(f"fp4_quantize knows the vector sizes {VECTOR_SIZES}, got sf_vec_size={vector_size}")
    column_major = is_column_major(stride)
    leading = tuple(shape[:-2])
    rows, k = (shape[-1], shape[-2]) if column_major else (shape[-2], shape[-1])
    if k % vector_size != 0 or k == 0:
        where = "column-major" if column_major else "row-major"
        raise LayoutError(
            f"fp4_quantize needs K to be a positive multiple of sf_vec_size={vector_size}; "
            f"this {where} input of shape {tuple(shape)} has K={k}"
        )
    packed = contiguous((*leading, rows, k // VALUES_PER_BYTE))
    scales = contiguous(scale_shape(math.prod(leading) * rows, k // vector_size, layout, rules))
    if column_major:
        return Quantized(transposed(packed), transposed(scales))
    return Quantized(packed, scales)


def scale_shape(rows: int, columns: int, layout: ScaleLayout, rules: LayoutRules) -> tuple[int, int]:
    """Return the two-dimensional shape in which FlashInfer hands back scale factors.

    Args:
        rows: of the quantised matrix, M.
        columns: scale factors in a row, K / vector.
        layout: of the scale factors.
        rules: the row of `LAYOUT_RULES` in force.

    Raises:
        LayoutError: see `quantized`.
    """
    if layout is ScaleLayout.LINEAR:
        return rows, columns
    padded_rows = round_up(rows, layout.value)
    padded_columns = round_up(columns, TILE_COLUMNS)
    if rules.pads_scale_columns:
        return padded_rows, padded_columns
    if padded_columns % columns == 0:
        return padded_rows * (padded_columns // columns), columns
    if padded_rows * padded_columns % columns == 0:
        return padded_rows * padded_columns // columns, columns
    raise LayoutError(
        f"FlashInfer {rules.flashinfer} cannot view a padded {padded_rows} x {padded_columns} scale buffer "
        f"with {columns} columns; K / sf_vec_size must be a multiple of {TILE_COLUMNS}"
    )


def swizzled_size(rows: int, columns: int, layout: ScaleLayout) -> int:
    """Return the number of scale factors in a padded buffer."""
    return round_up(rows, layout.value) * round_up(columns, TILE_COLUMNS)


def interleaved(shape: Sequence[int]) -> Strided:
    """Return the flat output of `block_scale_interleave` for scales `(rows, columns)` or `(experts, rows, columns)`.

    Mirrors upstream, where any other number of leading dimensions counts as one expert; those are refused here.

    Raises:
        LayoutError: neither two nor three dimensions.
    """
    if len(shape) not in (2, 3):
        raise LayoutError(f"block_scale_interleave needs 2 or 3 dimensions, got shape {tuple(shape)}")
    experts = shape[0] if len(shape) == 3 else 1
    return contiguous((experts * swizzled_size(shape[-2], shape[-1], ScaleLayout.SWIZZLED_128X4),))


def grouped(groups: int, rows: int, k: int) -> Quantized:
    """Return the outputs of the grouped (masked) NVFP4 quantisers.

    Packed is `(M, K / 2, B)`, a view of `(B, M, K / 2)`. Scales (float8_e4m3fn, not uint8) are
    `(32, 4, M' / 128, 4, K' / 64, B)`, a view of `(B, M' / 128, K' / 64, 32, 4, 4)`, with M and K rounded up.

    Raises:
        LayoutError: K is not a positive multiple of 16.
    """
    vector = VECTOR_SIZES[0]
    if k % vector != 0 or k == 0:
        raise LayoutError(f"grouped NVFP4 quantisation needs K to be a positive multiple of {vector}, got K={k}")
    tile = ScaleLayout.SWIZZLED_128X4.value
    packed = contiguous((groups, rows, k // VALUES_PER_BYTE))
    row_tiles = round_up(rows, tile) // tile
    column_tiles = round_up(k // vector, TILE_COLUMNS) // TILE_COLUMNS
    scales = contiguous((groups, row_tiles, column_tiles, 32, 4, 4))
    return Quantized(permuted(packed, (1, 2, 0)), permuted(scales, (3, 4, 1, 5, 2, 0)))


def permuted(strided: Strided, order: Sequence[int]) -> Strided:
    """Reorder the dimensions, as a view."""
    return Strided(tuple(strided.shape[i] for i in order), tuple(strided.stride[i] for i in order))


def offset(row: int, column: int, columns: int, layout: ScaleLayout) -> int:
    """Return where the scale factor of a row and column lies in its buffer.

    A 128x4 tile holds 32 rows of 4 row groups of 4 columns (row = 32 * group + row within the group); an 8x4 tile
    holds 8 rows of 4 columns. Tiles follow each other along the columns first.

    Args:
        row: of the quantised matrix.
        column: of the scale factors, k / vector.
        columns: scale factors in a row before padding.
        layout: of the scale factors.
    """
    if layout is ScaleLayout.LINEAR:
        return row * columns + column
    tile_rows: int = layout.value
    tiles_across = round_up(columns, TILE_COLUMNS) // TILE_COLUMNS
    tile = row // tile_rows * tiles_across + column // TILE_COLUMNS
    if layout is ScaleLayout.SWIZZLED_8X4:
        inside = row % tile_rows * TILE_COLUMNS
    else:
        inside = row % 32 * 16 + row % tile_rows // 32 * TILE_COLUMNS
    return tile * tile_rows * TILE_COLUMNS + inside + column % TILE_COLUMNS
