"""Compiled through SGLang's real `install_torch_compiled`, a model answers as it does eagerly, to the bit."""

import pytest
import torch
from glm5_plugins.plugins.no_fullgraph import _compile_whole_or_in_parts as plugin

from glm5_plugins.prefill import compiling
from tests.prefill import models

pytestmark = pytest.mark.filterwarnings("default")

LENGTHS = [16, 8, 4, 3, 16, 11, 4, 8, 8, 1]


def prompts():
    torch.manual_seed(1)
    return [torch.randn(length, models.WIDTH) for length in LENGTHS]


def assert_answers_as_eager(runner, model):
    for x in prompts():
        assert torch.equal(runner.serve(x), runner.without_graph(x))


def test_a_break_in_every_layer(runner):
    one = runner(plugin)
    model = models.Decoder()
    one.prepare(model)
    one.capture()
    assert_answers_as_eager(one, model)
    (compilation,) = compiling.COMPILATIONS
    assert "raw_quantize" in compilation.break_reason
    assert len(compilation.graphs) > 1
    assert [graph.captured() for graph in compilation.graphs] == [(0, 0)] * len(compilation.graphs)


def test_a_whole_model_is_captured(runner):
    one = runner(plugin)
    model = models.Decoder(models.WholeLayer)
    one.prepare(model)
    one.capture()
    assert_answers_as_eager(one, model)
    (compilation,) = compiling.COMPILATIONS
    assert compilation.break_reason == ""
    assert compilation.describe() == "Decoder: 1 Dynamo graph, 5 pieces captured in 15 CUDA graphs, 0 uncaptured"
    (graph,) = compilation.graphs
    pieces = len(list(graph.pieces()))
    assert pieces == 5
    assert graph.captured() == (pieces, pieces * 3)


def test_sglang_alone_refuses_a_break(runner):
    one = runner()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        one.prepare(models.Decoder())
