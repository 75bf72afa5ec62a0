"""Server arguments that plugins and profiles choose, on real servers: what SGLang says it runs with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm5_plugins import flags
from glm5_plugins.arguments import field_of
from tests.servers import third_party
from tests.servers.conftest import StartServer
from tests.support.server import STANDINS, ServerError, ServerProcess, cpu_environment
from tests.support.tiny_model import write_tiny_model

LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def rows(server: ServerProcess, plugin: str, role: str) -> list[dict[str, Any]]:
    """What the processes of one role report about a plugin."""
    files = sorted((server.log.parent / "reports").glob(f"glm5-*-{role}-*.json"))
    reports = [json.loads(file.read_text()) for file in files]
    return [row for report in reports for row in report["rows"] if row["plugin"] == plugin]


PARSER = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
rows = [[a.option_strings, a.dest, a.nargs, a.choices and sorted(map(str, a.choices))] for a in parser._actions]
print("ROWS" + json.dumps([row for row in rows if row[0] and "--help" not in row[0]]))
"""


def test_the_parser_of_this_version_is_as_the_table_says(sglang_version: str) -> None:
    """The table of flags that `glm5-plugins check` goes by, against SGLang's own parser."""
    command = [sys.executable, "-W", "ignore", "-c", PARSER]
    environment = {**os.environ, **cpu_environment(Path(sys.executable))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    line = next((line for line in done.stdout.splitlines() if line.startswith("ROWS")), None)
    assert line is not None, done.stderr
    rows = json.loads(line.removeprefix("ROWS"))
    real = {tuple(options): (field_of(dest), nargs, choices) for options, dest, nargs, choices in rows}
    table = {
        flag.options: (flag.field, flag.nargs, None if flag.choices is None else list(flag.choices))
        for flag in flags.of(sglang_version)
    }
    assert table == real


@pytest.mark.parametrize(
    ("args", "ep_size", "added"),
    [
        ((), 2, True),
        (("--ep-size=1",), 1, False),
        (("--expert-parallel-size", "1"), 1, False),
        (("--config", "{config}"), 1, False),
    ],
)
def test_expert_parallel_size(
    start_server: StartServer, tmp_path: Path, args: Sequence[str], ep_size: int, added: bool
) -> None:
    """Two ranks on a CPU: what the plugin chose is what SGLang runs with, and the user's own flag wins."""
    config = tmp_path / "server.yaml"
    config.write_text("ep-size: 1\n")
    server = start_server(
        plugins=["ep"],
        launcher=LAUNCHER,
        args=["--tp", "2", *(word.format(config=config) for word in args)],
        env={"GLM5_EP_SIZE": "auto", **TWO_RANKS},
        timeout=400,
    )
    with server:
        info = server.get_json("/server_info")
        assert (info["tp_size"], info["ep_size"]) == (2, ep_size)
        assert len(server.generate("hello", max_new_tokens=4)["output_ids"]) == 4
    # SGLang's own evidence: it puts the expert rank on the lines of a process that has one.
    assert ("TP1 EP1]" in server.log_text()) == (ep_size == 2)
    assert ("ep: adds the server argument ep_size=2" in server.log_text()) == added
    (row,) = rows(server, "ep", "main")
    assert row["verdict"] == ("applied" if added else "not needed")


def test_two_ranks_share_the_experts_of_a_model(start_server: StartServer, tmp_path: Path) -> None:
    """A model with four experts: SGLang's own layers say how many each rank holds.

    They hold them; they cannot compute with a part of them on a CPU. So this ends where the weights are loaded.
    """
    server = start_server(
        plugins=["ep", "expert_counter"],
        launcher=LAUNCHER,
        model=write_tiny_model(tmp_path / "tiny-glm4-moe", "glm4_moe"),
        args=["--tp", "2"],
        env={
            "GLM5_EP_SIZE": "2",
            "PYTHONPATH": os.pathsep.join([str(third_party.write(tmp_path / "third-party")), str(STANDINS)]),
            **TWO_RANKS,
        },
    )
    held = [f"rank {rank}: 2 of 4 experts in model.layers.1.mlp.experts, weights 2" for rank in (0, 1)]
    server.start()
    try:
        deadline = time.monotonic() + 400
        while server.returncode is None and time.monotonic() < deadline:
            server.processes()
            if all(line in server.log_text() for line in held):
                break
            time.sleep(0.5)
    finally:
        server.stop(grace=5)
    log = server.log_text()
    assert [line for line in held if line not in log] == [], server.log_tail()
    assert "ep: adds the server argument ep_size=2" in log
    assert "TP1 EP1]" in log


@pytest.mark.parametrize(
    ("plugin", "env", "args", "says"),
    [
        ("mscclpp", {}, ["--tp", "2"], "mscclpp cannot be in force: MSCCL++ runs on GPUs, and this machine has none."),
        ("ep", {"GLM5_EP_SIZE": "3"}, ["--tp", "2"], "does not divide the tensor parallel size 2"),
        ("ep", {}, ["--tp", "4", "--ep", "2", "--moe-runner-backend", "flashinfer_cutlass"], "of 1 or 4, not 2"),
    ],
)
def test_a_refusal_comes_before_any_child(
    start_server: StartServer, plugin: str, env: dict[str, str], args: list[str], says: str
) -> None:
    """Case 9: at once, in two lines, with this version's rule."""
    server = start_server(plugins=[plugin], launcher=LAUNCHER, env={"CUDA_VISIBLE_DEVICES": "", **env}, args=args)
    with pytest.raises(ServerError, match="ended with exit code 1"), server:
        pass
    assert says in server.log_text()
    assert len(server._seen) <= 2  # the server, and a resource tracker at most
    assert rows(server, plugin, "scheduler") == []


def test_overlap_that_cannot_help_is_in_force_and_says_so(start_server: StartServer, sglang_version: str) -> None:
    with start_server(
        plugins=["sbo", "moe_autotune"],
        launcher=LAUNCHER,
        env={"CUDA_VISIBLE_DEVICES": "", "GLM5_MOE_AUTOTUNE_ENABLED": "false"},
    ) as server:
        info = server.get_json("/server_info")
        assert info["enable_single_batch_overlap"] is True
        assert info["disable_flashinfer_autotune"] is True
    (row,) = rows(server, "sbo", "main")
    assert row["reason"].startswith("in force, no effect expected: ")


def test_a_profile(start_server: StartServer, tmp_path: Path, sglang_version: str) -> None:
    """Arguments and variables of a profile; the harness's own flags stand for a user's, and win."""
    file = tmp_path / "mine.toml"
    file.write_text(
        'summary = "s"\nsglang = ">=0.5.9"\nhardware = "a CPU"\nsource = ["https://example.org"]\nplugins = ["sbo"]\n'
        '[arguments]\nmax_running_requests = 3\nmax_total_tokens = 999\ntool_call_parser = "llama3"\n'
        'preferred_sampling_params = \'{"top_p": 0.5, "temperature": 1.0}\'\n'
        '[environment]\nSGLANG_TIMEOUT_KEEP_ALIVE = "7"\n'
    )
    with start_server(
        launcher=LAUNCHER,
        env={"GLM5_PROFILE": str(file), "GLM5_REPORT": str(tmp_path / "reports"), "CUDA_VISIBLE_DEVICES": ""},
    ) as server:
        info = server.get_json("/server_info")
        assert info["max_running_requests"] == 3
        assert info["max_total_tokens"] == 2048
        assert info["tool_call_parser"] == "llama3"
        assert "top_p" in info["preferred_sampling_params"]
        assert info["enable_single_batch_overlap"] is True
    main = next((tmp_path / "reports").glob("glm5-*-main-*.json"))
    assert json.loads(main.read_text())["profile"]["set"] == {"SGLANG_TIMEOUT_KEEP_ALIVE": "7"}
