"""From a name to its definition: through conditions, base classes, aliases and re-exports."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from glm5_plugins.source.definitions import Definition, Hop, How, Missing, Parameter, ParameterKind, close
from glm5_plugins.source.places import Place, locate, submodule_place, submodules
from glm5_plugins.source.scopes import Binding, File, Scope, read


@dataclass(frozen=True)
class Trail:
    """How a name was reached: the hops so far, and the names being looked up (imports can be circular)."""

    hops: tuple[Hop, ...] = ()
    seen: frozenset[tuple[str, str]] = frozenset()

    def step(self, hop: Hop) -> Trail:
        """This trail and one hop more."""
        return replace(self, hops=(*self.hops, hop))

    def entering(self, module: str, name: str) -> Trail:
        """This trail while a name of a module is looked up."""
        return replace(self, seen=self.seen | {(module, name)})


@dataclass(frozen=True)
class Owner:
    """The module, or the class in a module, in whose scope a name is looked up."""

    module: str
    file: File
    package: bool
    node: ast.ClassDef | None = None
    qualname: str = ""

    @property
    def scope(self) -> Scope:
        """The names it binds."""
        return self.file.scope if self.node is None else self.file.class_scope(self.node)

    @property
    def label(self) -> str:
        """How a message names it."""
        if self.node is None:
            return f"`{self.module}` ({self.file.path})"
        return f"`{self.module}:{self.qualname}` ({self.file.path}:{self.node.lineno})"

    def qualify(self, name: str) -> str:
        """A name in it, by its path from the module."""
        return f"{self.qualname}.{name}" if self.qualname else name


class Reader:
    """Resolves one target."""

    def __init__(self, target: str, roots: tuple[Path, ...] | None) -> None:
        self.target = target
        self.roots = roots
        self._classes: dict[tuple[str, str], Owner] = {}

    def in_module(self, module: str, parts: tuple[str, ...], trail: Trail) -> Definition:
        """Find an attribute path in a module.

        Raises:
            Missing: The source does not define it.
        """
        place = self._place(module)
        if not parts:
            file = place.file or next(iter(place.folders), Path(module))
            return Definition(module, "", file, 1, "module", through=trail.hops)
        if place.compiled:
            self._unreadable(module, place, "it is compiled; only importing it can tell")
        if place.file is None:
            return self._submodule(module, place, parts, trail)
        try:
            source = read(place.file)
        except (OSError, SyntaxError, ValueError) as error:
            self._unreadable(module, place, str(error))
        return self._in_module_scope(Owner(module, source, bool(place.folders)), place, parts, trail)

    def _unreadable(self, module: str, place: Place, note: str) -> NoReturn:
        found = f"`{module}` ({place.file})"
        raise Missing(self.target, "unreadable", name=module, found=found, note=note, certain=False)

    def _in_module_scope(self, owner: Owner, place: Place, parts: tuple[str, ...], trail: Trail) -> Definition:
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
        if submodule_place(place, name) is not None:
            return self._submodule(owner.module, place, parts, trail)
        _raise_first(failures)
        self._not_in_module(owner, name)

    def _place(self, module: str) -> Place:
        place = locate(module, self.roots)
        if place is not None:
            return place
        known: list[str] = []
        for name in module.split("."):
            if locate(".".join([*known, name]), self.roots) is None:
                break
            known.append(name)
        if not known:
            raise Missing(self.target, "package", name=name)
        above = locate(".".join(known), self.roots)
        names = submodules(above) if above else []
        raise Missing(
            self.target,
            "module",
            name=name,
            found=f"`{'.'.join(known)}`",
            suggestions=(".".join([*known, n]) for n in close(name, names)),
        )

    def _submodule(self, module: str, place: Place, parts: tuple[str, ...], trail: Trail) -> Definition:
        if submodule_place(place, parts[0]) is None:
            raise Missing(
                self.target,
                "attribute",
                name=parts[0],
                found=f"`{module}`",
                suggestions=close(parts[0], submodules(place)),
            )
        return self.in_module(f"{module}.{parts[0]}", parts[1:], trail)

    def _choose(
        self,
        owner: Owner,
        candidates: Sequence[Binding],
        parts: tuple[str, ...],
        trail: Trail,
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

    def _follow(self, owner: Owner, binding: Binding, rest: tuple[str, ...], trail: Trail, lazy: bool) -> Definition:
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
        owner: Owner,
        binding: Binding,
        how: How,
    ) -> Hop:
        return Hop(owner.module, owner.qualify(binding.name), owner.file.path, binding.line, how)

    def _imported(
        self, owner: Owner, binding: Binding, module: str, parts: tuple[str, ...], trail: Trail
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
        self, owner: Owner, parts: tuple[str, ...], trail: Trail, failures: list[Missing]
    ) -> Definition | None:
        name = parts[0]
        for node in reversed(owner.scope.stars):
            module = _absolute(owner, node)
            try:
                place = self._place(module)
                if place.file is not None and not place.compiled:
                    exported = read(place.file).exported
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

    def _assigned(self, owner: Owner, binding: Binding, rest: tuple[str, ...], trail: Trail) -> Definition:
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

    def _in_scopes(self, owner: Owner, parts: tuple[str, ...], trail: Trail) -> Definition:
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

    def _in_class(self, owner: Owner, parts: tuple[str, ...], trail: Trail) -> Definition:
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

    def _lineage(self, owner: Owner, trail: Trail) -> tuple[list[Owner], list[str]]:
        """The class and its bases, nearest first, and the bases whose source cannot be read here."""
        order: list[Owner] = []
        unread: list[str] = []

        def visit(cls: Owner, above: tuple[str, ...]) -> None:
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

    def _class(self, owner: Owner, dotted: tuple[str, ...], trail: Trail) -> Owner | None:
        reader = Reader(self.target, self.roots)
        outer = replace(owner, node=None, qualname="")
        try:
            found = reader._in_scopes(outer, dotted, Trail(seen=trail.seen))
        except Missing:
            return None
        return reader._classes.get((found.module, found.qualname)) if found.kind == "class" else None

    # --- what is not there ---------------------------------------------------------------------------------

    def _not_in_module(self, owner: Owner, name: str) -> NoReturn:
        scope = owner.scope
        note, certain, suggestions = "", True, close(name, scope.names())
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

    def _not_in_function(self, owner: Owner, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> NoReturn:
        label = owner.qualify(node.name)
        local = name in _locals(node)
        raise Missing(
            self.target,
            "attribute",
            name=name,
            found=f"`{owner.module}:{label}` ({owner.file.path}:{node.lineno})",
            suggestions=() if local else close(name, _locals(node)),
            note=(
                f"`{name}` is a local of `{label}`: it does not exist until `{label}` runs; patch `{label}` itself"
                if local
                else f"`{label}` is a function"
            ),
            # A decorator may hang attributes on what it returns.
            certain=local or not node.decorator_list,
        )

    def _not_in_class(self, owner: Owner, lineage: Sequence[Owner], unread: Sequence[str], name: str) -> NoReturn:
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
            suggestions=[n for n in close(name, names) if n != name],
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


def _absolute(owner: Owner, node: ast.ImportFrom) -> str:
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


def _class_parameters(owner: Owner) -> tuple[Parameter, ...] | None:
    """The parameters of a class's own ``__init__``, without ``self``; None if it has none of its own."""
    for binding in owner.scope.candidates("__init__"):
        if isinstance(binding.node, ast.FunctionDef):
            return _parameters(binding.node.args)[1:]
    return None


_GENERATED: Mapping[str, frozenset[str]] = {
    "dataclass": frozenset({"__init__", "__repr__", "__eq__"}),
}


def _generated(owner: Owner, name: str) -> Definition | None:
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


def _set_on_self(owner: Owner, name: str) -> str | None:
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
