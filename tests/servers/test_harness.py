"""The harness, without our layer: it starts what is unmodified, and reports what can't start."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.conftest import StartServer
from tests.support.server import ServerError, ServerProcess


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[ServerProcess]:
    with start_server() as server:
        yield server
        processes = server.processes()
    assert len(processes) >= 3
    assert not any(process.alive for process in processes), "some processes outlived the server"


def test_an_unmodified_server_answers(server: ServerProcess, sglang_version: str) -> None:
    """What answers is the SGLang of this environment, and greedy decoding repeats itself."""
    first = server.generate("hello", max_new_tokens=6)
    assert len(first["output_ids"]) == 6
    assert server.generate("hello", max_new_tokens=6)["output_ids"] == first["output_ids"]
    assert server.get_json("/server_info")["version"] == sglang_version


def test_nothing_of_ours_runs_unless_asked(server: ServerProcess) -> None:
    """The layer may be installed here; without a GLM5_* variable only SGLang's plugin loader names it."""
    loader = ("plugin glm5 from group", "glm5 -> glm5_plugins:register")
    ours = [line for line in server.log_text().splitlines() if "glm5" in line and not any(s in line for s in loader)]
    assert ours == []
    assert "Failed to" not in server.log_text()


def test_the_process_tree_is_seen(server: ServerProcess) -> None:
    """Scheduler and detokenizer are processes of their own, under titles that SGLang gives them."""
    commands = [process.command for process in server.processes()]
    assert "sglang.launch_server" in commands[0]
    assert any("sglang::scheduler" in command for command in commands)
    assert any("sglang::detokenizer" in command for command in commands)


def test_a_server_that_is_asked_nothing_sleeps(server: ServerProcess) -> None:
    """By `--sleep-on-idle`; otherwise every scheduler keeps a processor busy, and a few servers a whole machine."""
    server.generate("hello", max_new_tokens=1)
    time.sleep(1)
    before, began = server.cpu_seconds(), time.monotonic()
    time.sleep(4)
    assert (server.cpu_seconds() - before) / (time.monotonic() - began) < 0.25


def test_a_server_that_dies_at_start_up_is_reported_with_its_log(start_server: StartServer) -> None:
    """The harness doesn't sit out its time-out, and says why."""
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)ended with .*--no-such-flag"):
        start_server(args=["--no-such-flag"]).__enter__()
    assert time.monotonic() - began < 120


def test_a_scheduler_that_dies_takes_the_server_with_it(start_server: StartServer) -> None:
    """SGLang's child processes fail on their own; the parent's end is what the harness reports."""
    with pytest.raises(ServerError, match=r"(?s)ended with .*No module named 'vllm'"):
        start_server(env={"SGLANG_USE_CPU_ENGINE": "0"}).__enter__()


def test_a_silent_server_is_ended_and_reported(start_server: StartServer, tmp_path: Path) -> None:
    """Something that never listens is ended together with its children."""
    script = "import subprocess, sys; print('waiting', flush=True); subprocess.run(['sleep', '600'])"
    server = start_server(launcher=["-c", script], timeout=2)
    with pytest.raises(ServerError, match=r"(?s)didn't answer within 2 s.*waiting"):
        server.__enter__()
    assert server.returncode == -signal.SIGTERM
    assert server.processes() == []


def test_no_port_is_given_twice_before_its_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(sorted([*range(20000, 22000)] * 2))
    monkeypatch.setattr("random.randrange", lambda *bounds: next(numbers))
    first, second = (ServerProcess(tmp_path, tmp_path / "server.log") for _ in range(2))
    assert first.port != second.port
