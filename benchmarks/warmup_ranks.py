"""Eight ranks at once and an empty cache: seconds from the first call to the last module loaded.

Three ways, in turn, round after round: the once-per-node build of fp4_warmup; FlashInfer alone, where every rank calls
for the module and waits on FlashInfer's lock; FlashInfer alone with a cache for each rank, as with a home folder each.
The module is one small CUDA file, built by the real nvcc, ninja and c++ through FlashInfer's `gen_jit_spec`.
The ranks have imported everything before the clock starts. No GPU is needed.

    python benchmarks/warmup_ranks.py [--ranks 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from glm5_plugins.warmup.toolkit import Toolkit

MODULE = """
import functools
from pathlib import Path
from flashinfer.jit.core import gen_jit_spec

@functools.cache
def get_small_module(arch):
    return gen_jit_spec(f"small_{arch}", [Path(__file__).with_name("small.cu")]).build_and_load()
"""
SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename T, int N> __global__ void scale(T* x, float by) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[blockIdx.x * N + i] = T(float(x[blockIdx.x * N + i]) * by);
}
extern "C" void small(__half* x, __nv_bfloat16* y, float by) {
  scale<__half, 64><<<1, 1>>>(x, by);
  scale<__nv_bfloat16, 64><<<1, 1>>>(y, by);
}
"""
RANK = """
import os, sys, time
from pathlib import Path
import small_module
from glm5_plugins.warmup import building, specs
from glm5_plugins.warmup.needs import Module
specs.assume_cuda_build()
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.002)
if sys.argv[1] == "plugin":
    artifact = specs.find(Module("small", "small_module:get_small_module", ("120",)))
    builder = building.Builder(specs.cache_folder(), lambda text: None, timeout_s=600)
    builder.make_ready([artifact])
    artifact.load()
else:
    small_module.get_small_module("120")
print(time.time(), flush=True)
"""
NVCC = """#!/bin/sh
case "$*" in *" -c "*) echo run >> {log};; esac
exec {nvcc} "$@"
"""
ARMS = {
    "plugin": "fp4_warmup: one builds, the others wait",
    "lazy": "FlashInfer alone, one cache",
    "apart": "FlashInfer alone, a cache for each rank",
}


def measure(arm: str, ranks: int, folder: Path) -> tuple[float, int]:
    """Return the seconds until the last rank has loaded the module, and the number of nvcc runs."""
    kit = Toolkit.here()
    assert kit.home is not None, "no CUDA toolkit"
    (folder / "small_module.py").write_text(MODULE)
    (folder / "small.cu").write_text(SOURCE)
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(log=folder / "runs", nvcc=kit.nvcc))
    nvcc.chmod(0o755)
    env = {
        **os.environ,
        **kit.to_build_with(folder / "lib"),
        "PYTHONPATH": str(folder),
        "CUDA_HOME": str(kit.home),
        "FLASHINFER_NVCC": str(nvcc),
        "FLASHINFER_CUDA_ARCH_LIST": "12.0f",
        "LD_LIBRARY_PATH": os.pathsep.join(str(kit.home / name) for name in ("lib64", "lib")),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, arm, str(folder / "go")],
            env={**env, "FLASHINFER_WORKSPACE_BASE": str(folder / f"cache{rank if arm == 'apart' else ''}")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    began = time.time()
    (folder / "go").touch()
    ended = [float(process.communicate(timeout=900)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return max(ended) - began, len((folder / "runs").read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, int]]] = {arm: [] for arm in ARMS}
    names = list(ARMS)
    for number in range(options.rounds):
        for arm in names[number % 3 :] + names[: number % 3]:
            folder = Path(tempfile.mkdtemp(prefix="warmup-ranks-"))
            try:
                found[arm].append(measure(arm, options.ranks, folder))
            finally:
                shutil.rmtree(folder)
            print(f"round {number + 1}, {ARMS[arm]}: {found[arm][-1][0]:.1f} s", file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("glm5-plugins", "flashinfer-python", "torch"))
    cores = (
        f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), no GPU, load {os.getloadavg()[0]:.0f} at the end"
    )
    print(f"# {options.ranks} ranks, one small module, an empty cache\n")
    print(f"{datetime.date.today()}, {cores}, Python {platform.python_version()},")
    print(f"{versions}, nvcc {Toolkit.here().version}.\n")
    print("| way | seconds, each round | median | nvcc runs |\n|---|---|---|---|")
    for arm, results in found.items():
        seconds = [taken for taken, _ in results]
        runs = "/".join(sorted({str(count) for _, count in results}))
        each = ", ".join(f"{taken:.1f}" for taken in seconds)
        print(f"| {ARMS[arm]} | {each} | {statistics.median(seconds):.1f} | {runs} |")


if __name__ == "__main__":
    main()
