"""The benchmark's command line and the figures that are taken from its result."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from glm5_plugins.campaign import bench
from glm5_plugins.campaign.plan import Cell
from tests.unit.campaign.synthetic import plan

GOOD = {"completed": 4, "output_throughput": 12.5, "median_ttft_ms": 3.0, "server_info": {"api_key": "x"}}


def test_the_command_is_sglangs_own() -> None:
    argv = bench.command(plan(), Cell("chat", 256), 20000, 7, Path("out.jsonl"))
    pairs = dict(pairwise(argv))
    assert argv[1:3] == ["-m", "sglang.bench_serving"]
    assert (pairs["--max-concurrency"], pairs["--num-prompts"]) == ("256", "1024")
    assert (pairs["--host"], pairs["--dataset-name"], pairs["--seed"]) == ("127.0.0.1", "random-ids", "7")
    assert "--flush-cache" in argv


def test_figures_are_kept_and_configuration_is_not(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("older line\n" + json.dumps({**GOOD, "mean_itl_ms": float("nan")}) + "\n")
    assert bench.figures(path, 4) == {"completed": 4.0, "output_throughput": 12.5, "median_ttft_ms": 3.0}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({**GOOD, "completed": 3}, "1 of 4 requests failed"),
        ({**GOOD, "output_throughput": 0}, "no output throughput"),
        ("", "left no result"),
        ("{", "left no result"),
    ],
)
def test_a_result_that_does_not_compare_is_refused(tmp_path: Path, result: object, reason: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(result if isinstance(result, str) else json.dumps(result))
    with pytest.raises(bench.RunFailed, match=reason):
        bench.figures(path, 4)


def test_no_result_at_all_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(bench.RunFailed, match="left no result"):
        bench.figures(tmp_path / "none", 4)
