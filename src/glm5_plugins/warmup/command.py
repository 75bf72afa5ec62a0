"""`glm5-plugins warmup`: builds the modules of a launch beforehand, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError, NotInForce
from glm5_plugins.findings import Finding
from glm5_plugins.warmup import launches, needs, toolkit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--arch", help="architecture to build for, such as 12.0f; default: this machine's GPU")
    parser.add_argument("--model-path", type=Path, metavar="FOLDER", help="choose the modules this model uses")
    parser.add_argument("--modules", metavar="NAMES", help="choose modules by name, separated by commas")
    parser.add_argument("--moe-runner-backend", default="auto", help="as given to the server")
    parser.add_argument("--fp4-gemm-backend", default="auto", help="as given to the server")
    parser.add_argument("--attention-backend", default="", help="as given to the server; or that of DSA")
    parser.add_argument("--list", action="store_true", help="show what would be built and what is there; build nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="make a folder of modules to ship")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; default: MAX_JOBS, or what fits")
    parser.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help="give up after; default: 7200")


def run(arguments: argparse.Namespace) -> bool:
    """Run the command and print what became of each module.

    Returns:
        Whether all modules are ready; with `--list`, whether nothing stands in the way of building them.

    Raises:
        ConfigurationError: An argument is wrong.
        NotInForce: Something that a build needs is missing, or a build failed.
    """
    env = Environment()
    arch = needs.parse_arch(arguments.arch) if arguments.arch else _arch_of_gpu(env)
    if arch not in needs.SM90 | needs.SM100 | needs.SM120:
        known = "9.0, 10.0, 10.3, 12.0 and 12.1"
        raise ConfigurationError(
            f"No FP4 module is known for the architecture {arch[0]}.{arch[1]}.", f"Known: {known}."
        )
    wanted = _wanted(arguments, arch, env)
    kit = toolkit.Toolkit.here()
    findings = toolkit.preflight(env, arch, kit)
    _print_findings(findings)
    stopped = [finding for finding in findings if finding.level == "error"]
    if stopped and not arguments.list:
        raise NotInForce(f"{len(stopped)} things stand in the way of building.", "Mend what is said above.")
    if stopped:
        _print_rows([(str(module), "unknown", "-", why) for module, why in wanted.items()], arguments.json)
        return False

    # FlashInfer reads these when it is imported, which happens here for the first time.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", needs.arch_text(arch, env))
    os.environ.update(kit.to_load_with())
    from glm5_plugins.warmup import bundle, specs
    from glm5_plugins.warmup.building import Builder

    specs.assume_cuda_build()
    specs.assume_gpu(arch)
    artifacts = [specs.find(module) for module in wanted]
    why = {artifact.name: wanted[artifact.module] for artifact in artifacts}
    if arguments.list:
        rows = [(one.name, one.state().value, str(one.library), why[one.name]) for one in artifacts]
        _print_rows(rows, arguments.json)
        return True
    began = time.monotonic()
    progress = Progress(began)
    builder = Builder(
        specs.cache_folder(),
        progress.say,
        timeout_s=arguments.timeout,
        jobs=arguments.jobs,
        on_progress=progress.show,
    )
    try:
        how = builder.make_ready(artifacts)
    finally:
        progress.clear()
    _print_rows([(one.name, how[one.name], str(one.library), why[one.name]) for one in artifacts], arguments.json)
    if arguments.out is not None:
        made = bundle.write(arguments.out.absolute(), artifacts, env, specs.arch_list(), str(kit.version))
        print(f"{made.folder}: for FlashInfer {made.versions['flashinfer-python']}, {made.arch}, CUDA {made.cuda}; "
              f"serve with GLM5_FP4_WARMUP_PREBUILT={made.folder}", file=sys.stderr)  # fmt: skip
    return True


def _arch_of_gpu(env: Environment) -> needs.Arch:
    if not env.cuda_devices:
        raise ConfigurationError("There is no GPU here to build for.", "Say which: --arch 12.0f for RTX PRO 6000.")
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def _wanted(arguments: argparse.Namespace, arch: needs.Arch, env: Environment) -> dict[needs.Module, str]:
    if arguments.modules and arguments.model_path:
        raise ConfigurationError("--modules and --model-path both choose modules.", "Give one of them.")
    if arguments.modules:
        names = [name.strip() for name in arguments.modules.split(",") if name.strip()]
        return needs.modules_named(names, arch, env)
    backends: dict[str, Any] = {
        "moe_runner": arguments.moe_runner_backend,
        "fp4_gemm": arguments.fp4_gemm_backend,
        "attention": arguments.attention_backend,
    }
    if arguments.model_path:
        launch = launches.of_model(arguments.model_path, arch, env, **backends)
    else:
        launch = launches.of_flags(arch, env, **backends)
    found = needs.modules_for(launch, env)
    if not found:
        raise ConfigurationError(
            f"A launch with quantization {launch.quantization!r} on {arch[0]}.{arch[1]} uses no FP4 module.",
            "There is nothing to build; choose with --modules where you know better.",
        )
    return found


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.level}: {finding.what}\n  {finding.mend}", file=sys.stderr)


def _print_rows(rows: Sequence[tuple[str, str, str, str]], as_json: bool) -> None:
    if as_json:
        names = ("module", "state", "library", "why")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[3])


class Progress:
    """A bar on a terminal, lines in a log."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Print a line for good."""
        self.clear()
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def show(self, done: int, total: int, steps: Sequence[tuple[str, int, int]]) -> None:
        """Draw the bar: modules done, and what goes on in the others."""
        if not self._live:
            return
        part = (done + sum(step / of for _, step, of in steps if of)) / total
        columns = shutil.get_terminal_size().columns
        names = ", ".join(f"{name} {step}/{of}" if of else name for name, step, of in steps)
        bar = "#" * round(20 * part)
        text = f"[{bar:<20}] {done}/{total} {time.monotonic() - self._began:4.0f} s  {names}"
        print(f"\r\033[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
