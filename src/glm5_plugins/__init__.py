"""The public door of glm5-plugins: what a plugin author imports, and where SGLang comes in.

Importing this module loads nothing else, not even `__future__`; names are fetched when they are first used.
"""

import os

TYPE_CHECKING = False  # not from typing, which a process without GLM5_* variables would import for nothing
if TYPE_CHECKING:
    from typing import Any

    from glm5_plugins.environment import Environment as Environment
    from glm5_plugins.errors import ConfigurationError as ConfigurationError
    from glm5_plugins.errors import NotApplicable as NotApplicable
    from glm5_plugins.findings import Finding as Finding
    from glm5_plugins.hookspecs import hookimpl as hookimpl
    from glm5_plugins.patching import Kind as Kind
    from glm5_plugins.patching import Outcome as Outcome
    from glm5_plugins.patching import Patch as Patch
    from glm5_plugins.patching import Stage as Stage
    from glm5_plugins.patching import Verdict as Verdict
    from glm5_plugins.settings.model import PluginSettings as PluginSettings

__all__ = [
    "ConfigurationError",
    "Environment",
    "Finding",
    "Kind",
    "NotApplicable",
    "Outcome",
    "Patch",
    "PluginSettings",
    "Stage",
    "Verdict",
    "hookimpl",
    "register",
]

_HOME = {
    "ConfigurationError": "glm5_plugins.errors",
    "Environment": "glm5_plugins.environment",
    "Kind": "glm5_plugins.patching",
    "Finding": "glm5_plugins.findings",
    "NotApplicable": "glm5_plugins.errors",
    "Outcome": "glm5_plugins.patching",
    "Patch": "glm5_plugins.patching",
    "PluginSettings": "glm5_plugins.settings.model",
    "Stage": "glm5_plugins.patching",
    "Verdict": "glm5_plugins.patching",
    "hookimpl": "glm5_plugins.hookspecs",
}


def __getattr__(name: str) -> "Any":
    """Fetch a public name from the module it lives in (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def register() -> None:
    """Bring the layer into this process; SGLang calls it through the entry point `sglang.srt.plugins`.

    Returns at once, importing nothing, when no `GLM5_*` variable is set.

    Raises:
        SystemExit: A setting is wrong, or a requested plugin cannot be in force and `GLM5_ON_ERROR` is
            `strict`. SGLang swallows every `Exception` of a plugin; this it lets through.
    """
    if not any(name.startswith("GLM5_") for name in os.environ):
        return
    from glm5_plugins import bootstrap

    bootstrap.start("entry point")
