"""Who uses a function, and how: the places in installed source, found without importing it.

A patch on a function that nothing calls is dead, however well it is applied. Names are matched, not objects: a use that
is found may be of a namesake, one that is not found is not there.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from glm5_plugins import source

PACKAGES = ("sglang", "flashinfer")

_TESTS = {"test", "tests", "benchmark", "benchmarks", "bench"}


@dataclass(frozen=True)
class Use:
    """One place that reads a name.

    Args:
        name: The name looked for.
        file: The file.
        line: The line, from 1.
        call: Whether it is called there, or else passed on.
        positional: How many arguments are given by position.
        keywords: The arguments given by keyword, and the text of their values.
        spread: Whether `*args` or `**kwargs` are given, so that there may be more.
    """

    name: str
    file: Path
    line: int
    call: bool = False
    positional: int = 0
    keywords: tuple[tuple[str, str], ...] = ()
    spread: bool = False

    def keyword(self, name: str) -> str | None:
        """The text of the value given by this keyword, or None."""
        return dict(self.keywords).get(name)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def uses(
    names: Collection[str], roots: Sequence[Path] | None = None, packages: Sequence[str] = PACKAGES
) -> Iterator[Use]:
    """Find the uses of some names in packages, their own tests and benchmarks left out.

    Args:
        names: Names of functions, methods or other attributes.
        roots: As in `source.find`.
        packages: Top-level packages; those that are not there are passed over.
    """
    for package in packages:
        for file in _files(package, roots):
            yield from _uses_in(file, names)


def first_uses(
    names: Collection[str], roots: Sequence[Path] | None = None, packages: Sequence[str] = PACKAGES
) -> dict[str, Use]:
    """One use of each name that has any; reads each file at most once, and parses few."""
    wanted = set(names)
    found: dict[str, Use] = {}
    for package in packages:
        for file in _files(package, roots):
            for use in _uses_in(file, wanted):
                found.setdefault(use.name, use)
            wanted -= found.keys()
            if not wanted:
                return found
    return found


def _files(package: str, roots: Sequence[Path] | None) -> Iterator[Path]:
    return (file for file, inside in source.files(package, roots) if not _TESTS & set(inside.parts[:-1]))


def _uses_in(file: Path, names: Collection[str]) -> Iterator[Use]:
    for use in _found(source.Content.of(file), frozenset(names)):
        yield replace(use, file=file)


@lru_cache(maxsize=1 << 16)
def _found(content: source.Content, names: frozenset[str]) -> tuple[Use, ...]:
    text = content.path.read_bytes()
    here = {name for name in names if name.encode() in text}
    return tuple(_in_text(text, content.path, here)) if here else ()


def _in_text(text: bytes, file: Path, here: Collection[str]) -> Iterator[Use]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    nodes = list(ast.walk(tree))
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    aliases = {name: name for name in here} | dict(_renamed(nodes, here))
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in aliases:
                pass
            case ast.Attribute(attr=name, ctx=ast.Load()) if name in here:
                pass
            case _:
                continue
        call = called.get(id(node))
        if call is None:
            yield Use(aliases[name], file, node.lineno)
            continue
        yield Use(
            aliases[name],
            file,
            call.lineno,
            call=True,
            positional=sum(not isinstance(one, ast.Starred) for one in call.args),
            keywords=tuple((one.arg, ast.unparse(one.value)) for one in call.keywords if one.arg is not None),
            spread=any(isinstance(one, ast.Starred) for one in call.args) or any(k.arg is None for k in call.keywords),
        )


def _renamed(nodes: Iterable[ast.AST], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """The names under which `from … import name as other` makes them known, and their own."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname is not None and alias.name in names:
                    yield alias.asname, alias.name
