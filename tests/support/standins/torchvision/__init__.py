"""Stand in for torchvision on a machine without a GPU.

Refuses to touch an image: every name in every submodule is an empty class, and making one raises
NotImplementedError. It carries no distribution metadata and registers no torch operator.

SGLang and transformers import torchvision at module level for multimodal models; its wheels on the
package index need a CUDA build of torch. A text model never calls any of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0"


class Dummy(type):
    """The type of every name here: a class whose public attributes are dummy classes again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return dummy(f"{cls.__qualname__}.{name}", cls.__module__)

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is a stand-in: torchvision isn't here")


def dummy(qualname: str, module: str) -> Any:
    """A class to import, to annotate with, to compare with or to derive from; never to use."""
    return Dummy(qualname.rpartition(".")[2], (), {"__module__": module, "__qualname__": qualname})


class DummyModule(ModuleType):
    """A submodule whose every public name is a dummy class, the same one each time."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, dummy(name, self.__name__))
        return self.__dict__[name]


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serve any `torchvision.<submodule>`, at any depth."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DummyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return dummy(name, __name__)


sys.meta_path.append(SubmoduleFinder())
