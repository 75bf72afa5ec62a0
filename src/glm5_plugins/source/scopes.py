"""What a file binds: the names of its module and classes, and the statements that give them values."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

# ``try … except*`` is a node of its own from Python 3.11.
_TRY: tuple[type[ast.Try], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))


@dataclass(frozen=True)
class Binding:
    """One statement that gives a name a value."""

    name: str
    node: ast.stmt
    line: int
    always: bool
    """Whether it runs whenever the scope does; false below ``if``, ``try`` and loops."""
    value: ast.expr | None = None
    alias: ast.alias | None = None
    typing_only: bool = False

    @property
    def rebuilds(self) -> bool:
        """Whether it makes the name from itself (``C = decorate(C)``): the one before still counts."""
        return isinstance(self.value, ast.Call) and any(
            isinstance(inner, ast.Name) and inner.id == self.name for inner in ast.walk(self.value)
        )


@dataclass
class Scope:
    """The names bound by a module or a class body."""

    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    annotated: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Sequence[ast.stmt]) -> Scope:
        """The scope of a module's or a class's statements."""
        scope = cls()
        scope._read(body, always=True, typing_only=False)
        return scope

    def candidates(self, name: str, *, typing_only: bool = False) -> list[Binding]:
        """The bindings that may hold once the scope has run, in source order."""
        found = [b for b in self.bindings.get(name, ()) if b.typing_only == typing_only]
        for index in range(len(found) - 1, -1, -1):
            if found[index].always and not found[index].rebuilds:
                return found[index:]
        return found

    def names(self) -> list[str]:
        """The names that exist at run time."""
        return [n for n, found in self.bindings.items() if any(not b.typing_only for b in found)]

    def _add(self, binding: Binding) -> None:
        self.bindings.setdefault(binding.name, []).append(binding)

    def _read(self, body: Sequence[ast.stmt], *, always: bool, typing_only: bool) -> None:
        for node in body:
            self._walrus(node, always, typing_only)
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if not _refines_property(node):
                        self._add(Binding(node.name, node, node.lineno, always, typing_only=typing_only))
                case ast.ClassDef():
                    self._add(Binding(node.name, node, node.lineno, always, typing_only=typing_only))
                case ast.Assign():
                    for target in node.targets:
                        self._assign(target, node.value, node, always, typing_only)
                case ast.AnnAssign(target=ast.Name(id=name), value=None):
                    self.annotated.setdefault(name, node.lineno)
                case ast.AnnAssign():
                    self._assign(node.target, node.value, node, always, typing_only)
                case ast.Import():
                    for alias in node.names:
                        name = alias.asname or alias.name.partition(".")[0]
                        line = getattr(alias, "lineno", node.lineno)
                        self._add(Binding(name, node, line, always, alias=alias, typing_only=typing_only))
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    if not typing_only:
                        self.stars.append(node)
                case ast.ImportFrom():
                    for alias in node.names:
                        name = alias.asname or alias.name
                        self._add(Binding(name, node, node.lineno, always, alias=alias, typing_only=typing_only))
                case ast.Delete():
                    for target in node.targets:
                        if isinstance(target, ast.Name) and always:
                            self.bindings.pop(target.id, None)
                case ast.If():
                    for branch, holds in ((node.body, True), (node.orelse, False)):
                        known = _known(node.test)
                        if known is None:
                            self._read(branch, always=False, typing_only=typing_only)
                        elif known == "typing":
                            self._read(branch, always=always, typing_only=typing_only or holds)
                        elif known == holds:
                            self._read(branch, always=always, typing_only=typing_only)
                case ast.For() | ast.AsyncFor():
                    self._assign(node.target, None, node, False, typing_only)
                    self._read([*node.body, *node.orelse], always=False, typing_only=typing_only)
                case ast.While():
                    self._read([*node.body, *node.orelse], always=False, typing_only=typing_only)
                case ast.With() | ast.AsyncWith():
                    for item in node.items:
                        if item.optional_vars is not None:
                            self._assign(item.optional_vars, None, node, always, typing_only)
                    self._read(node.body, always=always, typing_only=typing_only)
                case ast.Match():
                    for case in node.cases:
                        self._read(case.body, always=False, typing_only=typing_only)
                case _ if isinstance(node, _TRY):
                    for part in (node.body, *(h.body for h in node.handlers), node.orelse):
                        self._read(part, always=False, typing_only=typing_only)
                    self._read(node.finalbody, always=always, typing_only=typing_only)
                case _:
                    pass

    def _assign(
        self, target: ast.expr, value: ast.expr | None, node: ast.stmt, always: bool, typing_only: bool
    ) -> None:
        match target:
            case ast.Name(id=name):
                self._add(Binding(name, node, target.lineno, always, value=value, typing_only=typing_only))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values: Sequence[ast.expr | None] = [None] * len(targets)
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets):
                    values = value.elts
                for one, its in zip(targets, values, strict=True):
                    self._assign(one, its, node, always, typing_only)
            case ast.Starred(value=inner):
                self._assign(inner, None, node, always, typing_only)
            case _:
                pass

    def _walrus(self, node: ast.stmt, always: bool, typing_only: bool) -> None:
        for expression in ast.iter_child_nodes(node):
            if not isinstance(expression, ast.expr):
                continue
            for inner in ast.walk(expression):
                if isinstance(inner, ast.NamedExpr):
                    self._assign(inner.target, inner.value, node, always, typing_only)


def _refines_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a ``def`` only adds a setter or deleter to the property of the same name."""
    return any(
        isinstance(d, ast.Attribute)
        and d.attr in ("getter", "setter", "deleter")
        and isinstance(d.value, ast.Name)
        and d.value.id == node.name
        for d in node.decorator_list
    )


