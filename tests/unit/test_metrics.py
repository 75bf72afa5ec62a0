"""The gauge of plugins in force, as SGLang's collector of all processes reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from glm5_plugins.metrics import verdicts
from glm5_plugins.patching import Verdict
from glm5_plugins.report import Row


def row(plugin: str, verdict: Verdict) -> Row:
    return Row(plugin, "m:f", verdict, verdict.value, "why")


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ((Verdict.APPLIED, Verdict.WAITING), Verdict.APPLIED),
        ((Verdict.NOT_NEEDED, Verdict.APPLIED), Verdict.APPLIED),
        ((Verdict.APPLIED, Verdict.DRIFTED, Verdict.SKIPPED), Verdict.DRIFTED),
        ((Verdict.WAITING, Verdict.NOT_APPLICABLE), Verdict.WAITING),
    ],
)
def test_the_worst_of_a_plugins_rows_speaks_for_it(found, worst):
    assert verdicts(row("p", verdict) for verdict in found) == {"p": worst}


SAY = """
import sys
from glm5_plugins.metrics import publish
from glm5_plugins.patching import Verdict
from glm5_plugins.report import Row
role, *verdicts = sys.argv[1:]
for verdict in verdicts:
    rows = [Row("probe", "m:f", Verdict(verdict), verdict, "why"), Row("idle", "m:g", Verdict.WAITING, "", "why")]
    print(publish(rows, role))
"""
SERVE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def python(code: str, *argv: str, **env: str) -> str:
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_processes_are_told_apart_and_a_verdict_that_no_longer_holds_is_0(tmp_path):
    pytest.importorskip("prometheus_client")
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    assert python(SAY, "main", "applied", **folder) == "None\n"
    python(SAY, "scheduler", "not needed", **folder)  # rank 0
    python(SAY, "scheduler", "not needed", "drifted", **folder)  # rank 1
    lines = [line for line in python(SERVE, **folder).splitlines() if not line.startswith("#")]
    assert sorted(filter(None, lines)) == [
        'glm5:plugin_in_force{plugin="probe",process="main",verdict="applied"} 1.0',
        'glm5:plugin_in_force{plugin="probe",process="scheduler",verdict="drifted"} 0.0',
        'glm5:plugin_in_force{plugin="probe",process="scheduler",verdict="not needed"} 1.0',
    ]


def test_without_a_folder_of_all_processes_it_says_so():
    assert python(SAY, "main", "applied") == "SGLang has not chosen PROMETHEUS_MULTIPROC_DIR in this process\n"


def test_without_the_client_it_says_so(tmp_path):
    hide = "import sys; sys.modules['prometheus_client'] = None\n"
    assert "prometheus_client" in python(hide + SAY, "main", "applied", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
