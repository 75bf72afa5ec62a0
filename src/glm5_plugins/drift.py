"""Whether plugins would still be in force after an upgrade of SGLang or FlashInfer, and what is different there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm5_plugins import callers, doctor, enable, seams, source, wheels
from glm5_plugins.environment import Environment

# With more uses than this a name says nothing about one function.
_RARE = 6


@dataclass(frozen=True)
class Change:
    """One plugin before and after.

    Args:
        name: The plugin.
        requested: Whether `GLM5_PLUGINS` names it.
        before: Its verdict now; empty where there is nothing to compare with.
        after: Its verdict then.
        reason: Why that.
        in_force: Whether it would do its work then; not being needed is as good.
        worse: Whether it would not though it does now or is requested; having nothing to do there is no worse if it has
            nothing to do now.
        differences: What is different about the functions it changes.
    """

    name: str
    requested: bool
    before: str
    after: str
    reason: str
    in_force: bool
    worse: bool
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Drift:
    """An upgrade, judged."""

    before: dict[str, str | None]
    after: dict[str, str | None]
    changes: tuple[Change, ...]
    layer: tuple[str, ...]
    """What the layer itself would miss; empty where it is in force."""

    @property
    def safe(self) -> bool:
        """Whether the layer would be in force then, and nothing is worse."""
        return not self.layer and not any(one.worse for one in self.changes)


def installed() -> Environment | None:
    """What is installed, or None without SGLang."""
    env = Environment()
    return env if env.version_text("sglang") is not None else None


def surroundings(sglang: str | None, flashinfer: str | None, scratch: Path, download: bool) -> Environment:
    """The surroundings after an upgrade.

    Args:
        sglang: A version or the path of a wheel; None for the installed one.
        flashinfer: The same; None for the version that this SGLang asks for.
        scratch: A folder to unpack wheels into.
        download: Whether pip may fetch what is not at hand.

    Raises:
        WheelError: A release is not to be had.
    """
    release = wheels.installed("sglang")
    if sglang is not None:
        release = wheels.find("sglang", sglang, scratch, download)
    if release is None:
        raise wheels.WheelError("SGLang is not installed here.", "Say with --sglang which version it is about.")
    pinned = flashinfer or release.pins.get("flashinfer-python")
    if pinned is None:
        raise wheels.WheelError(f"{release} asks for no one version of FlashInfer.", "Give it with --flashinfer.")
    other = wheels.find("flashinfer-python", pinned, scratch, download)
    # The folder of an installed release has all other packages in it too, so it comes after those of unpacked ones.
    # Whatever else plugins patch stays as it is installed.
    stays = {wheels.installed(name) for name in wheels.OLDEST}
    roots = [one.root for one in sorted((release, other), key=lambda one: one in stays)]
    return replace(wheels.environment(release, other), roots=(*roots, *(Path(entry) for entry in sys.path if entry)))


def compare(before: Environment | None, after: Environment, names: Sequence[str], requested: Sequence[str]) -> Drift:
    """Judge plugins in two surroundings; nothing of either is imported.

    Args:
        before: What is in use now, or None to judge `after` alone.
        after: What it would be.
        names: The plugins.
        requested: Those of them that are in use.
    """
    changes = []
    for name in names:
        then = doctor.examine_plugin(name, after, requested)
        now = doctor.examine_plugin(name, before, requested) if before is not None else None
        changes.append(
            Change(
                name,
                then.requested,
                now.verdict if now is not None else "",
                then.verdict,
                then.reason,
                then.in_force,
                worse=_worse(now, then),
                differences=tuple(_differences(now, then, before, after)) if now and before else (),
            )
        )
    return Drift(_versions(before), _versions(after), tuple(changes), tuple(_missed(before, after)))


def _worse(now: doctor.PluginRow | None, then: doctor.PluginRow) -> bool:
    if now is not None and now.in_force:
        return not then.in_force
    if then.requested:
        return not then.in_force and then.verdict != "not applicable"
    return now is None and then.verdict == "drifted"


def _versions(env: Environment | None) -> dict[str, str | None]:
    return {name: env.version_text(name) for name in ("sglang", "flashinfer-python")} if env is not None else {}


def _missed(before: Environment | None, after: Environment) -> Iterator[str]:
    """The lifecycle steps that the layer finds no way around, and the processes that it no longer gets into."""
    yield from (f"{step}: {why}" for step, why in seams.missed(after))
    if before is None or enable.enabled():
        return
    for role in ("main", "scheduler"):
        if doctor.loads_plugins(role, before) and not doctor.loads_plugins(role, after):
            what = f"SGLang {after.version_text('sglang')} loads no plugins in its {role} process"
            yield f"the way in: {what}; `glm5-plugins enable` brings the layer there"


def _differences(
    now: doctor.PluginRow, then: doctor.PluginRow, before: Environment, after: Environment
) -> Iterator[str]:
    old, new = ({patch.target: patch for patch in row.patches} for row in (now, then))
    for target in dict.fromkeys([*old, *new]):
        for text in _of_target(target, old.get(target), new.get(target), before, after):
            yield f"{target}: {text}"


def _of_target(
    target: str, old: doctor.PatchRow | None, new: doctor.PatchRow | None, before: Environment, after: Environment
) -> Iterator[str]:
    if old is None or new is None:
        yield "is changed only " + ("then" if old is None else "now")
        return
    if old.verdict != new.verdict:
        yield f"{old.verdict} now, {new.verdict} then: {new.reason}"
    if new.verdict != "ready":
        return
    try:
        was, will_be = source.find(target, before.roots), source.find(target, after.roots)
    except source.Missing:
        return
    if (first := _inside(was)) != (second := _inside(will_be)):
        yield f"moved from {first} to {second}"
    yield from _parameters(was, will_be)
    yield from _callers(target, new.needs, before, after)


def _inside(found: source.Definition) -> str:
    parts = found.file.parts
    package = found.module.partition(".")[0]
    return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :]) if package in parts else str(found.file)


def _parameters(was: source.Definition, will_be: source.Definition) -> Iterator[str]:
    if was.parameters is None or will_be.parameters is None:
        return
    old, new = ([str(one) for one in found.parameters or ()] for found in (was, will_be))
    if old == new:
        return
    gone = [one for one in old if one not in new]
    come = [one for one in new if one not in old]
    if gone:
        yield f"no longer takes {', '.join(gone)}"
    if come:
        yield f"takes {', '.join(come)}"
    if not gone and not come:
        yield f"takes its parameters in another order: {', '.join(new)}"


def _callers(target: str, needs: Sequence[str], before: Environment, after: Environment) -> Iterator[str]:
    name = target.replace(":", ".").rpartition(".")[2]
    if name.startswith("__"):
        return
    old, new = (list(callers.uses([name], env.roots)) for env in (before, after))
    if max(len(old), len(new)) > _RARE or (then := _calls(new, needs)) == (now := _calls(old, needs)):
        return
    yield f"is called by {then or 'nothing'}; now by {now or 'nothing'}"


def _calls(uses: Iterable[callers.Use], needs: Sequence[str]) -> str:
    """The files, and how they give what is relied on."""
    found = set()
    for use in uses:
        given = [f"{name}={use.keyword(name)}" for name in needs if use.keyword(name) is not None]
        found.add(f"{use.file.name} ({', '.join(given)})" if given else use.file.name)
    return ", ".join(sorted(found))
