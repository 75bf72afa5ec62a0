"""Faults, one a test: what a start that is disturbed leaves behind. On a made-up SGLang that runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5_plugins import merging
from tests.support.process_tree import Process, tree, wait_gone

ENTRY_POINT = ("-m", "sglang.launch_server", "--model", "tiny")
LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server", "--model", "tiny")

PAUSES = '''
"""Stops at the step that FIELD_PAUSE names until the file FIELD_GO is there."""
import os, time
from pathlib import Path
from glm5_plugins import hookimpl
def pause(step):
    if os.environ.get("FIELD_PAUSE") == step:
        print(f"paused in {step}", flush=True)
        while not Path(os.environ["FIELD_GO"]).exists(): time.sleep(0.02)
@hookimpl(wrapper=True)
def glm5_startup():
    pause("startup")
    return (yield)
@hookimpl(wrapper=True)
def glm5_model_load():
    pause("model load")
    return (yield)
@hookimpl(wrapper=True)
def glm5_graph_capture():
    pause("capture")
    return (yield)
'''

STEPS = ("startup", "model load", "capture")


class Start:
    """A server that has paused in a step of its start."""

    def __init__(self, folder: Path, step: str, plugins: str = "pauses", name: str = "server") -> None:
        self.reports = folder / "reports"
        self.go = folder / f"go-{name}"
        self.log = folder / f"{name}.log"
        env = {"PYTHONPATH": str(folder / "site"), "GLM5_PLUGINS": plugins, "GLM5_REPORT": str(self.reports)}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-W", "ignore", *ENTRY_POINT],
                env={**os.environ, **env, "FIELD_PAUSE": step, "FIELD_GO": str(self.go), "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        self.processes: list[Process] = []
        try:
            self._wait_for(step)
        except BaseException:
            self.end()
            raise
        self.processes = tree(self.popen.pid)

    def _wait_for(self, step: str) -> None:
        """Wait until a process has paused there, and each has reported once: the detokenizer waits for no other."""
        deadline = time.monotonic() + 60
        while f"paused in {step}" not in self.log.read_text() or (step != "startup" and not self._has("detokenizer")):
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def _has(self, role: str) -> bool:
        """Whether there is such a report of this server; another one may write into the same folder."""
        found = [json.loads(path.read_text())["process"] for path in self.reports.glob(f"glm5-*-{role}-*.json")]
        return any(process["server"] == self.popen.pid for process in found)

    def pid_of(self, role: str) -> int:
        (path,) = self.reports.glob(f"*-{role}-*.json")
        return int(json.loads(path.read_text())["process"]["pid"])

    def left(self) -> list[Process]:
        """Wait for the end; return the processes that are still there."""
        self.popen.wait(60)
        return wait_gone(self.processes, 20)

    def whole_reports(self) -> dict[str, dict]:
        """The reports by role; every file in the folder must be one."""
        assert [path.name for path in self.reports.iterdir() if path.suffix != ".json"] == []
        documents = [json.loads(path.read_text()) for path in self.reports.iterdir()]
        return {document["process"]["role"]: document for document in documents}

    def end(self) -> None:
        for process in [*self.processes, *tree(self.popen.pid)]:
            process.signal(signal.SIGKILL)
        self.popen.wait(10)


@pytest.fixture
def paused(site, tmp_path):
    """Start a server and wait until it has paused: `paused("model load")`."""
    site("0.5.23", pauses=PAUSES)
    started: list[Start] = []

    def start(step: str, **options) -> Start:
        started.append(Start(tmp_path, step, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.mark.parametrize(("step", "last"), [("model load", "logging is up"), ("capture", "model load")])
def test_a_scheduler_that_is_killed_ends_the_server(paused, step, last):
    """Lost: what the killed process did since its last report."""
    server = paused(step)
    os.kill(server.pid_of("scheduler"), signal.SIGKILL)
    assert server.left() == []
    assert server.popen.returncode != 0
    assert server.whole_reports()["scheduler"]["stage"] == last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", STEPS)
def test_a_signal_to_the_main_process_leaves_no_process_and_no_part_of_a_file(paused, step, number):
    """Lost: nothing but the start."""
    server = paused(step)
    server.popen.send_signal(number)
    assert server.left() == []
    assert server.popen.returncode != 0
    server.whole_reports()


def test_a_report_folder_that_vanishes_is_made_again(paused):
    """Lost: the reports of processes that had nothing more to say."""
    server = paused("model load")
    shutil.rmtree(server.reports)
    server.go.touch()
    assert server.left() == []
    assert server.popen.returncode == 0
    assert {"main", "scheduler"} <= set(server.whole_reports())


def test_a_full_disk_stops_no_server(site, launch, tmp_path):
    """Lost: the reports; each process says so once. No byte can be written to any file here."""
    site("0.5.23")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        done, reports = launch(*ENTRY_POINT, GLM5_PLUGINS="no_fullgraph", PYTHONDONTWRITEBYTECODE="1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written: ") == 3
    assert reports == {}
    assert list((tmp_path / "reports").iterdir()) == []


def test_a_clock_that_jumps_back_during_the_start_loses_nothing(site, launch, tmp_path):
    """Every process but the main one lives an hour earlier."""
    root = site("0.5.23")
    (root / "sitecustomize.py").write_text(
        "import multiprocessing, sys, time\n"
        "real = time.time\n"
        "if '--multiprocessing-fork' in sys.orig_argv: time.time = lambda: real() - 3600\n"
    )
    done, reports = launch(*ENTRY_POINT, GLM5_PLUGINS="no_fullgraph")
    assert done.returncode == 0, done.stderr
    assert reports["scheduler"]["process"]["started"] < reports["main"]["process"]["started"]
    (found,), problems = merging.read(tmp_path / "reports")
    assert problems == []
    assert {process.role for process in found.processes} == {"main", "scheduler", "detokenizer"}


def test_two_servers_with_other_plugins_share_a_folder(paused, site):
    first = paused("model load", name="first")
    second = paused("model load", name="second", plugins="no_fullgraph,pauses")
    for server in (second, first):
        server.go.touch()
        assert server.left() == []
        assert server.popen.returncode == 0
    launches, problems = merging.read(first.reports)
    assert problems == []
    assert [launch.healthy for launch in launches] == [True, True]
    assert [{process.plugins for process in launch.processes} for launch in launches] == [
        {("no_fullgraph", "pauses")},
        {("pauses",)},
    ]


# A requested plugin that is failed or dead, in whichever process: the server never becomes ready.

DEAD = """
from glm5_plugins import Patch, Stage, hookimpl
def _wrap(old):
    def new(*args, **kwargs): return old(*args, **kwargs)
    return new
