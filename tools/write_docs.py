"""Write docs/PATCHES.md and docs/COMPATIBILITY.md from what plugins declare and what upstream's wheels hold.

    python tools/fetch_wheels.py all
    python tools/write_docs.py

The wheels are read, never imported; docs/PATCHES.md needs none.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from glm5_plugins import doctor, seams, source, wheels
from glm5_plugins.contract import example_options, patches
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.manager import BUNDLED, PluginManager
from glm5_plugins.patching import Kind, Patch

sys.path.insert(0, str(Path(__file__).parent))
from refresh_requirements import VERSIONS as SERVERS

DOCS = Path(__file__).parent.parent / "docs"

WORDS = {"ready": "in force", "failed": "refused"}
BY_LAUNCH = "by launch"


def main() -> int:
    """Write both pages."""
    DOCS.mkdir(exist_ok=True)
    (DOCS / "PATCHES.md").write_text(patches_page(), encoding="utf-8")
    (DOCS / "COMPATIBILITY.md").write_text(compatibility_page(), encoding="utf-8")
    return 0


# --- docs/PATCHES.md -----------------------------------------------------------------------------------------

PATCHES_HEAD = """\
# Patches

What each bundled plugin changes in SGLang and FlashInfer: why, how, on which versions, and when the change can be
deleted. Written by `tools/write_docs.py` from the `Patch` objects; `tests/unit/test_docs.py` keeps it current.
"""


def patches_page() -> str:
    """The ledger of all patches."""
    os.environ.update({key: value for name in BUNDLED for key, value in example_options(name).items()})
    parts = [PATCHES_HEAD]
    for name in BUNDLED:
        plugin = PluginManager.find(name)
        parts.append(f"## `{name}`\n\n{plugin.summary}\n")
        parts += [_ledger_entry(patch) for patch in _declared(name)]
        if not _declared(name):
            parts.append("It changes no function: it works through lifecycle hooks alone.\n")
    parts.append("## The layer itself\n\nIt goes around these functions, and takes part in nothing else:\n")
    rows = [(seam.step, f"`{seam.target}`", seam.requires, seam.ends or "-") for seam in seams.SEAMS]
    parts.append(_table(("step", "target", "versions", "what ended them"), rows))
    return "\n".join(parts)


def _declared(name: str) -> list[Patch]:
    """All patches that a plugin declares on any version that has server tests, as it does on one that they are for."""
    found: dict[tuple[str, tuple[Window, ...]], Patch] = {}
    for sglang, (flashinfer, _) in reversed(SERVERS.items()):
        env = machine(Environment({"sglang": sglang, "flashinfer-python": flashinfer}, roots=()), 1)
        for patch in patches(name, env):
            inside = all(env.place(window) is Place.INSIDE for window in patch.windows)
            if inside or (patch.target, patch.windows) not in found:
                found[patch.target, patch.windows] = patch
    return list(found.values())


_HOW = {Kind.WRAP: "put around it, and it is called", Kind.REPLACE: "put in its place"}


def _ledger_entry(patch: Patch) -> str:
    fields = [
        ("why", patch.reason),
        ("how", _HOW[patch.kind]),
        ("versions", ", ".join(f"`{window}`" for window in patch.windows) or "all"),
        ("what ends them", patch.ends),
        ("seen in the source by", str(patch.outside) if patch.outside is not None else ""),
        ("relies on", ", ".join(f"`{name}`" for name in patch.needs)),
        ("knows only", ", ".join(f"`{name}`" for name in patch.knows)),
        ("never rebinds", ", ".join(f"`{name}`" for name in patch.keep)),
        ("not needed where", _first_line(patch.unless)),
        ("refused where", _first_line(patch.refuse)),
        ("must run by the end of", patch.must_fire_by.value if patch.must_fire_by is not None else ""),
        ("upstream", f"<{patch.upstream}>" if patch.upstream.startswith("http") else patch.upstream),
        ("fate", patch.fate),
    ]
    lines = "\n".join(f"- {name}: {text}" for name, text in fields if text)
    return f"### `{patch.target}`\n\n{lines}\n"


def _first_line(probe: object) -> str:
    """What a probe looks for: its own words, or the first line of its docstring; a method's answer."""
    if probe is None:
        return ""
    if inspect.ismethod(probe):
        answer = probe(machine(Environment(), 1))
        return f"everywhere: {answer}" if answer else ""
    return (probe.__doc__ or "").strip().partition("\n")[0] if inspect.isfunction(probe) else str(probe)


# --- docs/COMPATIBILITY.md -----------------------------------------------------------------------------------

COMPATIBILITY_HEAD = """\
# Compatibility

What becomes of each bundled plugin with each release on the package index. Written by `tools/write_docs.py` from the
version windows of the plugins and the source in the wheels; `tests/contracts` checks that each window is exactly where
the source bears it out, and keeps this page current. `glm5-plugins drift` says the same of an upgrade of yours.

*in force*: the functions it changes are there, and are changed · *by launch*: it chooses server arguments, or works
around a step of the start, and decides when it sees the launch (`glm5-plugins check` says it beforehand) · *not
needed*: upstream does it itself · *not applicable*: there is nothing for it to do · *refused*: it would do harm, and
the launch stops. The reasons are below each table.

Servers of SGLang {servers} are started in tests, on a CPU, with what is *in force* there. No other row was run.
"""


