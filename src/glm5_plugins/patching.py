"""Patches: what a plugin changes in a module, and the registry that checks, applies, verifies and restores them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from glm5_plugins import rebinding
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.errors import ConfigurationError, NotApplicable
from glm5_plugins.imports import when_imported


class Kind(str, Enum):
    """How a patch makes the new object: from the old one, or without it."""

    WRAP = "wrap"
    REPLACE = "replace"


class Stage(str, Enum):
    """Steps of a server's start, at whose end a patch can be held to have run."""

    ARGUMENTS = "arguments"
    STARTUP = "startup"
    MODEL_LOAD = "model load"
    CAPTURE = "graph capture"


class Verdict(str, Enum):
    """What became of a patch in this process."""

    APPLIED = "applied"
    WAITING = "waiting"
    NOT_NEEDED = "not needed"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"
    DRIFTED = "drifted"
    CONFLICT = "conflict"
    FAILED = "failed"
    DEAD = "dead"

    @property
    def bad(self) -> bool:
        """Whether a plugin with this verdict does not do what was asked of it."""
        return self in (Verdict.DRIFTED, Verdict.CONFLICT, Verdict.FAILED, Verdict.DEAD)


@dataclass(frozen=True)
class Outcome:
    """What a plugin that works in lifecycle hooks says became of it in this process.

    Args:
        verdict: As for a patch; a bad one stops the launch under `GLM5_ON_ERROR=strict`.
        reason: What was done, or why it was not.
        mend: For a bad verdict, what to do about it.
    """

    verdict: Verdict
    reason: str
    mend: str = ""


