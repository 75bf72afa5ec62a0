"""The report of one process: whole or not at all, for its owner's eyes, through nobody's link."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from glm5_plugins import report as module
from glm5_plugins.report import Report


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def warnings(report: Report) -> list[str]:
    return [text for _, text in report._pending]


def test_a_file_for_each_process_that_names_host_role_and_pid(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HOST", "node-1/../x")
    Report(tmp_path).write("main", 1, {"a": 1})
    assert only(tmp_path).name == f"glm5-node-1_.._x-main-{os.getpid()}.json"
    assert json.loads(only(tmp_path).read_text())["a"] == 1


@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("name", ["new/reports", "new/all.jsonl"])
def test_what_is_made_is_for_its_owner_alone(tmp_path, name, umask):
    before = os.umask(umask)
    try:
        Report(tmp_path / name).write("main", 1, {})
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o600]
    assert stat.S_IMODE(made[0].parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("form", ["folder", "file"])
def test_no_link_is_followed_into_another_file(tmp_path, form):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    reports = tmp_path / "reports"
    reports.mkdir()
    name = f"glm5-{module._in_a_name(module.HOST)}-main-{os.getpid()}.json" if form == "folder" else "all.jsonl"
    (reports / name).symlink_to(precious)
    report = Report(reports if form == "folder" else reports / name)
    report.write("main", 1, {})
    assert precious.read_text() == "mine"
    if form == "folder":
        assert not (reports / name).is_symlink(), "the link was replaced by the report"
    else:
        assert "cannot be written" in warnings(report)[0]


def test_a_second_name_of_another_file_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    os.link(tmp_path / "precious", tmp_path / "all.jsonl")
    report = Report(tmp_path / "all.jsonl")
    report.write("main", 1, {})
    assert (tmp_path / "precious").read_text() == "mine"
    assert "not a regular file of its own" in warnings(report)[0]


def test_a_pipe_that_nobody_reads_does_not_hold_the_server_up(tmp_path):
    os.mkfifo(tmp_path / "all.jsonl")
    report = Report(tmp_path / "all.jsonl")
    report.write("main", 1, {})
    assert "cannot be written" in warnings(report)[0]


def test_a_lock_that_is_never_given_up_does_not_either(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_TRIES", 3)
    code = f"import fcntl, time; f = open({str(tmp_path / 'all.jsonl')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        report = Report(tmp_path / "all.jsonl")
        report.write("main", 1, {})
        assert "another process keeps it locked" in warnings(report)[0]
    finally:
        holder.kill()
        holder.communicate()
    # The kernel gives the lock of a killed process up.
    report.write("main", 1, {})
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    report = Report(tmp_path / "reports")
    report.write("main", 1, {"n": 1})
    only(tmp_path / "reports").unlink()
    (tmp_path / "reports").rmdir()
    report.write("main", 1, {"n": 2})
    assert json.loads(only(tmp_path / "reports").read_text())["n"] == 2
    assert warnings(report) == []


FULL = """
import resource, signal, sys
from pathlib import Path
from glm5_plugins.report import Report
path = Path(sys.argv[1])
report = Report(path)
report.write("main", 1, {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = 0 if path.suffix == "" else path.stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
for n in (2, 3): report.write("main", 1, {"n": n, "much": "x" * 10_000})
print([text for _, text in report._pending])
"""


@pytest.mark.parametrize("name", ["reports", "all.jsonl"])
def test_a_full_disk_leaves_the_last_whole_report_and_is_said_once(tmp_path, name):
    """The limit on file sizes stops a write half way, as a full disk does."""
    (tmp_path / "full.py").write_text(FULL)
    argv = [sys.executable, str(tmp_path / "full.py"), str(tmp_path / "out" / name)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("cannot be written") == 1, done.stderr
    assert "File too large" in done.stdout
    left = only(tmp_path / "out" / name) if name == "reports" else tmp_path / "out" / name
    assert [json.loads(line)["n"] for line in left.read_text().splitlines()] == [1]


def test_where_files_need_a_name_from_the_start(tmp_path, monkeypatch):
    """Network file systems have no O_TMPFILE."""
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    Report(tmp_path).write("main", 1, {"n": 1})
    assert json.loads(only(tmp_path).read_text())["n"] == 1


WRITER = """
import sys
from pathlib import Path
from glm5_plugins.report import Report
report = Report(Path(sys.argv[1]))
print("ready", flush=True)
while True: report.write("main", 1, {"much": "x" * 200_000})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["reports", "all.jsonl"])
def test_whoever_is_ended_while_it_writes_leaves_whole_reports(tmp_path, name, number):
    """Every file of a report's name is whole, on any file system; a line that was cut off is seen as such."""
    (tmp_path / "writer.py").write_text(WRITER)
    out = tmp_path / "out" / name
    for delay in (0.0, 0.003, 0.01, 0.02):
        argv = [sys.executable, str(tmp_path / "writer.py"), str(out)]
        writer = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(number)
        writer.communicate(timeout=30)
    if name == "reports":
        for path in out.glob("glm5-*"):
            json.loads(path.read_text())
    elif out.exists():
        Report(out).write("main", 1, {"n": 1})
        assert json.loads(out.read_text().splitlines()[-1])["n"] == 1


def test_a_line_that_was_cut_off_does_not_take_the_next_with_it(tmp_path):
    (tmp_path / "all.jsonl").write_text('{"n": 1}\n{"n": ')
    Report(tmp_path / "all.jsonl").write("main", 1, {"n": 3})
    first, torn, last = (tmp_path / "all.jsonl").read_text().splitlines()
    assert (first, torn, json.loads(last)["n"]) == ('{"n": 1}', '{"n": ', 3)


def test_processes_that_append_at_once_do_not_mix(tmp_path):
    code = f"""
        from pathlib import Path
        from glm5_plugins import report
        from glm5_plugins.report import Report
        report._LOCK_TRIES = 3000  # 30 s on a busy machine
        for n in range(50): Report(Path({str(tmp_path / "all.jsonl")!r})).write("main", 1, {{"much": "x" * 20_000}})
    """
    writers = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 200
    assert len({line["process"]["pid"] for line in lines}) == 4


def test_a_clock_that_jumps_back_is_no_error(tmp_path, monkeypatch):
    report = Report(tmp_path)
    monkeypatch.setattr(time, "time", lambda: report.started - 3600)
    report.write("main", 1, {})
    times = json.loads(only(tmp_path).read_text())["process"]
    assert times["written"] < times["started"]
