"""The table of calls against the FlashInfer that is installed: parameters, shapes, strides, dtypes, launches.

FlashInfer's own Python allocates the outputs, so its kernels need not run for this.
"""

import itertools

import pytest
import torch
from packaging.specifiers import SpecifierSet

from glm5_plugins.fp4.calls import (
    BLOCK_SCALE_INTERLEAVE,
    CALLS,
    FP4_QUANTIZE,
    NVFP4_QUANTIZE,
    SCALED_FP4_GROUPED_QUANTIZE,
    SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE,
)
from glm5_plugins.fp4.layouts import LayoutError, release

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

INSTALLED = [call for call in CALLS if release(flashinfer.__version__) in SpecifierSet(call.flashinfer)]
needs_nvfp4_quantize = pytest.mark.skipif(
    NVFP4_QUANTIZE not in INSTALLED, reason=f"nvfp4_quantize is described for {NVFP4_QUANTIZE.flashinfer}"
)
OLD = release(flashinfer.__version__) in SpecifierSet("<0.6.8")


def described(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(output.shape, output.stride(), output.dtype) for output in outputs]


@pytest.mark.parametrize("call", INSTALLED, ids=lambda call: call.name)
def test_every_row_binds(new_operator, call):
    operator = new_operator(call)
    names = {argument.name for argument in operator.overload._schema.arguments}
    assert names <= call.parameters.keys()


def test_the_old_name_of_interleaving_is_the_same_function():
    assert flashinfer.nvfp4_block_scale_interleave is flashinfer.block_scale_interleave


SHAPES = [
    ("row-major", torch.zeros(5, 128)),
    ("many rows", torch.zeros(300, 64)),
    ("two vectors", torch.zeros(5, 32)),
    ("batched", torch.zeros(2, 3, 128)),
    ("column-major", torch.zeros(5, 128).t()),
    ("batched column-major", torch.zeros(2, 5, 128).transpose(-2, -1)),
]


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
@pytest.mark.parametrize("input", [shape for _, shape in SHAPES], ids=[name for name, _ in SHAPES])
def test_the_plan_is_what_flashinfer_allocates(new_operator, without_kernels, swizzled, small, vector, ue8m0, input):
    input = input.to(torch.bfloat16)
    arguments = (input, torch.ones(1), vector, ue8m0, swizzled, small)
    raw = flashinfer.fp4_quantize(*arguments)
    operator = new_operator()
    assert described(operator.bound.on_fake(*arguments)) == described(raw)
    for _ in range(2):
        assert described(operator.bound.on_cuda(*arguments)) == described(raw)
    assert without_kernels == ["fp4_quantize"] * 3


@pytest.mark.parametrize("swizzled", [True, False])
def test_six_scale_columns(new_operator, without_kernels, swizzled):
    arguments = (torch.zeros(5, 96, dtype=torch.bfloat16), torch.ones(1), 16, False, swizzled)
    operator = new_operator()
    if OLD and swizzled:
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            flashinfer.fp4_quantize(*arguments)
        with pytest.raises(LayoutError, match="cannot view"):
            operator.bound.on_cuda(*arguments)
    else:
        assert described(operator.bound.on_fake(*arguments)) == described(flashinfer.fp4_quantize(*arguments))


def test_zero_rows_are_not_launched(new_operator, without_kernels):
    packed, scales = new_operator().bound.on_cuda(torch.zeros(0, 64, dtype=torch.bfloat16), torch.ones(1))
    assert (packed.shape, scales.shape) == ((0, 32), (0, 4))
    assert without_kernels == []


def test_odd_columns_are_explained(new_operator, without_kernels):
    with pytest.raises(LayoutError, match="positive multiple of sf_vec_size=16"):
        new_operator().bound.on_cuda(torch.zeros(4, 40, dtype=torch.bfloat16), torch.ones(1))


@needs_nvfp4_quantize
@pytest.mark.parametrize("layout", ["layout_128x4", "layout_8x4", "layout_linear"])
def test_nvfp4_quantize(new_operator, without_kernels, layout):
    layout = flashinfer.SfLayout[layout]
    arguments = (torch.zeros(5, 128, dtype=torch.bfloat16), torch.ones(1))
    raw = flashinfer.nvfp4_quantize(*arguments, layout)
    operator = new_operator(NVFP4_QUANTIZE)
    assert described(operator.bound.on_fake(*arguments, layout.value)) == described(raw)
    assert described(operator.bound.on_cuda(*arguments, layout.value)) == described(raw)


@pytest.mark.parametrize("shape", [(3, 5), (130, 8), (2, 130, 6)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_block_scale_interleave(new_operator, without_kernels, shape, dtype):
    scales = torch.zeros(shape, dtype=dtype)
    operator = new_operator(BLOCK_SCALE_INTERLEAVE)
    assert described(operator.bound.on_fake(scales)) == described(flashinfer.block_scale_interleave(scales))


@pytest.mark.parametrize(
    "call", [SCALED_FP4_GROUPED_QUANTIZE, SILU_AND_MUL_NVFP4_EXPERTS_QUANTIZE], ids=lambda call: call.name
)
@pytest.mark.parametrize("shape", list(itertools.product([1, 3], [5, 130], [128, 192])))
def test_grouped(new_operator, without_kernels, call, shape):
    arguments = [
        torch.zeros(shape, dtype=torch.bfloat16),
        torch.ones(shape[0], dtype=torch.int32),
        torch.ones(shape[0]),
    ]
    operator = new_operator(call)
    assert described(operator.bound.on_fake(*arguments)) == described(getattr(flashinfer, call.name)(*arguments))


def test_the_shortcut_is_taken_only_where_the_function_is_bare(new_operator):
    bare = release(flashinfer.__version__) in SpecifierSet("<0.6.10")
    assert new_operator(FP4_QUANTIZE).bound.takes_shortcut == bare
