"""A launch command held against one SGLang version: its flags, a profile's rules, and what plugins would make of it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from glm5_plugins import doctor, enable, flags, seams
from glm5_plugins.arguments import given as given_by
from glm5_plugins.bootstrap import check_variables
from glm5_plugins.command import LAYER, Command, is_filled_in
from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError, Glm5Error, did_you_mean
from glm5_plugins.findings import Finding
from glm5_plugins.manager import PluginManager
from glm5_plugins.plugins import ep, mscclpp
from glm5_plugins.rules import Does, Launch, decide
from glm5_plugins.settings import profile as profiles
from glm5_plugins.settings.model import HostSettings, layer_variables, read, take_from_profile
from glm5_plugins.settings.profile import Profile

CAPABILITIES = {
    **{"sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3)},
    **{"sm110": (11, 0), "sm120": (12, 0), "sm121": (12, 1)},
}


@dataclass
class Judgement:
    """All that `glm5-plugins check` says.

    Args:
        asked: The version that was asked about.
        version: The version of the table that its flags were looked up in.
        architecture: The family of GPUs that rules were asked about; `unknown` where nobody said.
        profile: The profile that was asked for.
        rules_of: The profiles whose rules count: that one, or all that are about this model.
        given: What the command gives, by field of `ServerArgs`.
        findings: Errors first.
        added: What would be added: who, the flag as it would be typed.
        variables: Environment variables that would be set.
        outcomes: What each plugin says of itself.
        command: The whole command that it stands for.
    """

    asked: str
    version: str
    architecture: str
    profile: str | None = None
    rules_of: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    added: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing stops the launch."""
        return not any(finding.level == "error" for finding in self.findings)


def judge(
    command: Command, version: str | None = None, architecture: str | None = None, profile: str | None = None
) -> Judgement:
    """Hold a command against a version.

    Args:
        command: As taken apart.
        version: Of SGLang; else the one that a container image names, the one installed, or the newest known.
        architecture: A key of `CAPABILITIES`; else that of the profile's GPUs, or of this machine's.
        profile: Name or path; else `GLM5_PROFILE`, in front of the command or set.

    Raises:
        Glm5Error: The profile cannot be read.
    """
    asked = version or command.version or Environment().version_text("sglang") or flags.versions()[-1]
    known = flags.nearest(asked)
    with _variables(command.environment):
        findings = list(command.findings)
        given = _given(command, known, findings)
        name = os.environ.get("GLM5_PROFILE") or None if profile is None else profile
        chosen = None if name is None else profiles.load(name)
        if architecture is None and chosen is not None and len(chosen.architecture) == 1:
            architecture = chosen.architecture[0]
        capability = CAPABILITIES[architecture] if architecture else Environment().compute_capability
        env = Environment({"sglang": asked}, capability, elsewhere=True)
        found = Judgement(
            asked, known, Launch(env, {}).architecture, given=given.values if given else {}, findings=findings
        )
        if profile and os.environ.get("GLM5_PROFILE") != profile:
            found.variables["GLM5_PROFILE"] = profile
        if asked != known:
            findings.append(Finding("note", f"SGLang {asked} is not in the table of flags: those of {known} count."))
        _apply(command, found, env, chosen, given)
    findings[:] = sorted(dict.fromkeys(findings), key=lambda one: ("error", "warning", "note").index(one.level))
    return found


# --- flags ---------------------------------------------------------------------------------------------------


@dataclass
class _Given:
    """What a command gives.

    Args:
        values: By field, without those that only a shell knows.
        typed: The fields that are on the command line itself.
        whole: Whether that is all: nothing is left to a shell, or in a file that is not here.
    """

    values: dict[str, Any] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    whole: bool = True


