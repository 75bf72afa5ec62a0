"""Whole campaigns on a made-up SGLang: order, failures, interrupts, and that only its own processes are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

psutil = pytest.importorskip("psutil", reason="the extra `campaign` brings it")

from glm5_plugins.campaign import bench  # noqa: E402
from glm5_plugins.campaign.journal import Journal  # noqa: E402
from glm5_plugins.campaign.plan import Arm, Bench, Plan, Server, Shape  # noqa: E402
from glm5_plugins.campaign.progress import Progress  # noqa: E402
from glm5_plugins.campaign.report import Result, build, load  # noqa: E402
from glm5_plugins.campaign.run import Campaign, Stopped  # noqa: E402
from glm5_plugins.campaign.server import Server as ServerProcess  # noqa: E402
from glm5_plugins.campaign.server import _remember, end_left_over  # noqa: E402
from glm5_plugins.errors import ConfigurationError  # noqa: E402
from tests.fakes import serving  # noqa: E402

MakePlan = Callable[..., Plan]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return serving.write(tmp_path / "site")


@pytest.fixture
def make(tmp_path: Path, site: Path) -> MakePlan:
    def make(*arms: Arm, rounds: int = 2, timeout: float = 20, env: dict[str, str] | None = None) -> Plan:
        variables = {"PYTHONPATH": str(site), "PIDS": str(tmp_path / "pids"), **(env or {})}
        return Plan(
            name="made-up",
            rounds=rounds,
            server=Server(model="tiny", env=variables, start_timeout_s=timeout),
            bench=Bench(shapes=(Shape(name="chat", input=8, output=4),), concurrency=(1, 2), min_requests=2),
            arms=arms or (Arm(name="baseline"), Arm(name="fast", args=("--speed", "200"))),
        )

    return make


@pytest.fixture(autouse=True)
def nobody_is_left(tmp_path: Path) -> Iterator[None]:
    """No test leaves a server or its child behind."""
    yield
    left = [pid for pid in started(tmp_path) if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def started(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(plan: Plan, folder: Path, *, retry_failed: bool = False) -> Journal:
    with open(os.devnull, "w") as silent:
        return Campaign(plan, folder, retry_failed=retry_failed, progress=Progress(silent)).run()


def test_every_round_starts_every_arm_and_drives_it(make: MakePlan, tmp_path: Path) -> None:
    journal = run(make(), tmp_path / "out")
    assert [(start.round, start.arm) for start in journal.starts] == [
        *((0, "baseline"), (0, "fast")),
        *((1, "fast"), (1, "baseline")),
    ]
    assert all(start.ok for start in journal.starts)
    assert len(journal.runs) == 2 * 2 * 2
    speeds = {(r.arm, r.concurrency): r.metrics["output_throughput"] for r in journal.runs}
    assert speeds["fast", 2] == pytest.approx(400, rel=0.02)
    assert load(tmp_path / "out").complete


def test_arms_of_a_round_get_the_same_prompts_and_no_two_runs_of_an_arm_do(make: MakePlan, tmp_path: Path) -> None:
    """The made-up benchmark's noise comes from the seed alone: equal arms have equal figures, round by round."""
    journal = run(make(Arm(name="a"), Arm(name="b")), tmp_path / "out")
    figures = {(r.arm, r.round, r.concurrency): r.metrics["output_throughput"] for r in journal.runs}
    ours = [figures["a", number, level] for number in range(2) for level in (1, 2)]
    assert ours == [figures["b", number, level] for number in range(2) for level in (1, 2)]
    assert len({round(value, 9) for value in ours}) == len(ours)


def test_an_arm_that_does_not_start_is_a_result(make: MakePlan, tmp_path: Path) -> None:
    """Its log is kept, its cause named, it is not tried again, and the others go on."""
    plan = make(Arm(name="baseline"), Arm(name="broken", args=("--die",)), Arm(name="flag", args=("--no-such-flag",)))
    journal = run(plan, tmp_path / "out")
    failed = {start.arm: start for start in journal.starts if not start.ok}
    assert sorted(failed) == ["broken", "flag"]
    assert len([start for start in journal.starts if start.arm == "broken"]) == 1
    assert failed["broken"].reason.startswith("the server ended with status 1")
    broken, flag = failed["broken"].diagnosis, failed["flag"].diagnosis
    assert broken is not None
    assert flag is not None
    assert broken["name"] == "a Python module is missing"
    assert (flag["name"], "--no-such-flag" in flag["cause"]) == ("unknown flag", True)
    assert "No module named 'vllm'" in (tmp_path / "out" / failed["broken"].log).read_text()
    assert len([run for run in journal.runs if run.arm == "baseline"]) == 4
    report = build(load(tmp_path / "out"))
    assert [failure.title for failure in report.failures] == ["broken, round 1", "flag, round 1"]
    assert "**broken** did not start: a Python module is missing." in report.summary


