"""A made-up installation in a folder: distributions with metadata and source that must never be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from glm5_plugins.environment import Place, Window
from glm5_plugins.seams import RELIED_ON, SEAMS

EXPLODES = "raise SystemExit('imported')\n"


@dataclass
class Installation:
    """A folder on PYTHONPATH, and the command `glm5-plugins` run there."""

    folder: Path
    python: str = sys.executable
    env: dict[str, str] = field(default_factory=dict)

    def distribution(
        self,
        name: str,
        version: str,
        entry_points: str = "",
        files: dict[str, str] | None = None,
        requires: tuple[str, ...] = (),
    ) -> None:
        """Write a distribution's metadata and its files."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if entry_points:
            (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        for path, text in (files or {}).items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))

    def sglang(
        self, version: str, files: dict[str, str] | None = None, like: str = "", requires: tuple[str, ...] = ()
    ) -> None:
        """Write an SGLang that has the seams, and loads plugins where that version (or `like`) does."""
        public = Version(like or version)
        loads = {"main": "0.5.11", "scheduler": "0.5.11", "detokenizer": "0.5.22", "controller": "0.5.22"}
        called = {k: "    load_plugins()\n" if public >= Version(since) else "    ...\n" for k, since in loads.items()}
        made = {
            "sglang/__init__.py": EXPLODES,
            "sglang/launch_server.py": f"if __name__ == '__main__':\n{called['main']}",
            "sglang/srt/__init__.py": "",
            "sglang/srt/managers/__init__.py": "",
            "sglang/srt/managers/scheduler.py": f"def run():\n{called['scheduler']}",
            "sglang/srt/managers/detokenizer_manager.py": f"def run():\n{called['detokenizer']}",
            "sglang/srt/managers/data_parallel_controller.py": f"def run():\n{called['controller']}",
        }
        methods: dict[tuple[str, str], str] = {}
        for seam in SEAMS:
            if Window.parse(seam.requires).place(public) is not Place.INSIDE:
                continue
            module, _, path = seam.target.partition(":")
            owner, _, name = path.rpartition(".")
            key = module.replace(".", "/") + ".py", owner
            methods[key] = methods.get(key, "") + f"    def {name}({', '.join(['self', *seam.needs])}): ...\n"
        for target in RELIED_ON:
            module, _, name = target.partition(":")
            made[module.replace(".", "/") + ".py"] = f"def {name}(): ...\n"
        for (file, owner), text in methods.items():
            head = f"class {owner}:\n" if owner else "if True:\n"
            made[file] = made.get(file, "") + head + text
        self.distribution("sglang", version, files=made | (files or {}), requires=requires)

    def wheel(self, name: str, version: str, into: Path) -> Path:
        """Pack the folder as a wheel that pip takes."""
        stem = f"{name.replace('-', '_')}-{version}"
        (self.folder / f"{stem}.dist-info" / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
        (self.folder / f"{stem}.dist-info" / "RECORD").touch()
        into.mkdir(parents=True, exist_ok=True)
        path = into / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(self.folder.rglob("*")):
                archive.write(file, file.relative_to(self.folder))
        return path

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `glm5-plugins` here."""
        base = {"PATH": os.environ["PATH"], "HOME": str(self.folder / "home"), "PYTHONPATH": str(self.folder)}
        return subprocess.run(
            [self.python, "-m", "glm5_plugins.cli", *arguments],
            env=base | self.env | env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def json(self, *arguments: str, **env: str) -> Any:
        """Run a command with `--json` and parse what it prints."""
        return json.loads(self.run(*arguments, "--json", **env).stdout)


ACME = '''\
"""Warms the acme engine.

It takes a while.
"""
from glm5_plugins import Patch, PluginSettings, hookimpl

class Options(PluginSettings, plugin="acme"):
    """Options of acme."""

    timeout_s: float = 30.0
    """Seconds to wait for the engine."""
    mode: str | None = None

@hookimpl
def glm5_patches(env):
    yield Patch(
        target="engine.core:Engine.start",
        using=lambda old: old,
        reason="the engine starts cold",
        requires="acme-engine>=1.0,<3",
        ends="it warms itself up",
        needs=("warm",),
        upstream="https://example.org/acme/1",
        fate="delete with acme 2",
    )
'''

ENGINE = """\
class Engine:
    def start(self, warm=False): ...
"""


def with_acme(installation: Installation, engine: str = ENGINE, version: str = "2.0", plugin: str = ACME) -> None:
    """Add a third-party plugin `acme` and the package it patches."""
    installation.distribution(
        "acme-glm5",
        "0.3",
        """\
        [glm5_plugins]
        acme = acme_glm5
        """,
        {"acme_glm5.py": plugin},
    )
    installation.distribution(
        "acme-engine", version, files={"engine/__init__.py": EXPLODES, "engine/core.py": EXPLODES + engine}
    )
