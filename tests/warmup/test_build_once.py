"""One module, one cache, several ranks at once: whatever happens to them, it is built once and loaded whole."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_plugins.warmup.toolkit import Toolkit
from tests.warmup.conftest import TINY_CUDA, Node, end, make_node, wait_for


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_four_ranks_at_once_compile_once_and_load_the_same_file(node: Node) -> None:
    node.hold()
    ranks = [node.start() for _ in range(4)]
    wait_for(lambda: sum("waits for process" in rank.said for rank in ranks) == 3)
    node.go_on()
    answers = [rank.finish().answer for rank in ranks]
    assert node.compiles() == 1
    assert [answer["how"] for answer in answers].count("built here") == 1
    assert {tuple(answer["mapped"]) for answer in answers} == {(str(node.library()),)}
    assert len({answer["inode"] for answer in answers}) == 1
    assert node.run().answer["how"] == "cached"
    assert node.compiles() == 1


def test_who_waits_says_for_whom(node: Node) -> None:
    node.hold()
    first = node.start()
    wait_for(node.compiles)
    second = node.start()
    said = wait_for(lambda: second.said.endswith(" s)\n") and second.said)
    node.go_on()
    assert f"waits for process {first.pid} on " in said
    assert "which builds tiny_120 (10 s)" in said
    assert second.finish().answer["how"].startswith("built by another process")
    assert "builds tiny_120" in first.finish().err


def test_a_killed_builder_is_succeeded_and_leaves_nothing_running(node: Node) -> None:
    """Its compiler goes on for a moment; whoever takes over ends it first, since it writes into the same folder."""
    node.hold()
    ranks = [node.start() for _ in range(3)]
    wait_for(node.compiles)
    builder = next(rank for rank in ranks if rank.pid == node.journal["building"]["pid"])
    others = [rank for rank in ranks if rank is not builder]
    orphans = node.leftovers()
    assert len(orphans) >= 3, "the compiling process, ninja, a compiler"
    builder.process.send_signal(signal.SIGKILL)
    wait_for(lambda: node.compiles() == 2)
    assert not set(orphans) & set(node.leftovers())
    node.go_on()
    results = [rank.finish() for rank in others]
    assert [result.answer["how"] for result in results].count("built here") == 1
    assert any("ended half way; its work is taken up" in result.err for result in results)
    wait_for(lambda: not node.leftovers())
    assert node.compiles() == 2


def test_the_compiler_ends_with_the_server(node: Node) -> None:
    """Also where nobody takes over: an ended server leaves no compilers behind."""
    node.hold()
    rank = node.start()
    wait_for(node.compiles)
    rank.process.kill()
    rank.finish()
    wait_for(lambda: not node.leftovers(), 15)
    assert not node.library().exists()


def test_stale_lock_files_hold_nobody_up(node: Node) -> None:
    """Left by killed processes: ours, FlashInfer's, and a journal that speaks of a process long gone."""
    folder = node.cache / ".cache/flashinfer"
    assert node.run().code == 0
    for path in [*node.workspace.rglob("*.lock"), node.workspace / "glm5-warmup/lock"]:
        path.write_text("1")
    journal = '{"building": {"id": "x", "pid": 1, "host": "%s", "modules": ["tiny_120"]}, "failed": []}'
    (node.workspace / "glm5-warmup/journal.json").write_text(journal % os.uname().nodename)
    node.library().unlink()
    assert folder.is_dir()
    result = node.run()
    assert result.answer["how"] == "built here"
    assert "ended half way; its work is taken up, 0 processes of it are ended" in result.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"building": 1, "failed": null}'])
def test_a_journal_that_cannot_be_read_says_nothing(node: Node, text: str) -> None:
    assert node.run().code == 0
    (node.workspace / "glm5-warmup/journal.json").write_text(text)
    assert node.run().answer["how"] == "cached"


def test_a_truncated_module_is_linked_again(node: Node) -> None:
    """FlashInfer alone takes it for up to date, and dies loading it."""
    assert node.run().code == 0
    truncate(node.library())
    result = node.run()
    assert "tiny_120.so was half-written, and is made again" in result.err
    assert result.answer["how"] == "built here"
    assert node.compiles() == 1, "its objects were whole"


def test_a_truncated_object_is_compiled_again(node: Node) -> None:
    assert node.run().code == 0
    (made,) = node.library().parent.glob("*.o")
    truncate(made)
    node.library().unlink()
    assert node.run().answer["how"] == "built here"
    assert node.compiles() == 2


