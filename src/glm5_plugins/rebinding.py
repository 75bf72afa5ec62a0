"""Copies of a patched object: from-imports are rebound, other holders are found and named."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_plugins.patching import Patch

_CLASS_ATTRIBUTE = "class attribute "
_LAYER = "glm5_plugins."


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if type(namespace) is dict:
            yield name, namespace


def _shared(value: Any) -> bool:
    """Whether many unrelated names may hold this very object: numbers, texts, None, tuples of such."""
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, tuple, frozenset))


def rebind(old: Any, new: Any, patch: Patch, own_modules: Iterable[str]) -> int:
    """Put `new` wherever a module global holds `old`, except in `patch.keep` and in the plugin's own modules.

    A constant such as `True` is held by many modules that have nothing to do with the target: it is rebound only
    where the source of the module imports that name from the target's module.

    Returns:
        The number of globals changed.
    """
    own = tuple(own_modules)
    count = 0
    for module, namespace in _namespaces():
        if module in own or module.startswith(_LAYER):
            continue
        for name, value in list(namespace.items()):
            if value is not old or f"{module}:{name}" in patch.keep:
                continue
            if _shared(old) and not _from_imports(module, name, patch):
                continue
            namespace[name] = new
            count += 1
    return count


def unbind(new: Any, old: Any, patch: Patch) -> None:
    """Put `old` back wherever a module global holds `new`, also where it was imported after the patch."""
    for module, namespace in _namespaces():
        for name, value in list(namespace.items()):
            if value is new and (not _shared(new) or _from_imports(module, name, patch)):
                namespace[name] = old


def _from_imports(module_name: str, name: str, patch: Patch) -> bool:
    """Whether the module's source says `from <target's module> import <constant> [as name]`."""
    if len(patch.path) != 1:
        return False
    module = sys.modules.get(module_name)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError, SyntaxError):
        return False
    package = getattr(module, "__package__", "") or ""
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.ImportFrom):
            continue
        source = node.module or ""
        if node.level:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            source = f"{base}.{source}" if source else base
        if source == patch.module and any(
            alias.name == patch.path[0] and (alias.asname or alias.name) == name for alias in node.names
        ):
            return True
    return False


class HolderSearch:
    """Finds who still holds objects: dictionaries, partials, class attributes, default arguments, closures.

    Module globals are not named: they are rebound. One pass over the garbage collector's objects serves all.

    Args:
        own_modules: Modules, besides those of this layer, whose functions and objects do not count.
        ours: Objects whose references do not count.
    """

    def __init__(self, own_modules: Iterable[str], ours: Iterable[Any]) -> None:
        self._own_modules = set(own_modules)
        self._skip: set[int] = set()
        for item in ours:
            self._skip.add(id(item))
            self._skip.add(id(getattr(item, "__dict__", None)))

    def find(self, objects: Sequence[Any]) -> list[list[str]]:
        """Return for each object the names of its holders, sorted, such as `partial in pkg.mod:fast`."""
        wanted = [value for value in objects if not _shared(value)]
        found: dict[int, set[str]] = {id(value): set() for value in wanted}
        for referrer in gc.get_referrers(*wanted) if wanted else ():
            if id(referrer) in self._skip or referrer is wanted or referrer is objects:
                continue
            for value in gc.get_referents(referrer):
                if id(value) in found and (name := self._name(referrer, value)) is not None:
                    found[id(value)].add(name)
        return [sorted(found.get(id(value), ())) for value in objects]

    def _name(self, referrer: Any, value: Any) -> str | None:
        """Name a holder, or None for one that does not count: a module, a frame, our own code."""
        if isinstance(referrer, dict):
            return self._name_dict(referrer, value)
        if isinstance(referrer, CellType):
            return self._name_function(self._functions_over(referrer), "closure of", value)
        if isinstance(referrer, tuple):
            functions = [
                function
                for function in gc.get_referrers(referrer)
                if isinstance(function, FunctionType) and function.__defaults__ is referrer
            ]
            if functions:
                return self._name_function(functions, "default argument of", value)
        if isinstance(referrer, type):
            return _name_class(referrer, value)
        if isinstance(referrer, (ModuleType, FunctionType, FrameType)):
            return None
        if isinstance(referrer, (partial, staticmethod, classmethod, property, list, set, tuple)):
            where = _whereabouts(referrer)
            return f"{type(referrer).__name__} in {where}" if where else None
        names = [name for name, held in getattr(referrer, "__dict__", {}).items() if held is value]
        return self._name_attribute(referrer, names)

    def _name_dict(self, namespace: dict[Any, Any], value: Any) -> str | None:
        keys = [key for key, held in namespace.items() if held is value]
        for owner in gc.get_referrers(namespace):
            if isinstance(owner, ModuleType) and owner.__dict__ is namespace:
                return None
            if isinstance(owner, type) and keys and owner.__dict__.get(keys[0]) is value:
                return _name_class(owner, value)
            if isinstance(owner, FunctionType):
                if owner.__kwdefaults__ is namespace:
                    return self._name_function([owner], "default argument of", value)
                if owner.__dict__ is namespace:
                    return None  # functools.wraps leaves __wrapped__; the closure is what counts
            elif getattr(owner, "__dict__", None) is namespace:
                return self._name_attribute(owner, keys)
        where = _whereabouts(namespace)
        return f"dict {where}[{keys[0]!r}]" if keys and where else None

    def _name_attribute(self, owner: Any, names: Sequence[Any]) -> str | None:
        cls = type(owner)
        if not names or self._is_ours(cls.__module__) or id(owner) in self._skip:
            return None
        return f"attribute {names[0]!r} of a {cls.__module__}:{cls.__qualname__}"

    def _is_ours(self, module: Any) -> bool:
        return module in self._own_modules or str(module).startswith(_LAYER)

    def _functions_over(self, cell: CellType) -> list[FunctionType]:
        return [
            function
            for closure in gc.get_referrers(cell)
            if isinstance(closure, tuple)
            for function in gc.get_referrers(closure)
            if isinstance(function, FunctionType) and function.__closure__ is closure
        ]

    def _name_function(self, functions: Iterable[FunctionType], how: str, value: Any) -> str | None:
        parts = _parts(value)
        for function in functions:
            if id(function) in self._skip or any(function is part for part in parts):
                continue
            # Not __module__: functools.wraps copies that from the object it wraps.
            if not self._is_ours(function.__globals__.get("__name__")):
                return f"{how} {function.__module__}:{function.__qualname__}"
        return None


def _parts(value: Any) -> list[Any]:
    """What only serves `value`: itself, its attributes, and what its closure holds, such as a decorator's helpers."""
    cells = [cell for cell in getattr(value, "__closure__", None) or () if cell != CellType()]
    return [value, *getattr(value, "__dict__", {}).values(), *(cell.cell_contents for cell in cells)]


def _name_class(owner: type, value: Any) -> str | None:
    names = [name for name, held in vars(owner).items() if held is value]
    return class_attribute(owner, names[0]) if names else None


def class_attribute(owner: type, name: str) -> str:
    """How a class attribute is named as a holder."""
    return f"{_CLASS_ATTRIBUTE}{owner.__module__}:{owner.__qualname__}.{name}"


def _whereabouts(item: Any, depth: int = 3) -> str | None:
    """`pkg.mod:name` of the global or class attribute that leads to `item` through containers, if any does."""
    for referrer in gc.get_referrers(item):
        if isinstance(referrer, type):
            if named := _name_class(referrer, item):
                return named.removeprefix(_CLASS_ATTRIBUTE)
        elif isinstance(referrer, dict):
            names = [name for name, held in referrer.items() if held is item]
            for owner in gc.get_referrers(referrer):
                if isinstance(owner, ModuleType) and owner.__dict__ is referrer and names:
                    return f"{owner.__name__}:{names[0]}"
                if isinstance(owner, type) and names and owner.__dict__.get(names[0]) is item:
                    return f"{owner.__module__}:{owner.__qualname__}.{names[0]}"
            if depth and names and (outer := _whereabouts(referrer, depth - 1)):
                return f"{outer}[{names[0]!r}]"
        elif isinstance(referrer, (list, tuple, set)) and depth and (outer := _whereabouts(referrer, depth - 1)):
            return outer
    return None


def sglang_hooks(target: str) -> list[tuple[str, str]]:
    """The hooks that other SGLang plugins have on `target`: (kind, who), from SGLang's own registry.

    Reads `HookRegistry._hooks` of `sglang.srt.plugins.hook_registry` (0.5.11-0.5.23), and only if it is loaded.
    """
    module = sys.modules.get("sglang.srt.plugins.hook_registry")
    hooks = getattr(getattr(module, "HookRegistry", None), "_hooks", None)
    if not isinstance(hooks, Mapping):
        return []
    found = []
    for kind, hook, source in hooks.get(target.replace(":", "."), ()):
        who = getattr(source, "plugin_name", None) or f"{hook.__module__}.{hook.__qualname__}"
        found.append((str(getattr(kind, "value", kind)), f"the SGLang plugin {who!r}"))
    return found
