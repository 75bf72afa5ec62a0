"""On a real GPU: the operator calls what the raw FlashInfer call calls, and returns what it returns.

Contents are compared on SM100 and later only. On SM90 FlashInfer's kernel launches and converts nothing: it leaves
zeros, or whatever memory held, so there only shapes, strides, dtypes and the kernel's arguments are compared.

    python -m pytest tests/gpu/test_fp4_pass_through.py
"""

import functools
import inspect
import itertools
import sys

import pytest
import torch

from glm5_plugins.fp4 import reference
from glm5_plugins.fp4.calls import BLOCK_SCALE_INTERLEAVE, FP4_QUANTIZE
from glm5_plugins.fp4.layouts import LayoutError
from glm5_plugins.fp4.operator import Operator

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed", exc_type=ImportError)
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CONVERTS = torch.cuda.get_device_capability() >= (10, 0)
needs_conversion = pytest.mark.skipif(not CONVERTS, reason="the FP4 conversion needs SM100 or later")
LAYOUTS = list(itertools.product([True, False], [True, False]))
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
_numbers = itertools.count()


def new_operator(call=FP4_QUANTIZE):
    operator = Operator(call, namespace=f"glm5_gpu_{next(_numbers)}")
    operator.bind(getattr(flashinfer, call.name))
    return operator


def values(*shape, dtype=torch.bfloat16):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    return made.to(dtype).cuda()


def global_scale(input):
    return (448 * 6 / input.float().abs().max().clamp(min=1e-6)).reshape(1)


def assert_same(left, right):
    left, right = ((item,) if isinstance(item, torch.Tensor) else item for item in (left, right))
    for one, other in zip(left, right, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        if CONVERTS:
            assert torch.equal(one, other)


@pytest.fixture
def launches(monkeypatch):
    """Record the arguments of every launch of FlashInfer's kernel function."""
    scope = inspect.unwrap(flashinfer.fp4_quantize).__globals__
    major, minor = torch.cuda.get_device_capability()
    kernels = scope["get_fp4_quantization_module"](f"{major}{minor}")
    original = kernels.fp4_quantize_sm100
    seen = []

    @functools.wraps(original)
    def recorded(*args, **kwargs):
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append({name: value for name, value in bound.arguments.items() if name not in ("input", "global_scale")})
        seen[-1]["input"] = bound.arguments["input"].data_ptr()
        return original(*args, **kwargs)

    monkeypatch.setattr(kernels, "fp4_quantize_sm100", recorded)
    return seen


@pytest.mark.parametrize("shape", [(1, 128), (8, 4096), (130, 256), (2, 3, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("swizzled", "small"), LAYOUTS)
@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
def test_operator_and_raw_call_agree(launches, shape, dtype, swizzled, small, vector, ue8m0):
    input = values(*shape, dtype=dtype)
    arguments = (input, global_scale(input), vector, ue8m0, swizzled, small)
    operator = new_operator()
    raw = flashinfer.fp4_quantize(*arguments)
    for _ in range(3):  # the first goes through the function, later ones may take the shortcut
        assert_same(operator.replacement(*arguments), raw)
        assert_same(operator.overload(*arguments), raw)
    assert len(launches) == 7
    assert operator.fired == 6
    assert all(launch == launches[0] for launch in launches)


@pytest.mark.parametrize(("swizzled", "small"), LAYOUTS)
def test_fake_and_kernel_agree(swizzled, small):
    input = values(130, 256)
    operator = new_operator()
    fake = operator.bound.on_fake(input, global_scale(input), 16, False, swizzled, small)
    real = operator.replacement(input, global_scale(input), 16, False, swizzled, small)
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_modes_and_fake_tensors_meet_the_operator(launches):
    operator = new_operator()
    input, scale = values(8, 256), torch.ones(1, device="cuda")
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *given: operator.replacement(*given))(input, scale)
    assert operator.overload in {node.target for node in graph.graph.nodes}
    with torch._subclasses.FakeTensorMode() as mode:
        packed, _ = operator.replacement(mode.from_tensor(input), mode.from_tensor(scale))
    assert packed.shape == (8, 128)
    assert operator.traced >= 1


@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_enable_pdl_arrives(launches, enable_pdl):
    input = values(8, 256)
    operator = new_operator()
    flashinfer.fp4_quantize(input, global_scale(input), enable_pdl=enable_pdl)
    for _ in range(2):
        operator.replacement(input, global_scale(input), enable_pdl=enable_pdl)
    assert len({launch["enable_pdl"] for launch in launches}) == 1


def test_zero_rows_need_no_launch(launches):
    packed, scales = new_operator().replacement(values(0, 256), torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    assert (packed.shape, scales.shape) == ((0, 128), (0, 16))
    assert launches == []


def test_odd_columns_are_explained():
    with pytest.raises(LayoutError, match="positive multiple of sf_vec_size=16"):
        new_operator().replacement(values(4, 40), torch.ones(1, device="cuda"))


def test_column_major():
    input = values(8, 256).t()
    raw = flashinfer.fp4_quantize(input, global_scale(input))
    operator = new_operator()
    for _ in range(2):
        assert_same(operator.replacement(input, global_scale(input)), raw)


@pytest.mark.parametrize("shape", [(130, 8), (2, 130, 6)])
def test_block_scale_interleave(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    got = new_operator(BLOCK_SCALE_INTERLEAVE).replacement(scales)
    raw = flashinfer.block_scale_interleave(scales)
    assert (got.shape, got.dtype) == (raw.shape, raw.dtype)
    assert torch.equal(got, raw)
    assert torch.equal(got.cpu(), reference.block_scale_interleave(scales.cpu()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_fullgraph_agrees_with_raw(backend):
    scale = torch.full((1,), 100.0, device="cuda")
    compiled = torch.compile(new_operator().replacement, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 130, 257):
        input = values(rows, 256)
        assert_same(compiled(input, scale), flashinfer.fp4_quantize(input, scale))
    torch._dynamo.reset()


def test_raw_fails_in_fullgraph():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(flashinfer.fp4_quantize, backend="eager", fullgraph=True)(
            values(4, 256), torch.ones(1, device="cuda")
        )
    torch._dynamo.reset()


def test_captured_in_a_cuda_graph():
    input, scale = values(8, 256), torch.full((1,), 100.0, device="cuda")
    operator = new_operator()
    operator.replacement(input, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, scales = operator.replacement(input, scale)
    input.copy_(values(8, 256) * 0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert_same((packed, scales), flashinfer.fp4_quantize(input, scale))


@needs_conversion
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("swizzled", "small"), LAYOUTS)
@pytest.mark.parametrize(("vector", "ue8m0"), [(16, False), (32, True)])
def test_the_reference_has_the_bits_of_the_kernel(dtype, swizzled, small, vector, ue8m0):
    """All but the few elements that an approximate reciprocal may move over a rounding boundary."""
    input = values(257, 1024, dtype=dtype)
    scale = global_scale(input)
    operator = new_operator()
    packed, scales = operator.replacement(input, scale, vector, ue8m0, swizzled, small)
    expected = reference.fp4_quantize(
        input.cpu(), scale.cpu(), vector, ue8m0, swizzled, small, rules=operator.bound.rules
    )
    wrong_codes = (packed.cpu() != expected[0]).float().mean().item()
    wrong_scales = (scales.cpu() != expected[1]).float().mean().item()
    print(f"{dtype}: {wrong_codes:.2e} of packed bytes and {wrong_scales:.2e} of scales differ", file=sys.stderr)
    assert wrong_codes < 1e-3
    assert wrong_scales < 1e-3
