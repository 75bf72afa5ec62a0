"""fp4_warmup in real servers that really build: a builder that is killed, and two servers that share one cache.

There is no GPU here, so the third-party plugin `tiny_module` tells fp4_warmup that there is one, and gives it one small
C++ file to build in place of FlashInfer's CUDA sources, which take minutes. All else is real: SGLang and its processes,
the plugin, the lock, FlashInfer's JIT, ninja and the compiler; a script before the compiler lets it wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glm5_plugins import Environment, merging
from glm5_plugins.warmup import needs
from glm5_plugins.warmup.specs import is_whole
from glm5_plugins.warmup.toolkit import Toolkit
from tests.servers import third_party
from tests.servers.conftest import StartServer
from tests.servers.test_ranks import BIND, PATIENT, TWO_RANKS, WAY_IN
from tests.support.process_tree import wait_gone
from tests.support.server import STANDINS, ServerError, ServerProcess
from tests.warmup.conftest import Node, end, make_node, wait_for

pytestmark = pytest.mark.skipif(
    Toolkit.here().nvcc is None or shutil.which("c++") is None,
    reason="no nvcc, whose version FlashInfer asks for, or no C++ compiler",
)

Warm = Callable[..., ServerProcess]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An empty cache, compilers that wait when told to, and what FlashInfer needs to build."""
    node = make_node(tmp_path, tmp_path / "cache")
    node.env["FLASHINFER_CUDA_ARCH_LIST"] = needs.arch_text((12, 0), Environment())
    yield node
    end(node)


