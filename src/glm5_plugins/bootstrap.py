"""Brings the layer into a process, once: settings, then plugins, then seams and patches."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from glm5_plugins import agreement, seams
from glm5_plugins.agreement import Agreement
from glm5_plugins.environment import Environment, Role
from glm5_plugins.errors import ConfigurationError, Glm5Error, NotInForce, did_you_mean, stop
from glm5_plugins.manager import Plugin, PluginManager
from glm5_plugins.patching import Drift, Outcome, Patch, Record, Registry, Stage, Verdict
from glm5_plugins.report import HOST, Report, Row, row_as_json
from glm5_plugins.rules import Launch
from glm5_plugins.settings.model import (
    HostSettings,
    comparable,
    layer_variables,
    prefix_of,
    read,
    variables_of,
)

if TYPE_CHECKING:
    from glm5_plugins.preset import Preset
    from glm5_plugins.settings.model import PluginSettings

# Their versions are reported, and must be the same in every rank.
DISTRIBUTIONS = ("sglang", "flashinfer-python", "torch")

# The pid of the server's main process, in the environment of the processes that it starts.
SERVER = "_GLM5_SERVER"

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
    """Refuse `GLM5_*` variables that nothing reads, and options whose value does not fit, of whichever plugin.

    Args:
        environ: Variables that stand in for those of this process; their values are not looked at.

    Raises:
        ConfigurationError: A variable is unknown, and the text suggests the nearest one; or its value does not fit.
    """
    known = set(variables_of(HostSettings))
    set_here: dict[type[PluginSettings], None] = {}
    for variable in layer_variables(environ):
        if variable in known:
            continue
        owners = [name for name in PluginManager.known() if variable.startswith(prefix_of(name))]
        models = [options for owner in owners if (options := PluginManager.find(owner).options) is not None]
        choices = known.union(*map(variables_of, models))
        if variable not in choices:
            raise ConfigurationError(f"{variable} is not a variable of glm5-plugins.", did_you_mean(variable, choices))
        set_here |= dict.fromkeys(models)
    for model in set_here if environ is None else ():
        read(model)


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
        self.options = {plugin.name: read(plugin.options) for plugin in self.manager if plugin.options is not None}
        self.agreement = agreement.NOT_REACHED
        self.metrics = False
        """Whether SGLang serves metrics; known once it configures logging."""
        self.report = Report(self.settings.report)
        self.registry = Registry(self.env, self._on_bad_patch, self._lacking_in_source)
        self.seams = Registry(self.env, self._on_bad_seam)
        self._stage = "loading"
        self._verified = False
        self._captured: set[str] = set()
        self._compared: set[Stage] = set()
        self._ready = False
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
        found = list(seams.here(self.env))
        if not found and (sglang := self.env.version_text("sglang")) is not None:
            self._refuse("The layer itself", seams.NOT_MADE_FOR.format(sglang))
        for seam in found:
            self.seams.add("glm5-plugins", seam.patch(self))
        for plugin, patch in self.manager.patches(self.env):
            if any(record.plugin == plugin.name and record.verdict.bad for record in self.registry):
                self.registry.records.append(
                    Record(plugin.name, patch, Verdict.SKIPPED, "another patch of this plugin cannot be in force")
                )
                continue
            self.registry.add(plugin.name, patch)
        atexit.register(self._at_exit, os.getpid())

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
            self._count()
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

    def launches(self) -> None:
        """This process is about to start the server's processes: they learn whose they are."""
        os.environ[SERVER] = str(os.getpid())

    def agree(self, before: Stage) -> None:
        """Compare this rank with the other ranks of its server, once before each costly step.

        Raises:
            SystemExit: They differ, or one did not come; every rank stops.
        """
        if before in self._compared:
            return
        self._compared.add(before)
        try:
            self.agreement = self._compare()
        except Drift as drift:
            self.agreement = Agreement("not compared", str(drift))
            account = f"it cannot compare the ranks: drifted: {drift}"
            self._refuse("The layer itself", account, "Set GLM5_AGREEMENT=off to start without comparing.")
        except NotInForce as error:
            self.agreement = Agreement("not compared", error.what)
            raise self._end(error) from error
        found = self.agreement
        if found.state == "differs":
            raise self._end(agreement.refusal(found))
        detail = f"{len(found.ranks)} ranks, {found.digest}" if found.state == "agreed" else found.reason
        self.report.say(logging.INFO, f"agreement of ranks before {before.value}: {found.state}: {detail}")

    def _compare(self) -> Agreement:
        if self.settings.agreement == "off":
            return Agreement("off", "GLM5_AGREEMENT=off")
        return agreement.compare(seams.world(), self.facts(), HOST, os.getpid())

    def facts(self) -> dict[str, str]:
        """What must be the same in every rank, by name."""
        facts = {"the version of glm5-plugins": version("glm5-plugins")}
        facts |= {f"the version of {name}": self.env.public_version(name) for name in DISTRIBUTIONS}
        facts |= {"GLM5_PLUGINS": ",".join(self.settings.plugins), "GLM5_ON_ERROR": self.settings.on_error}
        facts |= {f"the plugin {plugin.name}": plugin.origin for plugin in self.manager}
        for name, options in self.options.items():
            facts |= {f"{prefix_of(name)}{field.upper()}": text for field, text in comparable(options).items()}
        for row in self.rows():
            name = f"the verdict of {row.plugin} on {row.target}"
            facts[name] = ", ".join(filter(None, (facts.get(name), agreement.standing(row.target, row.verdict))))
        return facts

    def ready(self) -> None:
        """The start of this process has ended, whichever steps SGLang went through: what never ran is dead."""
        if self._ready:
            return
        self._ready = True
        if self.env.role is Role.SCHEDULER:
            for stage in (Stage.MODEL_LOAD, Stage.CAPTURE):
                self.registry.expire(stage)
        self._act_on_outcomes()
        self._count()
        self.report.rows(self.rows())
        self._write("ready")

    def _count(self) -> None:
        """Set the gauges that say which plugins are in force, where SGLang serves metrics."""
        if self.metrics:
            from glm5_plugins import metrics

            if (lacking := metrics.publish(self.rows(), self.env.role.value)) is not None:
                self.note(f"plugins are not among the metrics: {lacking}")

    def failing(self) -> None:
        """The start of this process ends in an error: its parent may kill it before Python's own exit is reached."""
        self._write(self._stage)

    def summary(self) -> dict[str, Any]:
        """What `/server_info` says of this process; plain values only, none of them from the environment."""
        keys = ("plugin", "target", "verdict", "reason", "fired")
        rows = [row_as_json(row) for row in self.rows()]
        return {
            "version": version("glm5-plugins"),
            "plugins": list(self.settings.plugins),
            "on_error": self.settings.on_error,
            "stage": self._stage,
            "agreement": {"state": self.agreement.state, "reason": self.agreement.reason},
            "rows": [{key: row[key] for key in keys} for row in rows],
        }

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
        return {
            "layer": {
                "version": version("glm5-plugins"),
                "way": self.way,
                "on_error": self.settings.on_error,
                "plugins": list(self.settings.plugins),
            },
            "versions": {name: self.env.version_text(name) for name in DISTRIBUTIONS},
            "profile": None if self.preset is None else self.preset.document(),
            "stage": self._stage,
            "agreement": self.agreement.as_json(),
            "rows": [row_as_json(row) for row in self.rows()],
            "seams": [
                {"target": record.patch.target, "verdict": record.verdict.value, "fired": record.fired}
                for record in self.seams
            ],
            "notes": self._notes,
        }

    def _write(self, stage: str) -> None:
        self._stage = stage
        self.report.write(self.env.role.value, self._server(), self.document())

    def _server(self) -> int:
        """The pid of the server's main process, as far as this process knows."""
        told = os.environ.get(SERVER, "")
        return int(told) if self.env.is_child and told.isdecimal() else os.getpid()

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
            ways = "Take it out of GLM5_PLUGINS, or set GLM5_ON_ERROR=warn to start without it."
            raise self._end(NotInForce(what, mend or ways), alone=True)
        self.report.say(logging.WARNING, what)

    def _end(self, error: Glm5Error, alone: bool = False) -> SystemExit:
        """Write the last report, say the error, and return the exit to raise.

        Args:
            error: What stops this process.
            alone: Whether other processes of the server know nothing of it. A child then tells its parent, in the way
                that SGLang's own children do, or the parent might serve without it, or wait for it.
        """
        self._write(self._stage)
        parent = os.getppid()  # asked once: when it ends this becomes process 1
        if os.environ.get(SERVER) != str(parent):
            return stop(error)
        # At once: whoever notices the end of this process may kill it before Python has written its last words.
        # In one write, which print would make two of: other processes write to the same log.
        sys.stderr.write(f"glm5-plugins: {error}\n")
        sys.stderr.flush()
        if alone:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                os.kill(parent, signal.SIGQUIT)
        return SystemExit(1)


def _account(record: Record) -> str:
    return f"{record.patch.target}: {record.verdict.value}: {record.reason}"


@cache
def _lacking(patch: Patch) -> str | None:
    """What the installed source lacks of a patch's target; nothing of it is imported."""
    from glm5_plugins import source

    return source.lacks(patch.target, patch.needs, knows=patch.knows)
