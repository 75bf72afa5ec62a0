"""The layer in real servers: named in the environment, it is in every process, or the server says why not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.conftest import StartServer
from tests.support.server import SGLANG, ServerError, ServerProcess

LAUNCH = ("-m", "glm5_plugins.launch", "sglang.launch_server")
PLUGINS = ["cuda_version", "no_fullgraph"]


def reports(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """What each live process of the server has written to GLM5_REPORT, by role."""
    live = {process.pid for process in server.processes()}
    found = [json.loads(path.read_text()) for path in (server.log.parent / "reports").glob("*.json")]
    return {report["process"]["role"]: report for report in found if report["process"]["pid"] in live}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SGLANG, id="entry-point", marks=pytest.mark.sglang(">=0.5.11", reason="no plugins before")),
        pytest.param(LAUNCH, id="launcher"),
    ],
)
def server(start_server: StartServer, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with start_server(plugins=PLUGINS, launcher=request.param) as server:
        yield server


def test_the_server_answers(server: ServerProcess) -> None:
    """Nothing that serves is disturbed."""
    assert len(server.generate("hello", max_new_tokens=6)["output_ids"]) == 6


def test_the_scheduler_and_the_main_process_report_each_plugin(server: ServerProcess) -> None:
    """One file per process, a row per plugin, none of them bad."""
    found = reports(server)
    assert {"main", "scheduler"} <= found.keys()
    for report in found.values():
        assert {row["plugin"] for row in report["rows"]} == set(PLUGINS)
        assert not {row["verdict"] for row in report["rows"]} & {"drifted", "conflict", "failed", "dead"}


def test_the_verdicts_are_in_the_log(server: ServerProcess) -> None:
    """SGLang's own log says what is in force, though plugins load before it is configured."""
    for plugin in PLUGINS:
        assert f"glm5-plugins: {plugin}: " in server.log_text()


def test_an_unknown_plugin_stops_the_server(start_server: StartServer) -> None:
    """A slip of the pen isn't served; the error names the nearest plugin."""
    with pytest.raises(ServerError, match=r"(?s)ended with .*no_fullgraf.*no_fullgraph"):
        start_server(plugins=["no_fullgraf"], launcher=LAUNCH).__enter__()