def _given(command: Command, version: str, findings: list[Finding]) -> _Given | None:
    """What the command gives, and what is wrong with its flags; None where it is not understood."""
    words = flags.behind_serve(command.flags, version) if command.is_serve else list(command.flags)
    merged, off, read_all = _with_file(words, command.in_container, findings)
    unknown: list[str] = []
    try:
        values = _parsed(_without_ambiguous(merged, version, findings), version, unknown)
        typed = _parsed(_without_ambiguous(words, version, findings), version, []) if merged != words else values
    except flags.FlagError as error:
        findings.append(Finding("error", error.what, error.mend))
        return None
    if file := values.pop("config", None):
        what = f"SGLang {version} never reads {file}: it looks for the word --config alone."
        findings.append(Finding("warning", what, f"Write --config {file}."))
    findings += _unknown(unknown, version, foreign=command.module == "dynamo.sglang")
    by_field: dict[str, list[flags.Flag]] = {}
    for flag in flags.of(version):
        by_field.setdefault(flag.field, []).append(flag)
    findings += _retired(_typed(merged, version), version)
    given = dict(off)
    for name, value in values.items():
        given[name] = _value(value, by_field[name], findings)
    known = {name: value for name, value in given.items() if value is not None}
    return _Given(known, frozenset(typed), read_all and not any(map(is_filled_in, unknown)))


def _parsed(argv: Sequence[str], version: str, unknown: list[str]) -> dict[str, Any]:
    """Values by field as the version's parser has them, and the words that it does not know."""
    parser = flags.parser_of(version)

    def parse(words: Sequence[str]) -> Any:
        namespace, left = parser.parse_known_args(list(words))
        unknown[:] = left
        return namespace, left

    return given_by(parser, parse, argv)


def _with_file(argv: Sequence[str], elsewhere: bool, findings: list[Finding]) -> tuple[list[str], dict[str, Any], bool]:
    """Merge a `--config` file into a command line, as SGLang does; what it switches off; and whether it was read."""
    words = list(argv)
    if "--config" not in words or words.index("--config") + 1 >= len(words):
        return words, {}, True
    at = words.index("--config")
    file = Path(words[at + 1])
    rest = words[:at] + words[at + 2 :]
    if "--config" in rest:
        findings.append(Finding("error", "SGLang refuses a second --config.", "Give one file."))
        return [word for i, word in enumerate(words) if "--config" not in words[max(i - 1, 0) : i + 1]], {}, False
    try:
        content = _content(file, elsewhere)
    except _NotRead as reason:
        findings.append(Finding("note", f"--config {file} is not read: {reason}."))
        return rest, {}, False
    except ConfigurationError as error:
        findings.append(Finding("error", error.what, error.mend))
        return rest, {}, False
    merged: list[str] = []
    off = {}
    for key, value in content.items():
        if value is False:
            off[str(key).replace("-", "_")] = False
        elif value is True:
            merged.append(f"--{key}")
        elif isinstance(value, list):
            merged += [f"--{key}", *map(str, value)]
        else:
            merged += [f"--{key}", str(value)]
    return merged + rest, off, True


class _NotRead(Exception):
    """A file that says nothing here; the text is the reason."""


def _content(file: Path, elsewhere: bool) -> dict[Any, Any]:
    """What a `--config` file holds.

    Raises:
        _NotRead: It is on another machine, or cannot be read without PyYAML.
        ConfigurationError: SGLang refuses it.
    """
    if is_filled_in(str(file)):
        raise _NotRead("a shell fills it in")
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"--config {file}: SGLang takes .yaml and .yml, not {file.suffix!r}.", "Rename it.")
    if elsewhere:
        raise _NotRead("it is in the container")
    try:
        text = file.read_text(encoding="utf-8")
        yaml = import_module("yaml")  # SGLang has it, this layer does not ask for it
        return dict(yaml.safe_load(text) or {})
    except FileNotFoundError:
        raise ConfigurationError(f"--config {file} is no file.", "Correct the path.") from None
    except ImportError:
        raise _NotRead("PyYAML is not installed here") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"--config {file} cannot be read: {error}.", "Give a YAML file.") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config {file} cannot be read: {error}.", "Give a YAML file.") from None


def _without_ambiguous(argv: Sequence[str], version: str, findings: list[Finding]) -> list[str]:
    """Take out flags that are the start of several others, and say of gone ones how this version reads them.

    A flag that is gone may be the start of a new one: then SGLang takes it for that one, without a word.
    """
    options = {option for flag in flags.of(version) for option in flag.options}
    kept: list[str] = []
    skip = False
    for word in argv:
        option = word.partition("=")[0]
        if skip and not word.startswith("--"):
            skip = False
            continue
        skip = False
        matching = sorted(one for one in options if one.startswith(option))
        if not option.startswith("--") or option in options or not matching:
            kept.append(word)
            continue
        elsewhere = list(flags.with_option(option))
        gone = f"; the flag itself exists {flags.stretches(elsewhere)}" if elsewhere else ""
        if len(matching) > 1:
            what = f"{option} is the start of several flags of SGLang {version}, {', '.join(matching)}{gone}."
            findings.append(Finding("error", what, _instead(option, version) if elsewhere else "Write it out."))
            skip = "=" not in word and (not elsewhere or elsewhere[-1].kind == "value")
            continue
        if elsewhere:
            what = f"SGLang {version} reads {option} as {matching[0]}{gone}."
            findings.append(Finding("warning", what, f"Write {matching[0]}."))
        kept.append(word)
    return kept


