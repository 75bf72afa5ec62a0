"""The layer in a whole start: each way in, every process, and what stops a launch. On a made-up SGLang that runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_plugins import bootstrap
from glm5_plugins.enable import LINE
from glm5_plugins.errors import NotInForce

ENTRY_POINT = ("-m", "sglang.launch_server")
LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")
SERVER = ("--model", "tiny")

PROBE = '''
"""Counts what it is called for."""
from glm5_plugins import Patch, Stage, hookimpl
def _wrap(old):
    def new(*args, **kwargs): return old(*args, **kwargs)
    return new
@hookimpl
def glm5_patches():
    yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_model", _wrap, "to see it run")
@hookimpl(wrapper=True)
def glm5_model_load(model_runner):
    print("probe before", flush=True)
    result = yield
    print("probe after", flush=True)
    return result
'''


def rows(report: dict, plugin: str) -> dict[str, dict]:
    return {row["target"].rpartition(":")[2]: row for row in report["rows"] if row["plugin"] == plugin}


def test_without_a_variable_nothing_is_imported(run):
    run(
        """
        import sys
        before = set(sys.modules)
        import glm5_plugins
        glm5_plugins.register()
        new = set(sys.modules) - before
        assert new <= {"glm5_plugins"}, sorted(new)
        """
    )


def test_every_process_reports_by_entry_point(site, launch):
    site("0.5.23", probe=PROBE)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph,probe")
    assert done.returncode == 0, done.stderr
    assert "probe before\nloading\nprobe after\nscheduler is ready" in done.stdout
    assert set(reports) == {"main", "scheduler", "detokenizer"}
    assert {report["layer"]["way"] for report in reports.values()} == {"entry point"}
    assert {role: report["stage"] for role, report in reports.items()} == {
        "main": "ready",
        "scheduler": "ready",
        "detokenizer": "logging is up",
    }
    assert {report["process"]["server"] for report in reports.values()} == {reports["main"]["process"]["pid"]}
    for report in reports.values():
        assert [row["plugin"] for row in report["rows"]] == ["no_fullgraph"] * 3 + ["probe"] * 2
        assert rows(report, "no_fullgraph")["install_torch_compiled"]["verdict"] == "not needed"
    probe = rows(reports["scheduler"], "probe")
    assert probe["ModelRunner.load_model"]["verdict"] == "applied"
    assert probe["ModelRunner.load_model"]["fired"] == 1
    assert probe["glm5_model_load"]["fired"] == 1
    assert rows(reports["main"], "probe")["ModelRunner.load_model"]["verdict"] == "waiting"


def test_one_line_per_row_in_the_log_of_every_process(site, launch):
    site("0.5.23", probe=PROBE)
    done, _ = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph")
    lines = [
        line
        for line in done.stderr.splitlines()
        if "glm5-plugins: no_fullgraph: not needed: sglang.srt.compilation" in line
    ]
    assert sorted(line.split("]")[0] for line in lines) == ["[log", "[log detokenizer", "[log scheduler"]


@pytest.mark.parametrize("way", ["launcher", ".pth line"])
@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_the_other_ways_in_reach_every_process_of_any_version(site, launch, version, way):
    site(version, probe=PROBE)
    argv = LAUNCHER if way == "launcher" else ENTRY_POINT
    done, reports = launch(*argv, *SERVER, GLM5_PLUGINS="probe", pth=way == ".pth line", SGLANG_PLUGINS="")
    assert done.returncode == 0, done.stderr
    assert {role: report["layer"]["way"] for role, report in reports.items()} == dict.fromkeys(
        ("main", "scheduler", "detokenizer"), way
    )
    assert rows(reports["scheduler"], "probe")["ModelRunner.load_model"]["when"] == "early"
    assert "tiny" in done.stdout


def test_no_fullgraph_that_nothing_is_compiled_with_is_dead(site, launch):
    """The made-up SGLang goes through `install_torch_compiled` and compiles nothing: no effect may be claimed."""
    site("0.5.9")
    done, reports = launch(*LAUNCHER, *SERVER, GLM5_PLUGINS="no_fullgraph")
    assert "the backend is a plugin's" in done.stdout
    assert done.returncode == 1
    assert (
        "The plugin 'no_fullgraph' is not in force in the scheduler process: dead: SGLang captured its prefill graph "
        "and never had ModelRunner compiled." in done.stderr
    )
    assert "Traceback" not in done.stderr
    found = rows(reports["scheduler"], "no_fullgraph")
    assert found["install_torch_compiled"]["fired"] == 1
    assert found["glm5_graph_capture"]["verdict"] == "dead"


def test_a_scheduler_that_fails_says_first_what_had_happened(site, launch):
    site("0.5.23", probe=PROBE.replace('print("probe after", flush=True)', 'raise ValueError("oh")'))
    for _ in range(3):  # the parent kills its children as soon as it hears of the failure
        done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="probe")
        assert "The plugin 'probe' failed in glm5_model_load: ValueError: oh" in done.stderr
        assert rows(reports["scheduler"], "probe")["ModelRunner.load_model"]["fired"] == 1


def test_without_a_way_in_an_old_version_starts_as_it_is(site, launch):
    site("0.5.9")
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph")
    assert "the backend is SGLang's own" in done.stdout
    assert reports == {}


def test_sglang_plugins_that_leaves_us_out_is_said_where_we_are_in_all_the_same(site, launch):
    """Case 11 of the field."""
    site("0.5.23")
    done, reports = launch(*LAUNCHER, *SERVER, GLM5_PLUGINS="no_fullgraph", SGLANG_PLUGINS="other")
    assert "SGLANG_PLUGINS=other leaves out 'glm5'" in done.stderr
    assert reports["main"]["notes"] == [
        "SGLANG_PLUGINS=other leaves out 'glm5': the layer is in this process by its launcher alone"
    ]


@pytest.mark.parametrize(
    ("env", "what", "mend"),
    [
        ({"GLM5_PLUGINS": "no_fulgraph"}, "unknown plugin 'no_fulgraph'", "Did you mean 'no_fullgraph'?"),
        ({"GLM5_PLUGIN": "ep"}, "GLM5_PLUGIN is not a variable", "Did you mean 'GLM5_PLUGINS'?"),
        ({"GLM5_ON_ERROR": "never"}, "GLM5_ON_ERROR='never' is not valid", "Correct the value"),
        ({"GLM5_FP4_WARMUP_TIMEOUT_S": "abc"}, "GLM5_FP4_WARMUP_TIMEOUT_S='abc' is not valid", "Correct the value"),
    ],
)
@pytest.mark.parametrize("argv", [ENTRY_POINT, LAUNCHER], ids=["entry point", "launcher"])
def test_a_wrong_setting_stops_the_launch_in_two_lines(site, launch, argv, env, what, mend):
    """Case 8 of the field: the loader of SGLang swallows exceptions, this it does not."""
    site("0.5.23")
    done, _ = launch(*argv, *SERVER, **env)
    assert done.returncode == 1
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("glm5-plugins: ")
    assert what in first
    assert mend in second


DRIFTED = """
from glm5_plugins import Patch, hookimpl
@hookimpl
def glm5_patches():
    yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_weights", lambda old: old, "why")
    yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_model", lambda old: old, "why")
