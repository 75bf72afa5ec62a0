"""Which server arguments `piecewise` and `no_fullgraph` choose, by version, model and what the user gave."""

import json
from types import SimpleNamespace

import pytest
from glm5_plugins.plugins import no_fullgraph, piecewise

from glm5_plugins import ConfigurationError, Environment, Verdict
from glm5_plugins.prefill.asking import backend_of, pass_by
from glm5_plugins.prefill.upstream import overridden
from glm5_plugins.rules import Launch


@pytest.fixture
def model(tmp_path):
    """Write a model folder: `model(kv_lora_rank=512)`."""

    def write(**config):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
        return str(tmp_path)

    return write


def on(version):
    return Environment({"sglang": version}, capability=(12, 0))


@pytest.fixture
def ask(monkeypatch):
    """Ask a plugin for server arguments: `ask(piecewise, "0.5.9", mode="compile")(tp_size=2)`."""

    def of(plugin, version, **options):
        name = plugin.Options.plugin_name
        for option, value in options.items():
            monkeypatch.setenv(f"GLM5_{name}_{option}".upper(), value)
        monkeypatch.setattr(plugin, "_choice", type(plugin._choice)(name))
        return lambda **given: dict(plugin.glm5_server_args(on(version), given))

    return of


COMPILED = {
    "0.5.9": {"enable_piecewise_cuda_graph": True},
    "0.5.10.post1": {"enforce_piecewise_cuda_graph": True},
    "0.5.13": {"enforce_piecewise_cuda_graph": True},
    "0.5.14": {"cuda_graph_backend_prefill": "tc_piecewise"},
    "0.5.21": {"cuda_graph_backend_prefill": "tc_piecewise"},
}
BREAKABLE = {
    "0.5.11": {"enforce_piecewise_cuda_graph": True, "enable_breakable_cuda_graph": True},
    "0.5.14": {"cuda_graph_backend_prefill": "breakable"},
    "0.5.23": {"cuda_graph_backend_prefill": "breakable"},
}


@pytest.mark.parametrize("version", COMPILED)
def test_piecewise_asks_for_the_compiled_graph(ask, version):
    assert ask(piecewise, version, backend="tc_piecewise")() == COMPILED[version]


@pytest.mark.parametrize("version", BREAKABLE)
def test_piecewise_asks_for_the_breakable_graph(ask, version):
    assert ask(piecewise, version, backend="breakable")() == BREAKABLE[version]


@pytest.mark.parametrize(
    ("version", "mla", "expected"),
    [
        ("0.5.9", False, COMPILED["0.5.9"]),
        ("0.5.10", True, COMPILED["0.5.13"]),
        ("0.5.12", False, BREAKABLE["0.5.11"]),
        ("0.5.12", True, COMPILED["0.5.13"]),
        ("0.5.16", False, BREAKABLE["0.5.14"]),
        ("0.5.16", True, COMPILED["0.5.14"]),
        ("0.5.17", True, BREAKABLE["0.5.14"]),
        ("0.5.23", True, BREAKABLE["0.5.14"]),
    ],
)
def test_auto_takes_the_breakable_graph_where_it_takes_the_model(ask, model, version, mla, expected):
    assert ask(piecewise, version)(model_path=model(kv_lora_rank=512 if mla else None)) == expected


@pytest.mark.parametrize(
    ("version", "field"), [("0.5.9", "piecewise_cuda_graph_tokens"), ("0.5.14", "cuda_graph_bs_prefill")]
)
def test_sizes_are_given_in_order(ask, version, field):
    assert ask(piecewise, version, tokens="256, 64,1024,64")()[field] == [64, 256, 1024]


@pytest.mark.parametrize("tokens", ["64,x", "0", "-3", "64 256"])
def test_sizes_that_are_none_are_refused(ask, tokens):
    with pytest.raises(ConfigurationError, match="GLM5_PIECEWISE_TOKENS"):
        ask(piecewise, "0.5.9", tokens=tokens)()


