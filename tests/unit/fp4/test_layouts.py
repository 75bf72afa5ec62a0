"""Shapes, strides and offsets of packed values and scale factors."""

import pytest

from glm5_plugins.fp4 import layouts
from glm5_plugins.fp4.layouts import LAYOUT_RULES, LayoutError, ScaleLayout

OLD, NEW = LAYOUT_RULES
SWIZZLED, SMALL, LINEAR = ScaleLayout.SWIZZLED_128X4, ScaleLayout.SWIZZLED_8X4, ScaleLayout.LINEAR


def plan(shape, layout=SWIZZLED, vector_size=16, rules=NEW, stride=None):
    stride = stride or layouts.contiguous(shape).stride
    return layouts.quantized(shape, stride, vector_size=vector_size, layout=layout, rules=rules)


@pytest.mark.parametrize(
    ("shape", "layout", "vector_size", "packed", "scales"),
    [
        ((8, 4096), SWIZZLED, 16, (8, 2048), (128, 256)),
        ((129, 4096), SWIZZLED, 16, (129, 2048), (256, 256)),
        ((9, 96), SMALL, 16, (9, 48), (16, 8)),
        ((9, 96), LINEAR, 16, (9, 48), (9, 6)),
        ((9, 96), SWIZZLED, 32, (9, 48), (128, 4)),
        ((2, 3, 64), SWIZZLED, 16, (2, 3, 32), (128, 4)),
        ((2, 3, 64), LINEAR, 16, (2, 3, 32), (6, 4)),
        ((0, 64), SWIZZLED, 16, (0, 32), (0, 4)),
        ((0, 64), LINEAR, 16, (0, 32), (0, 4)),
    ],
)
def test_shapes_since_0_6_8(shape, layout, vector_size, packed, scales):
    got = plan(shape, layout, vector_size)
    assert (got.packed.shape, got.scales.shape) == (packed, scales)


@pytest.mark.parametrize(
    ("shape", "layout", "scales"),
    [
        ((8, 64), SWIZZLED, (128, 4)),
        ((8, 32), SWIZZLED, (256, 2)),
        ((8, 16), SMALL, (32, 1)),
        ((8, 96), LINEAR, (8, 6)),
    ],
)
def test_before_0_6_8_the_view_has_unpadded_columns(shape, layout, scales):
    assert plan(shape, layout, rules=OLD).scales.shape == scales


def test_before_0_6_8_some_buffers_cannot_be_viewed():
    with pytest.raises(LayoutError, match="cannot view a padded 128 x 8 scale buffer with 6 columns"):
        plan((8, 96), rules=OLD)


def test_column_major_outputs_are_transposed_views():
    got = plan((64, 3), stride=(1, 64))
    assert got.packed == ((32, 3), (1, 32))
    assert got.scales == ((4, 128), (1, 4))


def test_column_major_with_leading_dimensions():
    got = plan((2, 64, 3), LINEAR, stride=(192, 1, 64))
    assert got.packed == ((2, 32, 3), (96, 1, 32))
    assert got.scales == ((4, 6), (1, 4))


@pytest.mark.parametrize("shape", [(4, 24), (4, 0)])
def test_columns_must_be_a_positive_multiple_of_the_vector(shape):
    with pytest.raises(LayoutError, match=r"positive multiple of sf_vec_size=16.*-major.*K="):
        plan(shape)


def test_column_major_is_named_in_the_error():
    with pytest.raises(LayoutError, match=r"column-major input of shape \(24, 3\) has K=24"):
        plan((24, 3), stride=(1, 24))


def test_one_dimension_and_odd_vector_sizes_are_refused():
    with pytest.raises(LayoutError, match="at least 2 dimensions"):
        plan((64,))
    with pytest.raises(LayoutError, match="sf_vec_size=8"):
        plan((4, 64), vector_size=8)


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (8, 4), (130, 5), (256, 8)])
def test_offsets_are_distinct_and_inside_the_buffer(layout, rows, columns):
    places = {layouts.offset(row, column, columns, layout) for row in range(rows) for column in range(columns)}
    size = rows * columns if layout is LINEAR else layouts.swizzled_size(rows, columns, layout)
    assert len(places) == rows * columns
    assert max(places) < size


def test_offsets_by_hand():
    assert layouts.offset(33, 5, 8, SWIZZLED) == 512 + 1 * 16 + 1 * 4 + 1
    assert layouts.offset(128, 0, 8, SWIZZLED) == 1024
    assert layouts.offset(9, 6, 8, SMALL) == 2 * 32 + 32 + 1 * 4 + 2
    assert layouts.offset(9, 6, 8, LINEAR) == 78


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        ("0.6.1", OLD),
        ("0.6.7.post3", OLD),
        ("0.6.8", NEW),
        ("0.6.8.post1", NEW),
        ("0.6.8rc1", NEW),
        ("0.6.16+cu130", NEW),
        ("0.7.4", NEW),
    ],
)
def test_versions_pick_their_row(version, rules):
    assert layouts.rules_for(version) is rules


@pytest.mark.parametrize("version", ["0.0.0.dev1+gbfefdc52d", "0.0.0+unknown", "unknown"])
def test_development_builds_are_decided_by_parameters(version):
    assert layouts.rules_for(version, ["input", "enable_pdl"]) is OLD
    assert layouts.rules_for(version, ["input", "enable_pdl", "backend"]) is NEW
    with pytest.raises(LayoutError, match="no release number"):
        layouts.rules_for(version)


def test_interleaved_is_flat_and_padded():
    assert layouts.interleaved((3, 5)).shape == (128 * 8,)
    assert layouts.interleaved((2, 3, 5)).shape == (2 * 128 * 8,)
    with pytest.raises(LayoutError, match="2 or 3 dimensions"):
        layouts.interleaved((1, 2, 3, 4))


def test_grouped_outputs_are_permuted_views():
    got = layouts.grouped(2, 130, 96)
    assert got.packed == ((130, 48, 2), (48, 1, 130 * 48))
    assert got.scales == ((32, 4, 2, 4, 2, 2), (16, 4, 1024, 1, 512, 2048))


def test_importing_layouts_does_not_import_torch(run_python):
    run_python("import sys, glm5_plugins.fp4.layouts; assert 'torch' not in sys.modules")