def _unknown(words: Sequence[str], version: str, foreign: bool) -> Iterator[Finding]:
    """Say of each flag that the version does not have what became of it."""
    options = sorted({option for flag in flags.of(version) for option in flag.options})
    behind_unknown = False
    for word in words:
        option = word.partition("=")[0]
        if not option.startswith("--"):
            if is_filled_in(word):
                yield Finding("note", f"{word} is filled in by a shell: not judged.")
            elif not behind_unknown:
                mend = "Quote it with its flag, or take it out."
                yield Finding("error", f"{word!r} belongs to no flag of SGLang {version}.", mend)
            continue
        behind_unknown = True
        elsewhere = list(flags.with_option(option))
        if option in flags.FORK_FLAGS:
            what = f"{option} exists in no SGLang wheel; it is of {flags.FORK_FLAGS[option]}."
            yield Finding("error", what, "Take it out, or use that fork.")
        elif elsewhere:
            where = f"{option} is not a flag of SGLang {version}; it exists {flags.stretches(elsewhere)}."
            yield Finding("error", where, _instead(option, version))
        elif option in flags.RENAMED:
            what = f"{option} is not a flag of SGLang {version}, nor of any from {flags.versions()[0]} on."
            yield Finding("error", what, _instead(option, version))
        elif foreign:
            yield Finding("note", f"{option} is not a flag of SGLang {version}; it may be one of Dynamo's own.")
        else:
            what = f"{option} is not a flag of SGLang {version}, nor of any other from {flags.versions()[0]} on."
            yield Finding("error", what, did_you_mean(option, options) if options else "")


def _instead(option: str, version: str) -> str:
    here = {spelling for flag in flags.of(version) for spelling in flag.options}
    new = next((flag.new for flag in flags.with_option(option) if flag.new), None) or flags.RENAMED.get(option)
    if new is not None and (new.split()[0].partition("=")[0] in here or not new.startswith("--")):
        return f"Use {new}."
    old = [before for before, after in flags.RENAMED.items() if after.split()[0] == option and before in here]
    return f"In {version} it is called {old[0]}." if old else "Take it out, or install a version that has it."


def _typed(argv: Sequence[str], version: str) -> list[flags.Flag]:
    """The flags of a version that are on a command line, by their spelling or the start of it."""
    here = flags.of(version)
    spelled = {option: flag for flag in here for option in flag.options}
    found = []
    for word in argv:
        option = word.partition("=")[0]
        if not option.startswith("--"):
            continue
        if option in spelled:
            found.append(spelled[option])
        else:
            matching = [flag for name, flag in spelled.items() if name.startswith(option)]
            if len({id(flag) for flag in matching}) == 1:
                found.append(matching[0])
    return found


def _retired(typed: Sequence[flags.Flag], version: str) -> Iterator[Finding]:
    for flag in typed:
        if flag.gone:
            yield Finding("error", f"SGLang {version} refuses {flag.options[0]}: {flag.gone}", "Take it out.")
        elif flag.new:
            what = f"{flag.options[0]} is on its way out in SGLang {version}."
            yield Finding("note", what, f"Use {flag.new}.")