"""


def test_an_sglang_that_the_layer_is_not_made_for_stops_the_launch(site, launch):
    folder = site("0.5.9")
    (metadata,) = folder.glob("sglang-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.5.9", "Version: 0.5.7"))
    done, _ = launch(*LAUNCHER, *SERVER, GLM5_PLUGINS="ep")
    assert done.returncode == 1
    assert "no function of SGLang 0.5.7 is known to it; it is made for 0.5.8 and later" in done.stderr


def test_a_missing_target_stops_the_main_process_before_any_child(site, launch):
    """Case 5 of the field."""
    site("0.5.23", drifted=DRIFTED)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="drifted")
    assert done.returncode == 1
    assert "loading" not in done.stdout
    first, second = done.stderr.splitlines()
    assert "The plugin 'drifted' is not in force in the main process" in first
    assert "load_weights" in first
    assert "GLM5_ON_ERROR=warn" in second
    assert set(reports) == {"main"}


def test_under_warn_it_starts_without_the_plugin_and_says_so(site, launch):
    site("0.5.23", drifted=DRIFTED)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="drifted", GLM5_ON_ERROR="warn")
    assert done.returncode == 0, done.stderr
    assert "The plugin 'drifted' is not in force in the main process" in done.stderr
    for role in ("main", "scheduler"):
        assert [row["verdict"] for row in reports[role]["rows"]] == ["drifted", "skipped"]


DEAD = """
from glm5_plugins import Patch, Stage, hookimpl
def _wrap(old):
    def new(*args, **kwargs): return old(*args, **kwargs)
    return new