def test_a_file_whose_end_never_reached_the_disk_is_made_again(node: Node) -> None:
    """Of the right size, and zeros from the middle on: what a power cut leaves."""
    assert node.run().code == 0
    size = node.library().stat().st_size
    truncate(node.library())
    os.truncate(node.library(), size)
    assert node.run().answer["how"] == "built here"


def test_a_changed_source_is_built_again_by_one(node: Node) -> None:
    """Whether a module is up to date is ninja's to say, as it is when FlashInfer loads it."""
    assert node.run().code == 0
    source = node.folder / "site/tiny.cpp"
    source.write_text(source.read_text().replace("120", "121"))
    answers = [rank.finish().answer for rank in [node.start() for _ in range(2)]]
    assert [answer["how"] for answer in answers].count("built here") == 1
    assert node.compiles() == 2


@pytest.mark.parametrize("size", ["256k", "1m"], ids=["while compiling", "while linking"])
def test_a_full_disk_ends_in_two_lines(node: Node, small_disk: Callable[[str], Path], size: str) -> None:
    """Nothing half-written is loaded, then or after there is room again."""
    disk = small_disk(f"size={size}")
    full = make_node_on(node, disk)
    (full.folder / "site/tiny.cpp").write_text("char filler[600 << 10] = {1};\n")
    first, second = full.run().error
    assert first.startswith("The module tiny_120 was not built: ")
    assert "No space left on device" in first
    assert second.strip().startswith("Free space on the disks of the cache folder")
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    assert full.run().answer["how"] == "built here"


def test_a_read_only_cache_ends_in_two_lines(node: Node, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=16m")
    locked = make_node_on(node, disk)
    command = ["glm5-plugins", "warmup", "--arch", "12.0", "--modules", "fp4_quantization"]
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = subprocess.run(command, env=locked.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"{disk} is read-only.\n  Set FLASHINFER_WORKSPACE_BASE to a folder that can be written." in done.stderr
    assert "Traceback" not in done.stderr


def make_node_on(node: Node, disk: Path) -> Node:
    folder = node.folder / "other"
    folder.mkdir()
    other = make_node(folder, disk)
    node.ranks = other.ranks  # ended with the fixture
    return other


def test_time_up_names_the_module_and_leaves_nothing_running(node: Node) -> None:
    node.hold()
    result = node.run(timeout=8)
    first, second = result.error
    assert first.startswith("The module tiny_120 was not built: time is up after 8 s: ")
    assert second == "  Raise GLM5_FP4_WARMUP_TIMEOUT_S, or warm up beforehand: `glm5-plugins warmup`."
    wait_for(lambda: not node.leftovers(), 15)
    node.go_on()
    assert node.run().answer["how"] == "built here"


def test_who_waits_too_long_says_for_whom(node: Node) -> None:
    node.hold()
    first = node.start()
    wait_for(node.compiles)
    line, mend = node.run(timeout=6).error
    assert line.startswith("Waited 6 s for process ")
    assert "which builds tiny_120" in line
    assert "GLM5_FP4_WARMUP_TIMEOUT_S" in mend
    node.go_on()
    assert first.finish().code == 0


def test_a_compiler_error_is_everybodys_after_one_try(node: Node) -> None:
    (node.folder / "site/tiny.cpp").write_text("int tiny( { }\n")
    node.hold()
    ranks = [node.start() for _ in range(3)]
    wait_for(node.compiles)
    wait_for(lambda: sum("waits for" in rank.said for rank in ranks) == 2)
    node.go_on()
    errors = [rank.finish().error for rank in ranks]
    assert node.compiles() == 1
    assert len({tuple(error) for error in errors}) == 1
    assert errors[0][0].startswith("The module tiny_120 was not built: ")
    assert "error: expected" in errors[0][0]
    log = Path(errors[0][1].removeprefix("  The whole output is in ").rstrip("."))
    assert "tiny.cpp:1" in log.read_text()


def test_wheels_alone_are_a_toolkit(tmp_path: Path) -> None:
    """Their nvcc, headers and runtime compile, link and load a CUDA module, with nothing of the machine's toolkit."""
    home = next((home for home in Toolkit.here().wheels if (home / "bin/nvcc").is_file()), None)
    if home is None:
        pytest.skip("no wheel with an nvcc is installed: nvidia-cuda-nvcc and the rest")
    node = make_node(tmp_path, tmp_path / "cache", home)
    try:
        assert node.run(TINY_CUDA).answer["how"] == "built here"
    finally:
        end(node)
    commands = (node.folder / "compiles").read_text()
    assert f"-isystem {home}/include" in commands
    assert "/usr/local" not in commands