def test_a_baseline_that_does_not_start_ends_the_campaign(make: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=r"(?s)The baseline 'base' does not start, .*'vllm' is not installed.*--retry"):
        run(make(Arm(name="base", args=("--die",)), Arm(name="other")), tmp_path / "out")


def test_a_silent_server_is_given_up_and_ended(make: MakePlan, tmp_path: Path) -> None:
    plan = make(Arm(name="baseline"), Arm(name="silent", args=("--silent",)), rounds=1, timeout=10)
    journal = run(plan, tmp_path / "out")
    (failed,) = [start for start in journal.starts if not start.ok]
    assert failed.reason == "the server did not answer within 10 s"


def test_a_server_that_ignores_sigterm_is_killed_with_its_child(
    make: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = ServerProcess.stop
    monkeypatch.setattr(ServerProcess, "stop", lambda self: stop(self, grace=1))
    plan = make(Arm(name="baseline", args=("--stubborn",)), Arm(name="other"), rounds=1)
    journal = run(plan, tmp_path / "out")
    assert all(start.ok for start in journal.starts)


def test_a_server_that_dies_in_a_run_is_told(make: MakePlan, tmp_path: Path) -> None:
    plan = make(Arm(name="baseline"), Arm(name="mortal", args=("--die-in-run",)), rounds=1)
    journal = run(plan, tmp_path / "out")
    (failed,) = [run for run in journal.runs if not run.ok]
    assert "the server ended with status 3 during the run" in failed.reason
    assert any("mortal, round 1, chat x1: the server ended" in line for line in build(load(tmp_path / "out")).troubles)


def test_a_run_with_dropped_requests_does_not_count(make: MakePlan, tmp_path: Path) -> None:
    """A server that refuses half of the requests would look twice as fast."""
    journal = run(make(env={"BENCH_DROPS": "1"}, rounds=1), tmp_path / "out")
    assert {(run.ok, run.reason) for run in journal.runs if run.concurrency == 1} == {(False, "1 of 4 requests failed")}


def test_the_arm_alone_decides_what_of_the_layer_runs(
    make: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of whoever runs the campaign do not leak into an arm, and a baseline has none at all."""
    monkeypatch.setenv("GLM5_PLUGINS", "fp4_warmup")
    plan = make(Arm(name="baseline"), Arm(name="with", plugins=("cuda_version",)), rounds=1)
    run(plan, tmp_path / "out")
    logs = {arm: (tmp_path / f"out/starts/round-1-{arm}/server.log").read_text() for arm in ("baseline", "with")}
    assert logs["baseline"].rstrip().endswith("[]")
    assert logs["with"].rstrip().endswith("['GLM5_PLUGINS', 'GLM5_REPORT']")
    rows = [row for record in load(tmp_path / "out").journal.in_force for row in record.rows]
    assert rows == [{"plugin": "cuda_version", "target": "a:b", "verdict": "applied", "fired": 1}]


def test_an_arm_whose_plugins_nobody_reports_has_not_started(make: MakePlan, tmp_path: Path) -> None:
    """Before 0.5.11 SGLang loads no plugins by itself: that arm would be a second baseline."""
    deaf = Arm(name="deaf", plugins=("cuda_version",), env={"GLM5_NO_WAY_IN": "1"})
    journal = run(make(Arm(name="baseline"), deaf, rounds=1), tmp_path / "out")
    (failed,) = [start for start in journal.starts if not start.ok]
    assert "the layer did not get in" in failed.reason
    assert "glm5_plugins.launch" in failed.reason


def test_what_was_not_in_force_cannot_pay(make: MakePlan, tmp_path: Path) -> None:
    """Twice as fast, and yet not the plugin's doing: its patch was not needed."""
    idle = Arm(name="idle", plugins=("cuda_version",), env={"GLM5_VERDICT": "not needed"})
    plan = make(Arm(name="baseline"), idle, rounds=3)
    journal = run(plan, tmp_path / "out")
    assert [run.reason for run in journal.runs if not run.ok] == []
    result = load(tmp_path / "out")
    report = build(_with_speed(result, "idle", 2.0))
    assert {row[5] for row in report.decisions.rows} == {"cannot tell"}
    assert any("nothing of it was in force (cuda_version: not needed)" in line for line in report.troubles)


def _with_speed(result: Result, arm: str, factor: float) -> Result:
    from dataclasses import replace

    records = [
        replace(one, metrics={**one.metrics, "output_throughput": one.metrics["output_throughput"] * factor})
        if one.kind == "run" and one.arm == arm  # type: ignore[union-attr]
        else one
        for one in result.journal.records
    ]
    result.journal.records[:] = records  # type: ignore[assignment]
    return result


def test_going_on_does_only_what_is_missing(make: MakePlan, tmp_path: Path) -> None:
    plan, out = make(), tmp_path / "out"
    whole = run(plan, out)
    lines = (out / "runs.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"round": 1' not in line or '"arm": "fast"' in line]
    (out / "runs.jsonl").write_text("".join(kept) + '{"kind": "run", "round": 1, "arm": "base')  # cut off
    before = len(started(tmp_path))
    journal = run(plan, out)
    assert len(started(tmp_path)) - before == 2  # one server and its child
    key = lambda run: (run.round, run.arm, str(run.cell))  # noqa: E731
    assert sorted(map(key, journal.runs)) == sorted(map(key, whole.runs))
    assert sorted(map(key, Journal(out / "runs.jsonl").runs)) == sorted(map(key, whole.runs))
    assert (out / "starts/round-2-baseline-again-1").is_dir()
    assert run(plan, out).records == journal.records  # nothing left to do


def test_what_failed_is_tried_again_when_asked(make: MakePlan, tmp_path: Path) -> None:
    broken = Arm(name="broken", args=("--die",))
    plan, out = make(Arm(name="baseline"), broken, rounds=1), tmp_path / "out"
    run(plan, out)
    assert len(run(plan, out).starts) == 2
    assert len(run(plan, out, retry_failed=True).starts) == 3


def test_an_arm_that_starts_at_the_second_try_is_in_again(make: MakePlan, tmp_path: Path, site: Path) -> None:
    """A disk that was full, a port that was taken: what is mended is no failure any more."""
    plan, out = make(rounds=2), tmp_path / "out"
    launcher = site / "sglang" / "launch_server.py"
    good = launcher.read_text()
    launcher.write_text("import sys\nif '200' in sys.argv: sys.exit('out of order')\n" + good)
    assert run(plan, out).given_up == {"fast"}
    launcher.write_text(good)
    assert len(run(plan, out).starts) == 3
    journal = run(plan, out, retry_failed=True)
    assert journal.given_up == set()
    assert load(out).complete
    assert build(load(out)).failures == ()


def test_another_plan_is_refused(make: MakePlan, tmp_path: Path) -> None:
    run(make(rounds=1), tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"(?s)plan\.rounds was 1, is 2.*bend the statistics"):
        run(make(rounds=2), tmp_path / "out")


def test_another_version_is_refused(make: MakePlan, tmp_path: Path, site: Path) -> None:
    plan = make(rounds=1)
    run(plan, tmp_path / "out")
    info = site / "sglang-0.5.23.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    with pytest.raises(ConfigurationError, match=r'versions\.sglang was "0\.5\.23", is "0\.5\.22"'):
        run(plan, tmp_path / "out")


def test_an_interrupted_campaign_leaves_nothing_running_and_goes_on(make: MakePlan, tmp_path: Path) -> None:
    """SIGINT and SIGTERM in the middle of a run: the server and its child are ended, then the rest is done."""
    plan = make(rounds=1, env={"BENCH_SECONDS": "2"})
    out = tmp_path / "out"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = _elsewhere(plan, out, tmp_path)
        _until(lambda: bool(list(out.glob("starts/*/bench-*.log"))))
        pids = started(tmp_path)
        process.send_signal(number)
        assert process.wait(120) == 130
        assert not any(alive(pid) for pid in pids)
        assert not (out / "running.json").exists()
        for log in out.glob("starts/*/bench-*.log"):
            log.unlink()
    assert len(run(plan, out).runs) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_server_is_ended_waits_for_that_and_ends_the_campaign(
    make: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stop = ServerProcess.stop

    def interrupted(self: ServerProcess) -> None:
        os.kill(os.getpid(), number)
        stop(self)

    monkeypatch.setattr(ServerProcess, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(make(rounds=1), tmp_path / "out")
    assert [start.arm for start in Journal(tmp_path / "out" / "runs.jsonl").starts] == ["baseline"]
    assert not any(alive(pid) for pid in started(tmp_path))


def _serve(folder: Path, argv: list[str]) -> None:
    server = ServerProcess(argv, os.environ, folder / "log", folder / "running.json")
    try:
        server.start()
    finally:
        server.stop()


def _drive(folder: Path, argv: list[str]) -> None:
    bench.run(argv, os.environ, folder / "log", folder / "out.jsonl", 1, 60, lambda seconds: None)


@pytest.mark.parametrize("start", [_serve, _drive])
def test_an_interrupt_while_a_process_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path, list[str]], None]
) -> None:
    made = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            made.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"])
        assert [alive(pid) for pid in made] == [False]
    finally:
        for pid in filter(alive, made):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_campaign_ends_its_old_server_when_it_goes_on(make: MakePlan, tmp_path: Path) -> None:
    plan, out = make(rounds=1, env={"BENCH_SECONDS": "3"}), tmp_path / "out"
    process = _elsewhere(plan, out, tmp_path)
    _until(lambda: bool(list(out.glob("starts/*/bench-*.log"))))
    process.kill()
    process.wait(10)
    orphans = started(tmp_path)
    assert all(alive(pid) for pid in orphans)
    run(plan, out)
    assert not any(alive(pid) for pid in orphans)


def test_one_campaign_at_a_time_in_a_folder(make: MakePlan, tmp_path: Path) -> None:
    plan, out = make(rounds=1, env={"BENCH_SECONDS": "2"}), tmp_path / "out"
    process = _elsewhere(plan, out, tmp_path)
    _until(lambda: (out / "running.json").exists())
    with pytest.raises(ConfigurationError, match="Another campaign is running"):
        run(plan, out)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130


@pytest.mark.parametrize("out", ["a_file", "a_file/out", "no_lock"])
def test_a_folder_that_cannot_be_written_is_named(make: MakePlan, tmp_path: Path, out: str) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "no_lock/.lock").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=f"The folder {tmp_path / out} cannot be written: ") as refused:
        Campaign(make(), tmp_path / out).run()
    assert refused.value.mend == "Give another --out."


