"""Imported by the `.pth` line that `glm5-plugins enable` writes: brings the layer in just before SGLang.

The line runs in every Python of the environment, so this module imports only the standard library and waits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _BeforeSGLang(MetaPathFinder):
    """Finds nothing; starts the layer when somebody looks for `sglang`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            from glm5_plugins import bootstrap

            bootstrap.start(".pth line")
        return None


def install() -> None:
    """Wait for the first import of `sglang`."""
    if "sglang" not in sys.modules and not any(isinstance(one, _BeforeSGLang) for one in sys.meta_path):
        sys.meta_path.insert(0, _BeforeSGLang())


install()
