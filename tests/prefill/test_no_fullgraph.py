"""What no_fullgraph says about a prefill graph after capture, and how its check stops a launch."""

from types import SimpleNamespace

import pytest
import torch
from glm5_plugins.plugins import no_fullgraph

from glm5_plugins import Environment, Verdict
from glm5_plugins.prefill import checking, compiling
from tests.prefill import models
from tests.prefill.conftest import SIZES
from tests.prefill.test_hazards import BREAKING

pytestmark = pytest.mark.filterwarnings("default")


class ModelRunner:
    """As much of SGLang's model runner as the check asks for, around a `Runner` of these tests."""

    max_total_num_tokens = 4096
    model_config = SimpleNamespace(context_len=2048)

    def __init__(self, one):
        self.one = one
        self.req_to_token_pool = self.token_to_kv_pool_allocator = SimpleNamespace(clear=lambda: None)
        self.prefill_cuda_graph_runner = SimpleNamespace(can_run_graph=lambda forward_batch: True)

    def forward(self, x):
        return SimpleNamespace(can_run_graph=True, logits=self.one.serve(x))


@pytest.fixture
def after_capture(runner, monkeypatch):
    """Compile and capture a model inside the plugin's hooks, and return what the plugin says then."""
    monkeypatch.setattr(no_fullgraph, "_found", [])
    embedding = torch.randn(checking._VOCABULARY, models.WIDTH, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(
        checking, "_logits", lambda model_runner, prompt: model_runner.forward(embedding[prompt]).logits[-1]
    )

    def run(model, model_runner=None, compiler="eager"):
        one = runner(no_fullgraph._compile_whole_or_in_parts)
        model_runner = ModelRunner(one) if model_runner is None else model_runner
        model_runner.one = one
        hook = no_fullgraph.glm5_graph_capture(model_runner, "prefill")
        next(hook)
        if model is not None:
            one.prepare(model)
            one.capture()
            for compilation in compiling.COMPILATIONS:  # said afterwards: inductor's own rounding is not the matter
                compilation.arguments["compile_config"].compiler = compiler
        with pytest.raises(StopIteration) as stopped:
            hook.send(("what SGLang returned",))
        assert stopped.value.value == ("what SGLang returned",)
        return no_fullgraph.glm5_outcome(Environment())

    return run


def test_a_whole_model_is_reported_and_checked(after_capture):
    outcome = after_capture(models.Decoder(models.WholeLayer))
    assert outcome.verdict is Verdict.APPLIED
    assert outcome.reason == (
        "Decoder: 1 Dynamo graph, 5 pieces captured in 15 CUDA graphs, 0 uncaptured; "
        "checked: prompts of 4, 8 and 16 tokens: the same tokens, logits off by up to 0"
    )


def test_a_model_with_breaks_is_reported_with_what_would_be_faster(after_capture):
    outcome = after_capture(models.Decoder())
    assert outcome.verdict is Verdict.APPLIED
    (compilation,) = compiling.COMPILATIONS
    start, _, rest = outcome.reason.partition("; ")
    assert start.startswith(f"Decoder: {len(compilation.graphs)} Dynamo graph")
    assert "raw_quantize(self.up(x))" in start
    assert compilation.breaks >= 4
    assert f"{compilation.breaks} graph breaks" in start
    assert "0 pieces captured in 0 CUDA graphs" in start
    assert rest.startswith("so prompts go past it, as without a prefill graph; use fp4_custom_op ")


def test_prompts_go_past_a_graph_of_which_nothing_is_captured(after_capture):
    """What Dynamo makes of a model with breaks is slower than the model as written: 1.3-1.5 times, on an H200."""
    model_runner = ModelRunner(None)
    after_capture(models.Decoder(), model_runner=model_runner)
    assert not model_runner.prefill_cuda_graph_runner.can_run_graph(None)


def test_prompts_go_through_a_graph_that_is_captured(after_capture):
    model_runner = ModelRunner(None)
    after_capture(models.Decoder(models.WholeLayer), model_runner=model_runner)
    assert model_runner.prefill_cuda_graph_runner.can_run_graph(None)


@pytest.mark.parametrize(("compiler", "asked"), [("inductor", True), ("eager", False)])
def test_a_graph_with_breaks_that_stays_in_use_is_checked(after_capture, compiler, asked):
    """Where the parts may be worth their time, and where SGLang asks the runner in another way."""
    model_runner = ModelRunner(None)
    if not asked:
        model_runner.prefill_cuda_graph_runner = SimpleNamespace()
    outcome = after_capture(models.Decoder(), model_runner, compiler)
    assert "; prefill is no faster than without a graph; use fp4_custom_op " in outcome.reason
    assert "checked: prompts of 4, 8 and 16 tokens: the same tokens" in outcome.reason


@pytest.mark.parametrize("kind", BREAKING)
def test_the_check_finds_what_a_careless_capture_does(after_capture, monkeypatch, kind):
    monkeypatch.setattr(compiling.Graph, "release", lambda graph: None)
    monkeypatch.setenv("GLM5_NO_FULLGRAPH_TOLERANCE", "0.001")
    outcome = after_capture(kind())
    assert outcome.verdict is Verdict.FAILED
    assert outcome.reason.startswith("wrong answers: a prompt of ")
    assert "GLM5_NO_FULLGRAPH_MODE=breakable" in outcome.mend


def test_the_check_can_be_left_out(after_capture, monkeypatch):
    monkeypatch.setenv("GLM5_NO_FULLGRAPH_CHECK", "0")
    outcome = after_capture(models.Decoder(models.WholeLayer))
    assert outcome.reason.endswith("unchecked (GLM5_NO_FULLGRAPH_CHECK is off)")


def test_a_version_that_runs_prompts_in_another_way_is_said_to_be_unchecked(after_capture, monkeypatch):
    monkeypatch.setattr(checking, "_logits", lambda *_: checking._bench().extend_no_more)
    monkeypatch.setattr(checking, "_BENCHES", ("sglang.no_such_bench",))
    outcome = after_capture(models.Decoder(models.WholeLayer))
    assert outcome.verdict is Verdict.APPLIED
    assert "NOT checked: this SGLang runs one prompt in another way: ImportError" in outcome.reason


def test_nothing_is_claimed_where_nothing_is_compiled(after_capture):
    outcome = after_capture(None)
    assert outcome.verdict is Verdict.NOT_APPLICABLE


def test_sizes_beyond_the_memory_pool_are_not_checked(runner):
    model_runner = ModelRunner(None)
    model_runner.max_total_num_tokens = min(SIZES)
    finding = checking.check(model_runner, None, None, SIZES, None)
    assert finding == checking.Finding(False, "no captured size fits into the memory pool")