@hookimpl
def glm5_patches():
    yield Patch("sglang.srt.entrypoints.engine:Engine.__init__", _wrap, "why", must_fire_by=Stage.ARGUMENTS)
"""


def test_a_dead_patch_stops_the_launch_before_any_child(site, launch):
    site("0.5.23", dead=DEAD)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="dead")
    assert done.returncode == 1
    assert "Engine.__init__: dead: sglang.srt.entrypoints.engine:Engine.__init__ was not called" in done.stderr
    assert "loading" not in done.stdout
    assert reports["main"]["rows"][0]["verdict"] == "dead"


RAISES = """
from glm5_plugins import hookimpl
@hookimpl(wrapper=True)
def glm5_model_load(model_runner):
    raise RuntimeError("oops")
    yield
"""


def test_a_plugin_that_raises_in_a_child_is_named(site, launch):
    """Case 20 of the field."""
    site("0.5.23", raises=RAISES)
    done, _ = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="raises")
    assert done.returncode != 0
    assert "The plugin 'raises' failed in glm5_model_load: RuntimeError: oops" in done.stderr


ARGUMENTS = """
from glm5_plugins import hookimpl
@hookimpl
def glm5_server_args(given):
    return {"ep_size": 4, "enable_mscclpp": True, "cuda_graph_bs": [1, 2], "speculative_algorithm": "NEXTN",
            "model_loader_extra_config": {"num threads": 16}}
"""


@pytest.mark.parametrize(
    ("argv", "has"),
    [
        ((), "'ep_size': 4, 'model_loader_extra_config': '{\"num threads\": 16}'"),
        ((), "'enable_mscclpp': True"),
        ((), "'cuda_graph_bs': [1, 2]"),
        (("--ep-size=2",), "'ep_size': 2"),
        (("--expert-parallel-size", "2"), "'ep_size': 2"),
        (("--expert-parallel", "2"), "'ep_size': 2"),
        (("--speculative-algo", "EAGLE"), "'speculative_algorithm': 'EAGLE'"),
        (("--model-loader-extra-config", '{"a": "b c"}'), "'model_loader_extra_config': '{\"a\": \"b c\"}'"),
        (("--ep-size", "1"), "'ep_size': 1"),
    ],
)
def test_arguments_are_added_only_where_the_user_gave_none(site, launch, argv, has):
    """Case 15 of the field."""
    site("0.5.23", arguments=ARGUMENTS)
    done, _ = launch(*ENTRY_POINT, *SERVER, *argv, GLM5_PLUGINS="arguments")
    assert done.returncode == 0, done.stderr
    assert has in done.stdout


def test_what_is_added_is_said(site, launch):
    site("0.5.23", arguments=ARGUMENTS)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="arguments")
    assert "glm5-plugins: arguments: adds the server argument ep_size=4" in done.stderr
    assert reports["main"]["rows"][0]["verdict"] == "applied"


def test_engine_kwargs_are_added_to_as_well(site, run):
    site("0.5.23", arguments=ARGUMENTS)
    out = run(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.entrypoints.engine import Engine
        print(Engine(model_path="x", ep_size=2).server_args.__dict__)
        """,
        env={"GLM5_PLUGINS": "arguments"},
    ).stdout
    assert "'ep_size': 2, 'enable_mscclpp': True" in out


def test_a_report_of_all_processes_in_one_file(site, launch, tmp_path):
    site("0.5.23")
    launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph", GLM5_REPORT=str(tmp_path / "all.jsonl"))
    documents = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert {document["process"]["role"] for document in documents} == {"main", "scheduler", "detokenizer"}
    assert (tmp_path / "all.jsonl").stat().st_mode & 0o077 == 0


