"""fp4_warmup on a machine without a GPU: the server starts, and the report says truthfully that nothing was built."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import third_party
from tests.servers.conftest import StartServer
from tests.support.server import STANDINS, ServerProcess


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[ServerProcess]:
    # Before 0.5.11 the launcher is the way in.
    launcher = ("-m", "glm5_plugins.launch", "sglang.launch_server")
    with start_server(plugins=["fp4_warmup", "no_fullgraph"], launcher=launcher) as server:
        yield server


@pytest.fixture(scope="module")
def reader(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = third_party.write(tmp_path_factory.mktemp("third-party"))
    launcher = ("-m", "glm5_plugins.launch", "sglang.launch_server")
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(STANDINS)])}
    with start_server(plugins=["launch_reader"], launcher=launcher, env=env) as server:
        yield server


def test_what_decides_the_modules_is_read_from_every_version(reader: ServerProcess) -> None:
    """The places that hold it have moved more than once; a launch without FP4 and experts says so."""
    (line,) = [line for line in reader.log_text().splitlines() if "launch read:" in line]
    said = line.partition("launch read: ")[2]
    assert said.startswith("Launch(arch=(12, 0), quantization='', moe_runner='', fp4_gemm='")
    assert "'torch_native'" in said.partition("attention=")[2]
    assert "allreduce_fusion=False" in said


def reports(server: ServerProcess) -> dict[str, Any]:
    files = (server.log.parent / "reports").glob("*.json")
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    pids = {process.pid for process in server.processes()}
    return {report["process"]["role"]: report for report in found if report["process"]["pid"] in pids}


def test_the_server_answers(server: ServerProcess) -> None:
    assert len(server.generate("hello", max_new_tokens=4)["output_ids"]) == 4


def test_the_scheduler_says_that_nothing_was_built_and_why(server: ServerProcess) -> None:
    """The hook fired around the loading of the model; its verdict is not `applied`, since it did nothing."""
    rows = [row for row in reports(server)["scheduler"]["rows"] if row["plugin"] == "fp4_warmup"]
    assert [(row["target"], row["verdict"], row["fired"]) for row in rows] == [("glm5_model_load", "not applicable", 1)]
    assert rows[0]["reason"] == "no CUDA device here: no module is built or loaded"
    assert "fp4_warmup: not applicable, fired 1: glm5_model_load: no CUDA device here" in server.log_text()


def test_no_process_claims_the_warm_up(server: ServerProcess) -> None:
    for role, report in reports(server).items():
        verdicts = {row["verdict"] for row in report["rows"] if row["plugin"] == "fp4_warmup"}
        assert verdicts == {"not applicable"}, role


def test_nothing_of_the_builder_is_imported_where_nothing_is_built(server: ServerProcess) -> None:
    """What the plugin costs a process with no GPU is its own file."""
    code = "import sys; from glm5_plugins.plugins import fp4_warmup; print([m for m in sys.modules if 'warmup' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['glm5_plugins.plugins.fp4_warmup']"
