"""Every log of `logs/` is read right: `real/` was written by real servers and a real torch, `written/` by hand.

A file's name up to `--` is what has to come out.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from glm5_plugins.diagnosis.reading import Diagnosis, diagnose, diagnose_file
from glm5_plugins.diagnosis.signatures import CATALOGUE

LOGS = sorted((Path(__file__).parent / "logs").rglob("*.log"))

READY = "[2026-05-22 02:11:00] The server is fired up and ready to roll!"

# What other programs put before each line of a log.
WRAPPINGS = {
    "docker logs -t": "2026-11-29T19:48:12.123456789Z ",
    "docker compose": "sglang-1  | ",
    "docker compose logs -t": "sglang-1  | 2026-11-29T19:48:12.123456789Z ",
    "docker service logs": "llm_sglang.1.k3v1q7x9m2c8z4b6n5l0p1o2i@node-17    | ",
    "containerd": "2026-11-29T19:48:12.123456789+01:00 stderr F ",
    "kubectl logs --prefix": "[pod/sglang-0/server] ",
    "kubectl logs --prefix --timestamps": "[pod/sglang-0/server] 2026-11-29T19:48:12.123456789Z ",
    "journalctl": "Nov 29 19:48:12 node-17 python[123]: ",
    "journalctl -o short-precise": "Nov  9 19:48:12.123456 node-17 docker/sglang-1[4123]: ",
    "journalctl -o short-iso": "2026-11-29T19:48:12+0000 node-17 python3.12[123]: ",
    "journalctl -o short-full": "Sun 2026-11-29 19:48:12 UTC node-17 python[123]: ",
    "ts": "Nov 29 19:48:12 ",
    "srun --label": "3: ",
    "torchrun --tee": "[default3]:",
    "ISO time in brackets": "[2026-11-29T19:48:12+00:00] ",
    "a pod's journal": "Nov 29 19:48:12 node-17 k8s_server[123]: [pod/sglang-0/server] sglang-1 | [rank0]: ",
}


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read(name: str) -> Diagnosis:
    (path,) = [path for path in LOGS if path.stem == name]
    return diagnose_file(path)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_first_cause_is_named(path: Path) -> None:
    found = diagnose_file(path)
    expected = path.stem.partition("--")[0]
    assert slug(found.name) == expected, f"{found}\n{found.evidence}"
    if found.verdict == "known":
        assert found.line
        assert found.evidence in path.read_text(encoding="utf-8")
        assert found.cause
        assert found.cure
        assert not re.search(r"\{\w*\}|\(\)|  ", found.cause + found.cure)


@pytest.mark.parametrize("before", WRAPPINGS.values(), ids=WRAPPINGS)
def test_what_others_put_before_each_line_changes_nothing(before: str) -> None:
    for path in LOGS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert diagnose([f"{before}{line}" for line in lines]) == diagnose(lines), path.stem


def test_a_stamp_like_sglangs_is_anothers_where_sglang_writes_none() -> None:
    for path in LOGS:
        lines = path.read_text(encoding="utf-8").splitlines()
        found, expected = diagnose([f"[2026-11-29 19:48:12] {line}" for line in lines]), diagnose(lines)
        assert (found.name, found.line) == (expected.name, expected.line), path.stem


def test_a_stamp_of_sglang_is_no_wrapping() -> None:
    """Not even where all lines have one: without it, what is logged in passing reads as a refusal."""
    stamp = "[2026-05-22 02:11:00]"
    line = f"{stamp} glm5-plugins: cuda_version: applied (early, 3 rebound), fired 1"
    assert diagnose([READY, line]).verdict == "no failure"


def test_every_cause_has_a_log() -> None:
    have = {path.stem.partition("--")[0] for path in LOGS}
    assert {slug(signature.name) for signature in CATALOGUE if not signature.symptom} <= have
    assert len(LOGS) >= 20


def test_names_and_links_are_in_order() -> None:
    names = [signature.name for signature in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(signature.link.startswith("https://") for signature in CATALOGUE if signature.link)


@pytest.mark.parametrize(
    ("log", "frame"),
    [
        ("dynamo-cannot-trace-a-jit-loader", r"flashinfer/jit/cpp_ext\.py:\d+ in get_cuda_path"),
        ("compiler-disable-under-fullgraph", r"/srv/probe\.py:\d+ in forward"),
        ("a-plugin-raised", r"/srv/field_plugins/raises\.py:7 in glm5_model_load"),
        ("a-python-module-is-missing", r"rotary_embedding/base\.py:\d+ in __init__"),
        ("deepgemm-lacks-this-gpu", r"dsa_backend\.py:512 in init_forward_metadata"),
        ("deepgemm-lacks-this-gpu--docker-compose", r"dsa_backend\.py:512 in init_forward_metadata"),
        ("unknown--an-exception-nobody-knows", r"glm_moe_dsa\.py:77 in __init__"),
    ],
)
def test_the_deciding_frame(log: str, frame: str) -> None:
    """Dynamo: the last line it traced. A plugin: its own line. Else: where the first error was raised."""
    assert re.search(frame + "$", read(log).frame), read(log).frame


def test_the_process_that_failed_is_named() -> None:
    assert read("ninja-is-missing--takes-ranks-down").process == "TP2"
    assert read("out-of-memory--kubernetes").process == "TP6"


def test_what_came_later_is_not_the_cause_but_is_told() -> None:
    assert read("ninja-is-missing--takes-ranks-down").later == ("NCCL hangs",)
    assert read("unknown--before-something-known").later == ("NCCL hangs",)


def test_ignorance_is_said_with_the_line() -> None:
    found = read("unknown--an-exception-nobody-knows")
    assert (found.verdict, found.evidence) == ("unknown", "KeyError: 'index_topk_pattern'")
    assert "none that the catalogue knows" in found.cause


def test_a_consequence_alone_is_no_cause() -> None:
    found = read("unknown--only-a-consequence")
    assert found.verdict == "unknown"
    assert "a consequence only (a child process died)" in found.cause
    assert found.stage == "Load weight begin"


@pytest.mark.parametrize("before", [[], [READY]], ids=["starting", "ready"])
def test_a_traceback_without_its_end_is_no_healthy_log(before: list[str]) -> None:
    head = "Traceback (most recent call last):"
    found = diagnose([*before, head, '  File "/sgl/srt/managers/scheduler.py", line 4285, in run_scheduler_process'])
    assert (found.verdict, found.line, found.evidence) == ("unknown", len(before) + 1, head)
    assert "cannot be read" in found.cause


def test_a_traceback_without_its_end_before_the_server_is_ready_did_not_hinder_it() -> None:
    assert diagnose(["Traceback (most recent call last):", READY]).verdict == "no failure"


def test_a_hang_shows_how_far_it_came() -> None:
    found = read("unknown--hangs-at-init")
    assert (found.verdict, found.stage) == ("unknown", "Init torch distributed begin")
    assert found.cause.startswith("The log tells of no failure, and ends before the server was ready. Its last line: [")
    assert "diagnose its log again" in found.cure


def test_an_empty_log_is_no_healthy_one() -> None:
    found = diagnose([])
    assert (found.verdict, found.cause) == ("unknown", "The log is empty.")
    assert "2>&1" in found.cure


def test_a_server_that_is_ready_did_not_fail() -> None:
    assert diagnose([READY]).verdict == "no failure"


def test_a_server_that_starts_again_is_not_ready() -> None:
    found = read("unknown--starts-again")
    assert (found.verdict, found.stage) == ("unknown", "Load weight begin")


def test_the_layers_own_refusal_is_told_in_its_own_words() -> None:
    found = read("glm5-plugins-refused--unknown-plugin")
    assert "unknown plugin 'no_fulgraph'" in found.cause
    assert found.cure == "Did you mean 'no_fullgraph'?"


def test_what_the_layer_logs_in_passing_is_no_refusal() -> None:
    line = "[2026-05-22 02:11:00] glm5-plugins: cuda_version: applied (early, 3 rebound), fired 1"
    assert diagnose([READY, line]).verdict == "no failure"


def test_a_file_name_is_no_failure() -> None:
    assert diagnose([READY, '  File "/srv/TCPStore.py", line 1, in nvcc_not_found']).verdict == "no failure"


@pytest.mark.parametrize(
    "lines",
    [
        ["\x00\xff\x1b[31m", "Traceback (most recent call last):"],
        ["Traceback (most recent call last):"] * 500,
        ["torch._dynamo.exc.Unsupported: x"] * 5000,
        ["[2026-05-22 02:11:00", "]", "\r\r\r", "from user code:"],
        ["x" * 300_000 + "CUDA out of memory"],
        ["a | " * 50_000],
        ["NCCL error" + " " * 200_000],
    ],
)
def test_odd_input_ends_in_a_diagnosis(lines: list[str]) -> None:
    assert diagnose(lines).verdict in ("known", "unknown", "no failure")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a",
            "0",
            "/",
            "'",
            " ",
            "XQA",
            "model_path='",
            "model_path='a' speculative_algorithm='NEXTN' ",
            "NCCL error ",
        ),
        *("a | ", "a" * 100, "a ", "[pod/", "[pod/a] ", "[rank0]: ", "Nov 29 19:48:12 ", "Nov 29 19:48:12 a a[1]: "),
        *("2026-11-29T19:48:12Z ", "[2026-11-29T19:48:12Z] ", "[2026-11-29 19:48:12] "),
    ],
)
def test_a_long_line_takes_no_time(text: str) -> None:
    """Repeated up to the length at which lines are cut: no expression goes over it again and again."""
    began = time.process_time()
    diagnose([text * (200_000 // len(text))] * 3)
    assert time.process_time() - began < 2