def _value(value: Any, meant: Sequence[flags.Flag], findings: list[Finding]) -> Any:
    """A value as SGLang would have it; None for one that only a shell can tell and that must be of a kind."""
    flag = next((one for one in meant if one.kind in ("value", "append")), meant[0])
    values = value if isinstance(value, list) else [value]
    open_ = [one for one in values if isinstance(one, str) and is_filled_in(one)]
    findings += [Finding("note", f"{flag.options[0]} {one} is filled in by a shell: not judged.") for one in open_]
    if open_ and (flag.type or flag.choices):
        return None
    for one in values:
        if isinstance(one, str) and one in flags.FORK_VALUES:
            what = f"{flag.options[0]} {one} exists in no SGLang wheel; it is of {flags.FORK_VALUES[one]}."
            findings.append(Finding("error", what, f"Choose one of: {', '.join(flag.choices or ())}."))
        elif isinstance(one, str) and flag.choices is not None and one not in flag.choices:
            what = f"{flag.options[0]} {one} is not a value that this SGLang takes."
            findings.append(Finding("error", what, f"Choose one of: {', '.join(flag.choices)}."))
    if flag.type is None or not isinstance(value, str):
        return value
    try:
        return int(value) if flag.type == "int" else float(value)
    except ValueError:
        what = f"{flag.options[0]} {value} is no number."
        findings.append(Finding("error", what, f"Give {'a whole' if flag.type == 'int' else 'a'} number."))
        return None


# --- profile and plugins -------------------------------------------------------------------------------------


def _apply(
    command: Command, found: Judgement, env: Environment, in_force: Profile | None, given: _Given | None
) -> None:
    """Let the profile and the plugins go to work on what was given; None where that is not understood."""
    try:
        manager = _load(found, in_force)
        if manager.plugins or in_force is not None:
            found.findings += _ways_in(command, env)
        if given is None:
            return
        complete = dict(found.given)
        added: dict[str, tuple[str, Any]] = {}
        if in_force is not None:
            found.profile = in_force.name
            extra = in_force.arguments_for(Launch(env, complete))
            added = {name: (f"profile {in_force.name}", value) for name, value in extra.items()}
            complete |= extra
        added |= _of_plugins(manager, env, complete, found)
        complete |= {name: value for name, (_, value) in added.items()}
        launch = Launch(env, complete)
        fitting = [in_force] if in_force is not None else [one for one in profiles.bundled() if one.fits(launch)]
        _rules(fitting, launch, found)
        if given.whole and given.typed <= found.given.keys():
            found.findings += _unasked(launch, [plugin.name for plugin in manager])
        if in_force is None:
            found.findings += _unset(fitting, launch, command)
        else:
            wanted = in_force.variables_for(Launch(env, complete))
            found.variables |= {k: v for k, v in wanted.items() if k not in command.environment}
        found.findings += _lacking(command, given, complete, found.version)
        extra_words = _spell(added, found)
        found.command = _whole(command, found, extra_words)
    finally:
        take_from_profile({})


