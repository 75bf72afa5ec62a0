"""Throw-away packages to patch, in this process and in fresh ones."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm5_plugins import imports

Write = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _no_layer_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of whoever runs the tests do not count."""
    for name in list(os.environ):
        if name.startswith(("GLM5_", "SGLANG_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    """A patch that still waits for a module is forgotten with its test."""
    yield
    imports._waiting.clear()
    if imports._finder in sys.meta_path:
        sys.meta_path.remove(imports._finder)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules below a folder on sys.path: `package(**{"pkg/mod.py": source})`; forgotten afterwards."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    modules = set(sys.modules)

    def write(files: dict[str, str]) -> Path:
        for name, source in files.items():
            path = root / name
            for folder in [path.parent, *path.parent.parents]:
                folder.mkdir(parents=True, exist_ok=True)
                if folder == root:
                    break
                if name.endswith(".py"):
                    (folder / "__init__.py").touch()
            path.write_text(textwrap.dedent(source))
        return root

    yield write
    for name in set(sys.modules) - modules:
        module = sys.modules[name]
        if str(getattr(module, "__file__", None) or "").startswith(str(root)):
            del sys.modules[name]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run code in a fresh interpreter that also sees the throw-away packages."""

    def run_code(code: str, *, env: dict[str, str] | None = None, check: bool = True, options: tuple[str, ...] = ()):
        site = str(tmp_path / "site")
        result = subprocess.run(
            [sys.executable, *options, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": site, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        if check:
            assert result.returncode == 0, result.stderr + result.stdout
        return result

    return run_code