@pytest.fixture
def warm(start_server: StartServer, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Prepare a server on the node."""
    folder = third_party.write(tmp_path_factory.mktemp("third-party"))
    names = ("LD_LIBRARY_PATH", "CUDA_HOME", "CXX", "FLASHINFER_NVCC", "FLASHINFER_CUDA_ARCH_LIST")
    env = {name: node.env[name] for name in names} | {
        "FLASHINFER_WORKSPACE_BASE": str(node.cache),
        "PYTHONPATH": os.pathsep.join(map(str, (STANDINS, folder, node.folder / "site"))),
    }
    prepared: list[ServerProcess] = []

    def prepare(*plugins: str, args: tuple[str, ...] = (), **more: str) -> ServerProcess:
        server = start_server(plugins=plugins, env=env | more, args=args, launcher=WAY_IN, timeout=PATIENT)
        prepared.append(server)
        return server

    yield prepare
    for server in prepared:
        server.stop()


def until(what: Callable[[], Any], *servers: ServerProcess) -> Any:
    """Wait for something while servers run."""

    def look() -> Any:
        for server in servers:
            server.processes()
            assert server.returncode is None, server.log_tail()
        return what()

    return wait_for(look, PATIENT)


def compiled(node: Node) -> int:
    """How often the compiler was started on the module's one file."""
    log = node.folder / "compiles"
    return log.read_text().count("/tiny.cpp") if log.exists() else 0


def libraries(node: Node) -> list[Path]:
    return list(node.cache.rglob("tiny_120.so"))


def builder(node: Node) -> int:
    """The pid of the process that builds, as the journal has it."""
    (journal,) = node.cache.rglob("glm5-warmup/journal.json")
    return int(json.loads(journal.read_text())["building"]["pid"])


def left_behind(node: Node) -> list[str]:
    """Locks that are held, and files that are parts of files."""
    found = []
    for path in node.cache.rglob("*"):
        if path.name == "lock" or path.suffix == ".lock":
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(f"{path} is locked")
        if path.name.startswith(".journal.") or (path.suffix in (".o", ".so") and not is_whole(path)):
            found.append(f"{path} is a part")
    return found


def warm_up_rows(server: ServerProcess, reports: Path | None = None) -> list[dict[str, Any]]:
    """What the schedulers of a server that runs say of the warm-up."""
    pids = {process.pid for process in server.processes()}
    documents = [json.loads(path.read_text()) for path in (reports or server.log.parent / "reports").iterdir()]
    return [
        row
        for document in documents
        if document["process"]["pid"] in pids and document["process"]["role"] == "scheduler"
        for row in document["rows"]
        if row["plugin"] == "fp4_warmup"
    ]


def kill_builder(server: ServerProcess, node: Node) -> None:
    """Start a server, wait until a scheduler builds, and kill it."""
    server.start()
    until(lambda: compiled(node), server)
    pid = builder(node)
    (scheduler,) = [process for process in server.processes() if process.pid == pid]
    assert "scheduler" in scheduler.command
    assert node.leftovers()
    assert any("locked" in one for one in left_behind(node))
    scheduler.signal(signal.SIGKILL)


def wait_for_end(server: ServerProcess, node: Node) -> None:
    """Wait until the server has ended by itself, and look for what it has left."""
    with pytest.raises(ServerError, match="the server ended"):
        server.wait_ready()
    assert server.returncode != 0
    assert wait_gone(list(server._seen), 60) == []
    wait_for(lambda: not node.leftovers(), 60)  # compilers, which are in a session of their own
    assert left_behind(node) == []
    files = list((server.log.parent / "reports").iterdir())
    assert any("-scheduler-" in file.name for file in files)
    assert all(file.suffix == ".json" or file.name.startswith(".glm5-") for file in files)
    for file in files:
        json.loads(file.read_text())  # whole, also one that was about to get its name when its process was killed


def test_a_scheduler_that_is_killed_while_it_builds_leaves_nothing(warm: Warm, node: Node) -> None:
    """Lost: the start. The next one on the same cache builds and serves."""
    node.hold()
    server = warm("fp4_warmup", "tiny_module")
    kill_builder(server, node)
    began = time.monotonic()
    wait_for_end(server, node)
    assert time.monotonic() - began < 180
    assert libraries(node) == []

    node.go_on()
    with warm("fp4_warmup", "tiny_module") as second:
        assert second.generate("hello")["output_ids"]
        (row,) = warm_up_rows(second)
        assert row["verdict"] == "applied"
        assert "tiny_120 (built here)" in row["reason"]
    assert compiled(node) == 2
    assert left_behind(node) == []
    assert all(map(is_whole, libraries(node)))


def test_a_rank_that_is_killed_while_it_builds_ends_the_server(warm: Warm, node: Node) -> None:
    """Lost: the start. The other rank may take the build up; it ends all the same.

    SGLang 0.5.9 waits for its ranks one after the other, and notices no earlier than the other rank does that one is
    missing: when they compare before capture.
    """
    node.hold()
    server = warm("fp4_warmup", "tiny_module", args=TWO_RANKS, **BIND)
    kill_builder(server, node)
    wait_for(lambda: compiled(node) == 2 or server.returncode is not None, PATIENT)
    node.go_on()
    began = time.monotonic()
    wait_for_end(server, node)
    assert time.monotonic() - began < 240


def test_two_servers_with_other_plugins_share_one_cache(warm: Warm, node: Node, tmp_path: Path) -> None:
    """They start at the same time: one builds, the other waits, both serve, and each reports its own."""
    reports = tmp_path / "reports"
    reports.mkdir()
    node.hold()
    plugins = (("fp4_warmup", "tiny_module"), ("probe", "fp4_warmup", "tiny_module"))
    # SGLang takes the memory that goes to anybody while its weights load for that of its weights.
    roomy = ("--mem-fraction-static", "0.6")
    servers = [warm(*names, args=roomy, GLM5_REPORT=str(reports)) for names in plugins]
    for server in servers:
        server.start()
    until(lambda: compiled(node) and any("waits for process" in one.log_text() for one in servers), *servers)
    node.go_on()
    for server in servers:
        server.wait_ready()
    assert all(server.generate("hello")["output_ids"] for server in servers)
    assert compiled(node) == 1
    (library,) = libraries(node)
    assert is_whole(library)
    rows = [row for server in servers for row in warm_up_rows(server, reports)]
    assert [row["verdict"] for row in rows] == ["applied", "applied"]
    assert sorted(row["reason"].partition("tiny_120 (")[2].split(",")[0] for row in rows) == [
        "built by another process",
        "built here)",
    ]
    for server in servers:
        (scheduler,) = [process for process in server.processes() if "scheduler" in process.command]
        assert str(library) in Path(f"/proc/{scheduler.pid}/maps").read_text()

    launches, problems = merging.read(reports)
    assert problems == []
    assert [launch.healthy for launch in launches] == [True, True]
    by_plugins = {launch.processes[0].plugins: launch.processes for launch in launches}
    assert set(by_plugins) == set(plugins)
    for names, server in zip(plugins, servers, strict=True):
        assert {one.plugins for one in by_plugins[names]} == {names}
        assert {one.pid for one in by_plugins[names]} <= {process.pid for process in server.processes()}
