"""The layer in real servers: every process reports, plugins work, and what cannot be in force stops the launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.servers import third_party
from tests.servers.conftest import INSTALLED, StartServer
from tests.support.server import SGLANG, STANDINS, ServerError, ServerProcess

LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")
ROLES = {"main", "scheduler", "detokenizer"}
HAS_ENTRY_POINT = pytest.mark.sglang(">=0.5.11", reason="no plugin entry points before")
WAY_IN = SGLANG if INSTALLED != "0.5.9" else LAUNCHER
"""How a test that is not about ways in starts: the entry point where SGLang has one, else the launcher."""

Reports = dict[str, dict[str, Any]]
Field = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def field(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Field:
    """Prepare a server that sees the third-party plugins."""
    folder = third_party.write(tmp_path_factory.mktemp("third-party"))

    def prepare(
        *plugins: str, env: dict[str, str] | None = None, launcher: Sequence[str] = WAY_IN, args: Sequence[str] = ()
    ) -> ServerProcess:
        path = f"{STANDINS}{os.pathsep}{folder}"
        return start_server(plugins=plugins, env={"PYTHONPATH": path, **(env or {})}, launcher=launcher, args=args)

    return prepare


def reports_of(server: ServerProcess) -> Reports:
    found = [json.loads(path.read_text()) for path in (server.log.parent / "reports").glob("*.json")]
    return {report["process"]["role"]: report for report in found}


def row(report: dict[str, Any], plugin: str, end: str) -> dict[str, Any]:
    (found,) = [one for one in report["rows"] if one["plugin"] == plugin and one["target"].endswith(end)]
    return dict(found)


def refusal(server: ServerProcess) -> list[str]:
    """Start a server that must not come up, and return the two lines that say why."""
    with pytest.raises(ServerError):
        server.__enter__()
    lines = server.log_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("glm5-plugins: ")]
    assert len(starts) == 1, server.log_tail()
    return lines[starts[0] : starts[0] + 2]


# `GLM5_PLUGINS=cuda_version,no_fullgraph python -m sglang.launch_server …`, and a third party's plugins beside.


@pytest.fixture(scope="module")
def server(field: Field) -> Iterator[ServerProcess]:
    with field("cuda_version", "no_fullgraph", "probe", "chooser", args=["--stream-interval", "2"]) as server:
        assert server.generate("hello", max_new_tokens=4)["output_ids"]
        yield server


@pytest.fixture(scope="module")
def reports(server: ServerProcess) -> Reports:
    return reports_of(server)


def test_every_process_has_a_row_for_every_plugin(server: ServerProcess, reports: Reports) -> None:
    """SGLang before 0.5.22 loads no plugins in the detokenizer; the launcher gets there all the same."""
    reached = ROLES if INSTALLED in ("0.5.9", "0.5.22", "0.5.23") else ROLES - {"detokenizer"}
    assert set(reports) == reached
    alive = {process.pid for process in server.processes()}
    for report in reports.values():
        assert report["process"]["pid"] in alive
        assert {one["plugin"] for one in report["rows"]} == {"cuda_version", "no_fullgraph", "probe", "chooser"}
        assert report["versions"]["sglang"] == INSTALLED


def test_the_two_plugins_say_what_they_did(reports: Reports) -> None:
    for report in reports.values():
        cuda = row(report, "cuda_version", "get_cuda_version")
        assert cuda["verdict"] == "applied" or cuda["reason"].startswith("FlashInfer finds no CUDA here")
        full = row(report, "no_fullgraph", "install_torch_compiled")
        compiled = INSTALLED not in ("0.5.22", "0.5.23")
        assert full["verdict"] in (("applied", "waiting") if compiled else ("not needed",))


def test_what_runs_is_counted(reports: Reports) -> None:
    scheduler, main = reports["scheduler"], reports["main"]
    assert row(scheduler, "probe", "ModelRunner.load_model")["fired"] == 1
    seed = row(scheduler, "probe", "set_random_seed")
    assert seed["fired"] >= 1
    assert seed["when"] == "early" or seed["rebound"] >= 2
    assert row(scheduler, "probe", "TEST_RETRACT_INTERVAL")["verdict"] == "applied"
    assert row(scheduler, "probe", "glm5_graph_capture")["fired"] == 2
    assert row(main, "probe", "glm5_startup")["fired"] == 1
    assert row(main, "probe", "_tokenize_one_request")["verdict"] == "applied"


def test_every_seam_is_in_and_those_of_a_process_have_fired(reports: Reports) -> None:
    for report in reports.values():
        assert {seam["verdict"] for seam in report["seams"]} <= {"applied", "waiting"}
    fired = {
        (role, seam["target"].rpartition(":")[2].rpartition(".")[2])
        for role, report in reports.items()
        for seam in report["seams"]
        if seam["fired"]
    }
    for role in reports:
        assert (role, "configure_logger") in fired
    assert {("main", "add_cli_args"), ("main", "_launch_subprocesses"), ("scheduler", "load_model")} <= fired
    assert sum("capture" in name or "graph" in name for role, name in fired if role == "scheduler") == 2


def test_one_line_per_plugin_is_in_sglangs_own_log(server: ServerProcess, reports: Reports) -> None:
    log = server.log_text()
    for plugin in ("cuda_version", "no_fullgraph", "chooser"):
        lines = re.findall(rf"\[[-\d]+ [:\d]+[^]]*\] glm5-plugins: {plugin}: ", log)
        assert len(lines) >= len(reports)


def test_arguments_are_added_where_the_user_gave_none(server: ServerProcess) -> None:
    """Case 15 of the field."""
    info = json.dumps(server.get_json("/server_info"))
    assert '"chunked_prefill_size": 512' in info
    assert '"random_seed": 77' in info
    assert '"stream_interval": 2' in info
    assert "chooser: adds the server argument chunked_prefill_size=512" in server.log_text()
    assert "adds the server argument stream_interval" not in server.log_text()


def test_the_answer_is_that_of_the_unmodified_server(server: ServerProcess, start_server: StartServer) -> None:
    """Token for token, and to the last digit of each log-probability."""
    with start_server(args=["--chunked-prefill-size", "512", "--random-seed", "77"]) as plain:
        expected = plain.generate("the same", max_new_tokens=8)
    got = server.generate("the same", max_new_tokens=8)
    assert got["output_ids"] == expected["output_ids"]
    logprobs = "output_token_logprobs"
    assert got["meta_info"][logprobs] == expected["meta_info"][logprobs]
    assert len(got["meta_info"][logprobs]) == 8


def test_the_launcher_reaches_every_process(field: Field) -> None:
    with field("cuda_version", "no_fullgraph", launcher=LAUNCHER) as server:
        assert server.generate("hello")["output_ids"]
        reports = reports_of(server)
    assert {role: report["layer"]["way"] for role, report in reports.items()} == dict.fromkeys(ROLES, "launcher")


def test_the_line_in_site_packages_reaches_every_process_and_is_taken_back(field: Field) -> None:
    def command(name: str) -> list[str]:
        argv = [sys.executable, "-m", "glm5_plugins.cli", name, "--json"]
        document = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        return [document["changed"], document["path"]]

    command("disable")  # what a run that was killed has left
    changed, path = command("enable")
    assert changed
    try:
        with field("cuda_version", "no_fullgraph", launcher=SGLANG) as server:
            assert server.generate("hello")["output_ids"]
            reports = reports_of(server)
    finally:
        assert command("disable") == [True, path]
    assert not Path(path).exists()
    assert {role: report["layer"]["way"] for role, report in reports.items()} == dict.fromkeys(ROLES, ".pth line")


@pytest.mark.sglang("<0.5.11", reason="later versions have the entry point")
def test_without_a_way_in_the_old_server_starts_unchanged(field: Field) -> None:
    with field("cuda_version", launcher=SGLANG) as server:
        assert server.generate("hello")["output_ids"]
        assert reports_of(server) == {}


def test_a_drifted_target_stops_the_launch_before_any_child(field: Field) -> None:
    """Case 5 of the field."""
    server = field("drifted")
    what, mend = refusal(server)
    assert "The plugin 'drifted' is not in force in the main process: sglang.srt.model_executor" in what
    assert "load_weights_fast" in what
    assert "drifted" in what
    assert "GLM5_ON_ERROR=warn" in mend
    assert set(reports_of(server)) == {"main"}


def test_under_warn_the_server_starts_without_it(field: Field) -> None:
    with field("drifted", env={"GLM5_ON_ERROR": "warn"}) as server:
        assert server.generate("hello")["output_ids"]
        assert "The plugin 'drifted' is not in force in the main process" in server.log_text()
        assert row(reports_of(server)["main"], "drifted", "load_weights_fast")["verdict"] == "drifted"


@pytest.mark.sglang(">=0.5.20", reason="up to 0.5.19 the hook is called")
def test_a_hook_that_is_silently_ignored_is_dead(field: Field) -> None:
    server = field("dead")
    what, _ = refusal(server)
    assert "ServerArgs.__post_init__: dead: " in what
    assert "was not called by the end of arguments" in what
    assert row(reports_of(server)["main"], "dead", "__post_init__")["fired"] == 0


@pytest.mark.sglang("<0.5.20", reason="from 0.5.20 the hook is ignored")
def test_a_hook_that_is_called_is_alive(field: Field) -> None:
    with field("dead") as server:
        assert row(reports_of(server)["main"], "dead", "__post_init__")["fired"] == 1


@pytest.mark.parametrize(
    ("env", "what", "mend"),
    [
        ({"GLM5_PLUGINS": "no_fulgraph"}, "GLM5_PLUGINS names an unknown plugin 'no_fulgraph'.", "'no_fullgraph'"),
        ({"GLM5_PLUGIN": "ep"}, "GLM5_PLUGIN is not a variable of glm5-plugins.", "'GLM5_PLUGINS'"),
    ],
)
def test_a_wrong_setting_stops_the_launch(field: Field, env: dict[str, str], what: str, mend: str) -> None:
    """Case 8 of the field."""
    first, second = refusal(field("cuda_version", env=env))
    assert first == f"glm5-plugins: {what}"
    assert mend in second


@HAS_ENTRY_POINT
def test_sglang_plugins_that_leaves_us_out_is_said_where_we_are_in(field: Field) -> None:
    """Case 11 of the field: by the launcher the layer is in all the same, and says so."""
    with field("cuda_version", env={"SGLANG_PLUGINS": "other"}, launcher=LAUNCHER) as server:
        assert "SGLANG_PLUGINS=other leaves out 'glm5'" in server.log_text()
        assert set(reports_of(server)) == ROLES


def test_a_plugin_that_raises_is_named_and_the_server_does_not_come_up(field: Field) -> None:
    """Case 20 of the field; the scheduler in which it failed has said how far it came before it was killed."""
    with pytest.raises(ServerError):
        (server := field("raises")).__enter__()
    assert "The plugin 'raises' failed in glm5_model_load: RuntimeError: the probe lost its thread" in server.log_text()
    assert row(reports_of(server)["scheduler"], "raises", "glm5_model_load")["fired"] == 1


@pytest.mark.sglang(">=0.5.12", reason="SGLang's own operator around fp4_quantize came in 0.5.12")
@pytest.mark.parametrize("keep", [True, False])
def test_sglangs_own_stash_of_fp4_quantize_must_be_kept(keep: bool) -> None:
    """A replacement that calls SGLang's operator would call itself for ever through the rebound stash."""
    code = """
        import sys, torch, flashinfer
        from glm5_plugins.environment import Environment
        from glm5_plugins.patching import Patch, Registry
        def raw(input, **kwargs): return input, input
        flashinfer.fp4_quantize = raw
        import sglang.srt.layers.quantization.fp4_utils as fp4_utils
        def around(original):
            def fp4_quantize(input, **kwargs):
                return fp4_utils._flashinfer_fp4_quantize_impl(input)
            return fp4_quantize
        keep = ("sglang.srt.layers.quantization.fp4_utils:_flashinfer_fp4_quantize",) if KEEP else ()
        records = Registry(Environment())
        record = records.add("p", Patch("flashinfer:fp4_quantize", around, "test", keep=keep))
        assert record.verdict.value == "applied", record
        records.verify()
        assert record.verdict.value == "applied", record.reason
        try:
            flashinfer.fp4_quantize(torch.zeros(1))
            print("passed")
        except RecursionError:
            print("recursed")
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.replace("KEEP", str(keep)).splitlines())],
        env={**os.environ, "PYTHONPATH": str(STANDINS), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["passed" if keep else "recursed"], done.stderr
