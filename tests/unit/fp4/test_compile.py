"""`torch.compile(fullgraph=True)` through the replacement: same bits, one graph for any number of rows."""

import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.unit.fp4 import upstream


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def model(quantize, **options):
    def forward(x, scale):
        packed, scales = quantize(x * 2, scale, **options)
        return packed + 1, scales.reshape(-1)

    return forward


@pytest.mark.parametrize("version", upstream.VERSIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_sf_8x4_layout": True},
        {"is_sf_swizzled_layout": False},
        {"sf_vec_size": 32, "sf_use_ue8m0": True},
    ],
    ids=["128x4", "8x4", "linear", "mxfp4"],
)
def test_same_bits_as_eager_and_one_compilation(new_operator, version, options):
    forward = model(new_operator(version).replacement, **options)
    counter = CompileCounter()
    compiled = torch.compile(forward, backend=counter, fullgraph=True, dynamic=True)
    scale = torch.full((1,), 5.0)
    for rows in (5, 9, 130, 257):
        input = values(rows, 128, seed=rows)
        assert all(
            torch.equal(left, right) for left, right in zip(compiled(input, scale), forward(input, scale), strict=True)
        )
    assert counter.frame_count == 1


def test_automatic_dynamic_shapes_recompile_once(new_operator):
    counter = CompileCounter()
    compiled = torch.compile(model(new_operator().replacement), backend=counter, fullgraph=True)
    for rows in (5, 9, 130, 257):
        compiled(values(rows, 128), torch.ones(1))
    assert counter.frame_count == 2


def test_aot_autograd_keeps_shapes_and_strides(new_operator):
    forward = model(new_operator().replacement)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for input in (values(5, 128), values(130, 128), values(128, 5).t().contiguous().t()):
        for left, right in zip(compiled(input, torch.ones(1)), forward(input, torch.ones(1)), strict=True):
            assert torch.equal(left, right)
            assert left.stride() == right.stride()


def test_column_major_and_leading_dimensions_compile(new_operator):
    quantize = new_operator().replacement
    compiled = torch.compile(quantize, backend="aot_eager", fullgraph=True, dynamic=True)
    for input in (values(5, 128).t(), values(2, 3, 128), values(2, 3, 128).transpose(-2, -1)):
        for left, right in zip(compiled(input, torch.ones(1)), quantize(input, torch.ones(1)), strict=True):
            assert torch.equal(left, right)
            assert left.stride() == right.stride()


def test_zero_rows_compile(new_operator):
    compiled = torch.compile(new_operator().replacement, backend="aot_eager", fullgraph=True, dynamic=True)
    packed, scales = compiled(values(0, 64), torch.ones(1))
    assert (packed.shape, scales.shape) == ((0, 32), (0, 4))


def test_the_graph_holds_the_operator_and_nothing_of_upstream(new_operator):
    operator = new_operator()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(operator.replacement, backend=backend, fullgraph=True)(values(4, 64), torch.ones(1))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called[0] is operator.overload
    assert upstream.calls == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_warm_up_does_not_help_a_loader_that_shells_out():
    """Why the operator is needed: a cached loader is traced again, however often it ran."""

    @functools.cache
    def load():
        return subprocess.check_output([sys.executable, "-c", "print(1)"])

    def quantize(x):
        load()
        return x + 1

    quantize(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"allocate_lock|marked as skipped"):
        torch.compile(quantize, backend="eager", fullgraph=True)(torch.ones(2))
