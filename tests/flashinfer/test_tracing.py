"""The failure and its cure, with the installed FlashInfer: raw it stops Dynamo, as an operator it traces."""

import inspect

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounter

from glm5_plugins.fp4 import reference
from glm5_plugins.fp4.layouts import release
from glm5_plugins.fp4.operator import registered_by

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed", exc_type=ImportError)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def values(rows, k=128):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def model(quantize):
    def forward(x, scale):
        packed, scales = quantize(x * 2, scale)
        return packed + 1, scales

    return forward


def test_raw_stops_dynamo_in_the_loader(sm120):
    compiled = torch.compile(model(flashinfer.fp4_quantize), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(values(4), torch.ones(1))
    text = str(caught.value)
    assert "marked as skipped" in text
    assert "in get_fp4_quantization_module" in text
    assert "in get_cuda_version" in text
    assert "subprocess.py" in text


def test_warm_up_does_not_help(sm120, without_kernels):
    flashinfer.fp4_quantize(values(4), torch.ones(1))
    compiled = torch.compile(model(flashinfer.fp4_quantize), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(values(4), torch.ones(1))


def test_the_operator_traces_without_any_kernel(sm120, new_operator):
    operator = new_operator()
    graph = torch.fx.experimental.proxy_tensor.make_fx(model(operator.replacement), tracing_mode="fake")(
        values(4), torch.ones(1)
    )
    assert operator.overload in {node.target for node in graph.graph.nodes}
    assert (operator.fired, operator.traced) == (0, 1)


def test_the_operator_compiles_once_and_gives_the_bits_of_the_reference(sm120, new_operator):
    operator = new_operator(reference=True)
    counter = CompileCounter()
    compiled = torch.compile(model(operator.replacement), backend=counter, fullgraph=True, dynamic=True)
    scale = torch.full((1,), 5.0)
    for rows in (4, 9, 130, 257):
        packed, scales = compiled(values(rows), scale)
        expected = reference.fp4_quantize(values(rows) * 2, scale, rules=operator.bound.rules)
        assert torch.equal(packed, expected[0] + 1)
        assert torch.equal(scales, expected[1])
    assert counter.frame_count == 1


def test_the_replacement_has_the_signature_of_the_original(new_operator):
    replacement = inspect.signature(new_operator().replacement)
    original = inspect.signature(flashinfer.fp4_quantize)
    assert [(p.name, p.kind, p.default) for p in replacement.parameters.values()] == [
        (p.name, p.kind, p.default) for p in original.parameters.values()
    ]


def test_flashinfers_own_operator_is_left_alone(new_operator):
    new_operator()
    exists = hasattr(torch.ops.flashinfer, "fp4_quantize")
    assert exists == (Version(release(flashinfer.__version__)) >= Version("0.6.12"))
    if exists:
        assert registered_by("flashinfer::fp4_quantize").startswith("flashinfer.")
