"""`glm5-plugins trace`: which sets are tried, what is said, and the exit status; the tracing itself is made up here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from glm5_plugins import cli, trace
from glm5_plugins.environment import Environment
from glm5_plugins.trace import Attempt, Frame

STOPS = {"outcome": "stops", "error": "marked as skipped", "frames": [{"file": "/x/a.py", "line": 7, "function": "f"}]}
TRACES = {"outcome": "traces", "operators": ["glm5::fp4_quantize"]}
BREAKS = {"outcome": "breaks"}

Child = Callable[..., list[dict[str, str]]]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    """Answer in place of the process that traces, by set of plugins; return the environments it was given."""
    monkeypatch.setattr(Environment, "version_text", lambda self, name: "1.0")

    def answer(by_set: dict[str, object]) -> list[dict[str, str]]:
        seen: list[dict[str, str]] = []

        def run(argv: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
            seen.append({name: value for name, value in env.items() if name.startswith("GLM5_")})
            found = by_set[env.get("GLM5_PLUGINS", "")]
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, str):
                return subprocess.CompletedProcess(argv, 1, "", found)
            return subprocess.CompletedProcess(argv, 0, "chatter\n" + json.dumps({"rows": [], **found}) + "\n", "")

        monkeypatch.setattr(trace.subprocess, "run", run)
        return seen

    return answer


def test_without_plugins_the_cure_is_tried_and_named(child: Child, capsys) -> None:
    child({"": STOPS, "fp4_custom_op": TRACES})
    assert cli.main(["trace"]) == 1
    said = capsys.readouterr().out
    assert "Dynamo stops: marked as skipped" in said
    assert "it stops here  /x/a.py:7 f" in said
    assert "traces as one graph, with glm5::fp4_quantize" in said
    assert said.endswith("Cure, as tried: GLM5_PLUGINS=fp4_custom_op\n")


def test_a_set_that_traces_is_fine_and_nothing_more_is_tried(child: Child, capsys, monkeypatch) -> None:
    monkeypatch.setenv("GLM5_PLUGINS", "cuda_version, fp4_custom_op")
    monkeypatch.setenv("GLM5_REPORT", "somewhere")
    monkeypatch.setenv("GLM5_FP4_CUSTOM_OP_REFERENCE", "1")
    seen = child({"": STOPS, "cuda_version,fp4_custom_op": TRACES})
    assert cli.main(["trace", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["traces"], document["cure"], len(document["attempts"])) == (True, None, 2)
    options = {"GLM5_PLUGINS": "cuda_version,fp4_custom_op", "GLM5_FP4_CUSTOM_OP_REFERENCE": "1"}
    assert seen == [{}, options]


def test_a_set_that_does_not_trace_is_tried_with_the_cure(child: Child, capsys, monkeypatch) -> None:
    monkeypatch.setenv("GLM5_PLUGINS", "fp4_graph_break,cuda_version")
    refusal = "warning\nglm5-plugins: The plugin 'fp4_graph_break' needs 'no_fullgraph'.\n  Set it\n"
    child({"": STOPS, "fp4_graph_break,cuda_version": refusal, "cuda_version,fp4_custom_op": TRACES})
    assert cli.main(["trace", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    refused = document["attempts"][1]
    assert refused["outcome"] == "refused"
    assert refused["error"] == "The plugin 'fp4_graph_break' needs 'no_fullgraph'.\n  Set it"
    assert document["cure"] == ["cuda_version", "fp4_custom_op"]


def test_a_cure_that_does_not_cure_is_not_named(child: Child, capsys) -> None:
    child({"": STOPS, "fp4_custom_op": STOPS})
    assert cli.main(["trace"]) == 1
    assert "Cure" not in capsys.readouterr().out


def test_several_graphs_are_fine_where_they_were_asked_for(child: Child, capsys, monkeypatch) -> None:
    monkeypatch.setenv("GLM5_PLUGINS", "no_fullgraph,fp4_graph_break")
    child({"": STOPS, "no_fullgraph,fp4_graph_break": BREAKS})
    assert cli.main(["trace"]) == 0
    assert "traces as several graphs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"outcome": "unusable", "error": "SGLang cannot be imported here: ImportError: x"}, "cannot be imported"),
        ("glm5-plugins: p: a warning\nTraceback\nKilled", "the process ended with status 1: Traceback / Killed"),
        (subprocess.TimeoutExpired("python", 600), "no answer within 600 s"),
    ],
)
def test_an_attempt_that_says_nothing_is_no_proof(child: Child, capsys, found: object, said: str) -> None:
    child({"": found})
    assert cli.main(["trace"]) == 1
    assert said in capsys.readouterr().out


def test_without_sglang_there_is_nothing_to_trace(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Environment, "version_text", lambda self, name: None)
    assert cli.main(["trace"]) == 1
    what, mend = capsys.readouterr().err.splitlines()
    assert what.startswith("glm5-plugins: sglang is not installed for ")
    assert mend == "  Run this with the Python that runs the server."


def test_a_frame_is_written_without_the_folder_of_the_installation() -> None:
    assert str(Frame("/opt/x/lib/python3.11/site-packages/pkg/a.py", 3, "f")) == "pkg/a.py:3 f"
    assert str(Frame("/opt/x/lib/python3.11/subprocess.py", 4, "g")) == "subprocess.py:4 g"
    assert Attempt((), "traces").fine


def test_the_processes_are_light() -> None:
    """Importing the command's module loads neither torch nor SGLang."""
    import sys

    code = "import sys, glm5_plugins.trace; print([m for m in ('torch', 'sglang', 'flashinfer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
