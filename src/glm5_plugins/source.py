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
import difflib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NoReturn

Kind = Literal["module", "class", "function", "async function", "constant", "generated", "import"]
ParameterKind = Literal["positional only", "positional or keyword", "var positional", "keyword only", "var keyword"]
How = Literal["import", "star import", "alias", "base class", "lazy import"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, as written."""

    name: str
    kind: ParameterKind
    default: str | None = None
    """Source text of the default; None when the caller must give a value."""

    def __str__(self) -> str:
        star = {"var positional": "*", "var keyword": "**"}.get(self.kind, "")
        return f"{star}{self.name}" + (f"={self.default}" if self.default is not None else "")


@dataclass(frozen=True)
class Hop:
    """One step on the way from the name asked for to its definition."""

    module: str
    name: str
    file: Path
    line: int
    how: How

    def __str__(self) -> str:
        return f"{self.module}:{self.name} (line {self.line}, {self.how})"


@dataclass(frozen=True)
class Definition:
    """Where a target is defined.

    ``import`` as kind means that the name is bound by an import whose source is not installed here, or is
    compiled. ``generated`` is a method that a decorator writes (the ``__init__`` of a dataclass).
    """

    module: str
    qualname: str
    file: Path
    line: int
    kind: Kind
    parameters: tuple[Parameter, ...] | None = None
    """None where the source does not say: a class without ``__init__``, a value made by a call."""
    decorators: tuple[str, ...] = ()
    value: str | None = None
    """Source text of a constant's value, or what an unresolved import names (``package.module:name``)."""
    through: tuple[Hop, ...] = ()
    alternatives: tuple[Definition, ...] = ()
    """The other bindings of the name, where ``if`` or ``try`` decides at run time which one holds."""

    @property
    def target(self) -> str:
        """The definition's own address, ``module:attr.path``."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module

    def parameter(self, name: str) -> Parameter | None:
        """The parameter called ``name``, or None."""
        return next((p for p in self.parameters or () if p.name == name), None)

    def accepts(self, name: str) -> bool | None:
        """Whether ``name`` can be passed by keyword; None where the source does not say."""
        if self.parameters is None:
            return None
        found = self.parameter(name)
        if found is not None and found.kind in ("positional or keyword", "keyword only"):
            return True
        return any(p.kind == "var keyword" for p in self.parameters)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Missing(LookupError):
    """A target that the installed source does not define.

    Attributes:
        target: what was asked for, ``module:attr.path``.
        part: what is missing: the ``package``, a ``module``, an ``attribute``; or the file is ``unreadable``.
        found: the deepest part that exists, with its file and line; empty if nothing does.
        name: the first name that does not exist.
        suggestions: close names at that place.
        note: why the name cannot be found although it can be seen, and what to patch instead.
        certain: false where only running the code can tell.
    """

    def __init__(
        self,
        target: str,
        part: Literal["package", "module", "attribute", "unreadable"],
        *,
        name: str,
        found: str = "",
        suggestions: Iterable[str] = (),
        note: str = "",
        certain: bool = True,
    ) -> None:
        self.target = target
        self.part = part
        self.name = name
        self.found = found
        self.suggestions = tuple(suggestions)
        self.note = note
        self.certain = certain
        super().__init__(target)

    def __str__(self) -> str:
        match self.part:
            case "package":
                text = f"package `{self.name}` is not installed"
            case "module":
                text = f"{self.found} has no module `{self.name}`"
            case "attribute":
                text = f"{self.found} has no `{self.name}`"
            case "unreadable":
                text = f"{self.found or self.name} cannot be read"
        if not self.certain and self.part == "attribute":
            text += " that its source shows"
        if self.suggestions:
            text += "; did you mean " + " or ".join(f"`{s}`" for s in self.suggestions) + "?"
        return f"{text} ({self.note})" if self.note else text


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
    reader = _Reader(target, None if roots is None else tuple(Path(r) for r in roots))
    return reader.in_module(module, parts, _Trail())


def lacks(target: str, needs: Sequence[str] = (), roots: Sequence[Path] | None = None) -> str | None:
    """Say what the installed source lacks of a target and the parameters it must have; None for nothing.

    What only running the code can tell counts as there: this never raises a false alarm.
    """
    try:
        found = find(target, roots)
    except Missing as missing:
        return str(missing) if missing.certain else None
    told = [one for one in (found, *found.alternatives) if one.parameters is not None]
    gone = [name for name in needs if told and not any(one.parameter(name) for one in told)]
    if not gone:
        return None
    names = ", ".join(f"`{name}`" for name in gone)
    near = _close(gone[0], [p.name for one in told for p in one.parameters or ()])
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"`{found.target}` ({found}) does not take {names}{hint}"


def code(target: str, roots: Sequence[Path] | None = None) -> str:
    """The code of a module, function or class, without its comments and in a normal form.

    Raises:
        Missing: As `find` does.
    """
    found = find(target, roots)
    tree = _read(found.file).tree
    if found.kind == "module":
        return ast.unparse(tree)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == found.line)
    return ast.unparse(next(nodes, tree))


def elsewhere(name: str, package: str, roots: Sequence[Path] | None = None, limit: int = 3) -> list[str]:
    """Where else a top-level package has a ``def`` or ``class`` called ``name``, as ``path:line``.

    Reads the text of every file, so it is for a person who waits for an answer, not for a server's start.
    """
    place = _locate(package.partition(".")[0], None if roots is None else tuple(roots))
    pattern = re.compile(rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+" + re.escape(name.encode()) + rb"\b", re.M)
    hits: list[str] = []
    for folder in place.folders if place else ():
        for file in _python_files(folder):
            text = file.read_bytes()
            for match in pattern.finditer(text):
                line = text.count(b"\n", 0, match.start()) + 1
                hits.append(f"{file.relative_to(folder.parent)}:{line}")
                if len(hits) == limit:
                    return hits
    return hits


def files(package: str, roots: Sequence[Path] | None = None) -> Iterator[tuple[Path, Path]]:
    """The Python files of a top-level package, each with its path inside it; none where it is not installed."""
    place = _locate(package, None if roots is None else tuple(roots))
    for folder in place.folders if place else ():
        yield from ((file, file.relative_to(folder)) for file in _python_files(folder))


def _python_files(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder, followlinks=True):  # rglob does not go into linked folders
        folders.sort()
        yield from (Path(path, name) for name in sorted(names) if name.endswith(".py"))


# --- where a module lies -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A module on disk: its file (None for a namespace package) and, for a package, where submodules lie."""

    file: Path | None
    folders: tuple[Path, ...] = ()
    compiled: bool = False


_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def _below(folder: Path, name: str) -> _Place | None:
    """The module or package ``name`` in a folder."""
    package = folder / name
    if (package / "__init__.py").is_file():
        return _Place(package / "__init__.py", (package,))
    if (file := folder / f"{name}.py").is_file():
        return _Place(file)
    for suffix in _EXTENSIONS:
        if (file := folder / f"{name}{suffix}").is_file():
            return _Place(file, compiled=True)
    # A folder without Python in it (data, build leftovers) is importable, yet no module anybody means.
    if package.is_dir() and any(package.rglob("*.py")):
        return _Place(None, (package,))
    return None


def _locate(module: str, roots: tuple[Path, ...] | None) -> _Place | None:
    """Find a module's file: the top-level name through the import system (or ``roots``), the rest by path."""
    top, *rest = module.split(".")
    place = _top_level(top) if roots is None else next(filter(None, (_below(r, top) for r in roots)), None)
    for name in rest:
        if place is None:
            return None
        place = next(filter(None, (_below(folder, name) for folder in place.folders)), None)
    return place


def _top_level(name: str) -> _Place | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a stand-in in sys.modules without a spec
        spec = None
    if spec is None:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            return None
        return _Place(Path(file), tuple(Path(p) for p in getattr(module, "__path__", ())))
    folders = tuple(Path(p) for p in spec.submodule_search_locations or ())
    if not spec.has_location or spec.origin is None:
        return _Place(None, folders, compiled=not folders)
    return _Place(Path(spec.origin), folders, compiled=spec.origin.endswith(_EXTENSIONS))


# --- what a file binds -------------------------------------------------------------------------------------


# ``try … except*`` is a node of its own from Python 3.11.
_TRY: tuple[type[ast.Try], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))


