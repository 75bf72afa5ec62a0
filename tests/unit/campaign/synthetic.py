"""Made-up campaigns with known differences, from a seeded generator."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from glm5_plugins.campaign.journal import InForce, Journal, Run, Start
from glm5_plugins.campaign.plan import Arm, Bench, Plan, Server, Shape

Noise = Callable[[random.Random], float]


def normal(sigma: float) -> Noise:
    return lambda generator: generator.gauss(0, sigma)


def heavy_tailed(sigma: float) -> Noise:
    """Now and then a run is disturbed ten times as much."""
    return lambda generator: generator.gauss(0, sigma * (10 if generator.random() < 0.1 else 1))


def skewed(sigma: float) -> Noise:
    """Disturbances only ever slow a run down."""
    return lambda generator: -generator.expovariate(1 / sigma)


def plan(*, arms: int = 3, rounds: int = 5, concurrency: tuple[int, ...] = (1, 10, 256, 1024)) -> Plan:
    return Plan(
        name="made-up",
        rounds=rounds,
        server=Server(model="none"),
        bench=Bench(shapes=(Shape(name="chat", input=10, output=10),), concurrency=concurrency),
        arms=tuple(Arm(name="baseline" if index == 0 else f"arm{index}") for index in range(arms)),
    )


def campaign(
    of: Plan,
    generator: random.Random,
    noise: Noise,
    effects: Mapping[str, float] | None = None,
    drift: float = 0.0,
) -> list[Run]:
    """Runs of a whole campaign.

    Args:
        of: its plan.
        generator: where chance comes from.
        noise: what one server start adds to the logarithm of its throughput.
        effects: the true ratio to the baseline, by arm; 1 where none is given.
        drift: standard deviation of what a round adds for all its arms (heat, neighbours).
    """
    runs = []
    for number in range(of.rounds):
        for cell in of.cells:
            common = math.log(100.0 * cell.concurrency) + generator.gauss(0, drift)
            for arm in of.order(number):
                log = common + math.log((effects or {}).get(arm.name, 1.0)) + noise(generator)
                runs.append(run(number, arm.name, cell.concurrency, math.exp(log)))
    return runs


def run(number: int, arm: str, concurrency: int, throughput: float, *, ok: bool = True, shape: str = "chat") -> Run:
    metrics = {
        "output_throughput": throughput,
        "total_output_tokens": 256.0 * concurrency,
        "median_ttft_ms": 40.0 * concurrency**0.6 * 100 / (throughput / concurrency),
        "median_itl_ms": 900.0 / (throughput / concurrency),
    }
    return Run(number, arm, shape, concurrency, 0, ok, 1.0, metrics)


def folder(
    path: Path,
    of: Plan,
    runs: list[Run],
    *,
    failed: Mapping[str, Mapping[str, object]] | None = None,
    in_force: tuple[InForce, ...] = (),
) -> Path:
    """Write a campaign's folder as if it had been run.

    Args:
        path: where.
        of: its plan.
        runs: its runs.
        failed: what was diagnosed, by arm that did not start.
        in_force: reports of the layer.
    """
    path.mkdir(parents=True)
    about = {
        "plan": of.model_dump(mode="json"),
        "versions": {"python": "3.11.7", "sglang": "0.5.23"},
        "machine": {"host": "here", "cores": "2", "gpus": "none"},
        "begun": "2026-01-01T00:00:00+00:00",
    }
    (path / "campaign.json").write_text(json.dumps(about), encoding="utf-8")
    journal = Journal(path / "runs.jsonl")
    for arm, diagnosis in (failed or {}).items():
        log = f"starts/round-1-{arm}/server.log"
        journal.add(Start(0, arm, False, 7.5, log, "the server ended with status 1 after 7 s", diagnosis))
    for one in (*runs, *in_force):
        if not isinstance(one, Run) or one.arm not in (failed or {}):
            journal.add(one)
    return path