@hookimpl
def glm5_patches():
    yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.never", _wrap, "why", must_fire_by=Stage.CAPTURE)
"""
NEVER_CALLED = """
    class ModelRunner:
        def load_model(self): print("loading", flush=True)
        def never(self): pass
        def capture(self): CAPTURES
"""
HALF = """
from glm5_plugins import Patch, hookimpl
def _wrap(old): raise ValueError("not in this process")
@hookimpl
def glm5_patches(env):
    if env.role.value == "detokenizer":
        yield Patch("sglang.srt.utils.common:configure_logger", _wrap, "why")
"""


@pytest.mark.parametrize(
    "captures",
    [
        "pass",  # no seam of capture is reached
        "from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as c; "
        "c.capture_decode_graph(model_runner=self)",  # one of the two
    ],
)
def test_what_is_dead_at_the_end_of_the_start_ends_the_server(site, launch, package, captures):
    site("0.5.23", dead=DEAD)
    package({"sglang/srt/model_executor/model_runner.py": NEVER_CALLED.replace("CAPTURES", captures)})
    done, reports = launch(*ENTRY_POINT, GLM5_PLUGINS="dead")
    assert done.returncode != 0
    assert "server is ready" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("glm5-plugins: ")]
    assert len(lines) == 1
    assert "The plugin 'dead' is not in force in the scheduler process" in lines[0]
    assert "dead: sglang.srt.model_executor.model_runner:ModelRunner.never was not called" in lines[0]
    assert reports["scheduler"]["rows"][0]["verdict"] == "dead"


def test_what_fails_in_the_detokenizer_alone_ends_the_server(site, launch):
    site("0.5.23", half=HALF)
    done, reports = launch(*ENTRY_POINT, GLM5_PLUGINS="half")
    assert done.returncode != 0
    assert "server is ready" not in done.stdout
    assert "The plugin 'half' is not in force in the detokenizer process" in done.stderr
    assert reports["detokenizer"]["rows"][-1]["verdict"] == "failed"


def test_no_secret_of_the_environment_is_in_a_report_or_the_log(site, launch):
    site("0.5.23", pauses=PAUSES)
    secrets = {"HF_TOKEN": "hf_hunter2", "AWS_SECRET_ACCESS_KEY": "aws-hunter2", "SGLANG_API_KEY": "sg-hunter2"}
    done, reports = launch(*LAUNCHER, GLM5_PLUGINS="no_fullgraph,pauses", **secrets)
    assert done.returncode == 0, done.stderr
    assert set(reports) == {"main", "scheduler", "detokenizer"}
    assert "hunter2" not in json.dumps(reports) + done.stdout + done.stderr
