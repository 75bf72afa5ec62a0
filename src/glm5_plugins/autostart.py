"""Imported by the `.pth` line that `glm5-plugins enable` writes: brings the layer in just before SGLang.

The line runs in every Python of the environment, so this module imports little and waits.
"""

from __future__ import annotations

from glm5_plugins.imports import before_import


def _start() -> None:
    from glm5_plugins import bootstrap

    bootstrap.start(".pth line")


before_import("sglang", _start)
