"""What would happen here: plugins, patches, ways in and settings, judged without importing SGLang or torch."""

from __future__ import annotations

import ast
import inspect
import os
import platform
import re
import site
import sys
import sysconfig
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pluggy
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic_core import PydanticUndefined

from glm5_plugins import enable, hookspecs, seams, source
from glm5_plugins.environment import Environment, Window
from glm5_plugins.errors import ConfigurationError, Glm5Error, did_you_mean
from glm5_plugins.findings import Finding
from glm5_plugins.manager import GROUP, Plugin, PluginManager
from glm5_plugins.patching import Kind, Patch, Registry, Verdict
from glm5_plugins.settings.model import (
    PREFIX,
    HostSettings,
    from_profile,
    layer_variables,
    read,
    take_from_profile,
    variables_of,
)

if typing.TYPE_CHECKING:
    from pydantic_settings import BaseSettings

SGLANG_GROUP = "sglang.srt.plugins"
OURS = "glm5"
LAUNCHER = "python -m glm5_plugins.launch sglang.launch_server …"

# The main module of each kind of process; where it calls `load_plugins()`, the entry point gets in.
PROCESSES = {
    "main": "sglang.launch_server",
    "scheduler": "sglang.srt.managers.scheduler",
    "detokenizer": "sglang.srt.managers.detokenizer_manager",
    "data-parallel controller": "sglang.srt.managers.data_parallel_controller",
}

Standing = Literal[
    "ready",
    "not needed",
    "not applicable",
    "drifted",
    "conflict",
    "failed",
    "refused",
    "broken",
]


@dataclass(frozen=True)
class PatchRow:
    """One patch, and what would become of it here."""

    target: str
    kind: str
    verdict: Standing
    reason: str
    at: str
    """File and line of the definition in the installed source; empty where there is none."""
    why: str
    requires: tuple[str, ...]
    ends: str
    needs: tuple[str, ...]
    knows: tuple[str, ...]
    upstream: str
    fate: str


@dataclass(frozen=True)
class Option:
    """One variable: what it may hold, what it holds, and where that comes from."""

    variable: str
    plugin: str
    type: str
    default: str
    value: str
    source: Literal["environment", "profile", "default"]
    description: str
    error: str = ""


