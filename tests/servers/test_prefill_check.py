"""The check before serving, in the scheduler of a real server: real requests, pools and forwards, a stand-in graph."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.conftest import StartServer
from tests.support.server import STANDINS, ServerProcess

LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")

CHECKER = '''
    """Runs the check of no_fullgraph with a runner that takes the place of the prefill graph's."""
    import json, os
    from types import SimpleNamespace
    from glm5_plugins import hookimpl
    from glm5_plugins.prefill import asking, checking

    class Runner:
        """Runs the model as written; its answers to the first prompt come back a second time, if it is wrong."""
        def __init__(self, model_runner):
            self.model_runner, self.compilation = model_runner, SimpleNamespace(as_written=False)
            self.kept, self.calls = [], 0
        def takes(self, forward_batch): return not os.environ.get("FIELD_PAST_THE_GRAPH")
        def run(self, forward_batch, **kwargs):
            runner = self.model_runner
            runner.attn_backend.init_forward_metadata(forward_batch)
            result = runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
            self.calls += 1
            if os.environ.get("FIELD_WRONG") and not self.compilation.as_written:
                self.kept.append(result)
                result = self.kept[0]
            return result

    class OldRunner(Runner):
        can_run, replay = Runner.takes, Runner.run

    class NewRunner(Runner):
        can_run_graph, execute = Runner.takes, Runner.run

    @hookimpl(wrapper=True)
    def glm5_graph_capture(model_runner, kind):
        result = yield
        if kind == "prefill":
            old = hasattr(model_runner, "piecewise_cuda_graph_runner")
            runner = (OldRunner if old else NewRunner)(model_runner)
            if os.environ.get("FIELD_PASS_BY"):
                assert asking.pass_by(runner)
            before = dict(vars(model_runner))
            available = model_runner.token_to_kv_pool_allocator.available_size()
            tolerance = os.environ.get("FIELD_TOLERANCE")
            finding = checking.check(model_runner, runner, runner.compilation, [4, 64, 256, 1 << 20],
                                     float(tolerance) if tolerance else None)
            after = vars(model_runner)
            changed = sorted(k for k in {*before, *after} if k not in before or k not in after
                             or before[k] is not after[k])
            with open(os.environ["FIELD_OUT"], "w") as file:
                json.dump({"ran": finding.ran, "text": finding.text, "wrong": finding.wrong, "calls": runner.calls,
                           "changed": changed,
                           "all_free": available == model_runner.token_to_kv_pool_allocator.available_size()}, file)
        return result
'''

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def checked(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Start a server that runs the check, ask it something, and return what the check found."""
    folder = tmp_path_factory.mktemp("checker")
    info = folder / "field_checker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: field-checker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glm5_plugins]\nchecker = field_checker\n")
    (folder / "field_checker.py").write_text(textwrap.dedent(CHECKER))

    def start(tmp_path: Path, **env: str) -> dict[str, Any]:
        out = tmp_path / "finding.json"
        path = f"{STANDINS}{os.pathsep}{folder}"
        with start_server(
            plugins=["checker"], env={"PYTHONPATH": path, "FIELD_OUT": str(out), **env}, launcher=LAUNCHER
        ) as server:
            assert len(server.generate("hello", max_new_tokens=4)["output_ids"]) == 4
        return dict(json.loads(out.read_text()))

    return start


def test_equal_answers_pass_and_nothing_is_left_behind(checked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = checked(tmp_path, FIELD_TOLERANCE="0")
    assert found == {
        "ran": True,
        "text": "prompts of 4, 64 and 256 tokens: the same tokens, logits off by up to 0",
        "wrong": False,
        "calls": 15,
        "changed": ["forward_pass_id"],
        "all_free": True,
    }


def test_an_answer_that_is_another_prompts_is_found(checked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = checked(tmp_path, FIELD_WRONG="1")
    assert found["wrong"]
    assert found["text"].startswith("a prompt of 4 tokens: the graph gives token ")
    assert found["changed"] == ["forward_pass_id"]


@pytest.mark.parametrize("why", ["FIELD_PAST_THE_GRAPH", "FIELD_PASS_BY"])
def test_a_prompt_that_goes_past_the_graph_checks_nothing(
    checked: Callable[..., dict[str, Any]], tmp_path: Path, why: str
) -> None:
    """The runner may decline a prompt; and the plugin can make it decline every one, which SGLang then heeds."""
    found = checked(tmp_path, **{why: "1"})
    assert not found["ran"]
    assert not found["wrong"]
    assert found["calls"] == 0
