"""Ranks that build and load modules with the real FlashInfer, ninja and compilers, each in a cache of its own.

Most tests use a module of one small C++ file, so that a compiler run takes a second; it goes through FlashInfer's
`gen_jit_spec` as all modules do. `test_real_module.py` compiles FlashInfer's own FP4 module.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from glm5_plugins.warmup.toolkit import Toolkit

ROOT = Path(__file__).parents[2]

TINY = ("tiny", "tinykernels:get_tiny_module", "('120',)")
TINY_CUDA = ("tiny_cuda", "tinykernels:get_tiny_cuda_module", "('120',)")
REAL = ("fp4_quantization", "flashinfer.fp4_quantization:get_fp4_quantization_module", "('120',)")

if find_spec("flashinfer") is None or find_spec("torch") is None or Toolkit.here().nvcc is None:
    collect_ignore_glob = ["test_build_once.py", "test_real_module.py", "test_command.py"]

_TINY_MODULE = '''
"""A module of one C++ file, got as FlashInfer's own are."""
import functools
from pathlib import Path
from flashinfer.jit.core import gen_jit_spec

@functools.cache
def get_tiny_module(arch):
    source = Path(__file__).with_name("tiny.cpp")
    return gen_jit_spec(f"tiny_{arch}", [source]).build_and_load()

@functools.cache
def get_tiny_cuda_module(arch):
    source = Path(__file__).with_name("tiny.cu")
    return gen_jit_spec(f"tiny_cuda_{arch}", [source]).build_and_load()
'''

_TINY_CUDA = """\
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <curand_kernel.h>
__global__ void tiny(__half* x) { x[0] = __half(1.0f); }
extern "C" void launch(__half* x) { tiny<<<1, 1>>>(x); cudaDeviceSynchronize(); }
"""

# Stands before a compiler: writes down that it ran, waits as long as it is told to, and goes on.
_WRAPPER = """\
#!/bin/sh
case "$*" in *" -c "*) echo "$$ $*" >> {log}; [ -e {hold} ] && while [ -e {hold} ]; do sleep 0.05; done;; esac
exec {compiler} "$@"
"""


@dataclass
class Rank:
    """A running rank."""

    process: subprocess.Popen[str]
    errors: Path

    @property
    def said(self) -> str:
        """What it has written to standard error so far."""
        return self.errors.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def finish(self, timeout: float = 180) -> Result:
        """Wait for the end, and return what it printed."""
        out, _ = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, self.said)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        answer: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return answer

    @property
    def error(self) -> list[str]:
        """The last lines: those that do not begin with a process id."""
        assert self.code == 1, self.err
        return [line for line in self.err.splitlines() if line and not line.split(":")[0].isdigit()][-2:]


@dataclass
class Node:
    """A machine with a cache folder of its own, and compilers that are counted.

    Args:
        folder: Everything of the test is in here.
        cache: FLASHINFER_WORKSPACE_BASE.
    """

    folder: Path
    cache: Path
    env: dict[str, str]
    ranks: list[Rank] = field(default_factory=list)

    @property
    def workspace(self) -> Path:
        (found,) = self.cache.glob(".cache/flashinfer/*/120f")
        return found

    def library(self, name: str = "tiny_120") -> Path:
        return self.workspace / "cached_ops" / name / f"{name}.so"

    @property
    def journal(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.workspace / "glm5-warmup/journal.json").read_text())
            return found
        return {"building": {}, "failed": []}

    def compiles(self) -> int:
        """How many compiler runs there were."""
        log = self.folder / "compiles"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def hold(self) -> None:
        """Let compilers wait from now on."""
        (self.folder / "hold").touch()

    def go_on(self) -> None:
        (self.folder / "hold").unlink()

    def start(self, module: Sequence[str] = TINY, *, timeout: float = 180, **env: str) -> Rank:
        command = [sys.executable, "-m", "tests.warmup.rank", "--timeout", str(timeout), *module]
        errors = self.folder / f"rank{len(self.ranks)}.log"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env={**self.env, **env}, cwd=ROOT
            )
        self.ranks.append(Rank(process, errors))
        return self.ranks[-1]

    def run(self, module: Sequence[str] = TINY, **options: Any) -> Result:
        return self.start(module, **options).finish()

    def leftovers(self) -> list[int]:
        """Processes that were started for this node, ranks left out, and still run."""
        ranks = {rank.pid for rank in self.ranks}
        found = []
        wanted = f"FLASHINFER_WORKSPACE_BASE={self.cache}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (place / "environ").read_bytes().split(b"\0") and int(place.name) not in ranks:
                    found.append(int(place.name))
        return found


def wait_for(what: Callable[[], Any], seconds: float = 180) -> Any:
    """Wait until `what` answers with something, and return it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := what():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"nothing after {seconds} s")


def wrapper(path: Path, compiler: str, folder: Path) -> Path:
    """Write a script that stands before a compiler."""
    path.write_text(_WRAPPER.format(log=folder / "compiles", hold=folder / "hold", compiler=compiler))
    path.chmod(0o755)
    return path


def make_node(folder: Path, cache: Path, home: Path | None = None) -> Node:
    """Lay out a node; the compilers are the machine's own, or those of the toolkit in `home`."""
    found = Toolkit.here().home if home is None else home
    assert found is not None
    site = folder / "site"
    site.mkdir()
    (site / "tinykernels.py").write_text(_TINY_MODULE)
    (site / "tiny.cpp").write_text('extern "C" int tiny() { return 120; }\n')
    (site / "tiny.cu").write_text(_TINY_CUDA)
    driver = folder / "driver"
    driver.mkdir()
    stub = ["cc", "-shared", "-nostdlib", "-x", "c", "-Wl,-soname,libcuda.so.1", os.devnull]
    subprocess.run([*stub, "-o", str(driver / "libcuda.so.1")], check=True, timeout=60)
    runtimes = [str(found / name) for name in ("lib64", "lib") if (found / name).is_dir()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "GLM5_"))}
    env = {
        **kept,
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": os.pathsep.join([str(driver), *runtimes]),
        "CUDA_HOME": str(found),
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_CUDA_ARCH_LIST": "12.0f",
        "CXX": str(wrapper(folder / "c++", str(shutil.which("c++")), folder)),
        "FLASHINFER_NVCC": str(wrapper(folder / "nvcc", str(found / "bin/nvcc"), folder)),
    }
    return Node(folder, cache, env)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with an empty cache."""
    node = make_node(tmp_path, tmp_path / "cache")
    yield node
    end(node)


def end(node: Node) -> None:
    """End what a failed test left."""
    for rank in node.ranks:
        if rank.process.poll() is None:
            rank.process.kill()
        if rank.process.stdout is not None:
            rank.process.stdout.close()
        rank.process.wait()
    for pid in node.leftovers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs of a given size: `small_disk("1m")`; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