@dataclass(frozen=True)
class _Binding:
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
class _Scope:
    """The names bound by a module or a class body."""

    bindings: dict[str, list[_Binding]] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    annotated: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Sequence[ast.stmt]) -> _Scope:
        scope = cls()
        scope._read(body, always=True, typing_only=False)
        return scope

    def candidates(self, name: str, *, typing_only: bool = False) -> list[_Binding]:
        """The bindings that may hold once the scope has run, in source order."""
        found = [b for b in self.bindings.get(name, ()) if b.typing_only == typing_only]
        for index in range(len(found) - 1, -1, -1):
            if found[index].always and not found[index].rebuilds:
                return found[index:]
        return found

    def names(self) -> list[str]:
        return [n for n, found in self.bindings.items() if any(not b.typing_only for b in found)]

    def _add(self, binding: _Binding) -> None:
        self.bindings.setdefault(binding.name, []).append(binding)

    def _read(self, body: Sequence[ast.stmt], *, always: bool, typing_only: bool) -> None:
        for node in body:
            self._walrus(node, always, typing_only)
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if not _refines_property(node):
                        self._add(_Binding(node.name, node, node.lineno, always, typing_only=typing_only))
                case ast.ClassDef():
                    self._add(_Binding(node.name, node, node.lineno, always, typing_only=typing_only))
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
                        self._add(_Binding(name, node, line, always, alias=alias, typing_only=typing_only))
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    if not typing_only:
                        self.stars.append(node)
                case ast.ImportFrom():
                    for alias in node.names:
                        name = alias.asname or alias.name
                        self._add(_Binding(name, node, node.lineno, always, alias=alias, typing_only=typing_only))
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
                self._add(_Binding(name, node, target.lineno, always, value=value, typing_only=typing_only))
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
class _File:
    """A parsed file; scopes are read when they are asked for."""

    path: Path
    tree: ast.Module

    def at(self, path: Path) -> _File:
        """The same file by another path."""
        if path == self.path:
            return self
        known = replace(self, path=path)
        known.__dict__.update({**self.__dict__, "path": path})  # its scopes too, if they were read
        return known

    @cached_property
    def scope(self) -> _Scope:
        return _Scope.of(self.tree.body)

    @cached_property
    def _classes(self) -> dict[int, _Scope]:
        return {}

    def class_scope(self, node: ast.ClassDef) -> _Scope:
        return self._classes.setdefault(id(node), _Scope.of(node.body))

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
def _parse(content: Content) -> _File:
    return _File(content.path, ast.parse(content.path.read_bytes(), filename=str(content.path)))


