"""Read the source of installed packages without importing them.

A server imports torch, SGLang and FlashInfer when it starts: minutes, and a GPU. Whether a patch still
finds its target can be said before that, from the files alone. `find` locates a module by path, parses it
and follows the name through conditional definitions, base classes, aliases and re-exports to where it is
really defined.

What only running the code can decide (a compiled module, a module-level ``__getattr__``, an attribute of a
value) is never guessed: `Missing.certain` is false then.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from glm5_plugins.source.definitions import Definition, Hop, Missing, Parameter, close
from glm5_plugins.source.places import locate, python_files
from glm5_plugins.source.resolving import Reader, Trail
from glm5_plugins.source.scopes import Content, read

__all__ = ["Content", "Definition", "Hop", "Missing", "Parameter", "code", "elsewhere", "files", "find", "lacks"]


def find(target: str, roots: Sequence[Path] | None = None) -> Definition:
    """Find where ``target`` is defined, importing nothing.

    Args:
        target: ``package.module:attr.path``, or a module alone.
        roots: folders that hold top-level packages, such as unpacked wheels; by default the import path.

    Raises:
        Missing: when the source does not define it; says the deepest part that exists.
        ValueError: when ``target`` is not of that form.
    """
    module, colon, path = target.partition(":")
    parts = tuple(path.split(".")) if colon else ()
    if not all(part.isidentifier() for part in (*module.split("."), *parts)):
        raise ValueError(f"{target!r} is not of the form 'package.module:attr.path'")
    reader = Reader(target, None if roots is None else tuple(Path(r) for r in roots))
    return reader.in_module(module, parts, Trail())


def lacks(
    target: str, needs: Sequence[str] = (), roots: Sequence[Path] | None = None, knows: Sequence[str] = ()
) -> str | None:
    """Say what the installed source lacks of a target and the parameters it must have; None for nothing.

    What only running the code can tell counts as there: this never raises a false alarm.

    Args:
        target: As in `find`.
        needs: Names of parameters it must have.
        roots: As in `find`.
        knows: Names of all parameters it may have; () for any.
    """
    try:
        found = find(target, roots)
    except Missing as missing:
        return str(missing) if missing.certain else None
    told = [one for one in (found, *found.alternatives) if one.parameters is not None]
    gone = [name for name in needs if told and not any(one.parameter(name) for one in told)]
    if not gone:
        strange = [[p.name for p in one.parameters or () if p.name not in knows] for one in told] if knows else []
        if not strange or not all(strange):
            return None
        return f"`{found.target}` ({found}) takes {', '.join(f'`{name}`' for name in strange[0])}, which is not known"
    names = ", ".join(f"`{name}`" for name in gone)
    near = close(gone[0], [p.name for one in told for p in one.parameters or ()])
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"`{found.target}` ({found}) does not take {names}{hint}"


def code(target: str, roots: Sequence[Path] | None = None) -> str:
    """The code of a module, function or class, without its comments and in a normal form.

    Raises:
        Missing: As `find` does.
    """
    found = find(target, roots)
    tree = read(found.file).tree
    if found.kind == "module":
        return ast.unparse(tree)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == found.line)
    return ast.unparse(next(nodes, tree))


def elsewhere(name: str, package: str, roots: Sequence[Path] | None = None, limit: int = 3) -> list[str]:
    """Where else a top-level package has a ``def`` or ``class`` called ``name``, as ``path:line``.

    Reads the text of every file, so it is for a person who waits for an answer, not for a server's start.
    """
    place = locate(package.partition(".")[0], None if roots is None else tuple(roots))
    pattern = re.compile(rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+" + re.escape(name.encode()) + rb"\b", re.M)
    hits: list[str] = []
    for folder in place.folders if place else ():
        for file in python_files(folder):
            text = file.read_bytes()
            for match in pattern.finditer(text):
                line = text.count(b"\n", 0, match.start()) + 1
                hits.append(f"{file.relative_to(folder.parent)}:{line}")
                if len(hits) == limit:
                    return hits
    return hits


def files(package: str, roots: Sequence[Path] | None = None) -> Iterator[tuple[Path, Path]]:
    """The Python files of a top-level package, each with its path inside it; none where it is not installed."""
    place = locate(package, None if roots is None else tuple(roots))
    for folder in place.folders if place else ():
        yield from ((file, file.relative_to(folder)) for file in python_files(folder))
