"""Chooses the expert parallel size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from glm5_plugins import Environment, PluginSettings, hookimpl
from glm5_plugins.settings.model import read


class Options(PluginSettings, plugin="ep"):
    """The options."""

    size: Literal["auto"] | int = "auto"
    """Expert parallel size."""


@hookimpl
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the size."""
    size = read(Options).size
    return {"ep_size": given.get("tp_size", 1) if size == "auto" else size}