Probe = Callable[[Environment], "str | None"]


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of an upstream module, with everything needed to judge it later.

    Args:
        target: `package.module:attribute.path`, such as `sglang.srt.server_args:ServerArgs.from_cli_args`.
        using: For `WRAP` a function from the old object to the new one; for `REPLACE` the new object. For a
            static method, class method or property it deals in the plain function. It may raise
            `NotApplicable` with the reason why there is nothing to do here, and it may return the old object
            if that is the one wanted: another patch of the plugin has put it there.
        reason: Why the change is wanted, in a sentence.
        kind: `WRAP`, or `REPLACE` when the old object is not used; two REPLACE on one target are a conflict.
        requires: Version windows that must all hold, as in `sglang>=0.5.9,<0.5.22`.
        ends: What ended the windows that have an upper bound; said to users of newer versions.
        outside: Reads upstream's source and returns what shows that it is outside the windows, or None. It decides
            where a version cannot be placed (builds from source, forks), and the contract tests hold it to the
            windows in every release.
        needs: Names of parameters that the target must have.
        knows: Names of all parameters that the target may have, for a `using` that must carry each; () for any.
        unless: Asked before applying; returns why the patch is not needed here, or None.
        refuse: Asked before applying; returns why the patch must not be applied here, or None.
        keep: Module attributes, as `module:attribute`, that hold the old object on purpose. A module imported
            later gets it too.
        must_fire_by: A step of the start by whose end the target must have been called; else it is `dead`.
        counter: Returns how often the new object has run, for one that must not be wrapped by a counting
            function (a torch operator); without it the registry counts calls itself, outside traced code.
        upstream: Link to the upstream code, report or change this is about.
        fate: When the patch can be deleted.

    Raises:
        ConfigurationError: A field makes no sense; the text says which and why.
    """

    target: str
    using: Any
    reason: str
    kind: Kind = Kind.WRAP
    requires: str | Sequence[str] = ()
    ends: str = ""
    outside: Probe | None = None
    needs: Sequence[str] = ()
    knows: Sequence[str] = ()
    unless: Probe | None = None
    refuse: Probe | None = None
    keep: Sequence[str] = ()
    must_fire_by: Stage | None = None
    counter: Callable[[], int] | None = None
    upstream: str = ""
    fate: str = ""

    def __post_init__(self) -> None:
        module, colon, path = self.target.partition(":")
        if "<locals>" in path:
            owner = path.split(".<locals>")[0]
            raise ConfigurationError(
                f"Patch target {self.target!r} names a local of a function, which exists only while it runs.",
                f"Patch {module}:{owner} itself.",
            )
        parts = [*module.split("."), *path.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            raise ConfigurationError(
                f"Patch target {self.target!r} is not of the form 'package.module:attribute.path'.",
                "Separate the module from the attribute with one colon.",
            )
        if self.kind is Kind.WRAP and not callable(self.using):
            raise ConfigurationError(
                f"The patch on {self.target} wraps, but its `using` cannot be called.",
                "Give a function from the old object to the new one, or say kind=Kind.REPLACE.",
            )
        try:
            windows = self.windows
        except ValueError as error:
            raise ConfigurationError(f"The patch on {self.target}: {error}.") from error
        if any(window.has_end for window in windows) and not self.ends:
            raise ConfigurationError(
                f"The patch on {self.target} requires {', '.join(map(str, windows))} without saying what ends it.",
                "Say in `ends` what changed upstream at the upper bound.",
            )

    @property
    def module(self) -> str:
        """Name of the module the target lives in."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """Attribute names from the module to the target."""
        return tuple(self.target.partition(":")[2].split("."))

    @functools.cached_property
    def windows(self) -> tuple[Window, ...]:
        """The parsed `requires`."""
        texts = (self.requires,) if isinstance(self.requires, str) else tuple(self.requires)
        return tuple(Window.parse(text) for text in texts)


class Calls:
    """Counts the calls of one patched function."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Record:
    """What became of one patch in this process."""

    plugin: str
    patch: Patch
    verdict: Verdict = Verdict.WAITING
    reason: str = ""
    when: str = ""
    rebound: int = 0
    calls: Calls | None = None
    notes: list[str] = field(default_factory=list)
    _site: Site | None = field(default=None, repr=False)
    _old: Any = field(default=None, repr=False)
    _new: Any = field(default=None, repr=False)
    _made: Any = field(default=None, repr=False)
    """What `using` gave, which a counting function may wrap."""
    _call_off: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def fired(self) -> int | None:
        """How often the new object has run outside traced code; None for what cannot be counted (a constant)."""
        if self.patch.counter is not None:
            return self.patch.counter()
        return None if self.calls is None else self.calls.count

    def settle(self, verdict: Verdict, reason: str) -> None:
        """Set the verdict and why."""
        self.verdict = verdict
        self.reason = reason

    def describe(self) -> str:
        """The verdict as a person reads it: `applied (late, 2 rebound)`."""
        if self.verdict is not Verdict.APPLIED:
            return str(self.verdict.value)
        return f"{self.verdict.value} ({self.when}, {self.rebound} rebound)"


class Drift(Exception):
    """The installed package does not have what a patch relies on; the text says what is missing."""


@dataclass(frozen=True)
class Site:
    """Where an attribute is set: its holder, its name, the raw value, and whether the holder owns it."""

    holder: Any
    name: str
    raw: Any
    owned: bool

    def set(self, value: Any) -> None:
        """Put `value` in place."""
        setattr(self.holder, self.name, value)

    def reset(self) -> None:
        """Put the first value back; an attribute that was only inherited is taken away again."""
        if self.owned:
            setattr(self.holder, self.name, self.raw)
        else:
            delattr(self.holder, self.name)


def locate(module: ModuleType, path: Sequence[str]) -> Site:
    """Find an attribute and who holds it, without calling descriptors.

    Raises:
        Drift: Some part of the path does not exist.
    """
    holder: Any = module
    for depth, name in enumerate(path):
        where = ".".join((module.__name__, *path[:depth]))
        code = getattr(holder, "__code__", None)
        if code is not None and (name in code.co_varnames or name in code.co_cellvars):
            raise Drift(f"{name!r} is a local of {where}() and exists only while it runs; patch {where} itself")
        if not hasattr(holder, name) and name not in getattr(holder, "__dict__", {}):
            raise Drift(f"{where} has no {name!r}")
        if depth < len(path) - 1:
            holder = getattr(holder, name)
    name = path[-1]
    owned = name in vars(holder) if hasattr(holder, "__dict__") else False
    raw = inspect.getattr_static(holder, name, None)
    if raw is None and not owned:
        raw = getattr(holder, name)  # served by a module's __getattr__
    return Site(holder, name, raw, owned)