@dataclass(frozen=True)
class PluginRow:
    """One plugin, and what would become of it here."""

    name: str
    origin: str
    summary: str
    requested: bool
    verdict: Standing
    reason: str
    description: str = ""
    hooks: tuple[str, ...] = ()
    needs_plugins: tuple[str, ...] = ()
    excludes_plugins: tuple[str, ...] = ()
    patches: tuple[PatchRow, ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def in_force(self) -> bool:
        """Whether asking for this plugin gives what it promises here; not being needed is as good."""
        return self.verdict in ("ready", "not needed")

    @property
    def stops_a_launch(self) -> bool:
        """Whether a launch that asks for this plugin would end here, as `bootstrap` ends it.

        A plugin that has nothing to do here ends none; nor does one that cannot do its work under `GLM5_ON_ERROR=warn`.
        """
        if self.verdict in ("drifted", "conflict", "failed"):
            return _is_strict()
        return self.verdict in ("refused", "broken")


@dataclass(frozen=True)
class Way:
    """One way for the layer to get into processes."""

    name: str
    open: bool
    detail: str


@dataclass(frozen=True)
class Process:
    """One kind of process of a server, and how the layer reaches it."""

    role: str
    by: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """All that `glm5-plugins doctor` says."""

    versions: dict[str, str | None]
    ways: tuple[Way, ...]
    processes: tuple[Process, ...]
    plugins: tuple[PluginRow, ...]
    others: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether a launch would start, with every requested plugin in force that has something to do here."""
        return not any(finding.level == "error" for finding in self.findings)


def examine(environment: Environment | None = None) -> Diagnosis:
    """Judge this installation and these variables."""
    env = Environment() if environment is None else environment
    asked, findings = wanted()
    findings += wrong_variables()
    rows = tuple(examine_plugin(name, env, asked) for name in asked if name in PluginManager.known())
    findings += _unfit(rows, asked, [finding.what for finding in findings])
    findings += _rivals(rows)
    findings += _preflight(rows, env)
    ways, processes = _entrances(env)
    if asked:
        findings += _reached(processes, env)
    findings += left_out(env, bool(asked))
    findings += _stale_line()
    findings += hidden_installs(bool(asked))
    others, overlaps = _other_plugins(rows)
    findings += overlaps
    findings += _seams(env)
    names = ("glm5-plugins", "sglang", "flashinfer-python", "torch")
    versions = {name: env.version_text(name) for name in names}
    versions["python"] = platform.python_version()
    return Diagnosis(versions, ways, processes, rows, others, tuple(dict.fromkeys(findings)))


# --- plugins -------------------------------------------------------------------------------------------------


def examine_plugin(name: str, env: Environment, requested: Sequence[str] = ()) -> PluginRow:
    """Judge one plugin by name, whether it is requested or not.

    Raises:
        ConfigurationError: There is no such plugin.
    """
    asked = name in requested
    try:
        plugin = PluginManager.find(name)
    except ConfigurationError:
        if name not in PluginManager.known():
            raise
        return PluginRow(name, "?", "", asked, "broken", "its name is that of a bundled plugin")
    except Glm5Error as error:
        return PluginRow(name, _origin(name), "", asked, "broken", error.what)
    patches: tuple[PatchRow, ...] = ()
    options = options_of(plugin)
    verdict: Standing
    try:
        if (wrong := next((o for o in options if o.error), None)) is not None:
            raise ConfigurationError(wrong.error)
        patches = tuple(_examine_patch(patch, env) for patch in _patches(plugin, env))
        verdict, reason = _verdict(plugin, patches, env)
    except Glm5Error as error:
        verdict, reason = "refused", error.what
    except Exception as error:  # a plugin's own code
        verdict, reason = "broken", f"{type(error).__name__}: {error}"
    return PluginRow(
        name,
        plugin.origin,
        plugin.summary,
        asked,
        verdict,
        reason,
        inspect.cleandoc(getattr(plugin.body, "__doc__", None) or ""),
        _hooks(plugin),
        plugin.requires,
        plugin.conflicts,
        patches,
        options,
    )


def _origin(name: str) -> str:
    point = PluginManager.third_party().get(name)
    return f"{point.dist.name} {point.dist.version}" if point is not None and point.dist is not None else "?"


def _hooks(plugin: Plugin) -> tuple[str, ...]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin.body, plugin.name)
    return tuple(caller.name for caller in manager.get_hookcallers(plugin.body) or ())


def _patches(plugin: Plugin, env: Environment) -> list[Patch]:
    """Collect a plugin's patches as a server would, with the plugins it needs."""
    return [patch for owner, patch in _loaded(plugin).patches(env) if owner.name == plugin.name]


def _loaded(plugin: Plugin) -> PluginManager:
    names = [plugin.name]
    for name in names:
        names += [other for other in PluginManager.find(name).requires if other not in names]
    manager = PluginManager()
    manager.load(names)
    return manager


def _examine_patch(patch: Patch, env: Environment) -> PatchRow:
    registry = Registry(env)
    standing: Standing
    try:
        verdict, reason = registry.judge(patch)
    except Exception as error:  # a probe of the plugin
        verdict, reason = Verdict.FAILED, f"its probe raised {type(error).__name__}: {error}"
    at = ""
    if verdict is Verdict.WAITING:
        lacking = source.lacks(patch.target, patch.needs, env.roots, patch.knows)
        standing, reason = "ready", "its target is there"
        if lacking is not None:
            standing, reason = "drifted", lacking + _moved(patch, env)
        try:
            at = str(source.find(patch.target, env.roots))
        except source.Missing as missing:
            if lacking is None:
                reason = f"decided when it is imported: {missing}"
    else:
        standing = typing.cast(Standing, verdict.value)
    return PatchRow(
        patch.target,
        patch.kind.value,
        standing,
        reason,
        at,
        patch.reason,
        tuple(str(window) for window in patch.windows),
        patch.ends,
        tuple(patch.needs),
        tuple(patch.knows),
        patch.upstream,
        patch.fate,
    )


def _moved(patch: Patch, env: Environment) -> str:
    places = source.elsewhere(patch.path[-1], patch.module, env.roots)
    return f"; `{patch.path[-1]}` is defined in {', '.join(places)}" if places else ""


def _verdict(plugin: Plugin, patches: Sequence[PatchRow], env: Environment) -> tuple[Standing, str]:
    """A plugin is in force whole or not at all: the worst patch decides, and one that is ready outweighs the idle."""
    for patch in patches:
        if patch.verdict in ("drifted", "conflict", "failed"):
            return patch.verdict, f"{patch.target}: {patch.reason}"
    ready = sum(patch.verdict == "ready" for patch in patches)
    if ready:
        return "ready", f"{ready} of {len(patches)} patches" if len(patches) > 1 else patches[0].why
    hooks = [hook for hook in _hooks(plugin) if hook in (*hookspecs.WRAPPING, "glm5_server_args")]
    if hooks:
        manager = _loaded(plugin)
        outcome = manager.outcome(next(one for one in manager if one.name == plugin.name), env)
        if outcome is not None and outcome.verdict is Verdict.FAILED and "glm5_server_args" in hooks:
            return "refused", outcome.reason  # the launch is, as soon as its arguments are known
        if outcome is not None:
            return typing.cast(Standing, outcome.verdict.value), outcome.reason
        return "ready", "by " + ", ".join(hooks)
    for standing in ("not needed", "not applicable"):
        idle = [patch for patch in patches if patch.verdict == standing]
        if idle:
            last = max(idle, key=_ends_at)  # the plugin as a whole was needed for as long as this one
            return last.verdict, last.reason
    return "not applicable", "it has no patch and no hook for this installation"


def _ends_at(patch: PatchRow) -> list[Version]:
    """The upper bounds of its windows; none is least, as of a patch that is idle for another reason."""
    bounds = [part for text in patch.requires for part in Window.parse(text).requirement.specifier]
    return sorted((Version(part.version) for part in bounds if part.operator == "<"), reverse=True)


def _is_strict() -> bool:
    """Whether a launch ends where a requested plugin cannot do its work; one with a wrong setting ends in any case."""
    try:
        return read(HostSettings).on_error == "strict"
    except ConfigurationError:
        return True


def _level(stops_a_launch: bool) -> Literal["error", "warning"]:
    return "error" if stops_a_launch else "warning"


def requested() -> tuple[str, ...]:
    """The names in `GLM5_PLUGINS`, known or not."""
    return wanted()[0]


def wanted() -> tuple[tuple[str, ...], list[Finding]]:
    """The names in `GLM5_PLUGINS`, known or not, and what is wrong with them or the profile."""
    findings = _take_profile()
    try:
        names = read(HostSettings).plugins
    except ConfigurationError as error:
        findings.append(Finding("error", error.what, error.mend))
        names = tuple(n.strip() for n in os.environ.get("GLM5_PLUGINS", "").split(",") if n.strip())
    known = PluginManager.known()
    for name in names:
        if name not in known:
            findings.append(
                Finding("error", f"GLM5_PLUGINS names an unknown plugin {name!r}.", did_you_mean(name, known))
            )
    return tuple(dict.fromkeys(names)), findings


def _take_profile() -> list[Finding]:
    """Read settings from the profile too, where one is asked for and can be read."""
    from glm5_plugins.bootstrap import check_variables
    from glm5_plugins.settings import profile

    take_from_profile({})
    try:
        name = read(HostSettings).profile
        if name:
            loaded = profile.load(name)
            check_variables(loaded.options)
            take_from_profile(loaded.defaults)
    except ConfigurationError as error:
        return [Finding("error", error.what, error.mend)]
    return []


def _unfit(rows: Iterable[PluginRow], requested: Sequence[str], said: Collection[str]) -> list[Finding]:
    findings = []
    for row in rows:
        if row.verdict == "not applicable":
            what = f"The plugin {row.name!r} has nothing to do here: {row.reason.rstrip('.')}."
            findings.append(Finding("note", what, "The launch goes on without it."))
        elif not row.in_force and row.reason not in said:
            what = f"The plugin {row.name!r} would not be in force: {row.verdict}: {row.reason.rstrip('.')}."
            mend = "Take it out of GLM5_PLUGINS, or install versions it is made for"
            findings.append(
                Finding(_level(row.stops_a_launch), what, f"{mend}: see `glm5-plugins explain {row.name}`.")
            )
        for other in row.needs_plugins:
            if other not in requested:
                what = f"The plugin {row.name!r} needs {other!r}, which is not requested."
                findings.append(Finding("error", what, f"Set GLM5_PLUGINS={','.join([*requested, other])}"))
        for other in row.excludes_plugins:
            if other in requested:
                what = f"The plugins {row.name!r} and {other!r} exclude each other."
                findings.append(Finding("error", what, "Take one of them out of GLM5_PLUGINS."))
    return findings


def _rivals(rows: Iterable[PluginRow]) -> list[Finding]:
    first: dict[str, str] = {}
    findings = []
    for row in rows:
        for patch in row.patches:
            if patch.kind != Kind.REPLACE.value or patch.verdict != "ready":
                continue
            rival = first.setdefault(patch.target, row.name)
            if rival != row.name:
                what = f"The plugins {rival!r} and {row.name!r} both replace {patch.target}."
                findings.append(Finding(_level(_is_strict()), what, "Take one of them out of GLM5_PLUGINS."))
    return findings


def _preflight(rows: Iterable[PluginRow], env: Environment) -> list[Finding]:
    """What plugins that would be in force find wrong with this machine."""
    ready = [PluginManager.find(row.name) for row in rows if row.verdict == "ready"]
    return [finding for plugin in ready for finding in _loaded(plugin).findings(env)]


# --- variables -----------------------------------------------------------------------------------------------


def host_options() -> tuple[Option, ...]:
    """The variables of the layer itself."""
    return _options(HostSettings, "")


def options_of(plugin: Plugin) -> tuple[Option, ...]:
    """The variables of a plugin."""
    return () if plugin.options is None else _options(plugin.options, plugin.name)


def all_options() -> tuple[Option, ...]:
    """The variables of the layer and of every plugin that can be imported, a profile's values included."""
    _take_profile()
    found = list(host_options())
    for plugin in _importable():
        found += options_of(plugin)
    return tuple(found)


def wrong_variables() -> list[Finding]:
    """Variables that are not read, or whose value does not fit."""
    return [*unknown_variables(), *bad_values(), *misspelled_case()]


def unknown_variables() -> list[Finding]:
    """`GLM5_*` variables that nothing reads; each would stop a launch."""
    known = [option.variable for option in all_options()]
    return [
        Finding("error", f"{variable} is not a variable of glm5-plugins.", did_you_mean(variable, known))
        for variable in layer_variables()
        if variable not in known
    ]


def bad_values() -> list[Finding]:
    """Variables whose value does not fit; each would stop a launch, also that of a plugin that is not requested."""
    models: list[type[BaseSettings]] = [HostSettings]
    models += [plugin.options for plugin in _importable() if plugin.options is not None and _is_set(plugin.options)]
    findings = []
    for model in models:
        try:
            read(model)
        except ConfigurationError as error:
            findings.append(Finding("error", error.what, error.mend))
    return findings


def _is_set(model: type[BaseSettings]) -> bool:
    return any(name in os.environ or from_profile(name) is not None for name in variables_of(model))


def misspelled_case() -> list[Finding]:
    """Variables that only a capital letter keeps from being read: the layer looks for `GLM5_`."""
    wrong = [name for name in os.environ if name.upper().startswith(PREFIX) and name != name.upper()]
    return [
        Finding("error", f"{name} is not read: environment variables have capital letters.", f"Set {name.upper()}.")
        for name in sorted(wrong)
    ]


def _importable() -> list[Plugin]:
    found = []
    for name in PluginManager.known():
        try:
            found.append(PluginManager.find(name))
        except Glm5Error:
            continue
    return found


def _options(model: type[BaseSettings], plugin: str) -> tuple[Option, ...]:
    try:
        values: BaseSettings | None = read(model)
        error = ""
    except ConfigurationError as wrong:
        values, error = None, wrong.what
    documents = _field_documents(model)
    spelled = {name.upper(): name for name in os.environ}
    options = []
    for variable, name in variables_of(model).items():
        field = model.model_fields[name]
        given = os.environ.get(spelled.get(variable, ""))
        default = field.get_default(call_default_factory=True)
        profiled = from_profile(variable) if given is None else None
        raw = given if given is not None else _show(default) if profiled is None else profiled
        value = raw if values is None else _show(getattr(values, name))
        options.append(
            Option(
                variable,
                plugin,
                _show_type(field.annotation),
                "(required)" if default is PydanticUndefined else _show(default),
                value,
                "environment" if given is not None else "default" if profiled is None else "profile",
                field.description or documents.get(name, ""),
                error if variable in error else "",
            )
        )
    return tuple(options)


def _field_documents(model: type) -> dict[str, str]:
    """The string below each field of a settings model."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    found = {}
    statements = getattr(body, "body", [])
    for field, below in pairwise(statements):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple | list | set | frozenset):
        return ",".join(map(_show, value))
    return str(getattr(value, "value", value))


def _show_type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is type(None):
        return "unset"
    if origin is typing.Annotated:
        return _show_type(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(_show_type, arguments))
    if origin in (tuple, list, set, frozenset):
        return f"list of {_show_type(arguments[0])}" if arguments else "list"
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return "|".join(_show(member) for member in annotation)  # type: ignore[attr-defined]
    return str(getattr(annotation, "__name__", annotation)).replace("typing.", "")


# --- ways in -------------------------------------------------------------------------------------------------


def _entrances(env: Environment) -> tuple[tuple[Way, ...], tuple[Process, ...]]:
    point = _own_entry_point()
    version = env.version_text("sglang")
    loads = {role: loads_plugins(role, env) for role in PROCESSES}
    if version is None:
        entry = Way("entry point", False, "SGLang is not installed")
    elif not loads["scheduler"]:
        entry = Way("entry point", False, f"SGLang {version} loads no plugins; from 0.5.11 it does")
    elif point is None:
        entry = Way("entry point", False, "this interpreter sees no entry point of glm5-plugins")
    elif _is_left_out(env):
        entry = Way("entry point", False, f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves out {OURS!r}")
    else:
        entry = Way("entry point", True, f"SGLang {version} loads {OURS!r} of group {SGLANG_GROUP}")
    there = enable.enabled()
    line = Way(".pth line", there, str(enable.path()) if there else "`glm5-plugins enable` writes it")
    launcher = Way("launcher", True, f"{LAUNCHER}: any SGLang, for that launch")
    processes = []
    for role in PROCESSES:
        by = [way.name for way in (entry, line) if way.open and (way is line or loads[role])]
        detail = ""
        if not by and version is not None:
            detail = "`glm5-plugins enable` reaches it, and so does the launcher"
            if entry.open:
                detail = f"SGLang {version} loads no plugins in it (from 0.5.22 it does); {detail}"
        processes.append(Process(role, tuple(by), detail))
    return (entry, line, launcher), tuple(processes)


def worth_of_line() -> str:
    """Say which processes of the installed SGLang the `.pth` line is needed for."""
    env = Environment()
    version = env.version_text("sglang")
    if version is None:
        return "SGLang is not installed here; the line waits for it."
    missed = [role for role in PROCESSES if not loads_plugins(role, env)]
    if not missed:
        return f"It is not needed with SGLang {version}, which loads plugins in every process by itself."
    if "scheduler" in missed:
        return f"SGLang {version} loads no plugins by itself: this line is the way in."
    rest = " and the ".join(missed)
    return f"SGLang {version} loads plugins by itself: the line is not needed, except for the {rest}."


def _own_entry_point() -> metadata.EntryPoint | None:
    for point in metadata.entry_points(group=SGLANG_GROUP):
        if point.name == OURS and point.value.partition(":")[0].split(".")[0] == "glm5_plugins":
            return point
    return None


def loads_plugins(role: str, env: Environment) -> bool:
    """Whether a kind of process, as in `PROCESSES`, calls SGLang's plugin loader, by its source."""
    try:
        file = source.find(PROCESSES[role], env.roots).file
        return bool(re.search(r"^\s+load_plugins\(\)", file.read_text(encoding="utf-8"), re.M))
    except (source.Missing, OSError, UnicodeDecodeError):
        return False


def _reached(processes: Sequence[Process], env: Environment) -> list[Finding]:
    if env.version_text("sglang") is None:
        mend = f"Install it for {sys.executable}, or ask the python that has it."
        return [Finding("error", "SGLang is not installed in this environment.", mend)]
    missed = [process.role for process in processes if not process.by]
    if "main" in missed or "scheduler" in missed:
        if _is_left_out(env):
            return []  # said by left_out
        what = "Plugins are requested, and nothing brings the layer into the server's processes."
        return [Finding("error", what, f"Run `glm5-plugins enable`, or start with `{LAUNCHER}`.")]
    if missed:
        what = f"Patches are not applied in the {' and the '.join(missed)}."
        return [Finding("note", what, "If one matters there, run `glm5-plugins enable`.")]
    return []


def _seams(env: Environment) -> list[Finding]:
    """The layer's own hold on SGLang, checked as patches are."""
    if env.version_text("sglang") is None:
        return []
    mend = "This SGLang is not one it is made for; report it."
    return [
        Finding(_level(_is_strict()), f"The layer itself would not be in force ({step}): {why}.", mend)
        for step, why in seams.missed(env)
    ]


def _is_left_out(env: Environment) -> bool:
    return env.sglang_plugins is not None and OURS not in env.sglang_plugins


def left_out(env: Environment, requested: bool) -> list[Finding]:
    """Whether `SGLANG_PLUGINS` keeps the layer out."""
    if not _is_left_out(env):
        return []
    value = os.environ["SGLANG_PLUGINS"]
    covered = enable.enabled()
    return [
        Finding(
            "error" if requested and not covered else "warning",
            f"SGLANG_PLUGINS={value} leaves out {OURS!r}: SGLang drops this layer without a word"
            + ("; the .pth line brings it in all the same." if covered else "."),
            f"Set SGLANG_PLUGINS={value},{OURS}",
        )
    ]


def _stale_line() -> list[Finding]:
    if enable.enabled() or not enable.path().is_file():
        return []
    what = f"{enable.path()} is not the line that this version writes."
    return [Finding("warning", what, "Run `glm5-plugins enable` again, or `glm5-plugins disable`.")]


def hidden_installs(requested: bool = False) -> list[Finding]:
    """Packages in the user's own site-packages that this interpreter, or one without user sites, does not see."""
    folder = Path(site.getusersitepackages())
    if not folder.is_dir():
        return []
    seen = str(folder) in sys.path
    visible = {canonicalize_name(d.name) for d in metadata.distributions() if d.name}
    findings = []
    for distribution in metadata.distributions(path=[str(folder)]):
        groups = {point.group for point in distribution.entry_points}
        ours = canonicalize_name(distribution.name) == "glm5-plugins"
        if not ours and not groups & {GROUP, SGLANG_GROUP}:
            continue
        name = f"{distribution.name} {distribution.version}"
        if seen:
            if ours:
                what = f"{name} is installed for this user alone, in {folder}."
                mend = "A server under PYTHONNOUSERSITE=1, `python -s` or another user does not see it."
                findings.append(Finding("note", what, mend))
            continue
        elsewhere = canonicalize_name(distribution.name) in visible
        what = f"{name} is in {folder}, which is not read because {_why_no_user_site()}"
        what += "; another copy is in use." if elsewhere else "."
        mend = f"Install it with `{sys.executable} -m pip install {distribution.name}`" + (
            ", or unset PYTHONNOUSERSITE." if os.environ.get("PYTHONNOUSERSITE") else "."
        )
        findings.append(Finding(_level(bool(requested) and not elsewhere), what, mend))
    return findings


def _why_no_user_site() -> str:
    if os.environ.get("PYTHONNOUSERSITE"):
        return f"PYTHONNOUSERSITE={os.environ['PYTHONNOUSERSITE']} is set"
    if sys.flags.no_user_site:
        return "Python was started with -s or -I"
    if sys.prefix != sys.base_prefix:
        return f"{sysconfig.get_path('purelib')} belongs to a virtual environment"
    return "user site-packages are switched off"


def _other_plugins(rows: Sequence[PluginRow]) -> tuple[tuple[str, ...], list[Finding]]:
    """SGLang plugins of others, and which of our targets their source names; nothing of them is imported."""
    others, findings = [], []
    targets = {
        patch.target.replace(":", "."): (row.name, patch.target)
        for row in rows
        for patch in row.patches
        if patch.verdict == "ready"
    }
    for point in sorted(metadata.entry_points(group=SGLANG_GROUP), key=lambda point: point.name):
        module = point.value.partition(":")[0]
        if module.split(".")[0] == "glm5_plugins":
            continue
        label = f"{point.name} ({point.dist.name} {point.dist.version})" if point.dist else point.name
        others.append(label)
        text = _text_of(module)
        for dotted, (plugin, target) in targets.items():
            if dotted in text:
                findings.append(
                    Finding(
                        "warning",
                        f"The SGLang plugin {label} names {target}, which {plugin!r} patches too.",
                        f"Where they must not meet, set SGLANG_PLUGINS={OURS}, or do without {plugin!r}.",
                    )
                )
    return tuple(others), findings


def _text_of(module: str) -> str:
    """The source of a module's top-level package, or of the module where it is alone."""
    try:
        file = source.find(module.split(".")[0]).file
    except source.Missing:
        return ""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files if f.is_file())
