"""Brings the layer into a process, once: settings, then plugins, then seams and patches."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from glm5_plugins import seams
from glm5_plugins.environment import Environment, Role
from glm5_plugins.errors import ConfigurationError, Glm5Error, NotInForce, did_you_mean, stop
from glm5_plugins.manager import Plugin, PluginManager
from glm5_plugins.patching import Patch, Record, Registry, Stage, Verdict
from glm5_plugins.report import Report, Row, row_as_json
from glm5_plugins.settings.model import (
    HostSettings,
    layer_variables,
    prefix_of,
    read,
    variables_of,
)

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
        self._notes: list[str] = []

    def apply(self) -> None:
        """Put the seams and the patches in."""
        self._note_filter()
        for seam in seams.here(self.env):
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
        """Server arguments that plugins add to what the user gave, by field name."""
        try:
            wanted = self.manager.server_args(self.env, given)
        except Glm5Error as error:
            raise stop(error) from None
        for name, (plugin, value) in wanted.items():
            self.report.say(logging.INFO, f"{plugin.name}: adds the server argument {name}={value!r}")
        return {name: value for name, (_, value) in wanted.items()}

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
        self.registry.expire(stage)
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
            own += [self._hook_row(plugin, hook) for hook in self.manager.wrapping_hooks(plugin)]
            rows += own or [self._empty_row(plugin)]
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
        return Row(plugin.name, hook, Verdict.APPLIED, "applied", "lifecycle hook", fired=self.manager.calls[hook])

    def _empty_row(self, plugin: Plugin) -> Row:
        verdict, reason = Verdict.NOT_APPLICABLE, "it has nothing to change here"
        if self.manager.implements("glm5_server_args", plugin):
            verdict, reason = Verdict.APPLIED, "it chooses server arguments, in the main process"
        return Row(plugin.name, "-", verdict, verdict.value, reason)

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

    def _on_bad_patch(self, record: Record) -> None:
        self._refuse(record, f"The plugin {record.plugin!r}")
        self.registry.withdraw(record.plugin, "another patch of this plugin cannot be in force")

    def _on_bad_seam(self, record: Record) -> None:
        self._refuse(record, "The layer itself")

    def _refuse(self, record: Record, who: str) -> None:
        what = (
            f"{who} is not in force in the {self.env.role.value} process: "
            f"{record.patch.target}: {record.verdict.value}: {record.reason}."
        )
        if self.settings.on_error == "strict":
            self._write(self._stage)
            mend = "Take it out of GLM5_PLUGINS, or set GLM5_ON_ERROR=warn to start without it."
            raise stop(NotInForce(what, mend))
        self.report.say(logging.WARNING, what)


@cache
def _lacking(patch: Patch) -> str | None:
    """What the installed source lacks of a patch's target; nothing of it is imported."""
    from glm5_plugins import source

    return source.lacks(patch.target, patch.needs)