def test_a_report_that_cannot_be_written_is_said_once_and_stops_nothing(site, launch, tmp_path):
    site("0.5.23")
    (tmp_path / "file").touch()
    done, _ = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph", GLM5_REPORT=str(tmp_path / "file" / "below"))
    assert done.returncode == 0
    assert done.stderr.count("cannot be written") == 3  # once in each process


def test_a_forked_child_is_not_patched_twice(site, run):
    site("0.5.23", probe=PROBE)
    run(
        """
        import os
        from glm5_plugins import bootstrap
        layer = bootstrap.start("launcher")
        import sglang.srt.model_executor.model_runner as module
        method = module.ModelRunner.load_model
        pid = os.fork()
        if pid == 0:
            again = bootstrap.start("entry point")
            assert again is layer and again.pid == os.getpid()
            assert module.ModelRunner.load_model is method
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        env={"GLM5_PLUGINS": "probe"},
        options=("-W", "ignore"),
    )


@pytest.mark.parametrize("argv", [(), ("--flag",)])
def test_the_launcher_without_a_module_shows_its_usage(launch, argv):
    done, _ = launch("-m", "glm5_plugins.launch", *argv)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m glm5_plugins.launch MODULE")


def test_the_launcher_names_a_module_that_does_not_exist(launch):
    done, _ = launch("-m", "glm5_plugins.launch", "sglang_absent.launch_server")
    assert done.returncode == 1
    assert "no module named 'sglang_absent'" in done.stderr


@pytest.mark.parametrize("module", ["sglang.launch_server", "sglang"])
def test_the_launcher_names_what_sglang_lacks(launch, package, module):
    package({"sglang/__init__.py": "import numpy_absent", "sglang/launch_server.py": "", "sglang/__main__.py": ""})
    done, _ = launch("-m", "glm5_plugins.launch", module)
    assert done.returncode == 1
    assert done.stderr == (
        "glm5-plugins: sglang cannot be imported: there is no module named 'numpy_absent'.\n"
        "  Install the package that has it into this environment.\n"
    )


def test_the_line_is_harmless_where_the_package_is_gone(tmp_path):
    """As after `pip uninstall`, which leaves the line there; -S, that nothing else is on the path."""
    (tmp_path / "glm5_plugins.pth").write_text(LINE)
    code = f"import site; site.addsitedir({str(tmp_path)!r})"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env={"GLM5_PLUGINS": "ep"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_line_does_nothing_without_a_variable_and_only_waits_with_one(site, run):
    root = site("0.5.9")
    (root / "glm5_plugins.pth").write_text(LINE)
    code = f"""
        import site, sys
        before = set(sys.modules)
        site.addsitedir({str(root)!r})
        print(sorted(name for name in set(sys.modules) - before if "glm5" in name or "pluggy" in name))
    """
    assert run(code).stdout.strip() == "[]"
    assert (
        run(code, env={"GLM5_PLUGINS": "x"}).stdout.strip()
        == "['glm5_plugins', 'glm5_plugins.autostart', 'glm5_plugins.imports']"
    )


def test_server_info_holds_what_scheduler_and_main_process_say(site, run):
    """SGLang's own answer stays as it is, and its own dictionary is not written to."""
    site("0.5.23", probe=PROBE)
    out = run(
        """
        import asyncio, json
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.tokenizer_manager import ControlMixin, TokenizerManager
        told = Scheduler.get_internal_state(None, None).internal_state
        assert told["a"] == 1
        (state,) = asyncio.run(TokenizerManager().get_internal_state())
        assert state["a"] == 1
        assert asyncio.run(ControlMixin().get_internal_state()) == [{"a": 1}]
        json.dumps([told, state])
        print(json.dumps(state["glm5_plugins"]["main"]))
        """,
        env={"GLM5_PLUGINS": "probe"},
        options=("-W", "ignore"),
    ).stdout
    said = json.loads(out.splitlines()[-1])
    assert said["plugins"] == ["probe"]
    assert {row["target"].rpartition(":")[2] for row in said["rows"]} == {"ModelRunner.load_model", "glm5_model_load"}


@pytest.mark.parametrize(("setting", "state"), [("on", "not compared"), ("off", "off")])
def test_the_report_says_whether_ranks_compared(site, launch, setting, state):
    site("0.5.23")
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph", GLM5_AGREEMENT=setting)
    assert done.returncode == 0, done.stderr
    assert reports["scheduler"]["agreement"]["state"] == state
    assert done.stderr.count(f"agreement of ranks before graph capture: {state}") == 1


def test_a_group_of_ranks_that_has_moved_is_said(site, launch, package):
    site("0.5.23")
    package({"sglang/srt/distributed/parallel_state.py": "def get_the_world(): ..."})
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="no_fullgraph")
    assert done.returncode != 0
    first, second = [line for line in done.stderr.splitlines() if "not in force" in line or "GLM5_AGREEMENT" in line]
    assert "The layer itself is not in force in the scheduler process: it cannot compare the ranks: drifted: " in first
    assert "has no attribute 'get_world_group'" in first
    assert "GLM5_AGREEMENT=off" in second
    assert reports["scheduler"]["agreement"]["state"] == "not compared"


