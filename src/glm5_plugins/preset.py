"""The active profile in one process: what it adds to the arguments and the environment, and what came too late."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.rules import Does, Launch, decide
from glm5_plugins.settings.model import take_from_profile
from glm5_plugins.settings.profile import Profile


class Preset:
    """A profile at work.

    Args:
        profile: What was asked for.
        env: The surroundings that its conditions are asked of.
    """

    def __init__(self, profile: Profile, env: Environment) -> None:
        self.profile = profile
        self.env = env
        self.added: dict[str, Any] = {}
        """Arguments it added, by field."""
        self.set: dict[str, str] = {}
        """Environment variables it set."""
        self.kept: dict[str, str] = {}
        """Variables that were set to something else, which stays."""
        self.late: list[str] = []
        """Variables that code already loaded in this process may have read before; child processes get them in time."""
        self.warnings: list[str] = []

    def take_effect_on_settings(self) -> None:
        """Let plugins and options be read from the profile where no variable is set."""
        take_from_profile(self.profile.defaults)

    def set_variables(self, launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set variables where they are unset; again, once the arguments are known, for those that depend on them."""
        loaded = "sglang" in sys.modules or "torch" in sys.modules
        for name, value in self.profile.variables_for(launch).items():
            if name in self.set:
                continue
            if name not in environ:
                environ[name] = self.set[name] = value
                if loaded:
                    self.late.append(name)
            elif environ[name] != value:
                self.kept[name] = environ[name]

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the user gave together with what the profile adds to it."""
        launch = Launch(self.env, given)
        self.added = self.profile.arguments_for(launch)
        return {**self.added, **given}

    def judge(self, complete: Mapping[str, Any]) -> None:
        """Hold a launch against the profile's rules.

        Raises:
            ConfigurationError: One of them refuses it.
        """
        decision = decide(self.profile.table(), Launch(self.env, complete))
        self.warnings = [f"profile {self.profile.name}: {why}: {mend}" for why, mend in decision.warnings]
        if decision.does is Does.REFUSE:
            raise ConfigurationError(
                f"The profile {self.profile.name!r} refuses this launch: {decision.why}.", decision.mend
            )

    def notes(self) -> list[str]:
        """What a person should know, in sentences."""
        name = self.profile.name
        notes = [f"profile {name}: sets {variable}={value}" for variable, value in self.set.items()]
        notes += [f"profile {name}: {variable}={value} was set and stays" for variable, value in self.kept.items()]
        if self.late:
            notes.append(
                f"profile {name}: too late for what this process has loaded already, in time for its children: "
                f"{', '.join(self.late)}"
            )
        return notes

    def document(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "name": self.profile.name,
            "arguments": self.added,
            "set": self.set,
            "kept": self.kept,
            "late": self.late,
            "warnings": self.warnings,
        }