def _known(test: ast.expr) -> bool | Literal["typing"] | None:
    """The value of an ``if`` test where the source decides it, else None."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return "typing"
        case ast.Constant(value=value):
            return bool(value)
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()]):
            return False
        case ast.Compare(
            left=ast.Attribute(value=ast.Name(id="sys"), attr="version_info"),
            ops=[operator],
            comparators=[ast.Tuple(elts=elements)],
        ) if all(isinstance(e, ast.Constant) and isinstance(e.value, int) for e in elements):
            wanted = tuple(e.value for e in elements if isinstance(e, ast.Constant))
            match operator:
                case ast.GtE():
                    return sys.version_info >= wanted
                case ast.Gt():
                    return sys.version_info > wanted
                case ast.Lt():
                    return sys.version_info < wanted
                case ast.LtE():
                    return sys.version_info <= wanted
    return None


@dataclass(frozen=True)
class File:
    """A parsed file; scopes are read when they are asked for."""

    path: Path
    tree: ast.Module

    def at(self, path: Path) -> File:
        """The same file by another path."""
        if path == self.path:
            return self
        known = replace(self, path=path)
        known.__dict__.update({**self.__dict__, "path": path})  # its scopes too, if they were read
        return known

    @cached_property
    def scope(self) -> Scope:
        """The names of the module."""
        return Scope.of(self.tree.body)

    @cached_property
    def _classes(self) -> dict[int, Scope]:
        return {}

    def class_scope(self, node: ast.ClassDef) -> Scope:
        """The names of one of its classes."""
        return self._classes.setdefault(id(node), Scope.of(node.body))

    @cached_property
    def exported(self) -> frozenset[str] | None:
        """The names in ``__all__``; None where it is absent or computed."""
        names: set[str] = set()
        seen = False
        for node in self.tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                    | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
                ):
                    names, seen = set(), True
                case (
                    ast.AugAssign(target=ast.Name(id="__all__"), value=value)
                    | ast.Expr(
                        value=ast.Call(
                            func=ast.Attribute(value=ast.Name(id="__all__"), attr="extend" | "append"),
                            args=[value],
                        )
                    )
                ):
                    seen = True
                case _:
                    continue
            for part in _summands(value):
                if isinstance(part, ast.List | ast.Tuple | ast.Set):
                    elements: Sequence[ast.expr] = part.elts
                else:
                    elements = [part]
                for element in elements:
                    if not (isinstance(element, ast.Constant) and isinstance(element.value, str)):
                        return None
                    names.add(element.value)
        return frozenset(names) if seen else None


def _summands(value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from _summands(value.left)
        yield from _summands(value.right)
    else:
        yield value


@dataclass(frozen=True)
class Content:
    """What is in a file, told by its place on the disk: the same by every path, until it is written to."""

    path: Path = field(compare=False)
    device: int
    inode: int
    mtime_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> Content:
        """The content that a path, or where it links to, has now.

        Raises:
            OSError: There is no such file.
        """
        status = os.stat(path)
        return cls(path, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=128)
def parse(content: Content) -> File:
    """Parse what is in a file; `read` is for one who has a path."""
    return File(content.path, ast.parse(content.path.read_bytes(), filename=str(content.path)))


def read(path: Path) -> File:
    """Parse a file, once per process for as long as it does not change."""
    return parse(Content.of(path)).at(path)
