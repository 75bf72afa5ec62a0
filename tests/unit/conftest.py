"""Throw-away packages to patch, in this process and in fresh ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from glm5_plugins import imports
from glm5_plugins.enable import LINE
from tests.fakes.runnable_sglang import runnable_sglang

# All of it is about a torch operator; the environments py3.* have no PyTorch.
collect_ignore = [] if find_spec("torch") else ["fp4"]

Write = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _no_layer_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of whoever runs the tests do not count."""
    for name in list(os.environ):
        # COLUMNS: tox hands on the width of its terminal, at which commands wrap what they print.
        if name.startswith(("GLM5_", "SGLANG_", "NCCL_")) or name in ("COLUMNS", "OMP_NUM_THREADS"):
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


@pytest.fixture
def site(package, tmp_path):
    """Write a made-up SGLang and third-party plugins: `site("0.5.23", probe=PROBE)`."""

    def install(version: str, **plugins: str) -> Path:
        points = "".join(f"{name} = pkg_b.{name}\n" for name in plugins)
        return package(
            {
                **runnable_sglang(version),
                "third_party-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: third-party\nVersion: 1\n",
                "third_party-1.dist-info/entry_points.txt": f"[glm5_plugins]\n{points}",
                **{f"pkg_b/{name}.py": source for name, source in plugins.items()},
            }
        )

    return install


@pytest.fixture
def launch(tmp_path):
    """Start the made-up server and return what it printed, its status, and the reports by role."""

    def start(*argv: str, pth: bool = False, **env: str):
        site = tmp_path / "site"
        environment = {**os.environ, "PYTHONPATH": str(site), "GLM5_REPORT": str(tmp_path / "reports"), **env}
        if pth:
            # A folder on PYTHONPATH is not searched for .pth files; sitecustomize makes it one that is.
            (site / "glm5_plugins.pth").write_text(LINE)
            (site / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})")
        command = [sys.executable, "-W", "ignore", *argv]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        folder = tmp_path / "reports"
        reports = [json.loads(path.read_text()) for path in folder.glob("*.json")] if folder.exists() else []
        return done, {report["process"]["role"]: report for report in reports}

    return start