def missing_parameters(function: Any, needs: Sequence[str]) -> list[str]:
    """Return the names in `needs` that `function` does not take."""
    taken = _parameters(function) if needs else ()
    return [name for name in needs if taken is None or name not in taken]


def unknown_parameters(function: Any, knows: Sequence[str]) -> list[str]:
    """Return the names that `function` takes and are not in `knows`; none where that is empty."""
    taken = _parameters(function) if knows else ()
    return [name for name in taken or () if name not in knows]


def _parameters(function: Any) -> Collection[str] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


class Registry:
    """The patches of one process: `add` them, `verify` what was applied, `expire` what never ran, `restore`.

    Args:
        env: The surroundings the patches are judged by.
        on_bad: Called with a record whose verdict turned bad; it may raise to stop the process.
        check_source: Called with a patch whose module is not loaded; returns what the installed source lacks,
            or None. It must import nothing of the target's package.
    """

    def __init__(
        self,
        env: Environment,
        on_bad: Callable[[Record], None] = lambda record: None,
        check_source: Callable[[Patch], str | None] = lambda patch: None,
    ) -> None:
        self.env = env
        self.records: list[Record] = []
        self._on_bad = on_bad
        self._check_source = check_source

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def judge(self, patch: Patch) -> tuple[Verdict, str]:
        """Say whether `patch` is for these versions and this machine; nothing is imported or changed."""
        places = [self.env.place(window) for window in patch.windows]
        for window, place in zip(patch.windows, places, strict=True):
            name = window.requirement.name
            here = f"{name} {self.env.version_text(name)}"
            if place is Place.ABSENT:
                return Verdict.NOT_APPLICABLE, f"{name} is not installed"
            if place is Place.BELOW:
                return Verdict.NOT_APPLICABLE, f"{here} is older than {window}"
            if place is Place.ABOVE:
                return Verdict.NOT_NEEDED, f"{here}: {patch.ends}"
        if Place.UNKNOWN in places and patch.outside is not None and (why := patch.outside(self.env)):
            return Verdict.NOT_NEEDED, why
        if patch.refuse is not None and (why := patch.refuse(self.env)):
            return Verdict.FAILED, f"refused: {why}"
        if patch.unless is not None and (why := patch.unless(self.env)):
            return Verdict.NOT_NEEDED, why
        return Verdict.WAITING, "its module is not imported in this process"

    def add(self, plugin: str, patch: Patch) -> Record:
        """Judge a patch and apply it: at once if its module is loaded, else right after its import.

        Adding the same patch of the same plugin again changes nothing.
        """
        for known in self.records:
            if known.plugin == plugin and known.patch == patch:
                return known
        record = Record(plugin, patch)
        self.records.append(record)
        record.settle(*self.judge(patch))
        rival = self._rival(record)
        if record.verdict is Verdict.WAITING and rival is not None:
            record.settle(Verdict.CONFLICT, f"{rival.plugin} replaces {patch.target} too; choose one of them")
        if record.verdict is Verdict.WAITING and patch.module not in sys.modules:
            lacking = self._check_source(patch)
            if lacking is not None:
                record.settle(Verdict.DRIFTED, lacking)
        if record.verdict.bad:
            self._on_bad(record)
        if record.verdict is Verdict.WAITING:
            late = patch.module in sys.modules
            record._call_off.append(
                when_imported(patch.module, lambda module: self._apply(record, module, "late" if late else "early"))
            )
        return record

    def _rival(self, record: Record) -> Record | None:
        if record.patch.kind is not Kind.REPLACE:
            return None
        for other in self.records:
            if (
                other is not record
                and other.patch.kind is Kind.REPLACE
                and other.patch.target == record.patch.target
                and other.verdict in (Verdict.APPLIED, Verdict.WAITING)
            ):
                return other
        return None

    def _apply(self, record: Record, module: ModuleType, when: str) -> None:
        patch = record.patch
        if record.verdict is not Verdict.WAITING:
            return  # withdrawn by another callback of the same import
        try:
            site = locate(module, patch.path)
            old = _function_of(site.raw)
            lacking = missing_parameters(old, patch.needs)
            if lacking:
                raise Drift(f"{patch.target} no longer takes {', '.join(map(repr, lacking))}")
            unknown = unknown_parameters(old, patch.knows)
            if unknown:
                raise Drift(f"{patch.target} takes {', '.join(map(repr, unknown))}, which this plugin does not know")
            new = made = patch.using(old) if patch.kind is Kind.WRAP else patch.using
            if patch.counter is None and inspect.isroutine(old):
                record.calls = Calls()
                new = _counted(record.calls, old, new)
            site.set(_like(site.raw, new))
        except NotApplicable as reason:
            record.settle(Verdict.NOT_APPLICABLE, str(reason))
        except Drift as drift:
            record.settle(Verdict.DRIFTED, self._drifted(patch, drift))
        except Exception as error:
            record.settle(Verdict.FAILED, f"{type(error).__name__}: {error}")
        else:
            record._site, record._old, record._new, record._made = site, old, new, made
            record.when = when
            record.settle(Verdict.APPLIED, patch.reason)
            record.rebound = rebinding.rebind(old, new, patch, _own_modules(patch))
            self._give_back_kept(record)
        if record.verdict.bad:
            self._on_bad(record)

    def _give_back_kept(self, record: Record) -> None:
        """Let modules that keep the old object have it also when they import the target after this."""
        for kept in record.patch.keep:
            name, _, attribute = kept.partition(":")

            def give_back(module: ModuleType, attribute: str = attribute) -> None:
                if getattr(module, attribute, None) is record._new:
                    setattr(module, attribute, record._old)

            if name not in sys.modules:
                record._call_off.append(when_imported(name, give_back))

    def _drifted(self, patch: Patch, drift: Drift) -> str:
        versions = [
            f"{window.requirement.name} {self.env.version_text(window.requirement.name)}" for window in patch.windows
        ]
        return f"{drift}" + (f" (in {', '.join(versions)})" if versions else "")

    def verify(self) -> None:
        """Check that every applied patch is still in place and that nobody holds the old object.

        One pass over the garbage collector's objects, so it is called once, before the costly steps.
        """
        applied = [record for record in self.records if record.verdict is Verdict.APPLIED]
        own_modules = {module for record in applied for module in _own_modules(record.patch)}
        ours = [item for record in applied for item in _own_objects(record)]
        search = rebinding.HolderSearch(own_modules, ours)
        gone = [None if record._old is record._new else record._old for record in applied]
        for record, names in zip(applied, search.find(gone), strict=True):
            patch = record.patch
            allowed = {*patch.keep, *_bases_that_define(record._site)}
            found = [name for name in names if name not in allowed]
            replaced = self._replaced_by(record)
            if replaced:
                record.settle(Verdict.CONFLICT, replaced)
            elif found:
                record.settle(
                    Verdict.FAILED,
                    f"not effective: {patch.target} as it was is still held by {', '.join(found)}",
                )
            if record.verdict.bad:
                self._on_bad(record)

    def _replaced_by(self, record: Record) -> str | None:
        """Say who has taken the target over since, or None when our object is reached from it."""
        assert record._site is not None
        target = record.patch.target
        hooks = rebinding.sglang_hooks(target)
        for kind, source in hooks:
            if kind == "replace":
                return f"{source} replaces {target} through SGLang's own hook registry"
        record.notes = [f"{source} hooks it too ({kind})" for kind, source in hooks]
        current = _in_place(record.patch, record._site)
        seen = 0
        while current is not record._new and seen < 32:
            current = getattr(current, "__wrapped__", None)
            seen += 1
            if current is None:
                return _taken_over(record.patch)
        return None

    def expire(self, stage: Stage) -> None:
        """Call those patches dead that had to run by the end of `stage` and did not."""
        for record in self.records:
            late = record.patch.must_fire_by is stage and not record.fired
            if late and record.verdict in (Verdict.APPLIED, Verdict.WAITING):
                record.settle(Verdict.DEAD, f"{record.patch.target} was not called by the end of {stage.value}")
                self._on_bad(record)

    def withdraw(self, plugin: str, reason: str) -> None:
        """Take back what one plugin has applied: a plugin is in force whole or not at all."""
        for record in reversed(self.records):
            if record.plugin == plugin and record.verdict in (Verdict.APPLIED, Verdict.WAITING):
                self._restore(record)
                record.settle(Verdict.SKIPPED, reason)

    def restore(self) -> None:
        """Undo everything, last applied first, and forget it."""
        for record in reversed(self.records):
            self._restore(record)
        self.records.clear()

    def _restore(self, record: Record) -> None:
        while record._call_off:
            record._call_off.pop()()
        if record._site is None:
            return
        record._site.reset()
        rebinding.unbind(record._new, record._old, record.patch)
        record._site = record._old = record._new = record._made = None


