"""Stand in for SGLang's CUDA kernels on a machine without a GPU.

Refuses to compute anything: every name resolves, and whatever it resolves to raises
NotImplementedError when called. It registers no torch operator, so `torch.ops.sgl_kernel.*` stays
empty and SGLang's own probes for CPU kernels answer "no". It carries no distribution metadata.

SGLang imports names from `sgl_kernel` and its submodules at module level even where the CPU path
never calls them. That is all this package is for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import NoReturn

__version__ = "0.0.0"


class Missing:
    """A kernel that isn't here; attributes of it are missing kernels too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stand-in: this machine runs without SGLang's CUDA kernels")

    def __repr__(self) -> str:
        return f"<missing {self._name}>"


class MissingModule(ModuleType):
    """A submodule whose every public name is a missing kernel."""

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serve any `sgl_kernel.<submodule>`, at any depth."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{__name__}.{name}")


sys.meta_path.append(SubmoduleFinder())