OUTCOME = """
import os
from pathlib import Path
from glm5_plugins import Environment, Finding, Outcome, Verdict, hookimpl
_outcome = None
@hookimpl(wrapper=True)
def glm5_model_load(model_runner):
    global _outcome
    result = yield
    _outcome = Outcome(Verdict(os.environ["PROBE_VERDICT"]), "seven modules looked at", "Look again.")
    return result
@hookimpl
def glm5_outcome(env):
    return _outcome
@hookimpl
def glm5_preflight(env):
    yield Finding("error", "There is no compiler.", "Install one.")
"""


@pytest.mark.parametrize("verdict", ["applied", "not needed", "not applicable"])
def test_a_plugin_says_itself_what_became_of_it(site, launch, verdict):
    """Before it has said anything, and in processes that never come to the step, nothing is claimed."""
    site("0.5.23", outcome=OUTCOME)
    done, reports = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="outcome", PROBE_VERDICT=verdict)
    assert done.returncode == 0
    assert rows(reports["scheduler"], "outcome")["glm5_model_load"]["verdict"] == verdict
    assert rows(reports["main"], "outcome")["glm5_model_load"]["verdict"] == "waiting"
    assert f"outcome: {verdict}, fired 1: glm5_model_load: seven modules looked at" in done.stderr


def test_a_plugin_that_says_it_failed_stops_the_launch(site, launch):
    site("0.5.23", outcome=OUTCOME)
    done, _ = launch(*ENTRY_POINT, *SERVER, GLM5_PLUGINS="outcome", PROBE_VERDICT="failed")
    assert done.returncode != 0
    assert (
        "glm5-plugins: The plugin 'outcome' is not in force in the scheduler process: "
        "failed: seven modules looked at.\n  Look again.\n" in done.stderr
    )


def test_a_plugin_that_says_it_failed_is_a_warning_where_that_is_wanted(site, launch):
    site("0.5.23", outcome=OUTCOME)
    options = {"GLM5_PLUGINS": "outcome", "PROBE_VERDICT": "failed", "GLM5_ON_ERROR": "warn"}
    done, reports = launch(*ENTRY_POINT, *SERVER, **options)
    assert done.returncode == 0
    assert rows(reports["scheduler"], "outcome")["glm5_model_load"]["verdict"] == "failed"
    assert done.stderr.count("'outcome' is not in force in the scheduler process: failed: seven modules") == 1


def test_what_stops_a_child_is_said_in_one_write(monkeypatch):
    """Between two, a line of another process may get into the log they share. Here each write is a datagram."""
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
    monkeypatch.setenv(bootstrap.SERVER, str(os.getppid()))
    with ours, theirs, open(theirs.fileno(), "w", buffering=1, closefd=False) as stderr:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            bootstrap.Layer("launcher")._end(NotInForce("It is wrong.", "Mend it."))
        assert ours.recv(1000) == b"glm5-plugins: It is wrong.\n  Mend it.\n"


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_parent_that_ends_meanwhile_is_no_error_and_nobody_else_is_told(monkeypatch, error):
    """Whoever lost its parent is a child of process 1, which is somebody else's."""
    told = []

    def kill(pid, number):
        told.append(pid)
        raise error

    parent = os.getppid()
    parents = iter([parent])
    monkeypatch.setenv(bootstrap.SERVER, str(parent))
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    monkeypatch.setattr(os, "kill", kill)
    assert bootstrap.Layer("launcher")._end(NotInForce("It is wrong."), alone=True).code == 1
    assert told == [parent]


