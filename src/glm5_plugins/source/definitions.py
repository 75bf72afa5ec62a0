"""What reading source finds: where a name is defined, or what is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


def close(name: str, names: Iterable[str]) -> list[str]:
    """The names most like a name, at most three; those that go on where it ends come first."""
    known = sorted(set(names))
    longer = [other for other in known if other.startswith(f"{name}_")]
    return list(dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=3, cutoff=0.6)]))[:3]
