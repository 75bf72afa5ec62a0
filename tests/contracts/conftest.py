"""The releases at hand: each SGLang with the FlashInfer it asks for, and each FlashInfer by itself.

`python tools/fetch_wheels.py` fetches them. Nothing of them is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from glm5_plugins import wheels
from glm5_plugins.contract import Contract, contracts, example_options
from glm5_plugins.environment import Environment, Place
from glm5_plugins.manager import BUNDLED


def _environments() -> Iterator[Environment]:
    flashinfer = {release.version: release for release in wheels.cached("flashinfer-python")}
    for release in wheels.cached("sglang"):
        pinned = flashinfer.get(release.pins.get("flashinfer-python", ""))
        yield wheels.environment(release, *([pinned] if pinned is not None else []))
    for release in flashinfer.values():
        yield wheels.environment(release)


def label(env: Environment) -> str:
    """`sglang-0.5.9` or `flashinfer-0.6.3`, the release that these surroundings are about."""
    sglang = env.version_text("sglang")
    return f"sglang-{sglang}" if sglang else f"flashinfer-{env.version_text('flashinfer-python')}"


for name in BUNDLED:
    os.environ.update(example_options(name))

ENVIRONMENTS = list(_environments())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "env" in metafunc.fixturenames:
        metafunc.parametrize("env", ENVIRONMENTS, ids=label)
    if "sglang_env" in metafunc.fixturenames:
        metafunc.parametrize("sglang_env", [env for env in ENVIRONMENTS if env.version_text("sglang")], ids=label)


def in_force(env: Environment) -> list[Contract]:
    """The contracts whose windows hold these releases."""
    return [
        contract
        for contract in contracts(env)
        if env.version_text(contract.distribution)
        and all(env.place(window) in (Place.INSIDE, Place.ABSENT) for window in contract.windows)
        and (contract.unless is None or contract.unless(env) is None)
    ]
