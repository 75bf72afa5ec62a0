"""Callbacks around the first import of a module: `when_imported` right after it, `before_import` right before."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}
_before: dict[str, Callable[[], None]] = {}
_lock = threading.RLock()


def when_imported(name: str, callback: Callback) -> Callable[[], None]:
    """Call `callback(module)` once `name` is imported.

    Args:
        name: Full name of a module.
        callback: Runs in the importing thread, after the module's own code and before the import returns. What
            it raises, the import raises.

    Returns:
        A function that calls the wait off; it does nothing once the callback has run.
    """
    with _lock:
        module = sys.modules.get(name)
        if module is None:
            _waiting.setdefault(name, []).append(callback)
            _watch()
    if module is not None:
        callback(module)

    def call_off() -> None:
        with _lock:
            callbacks = _waiting.get(name, [])
            if callback in callbacks:
                callbacks.remove(callback)
                if not callbacks:
                    _forget(name)

    return call_off


def before_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback()` once, when the code of the module `name` is about to run for the first time.

    Looking for the module (`importlib.util.find_spec`) does not count. What the callback raises, the import raises.
    Does nothing if the module is loaded.
    """
    with _lock:
        if name not in sys.modules:
            _before[name] = callback
            _watch()


def _watch() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _forget(name: str) -> None:
    _waiting.pop(name, None)
    if not _waiting and not _before and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _notify(name: str) -> None:
    with _lock:
        callbacks = _waiting.get(name, [])[:]
        _forget(name)
    for callback in callbacks:
        callback(sys.modules[name])


class _Loader(importlib.abc.Loader):
    """Stands in for a module's loader until the module is executed, then gives the place back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = self._loader
        module.__loader__ = self._loader
        before = _before.pop(spec.name, None)
        if before is not None:
            before()
        self._loader.exec_module(module)
        _notify(spec.name)

    def __getattr__(self, name: str) -> Any:
        # runpy, pkgutil and inspect ask the loader for code, source and resources.
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find, and watches the modules somebody waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting and fullname not in _before:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder = _Finder()