def _lacking(command: Command, given: _Given, complete: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """The required flags that nobody gives."""
    for flag in flags.of(version):
        option = flag.options[0]
        if not flag.required or not given.whole or flag.field in given.typed or command.module == "dynamo.sglang":
            continue
        if flag.field not in complete:
            yield Finding("error", f"SGLang {version} needs {option}, and nothing gives it.", f"Give {option}.")
        elif command.is_serve:
            what = f"`sglang serve` of SGLang {version} looks for {option} on the command line alone."
            yield Finding("error", what, f"Give {option}.")


def _load(found: Judgement, in_force: Profile | None) -> PluginManager:
    """The plugins that are asked for, with everything refused that the layer refuses before it loads them."""
    manager = PluginManager()
    with _refusals(found):
        check_variables()
    with _refusals(found):
        check_variables({} if in_force is None else in_force.options)
    take_from_profile({} if in_force is None else in_force.defaults)
    with _refusals(found):
        manager.load(read(HostSettings).plugins)
    for plugin in manager:
        with _refusals(found):
            if plugin.options is not None:
                read(plugin.options)
    return manager


def _ways_in(command: Command, env: Environment) -> list[Finding]:
    """What keeps the layer out of the server, as far as the command and this machine tell."""
    if LAYER in command.front or (enable.enabled() and not command.in_container):
        return []
    if Launch(env, {}).is_sglang(seams.LOADS_PLUGINS):
        return doctor.left_out(env, requested=True)
    what = f"SGLang {env.version_text('sglang')} loads no plugins by itself, and nothing else brings the layer in"
    if command.in_container:
        mend = f"Run `glm5-plugins enable` in the image, or start with `{doctor.LAUNCHER}`."
        return [Finding("warning", f"{what}, unless the image does.", mend)]
    return [Finding("error", f"{what}.", f"Run `glm5-plugins enable`, or start with `{doctor.LAUNCHER}`.")]


@contextlib.contextmanager
def _refusals(found: Judgement) -> Iterator[None]:
    try:
        yield
    except Glm5Error as error:
        found.findings.append(Finding("error", error.what, error.mend))


def _of_plugins(
    manager: PluginManager, env: Environment, complete: Mapping[str, Any], found: Judgement
) -> dict[str, tuple[str, Any]]:
    refused = False
    for plugin in manager:
        if not manager.implements("glm5_server_args", plugin):
            continue
        alone = PluginManager()
        alone.load([plugin.name])
        try:
            alone.server_args(env, complete)
            outcome = alone.outcome(alone.plugins[0], env)
        except Glm5Error as error:
            refused = True
            found.findings.append(Finding("error", error.what, error.mend))
            found.outcomes[plugin.name] = "refused"
            continue
        found.outcomes[plugin.name] = "applied" if outcome is None else f"{outcome.verdict.value}: {outcome.reason}"
    if refused:
        return {}
    try:
        return {name: (plugin.name, value) for name, (plugin, value) in manager.server_args(env, complete).items()}
    except Glm5Error as error:
        found.findings.append(Finding("error", error.what, error.mend))
        return {}


def _rules(fitting: Sequence[Profile], launch: Launch, found: Judgement) -> None:
    """The rules of the profile that was asked for, or of all that are about this model and GPU."""
    said: dict[tuple[str, str], str] = {}
    for profile in fitting:
        decision = decide(profile.table(), launch)
        for why, mend in decision.warnings:
            said.setdefault((why, mend), "warning")
        if decision.does is Does.REFUSE:
            said[decision.why, decision.mend] = "error"
    for (why, mend), level in said.items():
        found.findings.append(Finding("error" if level == "error" else "warning", f"{why}.", mend))
    found.rules_of = [profile.name for profile in fitting]


def _unasked(launch: Launch, plugins: Sequence[str]) -> Iterator[Finding]:
    """What SGLang makes of flags that a plugin judges, where that plugin is not asked."""
    if "ep" not in plugins and (launch.given.get("ep_size") or 0) > 0:
        decision = decide((ep.SPANS, *ep.STOPPING), launch)
        if decision.does is Does.REFUSE:
            level: Literal["error", "warning"] = "warning" if ep.SPANS.holds(launch) else "error"
            yield Finding(level, f"{decision.why}.", decision.mend)
    if "mscclpp" not in plugins and launch.given.get("enable_mscclpp"):
        decision = decide(mscclpp.SIZES, launch)
        if decision.does is Does.REFUSE:
            yield Finding("warning", f"{decision.why}: it goes on with NCCL.", decision.mend)


def _unset(fitting: Sequence[Profile], launch: Launch, command: Command) -> Iterator[Finding]:
    """Variables without which launches of this model fail, as its profiles say."""
    there = {*command.environment, *([] if command.in_container else os.environ)}
    for part in (part for profile in fitting for part in profile.environment if part.why and part.holds(launch)):
        for name, value in part.set.items():
            if name not in there:
                yield Finding("warning", f"{name} is not set: {part.why}.", f"Set {name}={value}.")


def _spell(added: Mapping[str, tuple[str, Any]], found: Judgement) -> list[str]:
    from glm5_plugins import arguments

    parser = flags.parser_of(found.version)
    words: list[str] = []
    for name, (who, value) in added.items():
        try:
            spelled = arguments.flags(parser, {name: value})
        except Glm5Error as error:
            found.findings.append(Finding("error", f"{who}: {error.what}", error.mend))
            continue
        if spelled:
            found.added.append((who, shlex.join(spelled)))
            words += spelled
    return words


def _whole(command: Command, found: Judgement, extra: Sequence[str]) -> str:
    """The command with everything that would be added; empty where it stands inside a word of another."""
    if command.inside:
        return ""
    with _refusals(found):
        return handed_on(command, found).adding(extra).text
    return ""


def handed_on(command: Command, found: Judgement) -> Command:
    """The command with all variables that the layer goes by, and those that its profile sets.

    Raises:
        CommandError: What starts the container takes no variables.
    """
    layer = {name: os.environ[name] for name in layer_variables() if name not in command.environment}
    return command.with_program().setting({**layer, **found.variables})


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """The variables in front of the command count as set, as far as this layer reads them."""
    ours = {
        name: environment[name] for name in (*layer_variables(environment), "SGLANG_PLUGINS") if name in environment
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