def _read(path: Path) -> _File:
    """Parse a file, once per process for as long as it does not change."""
    return _parse(Content.of(path)).at(path)


# --- from a name to its definition -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trail:
    """How a name was reached: the hops so far, and the names being looked up (imports can be circular)."""

    hops: tuple[Hop, ...] = ()
    seen: frozenset[tuple[str, str]] = frozenset()

    def step(self, hop: Hop) -> _Trail:
        return replace(self, hops=(*self.hops, hop))

    def entering(self, module: str, name: str) -> _Trail:
        return replace(self, seen=self.seen | {(module, name)})


@dataclass(frozen=True)
class _Owner:
    """The module, or the class in a module, in whose scope a name is looked up."""

    module: str
    file: _File
    package: bool
    node: ast.ClassDef | None = None
    qualname: str = ""

    @property
    def scope(self) -> _Scope:
        return self.file.scope if self.node is None else self.file.class_scope(self.node)

    @property
    def label(self) -> str:
        if self.node is None:
            return f"`{self.module}` ({self.file.path})"
        return f"`{self.module}:{self.qualname}` ({self.file.path}:{self.node.lineno})"

    def qualify(self, name: str) -> str:
        return f"{self.qualname}.{name}" if self.qualname else name


class _Reader:
    """Resolves one target."""

    def __init__(self, target: str, roots: tuple[Path, ...] | None) -> None:
        self.target = target
        self.roots = roots
        self._classes: dict[tuple[str, str], _Owner] = {}

    def in_module(self, module: str, parts: tuple[str, ...], trail: _Trail) -> Definition:
        place = self._place(module)
        if not parts:
            file = place.file or next(iter(place.folders), Path(module))
            return Definition(module, "", file, 1, "module", through=trail.hops)
        if place.compiled:
            self._unreadable(module, place, "it is compiled; only importing it can tell")
        if place.file is None:
            return self._submodule(module, place, parts, trail)
        try:
            source = _read(place.file)
        except (OSError, SyntaxError, ValueError) as error:
            self._unreadable(module, place, str(error))
        return self._in_module_scope(_Owner(module, source, bool(place.folders)), place, parts, trail)

    def _unreadable(self, module: str, place: _Place, note: str) -> NoReturn:
        found = f"`{module}` ({place.file})"
        raise Missing(self.target, "unreadable", name=module, found=found, note=note, certain=False)

    def _in_module_scope(self, owner: _Owner, place: _Place, parts: tuple[str, ...], trail: _Trail) -> Definition:
        name = parts[0]
        failures: list[Missing] = []
        if (owner.module, name) not in trail.seen:
            inner = trail.entering(owner.module, name)
            found = self._choose(owner, owner.scope.candidates(name), parts, inner, failures)
            if found is None:
                found = self._starred(owner, parts, inner, failures)
            if found is None and "__getattr__" in owner.scope.bindings:
                lazy = owner.scope.candidates(name, typing_only=True)
                found = self._choose(owner, lazy, parts, inner, failures, lazy=True)
            if found is not None:
                return found
        if _submodule_place(place, name) is not None:
            return self._submodule(owner.module, place, parts, trail)
        _raise_first(failures)
        self._not_in_module(owner, name)

    def _place(self, module: str) -> _Place:
        place = _locate(module, self.roots)
        if place is not None:
            return place
        known: list[str] = []
        for name in module.split("."):
            if _locate(".".join([*known, name]), self.roots) is None:
                break
            known.append(name)
        if not known:
            raise Missing(self.target, "package", name=name)
        above = _locate(".".join(known), self.roots)
        names = _submodules(above) if above else []
        raise Missing(
            self.target,
            "module",
            name=name,
            found=f"`{'.'.join(known)}`",
            suggestions=(".".join([*known, n]) for n in _close(name, names)),
        )

    def _submodule(self, module: str, place: _Place, parts: tuple[str, ...], trail: _Trail) -> Definition:
        if _submodule_place(place, parts[0]) is None:
            raise Missing(
                self.target,
                "attribute",
                name=parts[0],
                found=f"`{module}`",
                suggestions=_close(parts[0], _submodules(place)),
            )
        return self.in_module(f"{module}.{parts[0]}", parts[1:], trail)

    def _choose(
        self,
        owner: _Owner,
        candidates: Sequence[_Binding],
        parts: tuple[str, ...],
        trail: _Trail,
        failures: list[Missing],
        *,
        lazy: bool = False,
    ) -> Definition | None:
        """Follow every binding that may hold; the most telling one leads, the others are its alternatives."""
        found: list[Definition] = []
        for binding in candidates:
            try:
                found.append(self._follow(owner, binding, parts[1:], trail, lazy))
            except Missing as missing:
                failures.append(missing)
        if not found:
            return None
        first, *others = sorted(found, key=_telling)  # stable: the first in the file among equals
        return replace(first, alternatives=(*first.alternatives, *others))

    def _follow(self, owner: _Owner, binding: _Binding, rest: tuple[str, ...], trail: _Trail, lazy: bool) -> Definition:
        node = binding.node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if rest:
                    self._not_in_function(owner, node, rest[0])
                return Definition(
                    owner.module,
                    owner.qualify(node.name),
                    owner.file.path,
                    node.lineno,
                    "function" if isinstance(node, ast.FunctionDef) else "async function",
                    _parameters(node.args),
                    tuple(ast.unparse(d) for d in node.decorator_list),
                    through=trail.hops,
                )
            case ast.ClassDef():
                inner = replace(owner, node=node, qualname=owner.qualify(node.name))
                if rest:
                    return self._in_class(inner, rest, trail)
                self._classes[inner.module, inner.qualname] = inner
                return Definition(
                    owner.module,
                    inner.qualname,
                    owner.file.path,
                    node.lineno,
                    "class",
                    _class_parameters(inner),
                    tuple(ast.unparse(d) for d in node.decorator_list),
                    through=trail.hops,
                )
            case ast.Import() if binding.alias is not None:
                module = binding.alias.name if binding.alias.asname else binding.name
                hop = self._hop(owner, binding, "lazy import" if lazy else "import")
                return self._imported(owner, binding, module, rest, trail.step(hop))
            case ast.ImportFrom() if binding.alias is not None:
                module = _absolute(owner, node)
                hop = self._hop(owner, binding, "lazy import" if lazy else "import")
                return self._imported(owner, binding, module, (binding.alias.name, *rest), trail.step(hop))
            case _:
                return self._assigned(owner, binding, rest, trail)

    def _hop(
        self,
        owner: _Owner,
        binding: _Binding,
        how: How,
    ) -> Hop:
        return Hop(owner.module, owner.qualify(binding.name), owner.file.path, binding.line, how)

    def _imported(
        self, owner: _Owner, binding: _Binding, module: str, parts: tuple[str, ...], trail: _Trail
    ) -> Definition:
        try:
            return self.in_module(module, parts, trail)
        except Missing as missing:
            asked_more = len(parts) > (1 if isinstance(binding.node, ast.ImportFrom) else 0)
            if missing.certain and missing.part == "attribute":
                raise
            if asked_more:
                missing.certain = False
                raise
        return Definition(
            owner.module,
            owner.qualify(binding.name),
            owner.file.path,
            binding.line,
            "import",
            value=f"{module}:{parts[0]}" if parts else module,
            through=trail.hops[:-1],
        )

    def _starred(
        self, owner: _Owner, parts: tuple[str, ...], trail: _Trail, failures: list[Missing]
    ) -> Definition | None:
        name = parts[0]
        for node in reversed(owner.scope.stars):
            module = _absolute(owner, node)
            try:
                place = self._place(module)
                if place.file is not None and not place.compiled:
                    exported = _read(place.file).exported
                    if name.startswith("_") if exported is None else name not in exported:
                        continue
                hop = Hop(owner.module, name, owner.file.path, node.lineno, "star import")
                return self.in_module(module, parts, trail.step(hop))
            except Missing as missing:
                if not missing.certain or missing.part in ("package", "module"):
                    failures.append(
                        Missing(
                            self.target,
                            "attribute",
                            name=name,
                            found=owner.label,
                            note=f"`from {module} import *` in line {node.lineno}: {missing}",
                            certain=False,
                        )
                    )
        return None

    def _assigned(self, owner: _Owner, binding: _Binding, rest: tuple[str, ...], trail: _Trail) -> Definition:
        dotted = _dotted(binding.value)
        if dotted:
            hop = self._hop(owner, binding, "alias")
            try:
                return self._in_scopes(owner, (*dotted, *rest), trail.step(hop))
            except Missing as missing:
                if rest:
                    missing.certain = False
                    raise
        if rest:
            raise Missing(
                self.target,
                "attribute",
                name=rest[0],
                found=f"`{owner.module}:{owner.qualify(binding.name)}` ({owner.file.path}:{binding.line})",
                note=f"`{binding.name}` is a value made when the module runs; only importing it can tell",
                certain=False,
            )
        value = binding.value
        text = None if value is None else ast.unparse(value)
        return Definition(
            owner.module,
            owner.qualify(binding.name),
            owner.file.path,
            binding.line,
            "constant",
            _parameters(value.args) if isinstance(value, ast.Lambda) else None,
            value=text,
            through=trail.hops,
        )

    def _in_scopes(self, owner: _Owner, parts: tuple[str, ...], trail: _Trail) -> Definition:
        """Look a dotted name up as code in ``owner``'s scope would: the class body, then the module."""
        if owner.node is not None:
            key = f"{owner.qualname}.{parts[0]}"
            if (owner.module, key) not in trail.seen:
                candidates = owner.scope.candidates(parts[0])
                found = self._choose(owner, candidates, parts, trail.entering(owner.module, key), [])
                if found is not None:
                    return found
        return self.in_module(owner.module, parts, trail)

    # --- classes -------------------------------------------------------------------------------------------

    def _in_class(self, owner: _Owner, parts: tuple[str, ...], trail: _Trail) -> Definition:
        name = parts[0]
        failures: list[Missing] = []
        lineage, unread = self._lineage(owner, trail)
        for cls in lineage:
            inner = trail.entering(cls.module, cls.qualify(name))
            if cls != owner:
                assert owner.node is not None
                line = owner.node.lineno
                inner = inner.step(Hop(owner.module, owner.qualify(name), owner.file.path, line, "base class"))
            found = self._choose(cls, cls.scope.candidates(name), parts, inner, failures)
            if found is not None:
                return found
            if (generated := _generated(cls, name)) is not None and len(parts) == 1:
                return replace(generated, through=inner.hops)
        _raise_first(failures)
        self._not_in_class(owner, lineage, unread, name)

    def _lineage(self, owner: _Owner, trail: _Trail) -> tuple[list[_Owner], list[str]]:
        """The class and its bases, nearest first, and the bases whose source cannot be read here."""
        order: list[_Owner] = []
        unread: list[str] = []

        def visit(cls: _Owner, above: tuple[str, ...]) -> None:
            if cls in order:  # a diamond: a shared base comes after all who share it
                order.remove(cls)
            order.append(cls)
            assert cls.node is not None
            for base in cls.node.bases:
                expression = base.value if isinstance(base, ast.Subscript) else base
                dotted = _dotted(expression)
                text = ast.unparse(expression)
                if text in (
                    "object",
                    "Generic",
                    "Protocol",
                    "ABC",
                    "typing.Generic",
                    "typing.Protocol",
                    "abc.ABC",
                ):
                    continue
                found = self._class(cls, dotted, trail) if dotted else None
                if found is None:
                    unread.append(text)
                elif f"{found.module}:{found.qualname}" not in above:
                    visit(found, (*above, f"{found.module}:{found.qualname}"))

        visit(owner, (f"{owner.module}:{owner.qualname}",))
        return order, unread

    def _class(self, owner: _Owner, dotted: tuple[str, ...], trail: _Trail) -> _Owner | None:
        reader = _Reader(self.target, self.roots)
        outer = replace(owner, node=None, qualname="")
        try:
            found = reader._in_scopes(outer, dotted, _Trail(seen=trail.seen))
        except Missing:
            return None
        return reader._classes.get((found.module, found.qualname)) if found.kind == "class" else None

    # --- what is not there ---------------------------------------------------------------------------------

    def _not_in_module(self, owner: _Owner, name: str) -> NoReturn:
        scope = owner.scope
        note, certain, suggestions = "", True, _close(name, scope.names())
        if "__getattr__" in scope.bindings:
            note = "the module has a `__getattr__` that may serve it; only importing it can tell"
            certain = False
        elif scope.candidates(name, typing_only=True):
            note = "it is imported for type checkers only and does not exist at run time"
        elif (holder := _local_of(owner.file.tree, name)) is not None:
            where, how = holder
            if how == "global":
                note = f"`{where}` sets it as a global: it does not exist until `{where}` runs"
            else:
                note = (
                    f"`{name}` is a local of `{where}`: it does not exist until `{where}` runs; patch `{where}` itself"
                )
        elif name in scope.annotated:
            note = f"line {scope.annotated[name]} only annotates it"
        if not note:
            members = [
                f"{cls.name}.{name}"
                for cls in owner.file.tree.body
                if isinstance(cls, ast.ClassDef) and owner.file.class_scope(cls).candidates(name)
            ]
            suggestions = [*members[:3], *suggestions]
        raise Missing(
            self.target,
            "attribute",
            name=name,
            found=owner.label,
            suggestions=suggestions,
            note=note,
            certain=certain,
        )

    def _not_in_function(self, owner: _Owner, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> NoReturn:
        label = owner.qualify(node.name)
        local = name in _locals(node)
        raise Missing(
            self.target,
            "attribute",
            name=name,
            found=f"`{owner.module}:{label}` ({owner.file.path}:{node.lineno})",
            suggestions=() if local else _close(name, _locals(node)),
            note=(
                f"`{name}` is a local of `{label}`: it does not exist until `{label}` runs; patch `{label}` itself"
                if local
                else f"`{label}` is a function"
            ),
            # A decorator may hang attributes on what it returns.
            certain=local or not node.decorator_list,
        )

    def _not_in_class(self, owner: _Owner, lineage: Sequence[_Owner], unread: Sequence[str], name: str) -> NoReturn:
        note, certain = "", not unread
        for cls in lineage:
            if (setter := _set_on_self(cls, name)) is not None:
                note, certain = f"it is set on instances by `{setter}`; the class does not have it", True
                break
            if name in cls.scope.annotated:
                line = cls.scope.annotated[name]
                note, certain = f"line {line} only annotates it: instances have it, the class does not", True
                break
        if not note and hasattr(object, name):
            note, certain = "it is `object`'s own", False
        elif not note and unread:
            note = "the source of " + ", ".join(f"base `{u}`" for u in unread) + " is not at hand"
        names = [n for cls in lineage for n in cls.scope.names()]
        raise Missing(
            self.target,
            "attribute",
            name=name,
            found=owner.label,
            suggestions=[n for n in _close(name, names) if n != name],
            note=note,
            certain=certain,
        )


def _telling(definition: Definition) -> int:
    """Order bindings by what they say: a definition, a value, an import that cannot be read, a bare None."""
    if definition.kind in ("import", "generated"):
        return 2
    if definition.kind == "constant":
        return 3 if definition.value == "None" else 1
    return 0


def _raise_first(failures: Sequence[Missing]) -> None:
    """Raise the first failure, certain only if all are: one unreadable binding leaves the name open."""
    if failures:
        failures[0].certain = all(f.certain for f in failures)
        failures[0].note = next((f.note for f in failures if f.note), "")
        raise failures[0]


def _absolute(owner: _Owner, node: ast.ImportFrom) -> str:
    """The absolute name of the module that ``from … import`` names."""
    if not node.level:
        return node.module or ""
    parts = owner.module.split(".")
    drop = node.level - (1 if owner.package else 0)
    base = parts[: len(parts) - drop] if drop else parts
    return ".".join([*base, *((node.module,) if node.module else ())])


def _dotted(expression: ast.expr | None) -> tuple[str, ...]:
    """``a.b.c`` as its names; empty for anything else."""
    match expression:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=value, attr=attr):
            head = _dotted(value)
            return (*head, attr) if head else ()
    return ()


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    found: list[Parameter] = []
    for index, argument in enumerate(positional):
        kind: ParameterKind = "positional only" if index < len(arguments.posonlyargs) else "positional or keyword"
        default = ast.unparse(arguments.defaults[index - missing]) if index >= missing else None
        found.append(Parameter(argument.arg, kind, default))
    if arguments.vararg is not None:
        found.append(Parameter(arguments.vararg.arg, "var positional"))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(argument.arg, "keyword only", None if value is None else ast.unparse(value)))
    if arguments.kwarg is not None:
        found.append(Parameter(arguments.kwarg.arg, "var keyword"))
    return tuple(found)


