"""Where a module lies on disk: by the import path, or below folders that hold top-level packages."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A module on disk: its file (None for a namespace package) and, for a package, where submodules lie."""

    file: Path | None
    folders: tuple[Path, ...] = ()
    compiled: bool = False


_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def below(folder: Path, name: str) -> Place | None:
    """The module or package ``name`` in a folder."""
    package = folder / name
    if (package / "__init__.py").is_file():
        return Place(package / "__init__.py", (package,))
    if (file := folder / f"{name}.py").is_file():
        return Place(file)
    for suffix in _EXTENSIONS:
        if (file := folder / f"{name}{suffix}").is_file():
            return Place(file, compiled=True)
    # A folder without Python in it (data, build leftovers) is importable, yet no module anybody means.
    if package.is_dir() and any(package.rglob("*.py")):
        return Place(None, (package,))
    return None


def locate(module: str, roots: tuple[Path, ...] | None) -> Place | None:
    """Find a module's file: the top-level name through the import system (or ``roots``), the rest by path."""
    top, *rest = module.split(".")
    place = _top_level(top) if roots is None else next(filter(None, (below(r, top) for r in roots)), None)
    for name in rest:
        if place is None:
            return None
        place = next(filter(None, (below(folder, name) for folder in place.folders)), None)
    return place


def _top_level(name: str) -> Place | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a stand-in in sys.modules without a spec
        spec = None
    if spec is None:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            return None
        return Place(Path(file), tuple(Path(p) for p in getattr(module, "__path__", ())))
    folders = tuple(Path(p) for p in spec.submodule_search_locations or ())
    if not spec.has_location or spec.origin is None:
        return Place(None, folders, compiled=not folders)
    return Place(Path(spec.origin), folders, compiled=spec.origin.endswith(_EXTENSIONS))


def python_files(folder: Path) -> Iterator[Path]:
    """Every Python file in a folder, in the order of their paths."""
    for path, folders, names in os.walk(folder, followlinks=True):  # rglob does not go into linked folders
        folders.sort()
        yield from (Path(path, name) for name in sorted(names) if name.endswith(".py"))


def submodule_place(place: Place, name: str) -> Place | None:
    """Where a module of a package lies."""
    return next(filter(None, (below(folder, name) for folder in place.folders)), None)


def submodules(place: Place) -> list[str]:
    """The names of the modules right below a package."""
    names: set[str] = set()
    for folder in place.folders:
        for entry in folder.iterdir():
            if entry.suffix == ".py" and entry.stem != "__init__":
                names.add(entry.stem)
            elif (entry / "__init__.py").is_file():
                names.add(entry.name)
    return sorted(names)
