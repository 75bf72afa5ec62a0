"""Several ranks and nodes of a real server: they agree or stop together, and a server tells what is in force."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.servers import third_party
from tests.servers.conftest import INSTALLED, StartServer
from tests.support.process_tree import wait_gone
from tests.support.server import SGLANG, STANDINS, ServerError, ServerProcess

LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")
WAY_IN = SGLANG if INSTALLED != "0.5.9" else LAUNCHER
TWO_RANKS = ("--tp", "2")
BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}
PATIENT = 480.0

Field = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def field(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Field:
    """Prepare a server that sees the third-party plugins."""
    folder = third_party.write(tmp_path_factory.mktemp("third-party"))

    def prepare(*plugins: str, args: tuple[str, ...] = (), env: dict[str, str] | None = None) -> ServerProcess:
        path = f"{STANDINS}{os.pathsep}{folder}"
        environment = {"PYTHONPATH": path, **(env or {})}
        return start_server(plugins=plugins, env=environment, launcher=WAY_IN, args=args, timeout=PATIENT)

    return prepare


def reports_of(server: ServerProcess) -> list[dict[str, Any]]:
    folder = server.log.parent / "reports"
    assert [path.name for path in folder.iterdir() if path.suffix != ".json"] == [], "a part of a file was left"
    return [json.loads(path.read_text()) for path in folder.iterdir()]


def merged(server: ServerProcess) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "glm5_plugins.cli", "report", "--json", str(server.log.parent / "reports")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def refusals(server: ServerProcess) -> list[list[str]]:
    """Start a server that must not come up, and return the two lines of every process that says why."""
    with pytest.raises(ServerError):
        server.__enter__()
    lines = server.log_text().splitlines()
    return [lines[at : at + 2] for at, line in enumerate(lines) if line.startswith("glm5-plugins: ")]


@pytest.fixture(scope="module")
def server(field: Field) -> Iterator[ServerProcess]:
    with field("cuda_version", "probe", args=(*TWO_RANKS, "--enable-metrics"), env=BIND) as server:
        assert server.generate("hello", max_new_tokens=4)["output_ids"]
        yield server


def test_two_ranks_agree_before_each_costly_step(server: ServerProcess) -> None:
    log = server.log_text()
    for step in ("model load", "graph capture"):
        assert log.count(f"agreement of ranks before {step}: agreed: 2 ranks, ") == 2
    schedulers = [report for report in reports_of(server) if report["process"]["role"] == "scheduler"]
    assert sorted(report["agreement"]["rank"] for report in schedulers) == [0, 1]
    assert len({report["agreement"]["digest"] for report in schedulers}) == 1
    assert {one["pid"] for one in schedulers[0]["agreement"]["ranks"]} == {s["process"]["pid"] for s in schedulers}


def test_the_reports_merge_into_one_table(server: ServerProcess) -> None:
    status, document = merged(server)
    (launch,) = document["launches"]
    assert (status, document["problems"], launch["differences"]) == (0, [], [])
    roles = [process["role"] for process in launch["processes"]]
    assert roles[0] == "main"
    assert roles.count("scheduler") == 2
    assert any("load_model" in row["target"] and len(row["at"]) == 2 and row["fired"] == 2 for row in launch["rows"])


def test_server_info_tells_what_is_in_force(server: ServerProcess) -> None:
    info = server.get_json("/server_info")
    for state in info["internal_states"]:
        told = state["glm5_plugins"]
        assert set(told) == {"main", "scheduler"}
        assert told["scheduler"]["agreement"] == {"state": "agreed", "reason": ""}
        assert told["scheduler"]["stage"] == "ready"
        rows = {row["target"].rpartition(".")[2]: row for row in told["scheduler"]["rows"]}
        assert rows["load_model"]["verdict"] == "applied"
        assert rows["load_model"]["fired"] == 1
        assert {row["plugin"] for row in told["main"]["rows"]} == {"cuda_version", "probe"}
        assert "chunked_prefill_size" in state, "what SGLang tells is still there"


def test_the_metrics_have_a_gauge_for_each_plugin(server: ServerProcess) -> None:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{server.url}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("glm5:plugin_in_force")]
    assert 'glm5:plugin_in_force{plugin="probe",process="scheduler",verdict="applied"} 1.0' in lines
    assert not any(line.endswith(" 0.0") for line in lines)


def test_200_requests_at_once_while_the_report_is_read(server: ServerProcess) -> None:
    expected = server.generate("the same", max_new_tokens=4)["output_ids"]

    def ask(number: int) -> bool:
        if number % 10 == 0:
            return "glm5_plugins" in server.get_json("/server_info", timeout=PATIENT)["internal_states"][0]
        if number % 10 == 1:
            return bool(reports_of(server))
        return bool(server.generate("the same", max_new_tokens=4, timeout=PATIENT)["output_ids"] == expected)

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(250)))
    assert all(answers)
    assert merged(server)[0] == 0


def test_a_rank_that_differs_stops_the_server(field: Field, tmp_path: Path) -> None:
    """Every rank says the same, and names the other."""
    server = field("uneven", args=TWO_RANKS, env={**BIND, "FIELD_LOCK": str(tmp_path / "lock")})
    found = refusals(server)
    assert len(found) == 2, server.log_tail()
    assert found[0] == found[1]
    what, mend = found[0]
    assert "The ranks of this server differ: the verdict of uneven on sglang.srt.model_executor" in what
    assert "is 'not applicable' on rank 1 on " in what or "is 'applied' on rank 1 on " in what
    assert "GLM5_AGREEMENT=off" in mend
    status, document = merged(server)
    assert status == 1
    assert "the verdict of uneven" in document["launches"][0]["differences"][0]["name"]
    assert server.processes() == []


def test_the_switch_lets_ranks_differ_and_says_so(field: Field, tmp_path: Path) -> None:
    env = {**BIND, "FIELD_LOCK": str(tmp_path / "lock"), "GLM5_AGREEMENT": "off"}
    with field("uneven", args=TWO_RANKS, env=env) as server:
        assert server.generate("hello")["output_ids"]
        assert "agreement of ranks before model load: off: GLM5_AGREEMENT=off" in server.log_text()
        assert {r["agreement"]["state"] for r in reports_of(server) if r["process"]["role"] == "scheduler"} == {"off"}


def test_a_rank_with_another_option_is_refused_by_both(field: Field) -> None:
    """The main process starts the scheduler of rank 1 with a variable that it does not have itself."""
    own = json.dumps({"GLM5_FP4_WARMUP_JOBS": "2"})
    server = field("own_variables", "fp4_warmup", args=TWO_RANKS, env={**BIND, "FIELD_RANK_1": own})
    found = refusals(server)
    assert len(found) == 2, server.log_tail()
    assert found[0] == found[1]
    assert "The ranks of this server differ: GLM5_FP4_WARMUP_JOBS is '2' on rank 1 on " in found[0][0]
    assert "it is '0' on rank 0 on " in found[0][0]
    schedulers = [report for report in reports_of(server) if report["process"]["role"] == "scheduler"]
    assert [report["agreement"]["state"] for report in schedulers] == ["differs", "differs"]
    assert server.processes() == []


Nodes = Callable[..., list[str]]


@pytest.fixture
def refused_by_nodes(field: Field) -> Nodes:
    """Start two nodes that differ, each with a main process and an environment of its own; return what each said."""

    def start(*plugins: str, other: dict[str, str]) -> list[str]:
        meeting = f"127.0.0.1:{24000 + os.getpid() % 4000}"
        args = (*TWO_RANKS, "--nnodes", "2", "--dist-init-addr", meeting)
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        nodes = [
            field(
                *plugins,
                args=(*args, "--node-rank", str(rank)),
                # A core for each rank: SGLang 0.5.9 counts the ranks of all nodes, later versions those of one.
                env={**env, "SGLANG_CPU_OMP_THREADS_BIND": f"{rank}|1", **(other if rank else {})},
            )
            for rank in range(2)
        ]
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                with pytest.raises(ServerError):
                    node.wait_ready()
            said = [
                [line for line in node.log_text().splitlines() if line.startswith("glm5-plugins: ")] for node in nodes
            ]
            assert list(map(len, said)) == [1, 1], "\n".join(node.log_tail() for node in nodes)
            return [line for (line,) in said]
        finally:
            for node in nodes:
                node.stop()

    return start


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"GLM5_PLUGINS": "cuda_version,no_fullgraph"}, "GLM5_PLUGINS is 'cuda_version,no_fullgraph' on rank 1"),
        ({"GLM5_ON_ERROR": "warn"}, "GLM5_ON_ERROR is 'warn' on rank 1"),
    ],
)
def test_a_node_with_other_settings_is_refused_by_both(
    refused_by_nodes: Nodes, other: dict[str, str], what: str
) -> None:
    for line in refused_by_nodes("cuda_version", other=other):
        assert f"The ranks of this server differ: {what}" in line


def test_a_node_with_another_version_of_a_plugin_is_refused_by_both(refused_by_nodes: Nodes, tmp_path: Path) -> None:
    """The node finds another distribution of that name, with files of its own."""
    newer = third_party.write(tmp_path, "1.1")
    for line in refused_by_nodes("probe", other={"PYTHONPATH": f"{STANDINS}{os.pathsep}{newer}"}):
        assert "The ranks of this server differ: the plugin probe is 'field-plugins 1.1' on rank 1 on " in line
        assert "it is 'field-plugins 1.0' on rank 0 on " in line


def test_a_node_with_another_version_of_a_package_is_refused_by_both(refused_by_nodes: Nodes, tmp_path: Path) -> None:
    """What says the version is another; the package behind it is the one that both nodes have."""
    third_party.write_metadata(tmp_path, "flashinfer-python", "0.6.99")
    path = os.pathsep.join(map(str, (STANDINS, tmp_path)))
    for line in refused_by_nodes("cuda_version", other={"PYTHONPATH": path}):
        assert "The ranks of this server differ: the version of flashinfer-python is '0.6.99' on rank 1 on " in line
        assert f"it is '{metadata.version('flashinfer-python')}' on rank 0 on " in line


@pytest.mark.sglang("!=0.5.11,!=0.5.12,!=0.5.14,!=0.5.19", reason="there the entry point misses the detokenizer")
def test_a_detokenizer_without_its_plugin_ends_the_server(field: Field) -> None:
    """The server never says that it is healthy, and does not wait for its own warm-up to time out."""
    began = time.monotonic()
    (found,) = refusals(field("half"))
    # By the launcher the layer is there before the process knows what it is for.
    assert re.search("The plugin 'half' is not in force in the (detokenizer|worker) process", found[0])
    assert "ValueError: not in this process" in found[0]
    assert time.monotonic() - began < PATIENT / 2


@pytest.fixture
def paused(field: Field) -> Iterator[Callable[[str], ServerProcess]]:
    """Start a server and wait until it has paused in a step: `paused("model load")`."""
    started: list[ServerProcess] = []

    def start(step: str) -> ServerProcess:
        started.append(server := field("pauses", env={"FIELD_PAUSE": step}))
        server.start()
        deadline = time.monotonic() + PATIENT
        while f"paused in {step}" not in server.log_text():
            assert time.monotonic() < deadline, server.log_tail()
            assert server.returncode is None, server.log_tail()
            time.sleep(0.5)
        server.processes()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("step", ["model load", "capture"])
def test_a_scheduler_that_is_killed_ends_the_server(paused: Callable[[str], ServerProcess], step: str) -> None:
    server = paused(step)
    scheduler = next(process for process in server.processes() if "scheduler" in process.command)
    scheduler.signal(signal.SIGKILL)
    with pytest.raises(ServerError, match="the server ended"):
        server.wait_ready()
    assert wait_gone(list(server._seen), 60) == []
    roles = {report["process"]["role"]: report for report in reports_of(server)}
    # What the killed process wrote last, before the step it died in.
    assert roles["scheduler"]["stage"] == ("logging is up" if step == "model load" else "model load")


@pytest.mark.sglang(">=0.5.11", reason="0.5.9 does not end at SIGTERM by itself, with the layer or without")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", ["startup", "model load"])
def test_a_signal_to_the_main_process_leaves_nothing(
    paused: Callable[[str], ServerProcess], step: str, number: signal.Signals
) -> None:
    server = paused(step)
    next(iter(server.processes())).signal(number)
    assert wait_gone(list(server._seen), 90) == []
    reports_of(server)