def _class_parameters(owner: _Owner) -> tuple[Parameter, ...] | None:
    """The parameters of a class's own ``__init__``, without ``self``; None if it has none of its own."""
    for binding in owner.scope.candidates("__init__"):
        if isinstance(binding.node, ast.FunctionDef):
            return _parameters(binding.node.args)[1:]
    return None


_GENERATED: Mapping[str, frozenset[str]] = {
    "dataclass": frozenset({"__init__", "__repr__", "__eq__"}),
}


def _generated(owner: _Owner, name: str) -> Definition | None:
    """The method a class decorator writes, if ``name`` is one."""
    assert owner.node is not None
    for decorator in owner.node.decorator_list:
        dotted = _dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if dotted and name in _GENERATED.get(dotted[-1], ()):
            return Definition(
                owner.module,
                owner.qualify(name),
                owner.file.path,
                owner.node.lineno,
                "generated",
                decorators=(ast.unparse(decorator),),
            )
    return None


def _locals(node: ast.AST) -> set[str]:
    """Every name bound below a function, at any depth."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if inner is node:
            continue
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
    return names


def _local_of(tree: ast.Module, name: str) -> tuple[str, Literal["local", "global"]] | None:
    """The function that binds ``name`` when it runs, by qualified name."""

    def visit(node: ast.AST, path: str) -> tuple[str, Literal["local", "global"]] | None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                label = f"{path}{child.name}"
                if name in _locals(child):
                    shared = any(isinstance(i, ast.Global) and name in i.names for i in ast.walk(child))
                    return label, "global" if shared else "local"
            elif isinstance(child, ast.ClassDef):
                if (found := visit(child, f"{path}{child.name}.")) is not None:
                    return found
            elif not isinstance(child, ast.expr) and (found := visit(child, path)) is not None:
                return found
        return None

    return visit(tree, "")


def _set_on_self(owner: _Owner, name: str) -> str | None:
    """The method that does ``self.name = …``."""
    assert owner.node is not None
    for method in owner.node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        me = method.args.args[0].arg
        for inner in ast.walk(method):
            match inner:
                case ast.Attribute(value=ast.Name(id=holder), attr=attr, ctx=ast.Store()) if (
                    holder == me and attr == name
                ):
                    return owner.qualify(method.name)
    return None


def _submodule_place(place: _Place, name: str) -> _Place | None:
    return next(filter(None, (_below(folder, name) for folder in place.folders)), None)


def _submodules(place: _Place) -> list[str]:
    names: set[str] = set()
    for folder in place.folders:
        for entry in folder.iterdir():
            if entry.suffix == ".py" and entry.stem != "__init__":
                names.add(entry.stem)
            elif (entry / "__init__.py").is_file():
                names.add(entry.name)
    return sorted(names)


def _close(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.6)
