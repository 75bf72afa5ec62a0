"""Merging reports: which processes belong to one launch, what differs, and what a broken folder does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glm5_plugins import merging
from glm5_plugins.cli import main


def report(pid: int, role: str, *, host: str = "a", server: int = 1, rank: int | None = None, **changed) -> dict:
    ranks = [{"rank": 0, "host": "a", "pid": 10}, {"rank": 1, "host": "b", "pid": 11}]
    row = {"plugin": "probe", "target": "m:f", "verdict": "applied", "reason": "why", "fired": 2, "summary": "s"}
    return {
        "process": {"pid": pid, "parent": server, "server": server, "role": role, "host": host}
        | {"started": 100.0, "written": 200.0},
        "layer": {"version": "0.1.0", "plugins": ["probe"], "way": "launcher", "on_error": "strict"},
        "versions": {"sglang": "0.5.23", "torch": None},
        "stage": "ready",
        "agreement": {"state": "agreed", "reason": "", "rank": rank, "ranks": ranks if rank is not None else []},
        "rows": [row | changed],
        "notes": [],
    }


def two_nodes(**changed) -> list[dict]:
    """Two nodes with a main process each; one rank on each."""
    return [
        report(1, "main", verdict="waiting", fired=0),
        report(10, "scheduler", rank=0),
        report(2, "main", host="b", server=2, verdict="waiting", fired=0),
        report(11, "scheduler", host="b", server=2, rank=1, **changed),
    ]


@pytest.fixture
def folder(tmp_path: Path):
    def write(*documents: dict) -> Path:
        for number, document in enumerate(documents):
            (tmp_path / f"{number}.json").write_text(json.dumps(document))
        return tmp_path

    return write


def test_nodes_are_one_launch_by_the_ranks_that_compared(folder):
    (launch,), problems = merging.read(folder(*two_nodes()))
    assert problems == []
    assert [(one.role, one.host) for one in launch.processes] == [
        ("main", "a"),
        ("main", "b"),
        ("scheduler", "a"),
        ("scheduler", "b"),
    ]
    assert launch.healthy
    applied, waiting = launch.lines
    assert (applied.where, applied.fired) == ("scheduler 0-1", 4)
    assert waiting.where == "main (of 2 processes)"


def test_a_verdict_that_differs_between_ranks_comes_first(folder):
    (launch,), _ = merging.read(folder(*two_nodes(verdict="drifted", reason="gone")))
    assert not launch.healthy
    (difference,) = launch.differences
    assert difference.name == "the verdict of probe on m:f"
    assert [value for value, _ in difference.values] == ["applied", "drifted"]
    assert launch.lines[0].verdict.value == "drifted"
    assert [line.differs for line in launch.lines] == [True, True, True]


def test_ranks_that_are_no_list_put_nothing_together(folder):
    documents = two_nodes()
    documents[1]["agreement"]["ranks"] = 1
    documents[3]["agreement"]["ranks"] = {"rank": 0}
    launches, problems = merging.read(folder(*documents))
    assert problems == []
    assert [[one.pid for one in launch.processes] for launch in launches] == [[1, 10], [2, 11]]


def test_another_version_on_one_node_is_a_difference_of_all_its_processes(folder):
    documents = two_nodes()
    for document in documents[2:]:
        document["versions"] = {"sglang": "0.5.22", "torch": None}
    (launch,), _ = merging.read(folder(*documents))
    (difference,) = launch.differences
    assert difference.name == "the version of sglang"
    assert [len(at) for _, at in difference.values] == [2, 2]


def test_launches_in_one_folder_are_kept_apart_and_the_newest_counts(folder, capsys):
    old = [report(5, "main", server=5), report(6, "scheduler", server=5, verdict="failed")]
    for document in old:
        document["process"]["started"] = 50.0
    path = folder(*old, *two_nodes())
    launches, _ = merging.read(path)
    assert [launch.healthy for launch in launches] == [True, False]
    assert main(["report", str(path)]) == 0
    assert "An earlier launch" in capsys.readouterr().out


def test_a_clock_that_jumped_back_loses_nothing(folder):
    """A process that seems to have written before it started, and a child older than its parent."""
    documents = two_nodes()
    documents[1]["process"] |= {"started": 90.0, "written": 5.0}
    (launch,), problems = merging.read(folder(*documents))
    assert problems == []
    assert len(launch.processes) == 4


def test_of_a_process_that_reports_several_times_the_last_line_counts(tmp_path):
    lines = [report(1, "main", verdict="waiting"), report(1, "main", verdict="applied")]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (launch,), _ = merging.read(file)
    assert [line.verdict.value for line in launch.lines] == ["applied"]


def test_what_cannot_be_read_is_left_out_by_name(folder, monkeypatch):
    path = folder(*two_nodes())
    (path / "torn.json").write_text('{"process": {"pid"')
    (path / "other.json").write_text('{"a": 1}')
    (path / "list.json").write_text("[[[]]]")
    (path / "verdict.json").write_text(json.dumps(report(7, "main", verdict="fine")))
    (path / ".glm5-a-main-1.json.1234").write_text("{")
    (path / "readme.txt").write_text("hello")
    (path / "large.json").write_bytes(b"x" * 5000)
    (path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (path / "deep.json").write_text("[" * 4000)
    os.mkfifo(path / "pipe.json")
    (path / "loop.json").symlink_to("loop.json")
    (path / "folder.json").mkdir()
    monkeypatch.setattr(merging, "MOST_BYTES", 4500)
    (launch,), problems = merging.read(path)
    assert len(launch.processes) == 4
    left_out = {problem.partition(":")[0] for problem in problems}
    names = ("torn", "other", "list", "verdict", "large", "bytes", "deep", "pipe", "loop", "folder")
    assert left_out == {f"{name}.json" for name in names}


def test_the_table_says_differences_first(folder, capsys):
    path = folder(*two_nodes(verdict="failed", reason="ValueError: no"))
    assert main(["report", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Differences"
    assert lines[1].strip() == "the verdict of probe on m:f"
    assert lines[2].split() == ["failed", "scheduler", "rank", "1", "on", "b", "(pid", "11)"]
    (head,) = [number for number, line in enumerate(lines) if "PLUGIN" in line]
    assert lines[head + 1].split()[:4] == ["!", "probe", "m:f", "failed"]


def test_json_says_the_same(folder, capsys):
    path = folder(*two_nodes(verdict="failed", reason="ValueError: no"))
    assert main(["report", "--json", str(path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["launches"][0]["differences"][0]["values"][1] == {
        "value": "failed",
        "at": ["scheduler rank 1 on b (pid 11)"],
    }


@pytest.mark.parametrize("argument", ["nowhere", "a\0b"])
def test_a_path_that_is_none_is_wrong_usage(argument, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", argument]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert repr(argument) in error[0]
    assert "GLM5_REPORT" in error[1]


def test_an_empty_folder_is_said(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no report" in capsys.readouterr().out