def test_doctor_asks_a_requested_plugin_for_its_preflight(site, run):
    site("0.5.23", outcome=OUTCOME)
    code = """
        from glm5_plugins import doctor
        print([(f.what, f.mend) for f in doctor.examine().findings if f.level == "error"])
    """
    assert run(code, env={"GLM5_PLUGINS": "outcome"}).stdout.strip() == "[('There is no compiler.', 'Install one.')]"
    assert run(code).stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
@pytest.mark.parametrize(
    ("config", "has"),
    [
        ('{"ep-size": 2, "enable-mscclpp": false}', "'enable_mscclpp': False, 'ep_size': 2"),
        ('{"enable_mscclpp": false, "speculative-algorithm": "EAGLE"}', "'enable_mscclpp': False, 'ep_size': 4"),
    ],
)
def test_a_config_file_is_the_users_word_too(site, launch, tmp_path, version, config, has):
    """Case 15 of the field; SGLang itself drops `flag: false` from a file."""
    site(version, arguments=ARGUMENTS)
    (tmp_path / "server.yaml").write_text(config)
    done, _ = launch(*LAUNCHER, *SERVER, "--config", str(tmp_path / "server.yaml"), GLM5_PLUGINS="arguments")
    assert done.returncode == 0, done.stderr
    assert has in done.stdout


def test_a_refusal_stops_the_main_process_before_any_child(site, launch):
    """Case 9 of the field."""
    site("0.5.23")
    done, reports = launch(*ENTRY_POINT, *SERVER, "--tp-size", "8", GLM5_PLUGINS="ep", GLM5_EP_SIZE="3")
    assert done.returncode == 1
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("glm5-plugins: ep cannot be in force: an expert parallel size of 3 does not divide")
    assert second == "  Choose a divisor of 8."
    assert set(reports) == {"main"}


