"""A whole campaign on real servers: three arms, one of which does not start, driven by SGLang's own benchmark.

Nine starts and twelve benchmark runs take some eight minutes on two free cores: `tox -e campaign` runs it, the
`server-` environments have not what the benchmark imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

for _package in ("datasets", "matplotlib", "scipy"):
    pytest.importorskip(_package, reason="for `tox -e campaign`")
psutil = pytest.importorskip("psutil", reason="for `tox -e campaign`")

from glm5_plugins import cli  # noqa: E402
from glm5_plugins.campaign.journal import Journal  # noqa: E402
from glm5_plugins.campaign.report import load  # noqa: E402
from tests.support.server import CPU_ARGS, cpu_environment  # noqa: E402

PLAN = """
name = "tiny"
rounds = 3
[server]
model = "{model}"
args = "{args}"
start_timeout_s = 300
[server.env]
{env}
[bench]
concurrency = [1, 4]
min_requests = 4
[[bench.shapes]]
name = "short"
input = 32
output = 8
[[arms]]
name = "baseline"
[[arms]]
name = "cuda_version"
plugins = ["cuda_version"]
[[arms]]
name = "old-flag"
plugins = ["no_fullgraph"]
args = "--fp4-gemm-backend cutlass"
"""


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a campaign that was run by its command."""
    where = tmp_path_factory.mktemp("campaign")
    variables = {**cpu_environment(Path(sys.executable)), "STARTED_BY": str(where)}
    env = "\n".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
    plan = where / "plan.toml"
    plan.write_text(PLAN.format(model=tiny_model, args=" ".join(CPU_ARGS), env=env), encoding="utf-8")
    assert cli.main(["campaign", str(plan), "--out", str(where / "out")]) == cli.NOT_IN_FORCE
    environments = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
    assert not [one for one in environments if one.get("STARTED_BY") == str(where)], "some processes outlived it"
    return where / "out"


def test_every_start_and_run_is_in_the_journal(folder: Path) -> None:
    journal = Journal(folder / "runs.jsonl")
    assert [(start.round, start.arm, start.ok) for start in journal.starts] == [
        *((0, "baseline", True), (0, "cuda_version", True), (0, "old-flag", False)),
        *((1, "cuda_version", True), (1, "baseline", True)),
        *((2, "baseline", True), (2, "cuda_version", True)),
    ]
    assert len(journal.runs) == 3 * 2 * 2
    for run in journal.runs:
        assert run.ok, run.reason
        assert run.metrics["total_output_tokens"] == run.metrics["completed"] * 8
        assert run.metrics["output_throughput"] > 0
        assert run.metrics["median_ttft_ms"] > 0
    assert load(folder).complete


def test_the_arm_that_does_not_start_is_told_with_its_cause(folder: Path) -> None:
    (failed,) = [start for start in Journal(folder / "runs.jsonl").starts if not start.ok]
    assert failed.diagnosis is not None
    assert failed.diagnosis["name"] == "value not allowed for a flag"
    assert "invalid choice: 'cutlass'" in (folder / failed.log).read_text(encoding="utf-8")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<strong>old-flag</strong> did not start: value not allowed for a flag." in page


def test_the_report_is_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table's ratios are those of the journal, and the page has its plots inside."""
    assert cli.main(["campaign", str(folder), "--report-only", "--json"]) == cli.NOT_IN_FORCE
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    rows = report["decisions"]["rows"]
    assert [row[:2] for row in rows] == [
        ["cuda_version", "short x1"],
        ["cuda_version", "short x4"],
        ["old-flag", "all"],
    ]
    runs = Journal(folder / "runs.jsonl").runs
    for row in rows[:2]:
        level = int(row[1].rpartition("x")[2])
        product = 1.0
        for number in range(3):
            ours, theirs = (
                next(
                    run.metrics["output_throughput"]
                    for run in runs
                    if (run.round, run.arm, run.concurrency) == (number, arm, level)
                )
                for arm in ("cuda_version", "baseline")
            )
            product *= ours / theirs
        assert float(row[2]) == pytest.approx(product ** (1 / 3), abs=6e-4)
        assert row[4] == "3"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/svg+xml;base64,') == 2
    assert "http" not in page.replace("https://", "").replace("http://www.w3.org", "").partition("<body>")[0]


def test_the_baseline_runs_without_the_layer(folder: Path) -> None:
    log = (folder / "starts/round-1-baseline/server.log").read_text(encoding="utf-8")
    assert "glm5-plugins:" not in log
    in_force = {record.arm: record.rows for record in Journal(folder / "runs.jsonl").in_force}
    assert in_force["baseline"] == []
    assert {row["plugin"] for row in in_force["cuda_version"]} == {"cuda_version"}
