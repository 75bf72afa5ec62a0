"""FlashInfer's own SM120 FP4 module, compiled by the real nvcc without a GPU: about two minutes on 2 idle cores.

One compilation serves all tests of a run but one, which kills its builder half way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.warmup.conftest import REAL, Node, Result, end, make_node, wait_for

NAME = "fp4_quantization_120f"
pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("real")
    node = make_node(folder, folder / "cache")
    yield node
    end(node)


@pytest.fixture(scope="module")
def results(node: Node) -> list[Result]:
    """Four ranks at once with an empty cache."""
    ranks = [node.start(REAL, timeout=900) for _ in range(4)]
    return [rank.finish(900) for rank in ranks]


def nvcc_runs(node: Node) -> int:
    """How often nvcc was started on the module's one CUDA file."""
    log = node.folder / "compiles"
    return log.read_text().count("quantization.cu -o") if log.exists() else 0


def test_four_ranks_at_once_compile_once_and_load_one_file(node: Node, results: list[Result]) -> None:
    answers = [result.answer for result in results]
    assert [answer["how"] for answer in answers].count("built here") == 1
    assert {tuple(answer["mapped"]) for answer in answers} == {(str(node.library(NAME)),)}
    assert len({answer["inode"] for answer in answers}) == 1
    assert nvcc_runs(node) == 1


def test_progress_was_said_at_least_every_ten_seconds(results: list[Result]) -> None:
    (log,) = [result.err for result in results if result.answer["how"] == "built here"]
    lines = [line for line in log.splitlines() if f"builds {NAME}" in line]
    seconds = [int(line.rsplit(" ", 2)[-2]) for line in lines if line.endswith(" s")]
    assert len(seconds) >= 2
    assert max(after - before for before, after in zip([0, *seconds], seconds, strict=False)) <= 12
    assert any(re.search(r"\d of \d steps", line) for line in lines)


def test_it_exports_what_the_runtime_calls(node: Node, results: list[Result]) -> None:
    assert all(result.code == 0 for result in results)
    symbols = subprocess.run(["nm", "-D", node.library(NAME)], capture_output=True, text=True, check=True).stdout
    assert "__tvm_ffi_fp4_quantize" in symbols


def test_a_warm_cache_compiles_nothing(node: Node, results: list[Result]) -> None:
    before, began = nvcc_runs(node), time.monotonic()
    ranks = [node.start(REAL) for _ in range(4)]
    assert {rank.finish().answer["how"].partition(",")[0] for rank in ranks} <= {"cached", "built by another process"}
    assert nvcc_runs(node) == before
    assert time.monotonic() - began < 60


def test_a_truncated_module_is_linked_again_without_nvcc(node: Node, results: list[Result]) -> None:
    before = nvcc_runs(node)
    os.truncate(node.library(NAME), node.library(NAME).stat().st_size - 4096)
    answers = [rank.finish().answer for rank in [node.start(REAL) for _ in range(4)]]
    assert [answer["how"] for answer in answers].count("built here") == 1
    assert nvcc_runs(node) == before


def test_stale_lock_files_hold_nobody_up(node: Node, results: list[Result]) -> None:
    for path in [*node.workspace.rglob("*.lock"), node.workspace / "glm5-warmup/lock"]:
        path.write_text("1")
    assert node.run(REAL).answer["how"] == "cached"


def test_a_builder_killed_half_way_is_succeeded_by_one(tmp_path: Path) -> None:
    node = make_node(tmp_path, tmp_path / "cache")
    try:
        ranks = [node.start(REAL, timeout=900) for _ in range(4)]
        builder = wait_for(lambda: node.journal["building"].get("pid"))
        wait_for(lambda: nvcc_runs(node))
        next(rank for rank in ranks if rank.pid == builder).process.send_signal(signal.SIGKILL)
        answers = [rank.finish(900).answer for rank in ranks if rank.pid != builder]
        assert [answer["how"] for answer in answers].count("built here") == 1
        assert {tuple(answer["mapped"]) for answer in answers} == {(str(node.library(NAME)),)}
        assert nvcc_runs(node) == 2
        assert node.leftovers() == []
    finally:
        end(node)


def test_a_full_disk_ends_in_two_lines(
    tmp_path: Path, small_disk: Callable[[str], Path], results: list[Result]
) -> None:
    """The first C++ objects do not fit."""
    full = make_node(tmp_path, small_disk("size=300k"))
    try:
        first, second = full.start(REAL, timeout=300).finish(300).error
    finally:
        end(full)
    assert first.startswith(f"The module {NAME} was not built: ")
    assert "No space left on device" in first
    assert "Free space" in second
