"""One run of SGLang's own benchmark, `python -m sglang.bench_serving`, and its figures."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from glm5_plugins.campaign.interrupts import undisturbed
from glm5_plugins.campaign.plan import Cell, Plan
from glm5_plugins.errors import Glm5Error

METRICS = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "total_throughput",
    *(f"{stat}_{of}_ms" for of in ("ttft", "tpot", "itl", "e2e_latency") for stat in ("mean", "median", "p99")),
)
"""What is kept, under SGLang's names: seconds, tokens per second, milliseconds."""


class RunFailed(Glm5Error):
    """The run has no figures that could be compared."""


def command(plan: Plan, cell: Cell, port: int, seed: int, output: Path) -> list[str]:
    """The command line of one run; arms that share the seed answer the same prompts."""
    shape = plan.shape(cell.shape)
    return [
        *(plan.server.python, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", plan.server.model, "--tokenizer", plan.server.tokenizer or plan.server.model),
        *("--num-prompts", str(plan.bench.requests(cell.concurrency)), "--max-concurrency", str(cell.concurrency)),
        *("--random-input-len", str(shape.input), "--random-output-len", str(shape.output)),
        *("--warmup-requests", str(min(cell.concurrency, 64)), "--flush-cache", "--disable-tqdm"),
        *("--seed", str(seed), "--output-file", str(output)),
        *plan.bench.args,
    ]


def run(
    argv: list[str],
    env: Mapping[str, str],
    log: Path,
    output: Path,
    requests: int,
    timeout: float,
    progress: Callable[[float], None],
) -> dict[str, float]:
    """Run it and return its figures.

    Raises:
        RunFailed: It failed, took too long, or not every request was answered: a server that drops requests looks fast.
    """
    output.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as file, ExitStack() as stack:
        with undisturbed():  # or nobody knows of it
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
        while process.poll() is None:
            elapsed = time.monotonic() - began
            if elapsed > timeout:
                raise RunFailed(f"the benchmark took longer than {timeout:.0f} s")
            progress(elapsed)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().rsplit("\n", 1)[-1]
        raise RunFailed(f"the benchmark ended with status {process.returncode}: {tail[:300]}")
    return figures(output, requests)


def figures(output: Path, requests: int) -> dict[str, float]:
    """Read the figures of the last line of a result file.

    Raises:
        RunFailed: There is no such line, or requests failed.
    """
    try:
        result = json.loads(output.read_text(encoding="utf-8").strip().rsplit("\n", 1)[-1])
    except (OSError, ValueError) as error:
        raise RunFailed(f"the benchmark left no result: {error}") from None
    kept = {name: float(result[name]) for name in METRICS if _is_number(result.get(name))}
    completed = int(kept.get("completed", 0))
    if completed != requests:
        raise RunFailed(f"{requests - completed} of {requests} requests failed")
    if not kept.get("output_throughput"):
        raise RunFailed("the benchmark reports no output throughput")
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
