"""What docs/COMPATIBILITY.md calls in force on a machine without a GPU is in force in a server of this version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glm5_plugins.doctor import examine_plugin
from glm5_plugins.environment import Environment
from glm5_plugins.fp4.sites import DENSE
from glm5_plugins.manager import PluginManager
from tests.servers.conftest import INSTALLED, StartServer
from tests.support.server import SGLANG

LAUNCHER = ("-m", "glm5_plugins.launch", "sglang.launch_server")
WAY_IN = SGLANG if INSTALLED != "0.5.9" else LAUNCHER
PAGE = Path(__file__).parents[2] / "docs" / "COMPATIBILITY.md"


def in_force() -> list[str]:
    """The plugins that the page calls in force for the installed SGLang."""
    section = PAGE.read_text().partition("## SGLang, on a machine without\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads, _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)
    (row,) = [row for row in rows if row[0] == INSTALLED]
    return [name for name, verdict in zip(heads, row, strict=True) if verdict == "in force"]


def fitting() -> list[list[str]]:
    """The same in groups of plugins that do not exclude each other."""
    groups: list[list[str]] = []
    for name in in_force() if INSTALLED is not None else ():
        plugin = PluginManager.find(name)
        for group in groups:
            others = [PluginManager.find(other) for other in group]
            if not any(other.name in plugin.conflicts or name in other.conflicts for other in others):
                group.append(name)
                break
        else:
            groups.append([name])
    for group in groups:
        group += dict.fromkeys(n for one in group for n in PluginManager.find(one).requires if n not in group)
    return groups


@pytest.mark.parametrize("plugins", fitting(), ids=",".join)
def test_every_plugin_in_force_on_the_page_is_in_force_in_a_server(
    start_server: StartServer, plugins: list[str]
) -> None:
    if shutil.which("nvcc") is None:
        plugins = [name for name in plugins if name != "cuda_version"]  # FlashInfer finds no CUDA without it
    if not set(plugins) & set(in_force()):
        pytest.skip("needs nvcc: there is no CUDA toolkit whose version could be asked for")
    with start_server(plugins=plugins, launcher=WAY_IN) as server:
        assert server.generate("hello")["output_ids"]
        reports = [json.loads(path.read_text()) for path in (server.log.parent / "reports").glob("*.json")]
    verdicts: dict[tuple[str, str], set[str]] = {}
    for row in (row for report in reports for row in report["rows"]):
        verdicts.setdefault((row["plugin"], row["target"]), set()).add(row["verdict"])
    for name in set(plugins) & set(in_force()):
        ready = [row.target for row in examine_plugin(name, Environment()).patches if row.verdict == "ready"]
        became = {target: verdicts[name, target] for target in ready}
        # What dense layers hold is FlashInfer's on SM120 only, and the patch on it says so elsewhere.
        left = {target: found for target, found in became.items() if "applied" not in found and target != DENSE}
        assert became, name
        assert not left, (name, left)
