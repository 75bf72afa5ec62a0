"""Real SGLang servers on a CPU: the ones that the running environment has.

Nothing here is collected where SGLang isn't installed. `tox -e server-sglangVERSION` makes an
environment for each version; a test that holds for some of them only says so:

    @pytest.mark.sglang(">=0.5.11", reason="no plugin entry points before")
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.server import SGLANG, ServerProcess
from tests.support.tiny_model import write_tiny_model

try:
    INSTALLED: str | None = metadata.version("sglang")
except metadata.PackageNotFoundError:
    INSTALLED = None
    collect_ignore_glob = ["test_*.py"]


class StartServer(Protocol):
    """Prepare a server; entering it starts it and waits until it answers."""

    def __call__(
        self,
        *,
        plugins: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        launcher: Sequence[str] = SGLANG,
        model: Path | None = None,
        timeout: float = 240,
    ) -> ServerProcess: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sglang(specifier, reason): the SGLang versions that a test is about")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("sglang"):
            if INSTALLED is not None and not SpecifierSet(mark.args[0]).contains(INSTALLED, prereleases=True):
                reason = f"for sglang{mark.args[0]}, not {INSTALLED}: {mark.kwargs['reason']}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sglang_version() -> str:
    """The version of SGLang in this environment."""
    assert INSTALLED is not None
    return INSTALLED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of hidden size 128."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def start_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """`with start_server(plugins=["cuda_version"]) as server: …`, for tests and for wider fixtures.

    Plugins set GLM5_PLUGINS, and GLM5_REPORT to the folder `reports` next to the server's log.
    """
    numbers = itertools.count(1)

    def prepare(
        *,
        plugins: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        launcher: Sequence[str] = SGLANG,
        model: Path | None = None,
        timeout: float = 240,
    ) -> ServerProcess:
        folder = tmp_path_factory.mktemp(f"server-{next(numbers)}")
        environment = dict(env or {})
        if plugins:
            reports = folder / "reports"
            reports.mkdir()
            environment = {
                "GLM5_PLUGINS": ",".join(plugins),
                "GLM5_REPORT": str(reports),
                **environment,
            }
        return ServerProcess(
            model or tiny_model,
            folder / "server.log",
            launcher=launcher,
            args=args,
            env=environment,
            timeout=timeout,
        )

    return prepare
