"""On a real GPU: a folder of modules made by `glm5-plugins warmup --out` serves where no compiler works.

    python -m tests.gpu.shipped_folder --out FOLDER --work FOLDER [--limit 400]

The model and its raw FP4 call in every MLP are those of `prefill_server`. A first server fills the caches of whatever
SGLang compiles, while the folder is made. Then the FP4 module is taken out of FlashInfer's cache and the compiler is
replaced by one that writes down each call and fails. A server with `fp4_warmup` and the folder must serve, with the
tokens of the first, without a call; the same server without them must not come up. Results go to `results.jsonl` in
--out; ends with 1 if any of it did not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu.prefill_server import find_versions
from tests.gpu.side_by_side import Run, one_token, rows, start_and_ask

MODULE = "fp4_quantization"
COMMAND = "import sys; from glm5_plugins.cli import main; sys.exit(main())"


def make_folder(run: Run, folder: Path) -> None:
    """Make the folder with the command that a build host would run."""
    arch = ".".join(map(str, torch.cuda.get_device_capability()))
    command = [sys.executable, "-c", COMMAND, "warmup", "--arch", arch, "--modules", MODULE, "--out", str(folder)]
    env = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(run.work / "build-host")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=run.limit)
    run.say("folder", status=done.returncode, said=done.stdout[-600:] + done.stderr[-600:])
    shutil.rmtree(run.work / "build-host", ignore_errors=True)


class Compiler:
    """What FlashInfer calls as nvcc: one path throughout, for ninja compares commands; later it only fails."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls = folder / "nvcc", folder / "nvcc.calls"
        self._become(f'exec {shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"} "$@"')

    def take_away(self) -> None:
        """From now on each call is written down and fails."""
        self._become(f'echo "$@" >> {self.calls}\necho "there is no compiler here" >&2\nexit 1')

    def _become(self, text: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{text}\n")
        self.path.chmod(0o755)


def start(run: Run, name: str, plugins: tuple[str, ...], **variables: str) -> list[int] | None:
    """Start a server, ask it, and say what it has reported; None if it does not come up."""
    asked = start_and_ask(run, name, plugins, variables, one_token, until=run.limit - 10, caches="caches")
    if asked is None:
        return None
    server, tokens = asked
    run.say("served", server=name, seconds=server.ready_after, tokens=tokens, said=rows(server))
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, caches, logs and reports")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which the run ends")
    options = parser.parse_args()
    run = Run(options.out, options.work, options.limit, None, (), {})
    run.say("begin", versions=find_versions())
    folder, compiler = run.work / "modules", Compiler(run.work)
    asks = {"FLASHINFER_NVCC": str(compiler.path)}
    with ThreadPoolExecutor() as pool:
        made = pool.submit(make_folder, run, folder)
        expected = start(run, "filling", (), **asks)
        made.result()
        for built in list((run.work / "caches").rglob(f"cached_ops/{MODULE}*")):
            shutil.rmtree(built)
        compiler.take_away()
        there = {"GLM5_FP4_WARMUP_MODULES": MODULE, "GLM5_FP4_WARMUP_PREBUILT": str(folder)}
        found = start(run, "shipped", ("fp4_warmup",), **asks, **there)
        calls = compiler.calls.exists()
        refused = start(run, "without", (), **asks) is None and compiler.calls.exists()
    right = expected is not None and found == expected and not calls and refused
    run.say("end", right=right, same_tokens=found == expected, compiler_called=calls, stopped_without=refused)
    run.end_all_but()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
