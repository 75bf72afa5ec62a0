"""Brings the layer into a process, once: settings, then plugins, then seams and patches."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from glm5_plugins import seams
from glm5_plugins.environment import Environment, Place, Role
from glm5_plugins.errors import ConfigurationError, Glm5Error, NotInForce, did_you_mean, stop
from glm5_plugins.manager import Plugin, PluginManager
from glm5_plugins.patching import Outcome, Patch, Record, Registry, Stage, Verdict
from glm5_plugins.report import Report, Row, row_as_json
from glm5_plugins.rules import Launch
from glm5_plugins.settings.model import (
    HostSettings,
    layer_variables,
    prefix_of,
    read,
    variables_of,
)

if TYPE_CHECKING:
    from glm5_plugins.preset import Preset

_layer: Layer | None = None


def start(way: str) -> Layer:
    """Bring the layer into this process, or return the one that is there.

    Args:
        way: How the layer got in: `entry point`, `.pth line` or `launcher`.

    Raises:
        SystemExit: A setting is wrong, or a requested plugin cannot be in force under `GLM5_ON_ERROR=strict`.
    """
    global _layer
    if _layer is not None:
        if _layer.pid != os.getpid():
            _layer.forked()
        return _layer
    try:
        _layer = Layer(way)
        _layer.apply()
    except Glm5Error as error:
        raise stop(error) from None
    return _layer


def check_variables(environ: Mapping[str, str] | None = None) -> None:
    """Refuse `GLM5_*` variables that nothing reads.

    Raises:
        ConfigurationError: A variable is unknown; the text suggests the nearest one.
    """
    known = set(variables_of(HostSettings))
    for variable in layer_variables(environ):
        if variable in known:
            continue
        owners = [name for name in PluginManager.known() if variable.startswith(prefix_of(name))]
        choices = set(known)
        for owner in owners:
            options = PluginManager.find(owner).options
            choices |= set(variables_of(options)) if options is not None else set()
        if variable not in choices:
            raise ConfigurationError(f"{variable} is not a variable of glm5-plugins.", did_you_mean(variable, choices))


class Layer:
    """The layer in one process.

    Args:
        way: How it got in.

    Raises:
        Glm5Error: A setting or plugin is wrong.
    """

    def __init__(self, way: str) -> None:
        self.pid = os.getpid()
        self.way = way
        self.env = Environment()
        self.settings = read(HostSettings)
        check_variables()
        self.preset = self._preset()
        self.settings = read(HostSettings)
        self.manager = PluginManager()
        self.manager.load(self.settings.plugins)
        for plugin in self.manager:
            if plugin.options is not None:
                read(plugin.options)
        self.report = Report(self.settings.report)
        self.registry = Registry(self.env, self._on_bad_patch, self._lacking_in_source)
        self.seams = Registry(self.env, self._on_bad_seam)
        self._stage = "loading"
        self._verified = False
        self._captured: set[str] = set()
        self._refused: set[str] = set()
        self._arguments_chosen = False
        self._added: dict[str, tuple[str, Any]] = {}
        self._notes: list[str] = []
        if self.preset is not None:
            self.preset.set_variables(Launch(self.env, {}))

    def _preset(self) -> Preset | None:
        """The profile that is asked for; from here on settings are read from it too."""
        if not self.settings.profile:
            return None
        from glm5_plugins.preset import Preset
        from glm5_plugins.settings import profile

        preset = Preset(profile.load(self.settings.profile), self.env)
        check_variables(preset.profile.options)
        preset.take_effect_on_settings()
        return preset

    def apply(self) -> None:
        """Put the seams and the patches in."""
        self._note_filter()
        for seam in self._seams_here():
            self.seams.add("glm5-plugins", seam.patch(self))
        for plugin, patch in self.manager.patches(self.env):
            if any(record.plugin == plugin.name and record.verdict.bad for record in self.registry):
                self.registry.records.append(
                    Record(plugin.name, patch, Verdict.SKIPPED, "another patch of this plugin cannot be in force")
                )
                continue
            self.registry.add(plugin.name, patch)
        atexit.register(self._at_exit, os.getpid())

    def _seams_here(self) -> Iterable[seams.Seam]:
        """The seams of this version; for a version that cannot be placed, those its source has."""
        for seam in seams.SEAMS:
            patch = seam.patch(self)
            place = self.env.place(patch.windows[0])
            if place is Place.INSIDE or (place is Place.UNKNOWN and _lacking(patch) is None):
                yield seam

    def _note_filter(self) -> None:
        allowed = self.env.sglang_plugins
        if allowed is not None and "glm5" not in allowed and self.way != "entry point":
            self.note(
                f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves out 'glm5': "
                f"the layer is in this process by its {self.way} alone"
            )

    def note(self, text: str) -> None:
        """Say something about this process in the log and the report."""
        if text not in self._notes:
            self._notes.append(text)
            self.report.say(logging.WARNING, text)

    def forked(self) -> None:
        """Become the layer of a forked child: what is patched stays, reports are its own."""
        self.pid = os.getpid()
        self.report.forked()

    def server_args(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Server arguments that plugins add to what the user gave, by field name.

        Raises:
            SystemExit: A plugin refuses the launch, or two plugins disagree.
        """
        self._arguments_chosen = True
        try:
            complete = dict(given) if self.preset is None else self.preset.complete(given)
            wanted = self.manager.server_args(self.env, complete)
            added = {name: value for name, (_, value) in wanted.items()}
            if self.preset is not None:
                self.preset.judge({**complete, **added})
        except Glm5Error as error:
            raise stop(error) from None
        if self.preset is not None:
            added = {**self.preset.added, **added}
            self.preset.set_variables(Launch(self.env, {**complete, **added}))
            self._say_preset(self.preset)
        for name, (plugin, value) in wanted.items():
            self.report.say(logging.INFO, f"{plugin.name}: adds the server argument {name}={value!r}")
        self._added = {name: (plugin.name, value) for name, (plugin, value) in wanted.items()}
        return added

    def _say_preset(self, preset: Preset) -> None:
        for note in preset.notes():
            self.report.say(logging.INFO, note)
        for name, value in preset.added.items():
            self.report.say(logging.INFO, f"profile {preset.profile.name}: adds the server argument {name}={value!r}")
        for warning in preset.warnings:
            self.note(warning)

    def resolved(self, values: Mapping[str, Any]) -> None:
        """Compare what plugins added with what SGLang made of it.

        Args:
            values: What SGLang goes by, for each field that was added.
        """
        for name, (plugin, value) in self._added.items():
            if name in values and values[name] != value:
                self.note(f"{plugin}: added {name}={value!r}, and SGLang made it {values[name]!r}")

    @property
    def chooses_arguments(self) -> bool:
        """Whether a plugin or a profile may add server arguments."""
        return self.preset is not None or self.manager.implements("glm5_server_args")

    @property
    def added(self) -> Iterable[str]:
        """The fields that plugins added."""
        return self._added

    def logging_is_up(self) -> None:
        """SGLang has configured logging: say what was kept, and the verdicts."""
        self.report.flush()
        if self.env.role not in (Role.MAIN, Role.SCHEDULER):
            self.verify()  # no later seam is reached in these processes
        self.report.rows(self.rows())
        self._write("logging is up")

    def verify(self) -> None:
        """Check once that what was applied is in force, before the costly steps."""
        if not self._verified:
            self._verified = True
            self.registry.verify()

    def reach(self, stage: Stage) -> None:
        """A stage of the start has ended in this process."""
        if stage is Stage.ARGUMENTS:
            self.verify()
            self._check_arguments_chosen()
        self.registry.expire(stage)
        self._act_on_outcomes()
        if stage is not Stage.ARGUMENTS:
            self.report.rows(self.rows())
        self._write(stage.value)

    def captured(self, kind: str) -> None:
        """One kind of graph capture has ended in this process."""
        self._captured.add(kind)
        if self._captured == {"decode", "prefill"}:
            self.reach(Stage.CAPTURE)

    def rows(self) -> list[Row]:
        """A row for each patch and each wrapping hook of each requested plugin; at least one for each."""
        rows: list[Row] = []
        for plugin in self.manager:
            own = [self._patch_row(record) for record in self.registry if record.plugin == plugin.name]
            own += [row for row in (self._arguments_row(plugin),) if row is not None]
            own += [self._hook_row(plugin, hook) for hook in self.manager.wrapping_hooks(plugin)]
            nothing = Row(plugin.name, "-", Verdict.NOT_APPLICABLE, "not applicable", "it has nothing to change here")
            rows += own or [nothing]
        return rows

    def _patch_row(self, record: Record) -> Row:
        return Row(
            record.plugin,
            record.patch.target,
            record.verdict,
            record.describe(),
            record.reason,
            record.when,
            record.rebound,
            record.fired,
            tuple(record.notes),
        )

    def _hook_row(self, plugin: Plugin, hook: str) -> Row:
        calls = self.manager.calls[hook]
        outcome = self.manager.outcome(plugin, self.env)
        if outcome is None and calls:
            outcome = Outcome(Verdict.APPLIED, "lifecycle hook")
        elif outcome is None:
            outcome = Outcome(Verdict.WAITING, "this process has not come to this step of the start")
        return Row(plugin.name, hook, outcome.verdict, outcome.verdict.value, outcome.reason, fired=calls)

    def _arguments_row(self, plugin: Plugin) -> Row | None:
        """What became of the server arguments that a plugin chooses."""
        if not self.manager.implements("glm5_server_args", plugin):
            return None
        outcome = self.manager.outcome(plugin, self.env)
        if self.env.is_child:
            outcome = Outcome(Verdict.NOT_APPLICABLE, "it chooses server arguments, which the main process does")
        elif outcome is None and not self._arguments_chosen:
            outcome = Outcome(Verdict.WAITING, "SGLang has not come to its arguments")
        elif outcome is None:
            outcome = Outcome(Verdict.APPLIED, "it chooses server arguments")
        return Row(plugin.name, "server arguments", outcome.verdict, outcome.verdict.value, outcome.reason)

    def document(self) -> dict[str, Any]:
        """What the JSON report says besides the process itself."""
        names = ("sglang", "flashinfer-python", "torch")
        return {
            "layer": {
                "version": version("glm5-plugins"),
                "way": self.way,
                "on_error": self.settings.on_error,
                "plugins": list(self.settings.plugins),
            },
            "versions": {name: self.env.version_text(name) for name in names},
            "profile": None if self.preset is None else self.preset.document(),
            "stage": self._stage,
            "rows": [row_as_json(row) for row in self.rows()],
            "seams": [
                {"target": record.patch.target, "verdict": record.verdict.value, "fired": record.fired}
                for record in self.seams
            ],
            "notes": self._notes,
        }

    def _write(self, stage: str) -> None:
        self._stage = stage
        self.report.write(self.env.role.value, self.document())

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():
            self._write(self._stage)

    def _lacking_in_source(self, patch: Patch) -> str | None:
        """In the main process, look into the source of what other processes will import."""
        if self.env.is_child:
            return None
        return _lacking(patch)

    def _check_arguments_chosen(self) -> None:
        """Whoever makes `ServerArgs` himself goes past the parser, and so past the plugins that choose arguments."""
        if self._arguments_chosen or self.env.is_child:
            return
        names = [plugin.name for plugin in self.manager if self.manager.implements("glm5_server_args", plugin)]
        who = [f"The plugin {name!r}" for name in names]
        who += [] if self.preset is None else [f"The profile {self.preset.profile.name!r}"]
        for one in who:
            account = "dead: the server arguments were made without SGLang's parser, so nothing was added to them"
            mend = "Give Engine the arguments themselves, or make them with ServerArgs.add_cli_args and a parser."
            self._refuse(one, account, mend)

    def _act_on_outcomes(self) -> None:
        for plugin in self.manager:
            outcome = self.manager.outcome(plugin, self.env)
            if outcome is not None and outcome.verdict.bad and plugin.name not in self._refused:
                self._refused.add(plugin.name)
                who = f"The plugin {plugin.name!r}"
                self._refuse(who, f"{outcome.verdict.value}: {outcome.reason}", outcome.mend)

    def _on_bad_patch(self, record: Record) -> None:
        self._refuse(f"The plugin {record.plugin!r}", _account(record))
        self.registry.withdraw(record.plugin, "another patch of this plugin cannot be in force")

    def _on_bad_seam(self, record: Record) -> None:
        self._refuse("The layer itself", _account(record))

    def _refuse(self, who: str, account: str, mend: str = "") -> None:
        what = f"{who} is not in force in the {self.env.role.value} process: {account.rstrip('.')}."
        if self.settings.on_error == "strict":
            self._write(self._stage)
            ways = "Take it out of GLM5_PLUGINS, or set GLM5_ON_ERROR=warn to start without it."
            raise stop(NotInForce(what, mend or ways))
        self.report.say(logging.WARNING, what)


def _account(record: Record) -> str:
    return f"{record.patch.target}: {record.verdict.value}: {record.reason}"


@cache
def _lacking(patch: Patch) -> str | None:
    """What the installed source lacks of a patch's target; nothing of it is imported."""
    from glm5_plugins import source

    return source.lacks(patch.target, patch.needs)