@pytest.mark.parametrize(
    ("version", "options", "given", "message"),
    [
        ("0.5.10", {"backend": "breakable"}, {}, "SGLang 0.5.10 has no breakable prefill graph"),
        ("0.5.22", {"backend": "tc_piecewise"}, {}, "SGLang 0.5.22 has no prefill graph by torch.compile"),
        ("0.5.9", {}, {"pp_size": 2}, r"with pipeline parallelism \(--pp-size 2\)"),
        ("0.5.9", {}, {"moe_a2a_backend": "deepep"}, "with --moe-a2a-backend deepep"),
        ("0.5.9", {}, {"enable_torch_compile": True}, "with --enable-torch-compile"),
        ("0.5.14", {"backend": "tc_piecewise"}, {"speculative_algorithm": "NEXTN"}, "--speculative-algorithm NEXTN"),
    ],
)
def test_what_no_flag_turns_on_is_refused(ask, version, options, given, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        ask(piecewise, version, **options)(**given)
    assert error.value.mend


@pytest.mark.parametrize("plugin", [piecewise, no_fullgraph])
def test_what_the_user_chose_is_left_alone(ask, plugin):
    assert ask(plugin, "0.5.14")(cuda_graph_backend_prefill="disabled") == {}
    assert plugin._choice.outcome.verdict is Verdict.NOT_NEEDED


@pytest.mark.parametrize("plugin", [piecewise, no_fullgraph])
def test_nothing_is_asked_for_without_a_gpu(monkeypatch, plugin):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert dict(plugin.glm5_server_args(Environment({"sglang": "0.5.14"}), {})) == {}


@pytest.mark.parametrize(
    ("version", "mode", "mla", "expected", "verdict"),
    [
        ("0.5.9", "auto", False, {}, Verdict.NOT_APPLICABLE),
        ("0.5.11", "auto", False, {"enable_breakable_cuda_graph": True}, Verdict.APPLIED),
        ("0.5.11", "auto", True, {}, Verdict.NOT_APPLICABLE),
        ("0.5.13", "breakable", False, {"enable_breakable_cuda_graph": True}, Verdict.APPLIED),
        ("0.5.14", "auto", False, {"cuda_graph_backend_prefill": "breakable"}, Verdict.APPLIED),
        ("0.5.14", "compile", False, {}, Verdict.NOT_APPLICABLE),
        ("0.5.15", "auto", False, {}, Verdict.NOT_NEEDED),
        ("0.5.21", "breakable", False, {}, Verdict.NOT_NEEDED),
        ("0.5.22", "auto", True, {}, Verdict.NOT_NEEDED),
        ("0.5.23", "compile", True, {}, Verdict.NOT_NEEDED),
    ],
)
def test_no_fullgraph_chooses_the_breakable_graph(ask, model, version, mode, mla, expected, verdict):
    path = model(kv_lora_rank=512 if mla else None)
    assert ask(no_fullgraph, version, mode=mode)(model_path=path) == expected
    assert no_fullgraph._choice.outcome.verdict is verdict


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10.post1"])
def test_the_breakable_graph_cannot_be_asked_of_versions_without_it(ask, version):
    with pytest.raises(ConfigurationError, match=f"SGLang {version} has no breakable prefill graph") as error:
        ask(no_fullgraph, version, mode="breakable")()
    assert "GLM5_NO_FULLGRAPH_MODE=compile" in error.value.mend


@pytest.mark.parametrize("version", [*COMPILED, *BREAKABLE, "0.5.12", "0.5.15", "0.5.17"])
def test_the_two_agree(ask, version):
    first, second = ask(piecewise, version)(), ask(no_fullgraph, version)()
    assert {**first, **second} == {**second, **first}


@pytest.mark.parametrize(
    ("server_args", "expected"),
    [
        ({"enable_piecewise_cuda_graph": False}, "disabled"),
        ({"enable_piecewise_cuda_graph": True}, "tc_piecewise"),
        ({"disable_piecewise_cuda_graph": True}, "disabled"),
        ({"disable_piecewise_cuda_graph": False, "enable_breakable_cuda_graph": True}, "breakable"),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))}, "full"),
        ({"cuda_graph_config": None}, "unknown"),
    ],
)
def test_the_backend_is_read_from_resolved_arguments(server_args, expected):
    assert backend_of(SimpleNamespace(**server_args)) == expected


class ServerArgs(SimpleNamespace):
    """Resolved arguments with everything off."""

    def __init__(self, **values):
        off = {
            "device": "cuda",
            "moe_a2a_backend": "none",
            "disaggregation_mode": "null",
            "lora_paths": None,
            "enable_lora": False,
            "load_format": "auto",
            "quantization": None,
            "cpu_offload_gb": 0,
            "moe_runner_backend": "auto",
            "denied": False,
            "mla": False,
        }
        super().__init__(**{**off, **values})

    def get_model_config(self):
        return SimpleNamespace(is_piecewise_cuda_graph_disabled_model=self.denied, is_multimodal=False)

    def use_mla_backend(self):
        return self.mla


@pytest.mark.parametrize(
    ("version", "backend", "values", "expected"),
    [
        ("0.5.9", "tc_piecewise", {"denied": True, "enable_dp_attention": True}, []),
        ("0.5.10", "tc_piecewise", {"denied": True}, ["the model's architecture is on SGLang's deny-list"]),
        ("0.5.10", "tc_piecewise", {"speculative_algorithm": "EAGLE"}, ["speculative decoding"]),
        ("0.5.11", "tc_piecewise", {"speculative_algorithm": "EAGLE"}, []),
        ("0.5.11", "breakable", {"pp_size": 2, "mla": True}, ["pipeline parallelism"]),
        ("0.5.14", "breakable", {"pp_size": 2, "mla": True}, ["MLA"]),
        ("0.5.17", "breakable", {"mla": True, "enable_two_batch_overlap": True}, ["two-batch overlap"]),
        ("0.5.19", "tc_piecewise", {"moe_a2a_backend": "deepep", "dcp_size": 2}, ["an all-to-all backend", "decode"]),
        ("0.5.12", "tc_piecewise", {"moe_runner_backend": "flashinfer_trtllm"}, ["the MoE runner"]),
        ("0.5.13", "tc_piecewise", {"moe_runner_backend": "flashinfer_trtllm"}, []),
        ("0.5.22", "breakable", {"enable_torch_compile": True}, []),
    ],
)
def test_the_rules_that_are_overridden_are_named(version, backend, values, expected):
    found = list(overridden(Launch(on(version), {}), backend, ServerArgs(**values)))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_a_rule_that_cannot_be_told_is_named_too():
    args = ServerArgs()
    del args.device
    (found,) = overridden(Launch(on("0.5.13"), {}), "tc_piecewise", args)
    assert found.startswith("a device other than CUDA (cannot be told here: AttributeError")