def test_a_process_that_only_has_the_pid_is_left_alone(tmp_path: Path) -> None:
    """The pid in the note belongs to somebody else by now: its start time differs."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        note = tmp_path / "running.json"
        _remember(note, [psutil.Process()])
        ((_, started),) = json.loads(note.read_text())
        note.write_text(json.dumps([[stranger.pid, started]]))
        assert end_left_over(note) == 0
        assert stranger.poll() is None
        assert not note.exists()
        note.write_text("no json")
        assert end_left_over(note) == 0
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_that_took_the_pid_of_one_that_ended_is_not_noted(tmp_path: Path) -> None:
    note = tmp_path / "running.json"
    ended = SimpleNamespace(pid=os.getpid(), is_running=lambda: False)
    _remember(note, [ended])
    assert json.loads(note.read_text()) == []


def test_a_clock_that_was_set_meanwhile_hides_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel's clock ticks since boot is all that stays: times of day are made of it anew."""
    note = tmp_path / "running.json"
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        _remember(note, [psutil.Process(orphan.pid)])
        create_time = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
        assert end_left_over(note) == 1
    finally:
        orphan.kill()
        orphan.wait()


def test_the_servers_secrets_do_not_stay(make: MakePlan, tmp_path: Path) -> None:
    """The benchmark's own result holds the server's whole configuration."""
    run(make(rounds=1), tmp_path / "out")
    assert not any(b"hush-hush" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())


def _elsewhere(plan: Plan, out: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Run the campaign by its command in another process, so that it can be interrupted."""
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    code = (
        "import pathlib, sys\n"
        "from glm5_plugins import cli\n"
        "from glm5_plugins.campaign import plan\n"
        "plan.read = lambda path: plan.Plan.model_validate_json(path.read_text())\n"
        f"sys.exit(cli.main(['campaign', {str(path)!r}, '--out', {str(out)!r}]))\n"
    )
    with (tmp_path / "elsewhere.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log, start_new_session=True)


def _until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