def compatibility_page() -> str:
    """The verdict of every plugin on every release at hand."""
    return "\n".join(
        [
            COMPATIBILITY_HEAD.format(servers=", ".join(SERVERS)),
            "## SGLang, on a machine with an SM120 GPU\n",
            *sglang_section(devices=1),
            "## SGLang, on a machine without\n",
            *sglang_section(devices=0),
            "## FlashInfer\n",
            "The functions of it that plugins change, by the source alone.\n",
            flashinfer_table(),
            "## Where the layer comes in\n",
            seams_table(),
        ]
    )


def sglang_environments(devices: int) -> Iterator[Environment]:
    """Each SGLang at hand with the FlashInfer that it asks for."""
    at_hand = {release.version for release in wheels.cached("flashinfer-python")}
    for release in wheels.cached("sglang"):
        pinned = release.pins.get("flashinfer-python")
        if pinned is not None and pinned in at_hand:
            env = wheels.environment(release, wheels.fetch("flashinfer-python", pinned))
            yield machine(env, devices)


def machine(env: Environment, devices: int) -> Environment:
    """The same versions on a machine like those this is for, or on one without a GPU; never on this one."""
    env.elsewhere = True
    env.cuda_devices = devices
    env.capability = (12, 0) if devices else None
    return env


def sglang_rows(devices: int) -> Iterator[tuple[str, ...]]:
    """The rows of the table: SGLang, FlashInfer, and a verdict for each plugin."""
    for env in sglang_environments(devices):
        rows = [doctor.examine_plugin(name, env) for name in BUNDLED]
        versions = (str(env.version_text("sglang")), str(env.version_text("flashinfer-python")))
        yield (*versions, *map(word, rows))


def word(row: doctor.PluginRow) -> str:
    """The verdict of one plugin, as the page says it."""
    if row.verdict == "ready" and not any(patch.verdict == "ready" for patch in row.patches):
        return BY_LAUNCH
    return WORDS.get(row.verdict, row.verdict)


def sglang_section(devices: int) -> Iterator[str]:
    """The table of one kind of machine, and the reasons in it."""
    yield _table(("SGLang", "its FlashInfer", *(f"`{name}`" for name in BUNDLED)), sglang_rows(devices))
    reasons = []
    for name in BUNDLED:
        verdicts = []
        for env in sglang_environments(devices):
            row = doctor.examine_plugin(name, env)
            version = str(env.version_text("sglang"))
            verdicts.append((word(row), _general(row.reason, env), version))
        for (verdict, reason), group in groupby(verdicts, key=lambda one: one[:2]):
            if verdict not in ("in force", BY_LAUNCH):
                reasons.append(f"- `{name}` is {verdict} on {_range([version for *_, version in group])}: {reason}")
    if reasons:
        yield "\n".join(reasons) + "\n"


def _general(reason: str, env: Environment) -> str:
    """A reason without the version it was given for."""
    for name in ("sglang", "flashinfer-python"):
        reason = re.sub(rf"{name} {re.escape(str(env.version_text(name)))}: ", "", reason)
    reason = reason.replace(f"SGLang {env.version_text('sglang')} ", "this SGLang ")
    return re.sub(r"^[\w.]+:[\w.]+: (refused: )?", "", reason)


def flashinfer_table() -> str:
    """Which FlashInfer has the functions that plugins change, with the parameters they rely on."""
    wanted: dict[str, list[tuple[str, Patch]]] = {}
    for name in BUNDLED:
        for patch in _declared(name):
            if patch.module.partition(".")[0] == "flashinfer":
                wanted.setdefault(patch.target, []).append((f"`{name}`", patch))
    verdicts = []
    for release in wheels.cached("flashinfer-python"):
        cells = [
            "missing" if any(source.lacks(p.target, p.needs, [release.root], p.knows) for _, p in patches) else "there"
            for patches in wanted.values()
        ]
        verdicts.append((tuple(cells), release.version))
    rows = [
        (_range([version for _, version in group]), *cells)
        for cells, group in groupby(verdicts, key=lambda one: one[0])
    ]
    heads = [f"`{target}` ({', '.join(dict.fromkeys(name for name, _ in of))})" for target, of in wanted.items()]
    return _table(("FlashInfer", *heads), rows)


def seams_table() -> str:
    """The function that each lifecycle step goes through."""
    found: dict[tuple[str, str], list[str]] = {}
    for release in wheels.cached("sglang"):
        for seam in seams.here(wheels.environment(release)):
            found.setdefault((seam.step, seam.target), []).append(release.version)
    rows = [(step, _range(versions), f"`{target}`") for (step, target), versions in found.items()]
    steps = list(dict.fromkeys(seam.step for seam in seams.SEAMS))
    return _table(("step", "SGLang", "function"), sorted(rows, key=lambda row: steps.index(row[0])))


def _range(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} – {versions[-1]}"  # noqa: RUF001


def table_row(cells: Iterable[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([table_row(heads), "|---" * len(heads) + "|", *map(table_row, rows)]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