def test_arguments_that_were_made_without_the_parser_are_dead(site, run):
    site("0.5.23", arguments=ARGUMENTS)
    done = run(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
        Engine._launch_subprocesses(ServerArgs(model_path="x"))
        """,
        env={"GLM5_PLUGINS": "arguments"},
        check=False,
    )
    assert done.returncode == 1
    assert "dead: the server arguments were made without SGLang's parser" in done.stderr


PROFILE = """
summary = "for a test"
sglang = ">=0.5.9"
hardware = "none"
source = ["https://example.org"]
plugins = ["ep"]
options = { GLM5_EP_SIZE = "4" }
[arguments]
tp_size = 8
speculative_algorithm = "NEXTN"
model_loader_extra_config = '{"a": "b c"}'
[[environment]]
set = { PROFILED = "yes", OMP_NUM_THREADS = "8" }
[[environment]]
sglang = "<0.5.11"
given = { speculative_algorithm = ["NEXTN"] }
set = { SGLANG_ENABLE_SPEC_V2 = "True" }
[[rules]]
level = "error"
given = { tp_size = [16] }
why = "there are no {tp_size} GPUs"
mend = "Give --tp-size 8."
[[rules]]
level = "warning"
given = { tp_size = [2] }
why = "{tp_size} GPUs are few"
mend = "Give --tp-size 8."
"""

SHOWS = """
import os
from pathlib import Path
from glm5_plugins import hookimpl
@hookimpl(wrapper=True)
def glm5_model_load(model_runner):
    print("scheduler sees", [os.environ.get(n) for n in ("PROFILED", "OMP_NUM_THREADS", "SGLANG_ENABLE_SPEC_V2")])
    return (yield)
"""


@pytest.fixture
def profile(tmp_path) -> str:
    (tmp_path / "mine.toml").write_text(PROFILE)
    return str(tmp_path / "mine.toml")


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_a_profile_adds_arguments_plugins_options_and_variables(site, launch, profile, version):
    """Case 19 of the field: SGLANG_ENABLE_SPEC_V2 where a version needs it."""
    site(version, shows=SHOWS)
    done, reports = launch(*LAUNCHER, "--model", "X", GLM5_PROFILE=profile, OMP_NUM_THREADS="32")
    assert done.returncode == 0, done.stderr
    for has in ("'tp_size': 8", "'ep_size': 4", "'model_path': 'X'", "'speculative_algorithm': 'NEXTN'"):
        assert has in done.stdout
    report = reports["main"]
    assert report["layer"]["plugins"] == ["ep"]
    v2 = {"SGLANG_ENABLE_SPEC_V2": "True"} if version == "0.5.9" else {}
    assert report["profile"]["set"] == {"PROFILED": "yes", **v2}
    assert report["profile"]["kept"] == {"OMP_NUM_THREADS": "32"}
    assert "OMP_NUM_THREADS=32 was set and stays" in done.stderr
    assert "adds the server argument speculative_algorithm='NEXTN'" in done.stderr


def test_a_profiles_variables_reach_the_children(site, launch, profile):
    site("0.5.9", shows=SHOWS)
    done, reports = launch(*LAUNCHER, "--model", "X", GLM5_PROFILE=profile, GLM5_PLUGINS="shows")
    assert "scheduler sees ['yes', '8', 'True']" in done.stdout
    assert reports["scheduler"]["profile"]["set"] == {}


@pytest.mark.parametrize(("way", "late"), [(ENTRY_POINT, {"PROFILED", "OMP_NUM_THREADS"}), (LAUNCHER, set())])
def test_what_comes_too_late_for_the_main_process_is_said(site, launch, profile, way, late):
    """By the entry point, SGLang is imported first."""
    site("0.5.23")
    done, reports = launch(*way, "--model", "X", GLM5_PROFILE=profile)
    assert set(reports["main"]["profile"]["late"]) == late
    assert ("too late for what this process has loaded already" in done.stderr) == bool(late)


def test_the_user_wins_over_the_profile(site, launch, profile):
    site("0.5.23")
    typed = ("--model", "X", "--tp-size=2", "--speculative-algo", "EAGLE")
    done, reports = launch(*LAUNCHER, *typed, GLM5_PROFILE=profile, GLM5_EP_SIZE="2")
    assert "'ep_size': 2" in done.stdout
    assert "'tp_size': 2" in done.stdout
    assert "'speculative_algorithm': 'EAGLE'" in done.stdout
    assert "2 GPUs are few: Give --tp-size 8." in reports["main"]["notes"][0]


def test_a_rule_of_a_profile_stops_the_main_process(site, launch, profile):
    site("0.5.23")
    done, _ = launch(*LAUNCHER, "--model", "X", "--tp-size", "16", GLM5_PROFILE=profile)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "glm5-plugins: The profile 'mine' refuses this launch: there are no 16 GPUs.\n  Give --tp-size 8.\n"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("GLM5_EP_SIZE", "GLM5_EP_SIZ"), "Did you mean 'GLM5_EP_SIZE'?"),
        (('GLM5_EP_SIZE = "4"', 'GLM5_EP_SIZE = "x"'), "The profile's GLM5_EP_SIZE='x' is not valid"),
        (('plugins = ["ep"]', 'plugins = ["epp"]'), "unknown plugin 'epp'"),
        (("loader_extra_config", "loader_extra_confg"), "Did you mean 'model_loader_extra_config'?"),
    ],
)
def test_a_mistake_in_a_profile_stops_the_launch(site, launch, profile, change, says):
    site("0.5.23")
    Path(profile).write_text(PROFILE.replace(*change, 1))
    done, _ = launch(*LAUNCHER, "--model", "X", GLM5_PROFILE=profile)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_is_given_the_profile_too(site, run, profile):
    site("0.5.23")
    out = run(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.entrypoints.engine import Engine
        print(sorted(Engine(model_path="x", tp_size=4).server_args.__dict__.items()))
        """,
        env={"GLM5_PROFILE": profile},
    ).stdout
    assert "('ep_size', 4)" in out
    assert "('tp_size', 4)" in out