def _in_place(patch: Patch, site: Site) -> Any:
    """The function that is now reached under a patch's target; a class on the way may have been replaced."""
    module = sys.modules.get(patch.module)
    if module is not None:
        try:
            site = locate(module, patch.path)
        except Drift:
            return None
    return _function_of(inspect.getattr_static(site.holder, site.name, None))


def _taken_over(patch: Patch) -> str:
    """Say who has put something in place of a patch, or of a class that it is in."""
    for depth in range(len(patch.path) - 1, 0, -1):
        owner = f"{patch.module}:{'.'.join(patch.path[:depth])}"
        for kind, source in rebinding.sglang_hooks(owner):
            if kind == "replace":
                return f"{source} replaces {owner}, without the change, through SGLang's own hook registry"
    return f"something else has put its own object in place of {patch.target}"


def _bases_that_define(site: Site | None) -> Iterator[str]:
    """The base classes that a patched class inherited the attribute from: they rightly keep it."""
    if site is not None and not site.owned and isinstance(site.holder, type):
        for base in site.holder.__mro__:
            if base is not site.holder and site.name in vars(base):
                yield rebinding.class_attribute(base, site.name)


def _own_objects(record: Record) -> tuple[Any, ...]:
    """What may refer to the old object because the patch is made of it."""
    return record, record._new, record._made, record._site, record.patch


def _own_modules(patch: Patch) -> set[str]:
    """The modules that may hold the old object on purpose: the plugin's own and the registry's."""
    return {str(getattr(patch.using, "__module__", "")), __name__, rebinding.__name__}


def _function_of(raw: Any) -> Any:
    """The plain function inside a static method, class method or property; anything else as it is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    return raw


def _like(raw: Any, new: Any) -> Any:
    """Dress `new` as the descriptor that `raw` is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(new)
    if isinstance(raw, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    return new


def _counted(calls: Calls, old: Any, new: Any) -> Any:
    """Wrap `new` so that calls are counted, except where torch.compile traces them."""
    torch = sys.modules.get("torch")
    # Dynamo folds is_compiling() to True and never sees the counter: no guard on it, no recompile.
    compiling: Callable[[], bool] = torch.compiler.is_compiling if torch is not None else bool

    def counting(*args: Any, **kwargs: Any) -> Any:
        if not compiling():
            calls.count += 1
        return new(*args, **kwargs)

    async def counting_async(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return await new(*args, **kwargs)

    shim = counting_async if inspect.iscoroutinefunction(old) else counting
    functools.update_wrapper(shim, old)
    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(old, name):
            setattr(shim, name, getattr(old, name))
    return shim