class BreakableCudaGraphRunner:
    """Named like SGLang's."""


@pytest.fixture
def capture(monkeypatch):
    """Run piecewise's hook around a prefill capture, on resolved arguments and what the capture returned."""
    monkeypatch.setattr(piecewise, "_seen", [])

    def run(server_args, result, **runner):
        hook = piecewise.glm5_graph_capture(SimpleNamespace(server_args=server_args, **runner), "prefill")
        next(hook)
        with pytest.raises(StopIteration) as stopped:
            hook.send((result,))
        assert stopped.value.value == (result,)
        return piecewise.glm5_outcome(on("0.5.14"))

    return run


ASKED = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="breakable")))


def test_a_graph_that_is_made_is_said_to_be(capture):
    outcome = capture(ASKED, SimpleNamespace(runner=BreakableCudaGraphRunner()), prefill_cuda_graph_runner=None)
    assert (outcome.verdict, outcome.reason) == (Verdict.APPLIED, "the prefill graph is made (breakable)")


def test_a_graph_is_found_where_old_versions_keep_it(capture):
    outcome = capture(ServerArgs(), None, piecewise_cuda_graph_runner=BreakableCudaGraphRunner())
    assert outcome.verdict is Verdict.APPLIED


def test_a_graph_that_is_not_made_though_asked_for_stops_the_launch(capture, monkeypatch):
    monkeypatch.setattr(Environment, "cuda_devices", 1)
    outcome = capture(ASKED, SimpleNamespace(runner=None))
    assert outcome.verdict is Verdict.FAILED
    assert outcome.mend


def test_none_is_expected_without_a_gpu(capture, monkeypatch):
    monkeypatch.setattr(Environment, "cuda_devices", 0)
    assert capture(ASKED, SimpleNamespace(runner=None)).verdict is Verdict.NOT_APPLICABLE


def test_the_main_process_names_the_rules_and_a_request_that_came_to_nothing(ask, monkeypatch):
    monkeypatch.setattr(piecewise, "_seen", [])
    monkeypatch.setattr(piecewise, "_overridden", [])
    monkeypatch.setattr(piecewise, "Environment", lambda: on("0.5.13"))
    ask(piecewise, "0.5.13")()
    for args, verdict, text in (
        (
            ServerArgs(denied=True, pp_size=2),
            Verdict.APPLIED,
            "left it off for: the model's architecture",
        ),
        (ServerArgs(disable_piecewise_cuda_graph=True), Verdict.FAILED, "turned the prefill graph off all the same"),
    ):
        hook = piecewise.glm5_startup(args)
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(("started",))
        outcome = piecewise.glm5_outcome(on("0.5.13"))
        assert outcome.verdict is verdict
        assert text in outcome.reason


@pytest.mark.parametrize("name", ["can_run_graph", "can_run"])
def test_every_prompt_goes_past_a_runner_that_is_asked(name):
    """From 0.5.14 SGLang asks `can_run_graph`, before that `can_run`."""
    runner = type("Runner", (), {name: lambda self, forward_batch: True})()
    assert pass_by(runner)
    assert not getattr(runner, name)("a batch")


def test_a_runner_that_is_asked_in_another_way_stays_in_use():
    assert not pass_by(SimpleNamespace(may_run=lambda forward_batch: True))
    assert not pass_by(None)


@pytest.mark.parametrize(
    ("file", "verdict"),
    [
        ("sglang/srt/model_executor/piecewise_cuda_graph_runner.py", Verdict.NOT_APPLICABLE),
        ("sglang/srt/model_executor/runner.py", Verdict.NOT_NEEDED),
    ],
)
def test_a_build_from_source_is_asked_for_a_compiled_graph_itself(package, monkeypatch, file, verdict):
    """Case 10 of the field: a build of any age that no version number places."""
    root = package({file: "class PiecewiseCudaGraphRunner: ...\n"})
    env = Environment({"sglang": "0.0.0.dev1+gbfefdc52d"}, capability=(12, 0), roots=(root,))
    monkeypatch.setattr(no_fullgraph, "_choice", type(no_fullgraph._choice)("no_fullgraph"))
    assert no_fullgraph.glm5_server_args(env, {}) == {}
    assert no_fullgraph._choice.outcome.verdict is verdict
