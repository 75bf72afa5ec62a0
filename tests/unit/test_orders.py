"""Every order of {import target, import importer, apply, restore, apply again}, each in its own process."""

from __future__ import annotations

from itertools import permutations

import pytest

TARGET = """
    import asyncio
    FLAG = True
    LIMITS = {"a": 1}
    def function(x): return ("function", x)
    async def coroutine(x): return ("coroutine", x)
    class Base:
        def inherited(self, x): return ("inherited", x)
    class Thing(Base):
        def method(self, x): return ("method", x)
        @staticmethod
        def static(x): return ("static", x)
        @classmethod
        def made(cls, x): return (cls.__name__, x)
        @property
        def prop(self): return ("prop", 1)
        async def later(self, x): return ("later", x)
"""
IMPORTER = """
    from target_pkg.target import FLAG, LIMITS, Thing, coroutine, function as renamed
    from . import reexport
    OTHER = True
    def call(): return renamed(1)
"""
REEXPORT = """
    from target_pkg.target import function
"""
DRIVER = """
    import asyncio, functools, importlib, sys
    from glm5_plugins.environment import Environment
    from glm5_plugins.patching import Kind, Patch, Registry, Verdict

    def wrap(old):
        @functools.wraps(old)
        def new(*args): return ("patched", old(*args))
        return new
    def wrap_async(old):
        async def new(*args): return ("patched", await old(*args))
        return new

    T = "target_pkg.target:"
    patches = [Patch(T + name, wrap, "test") for name in
               ("function", "Thing.method", "Thing.static", "Thing.made", "Thing.prop", "Thing.inherited")]
    patches += [Patch(T + name, wrap_async, "test") for name in ("coroutine", "Thing.later")]
    patches += [Patch(T + name, value, "test", kind=Kind.REPLACE) for name, value in
                (("FLAG", False), ("LIMITS", {"a": 2}))]
    registry = Registry(Environment())
    applied = False
    for step in sys.argv[1].split(","):
        if step == "target": import target_pkg.target
        elif step == "importer": import target_pkg.importer
        elif step == "restore": registry.restore(); applied = False
        else:
            for patch in patches: registry.add("test", patch)
            applied = True
    import target_pkg.target as target
    import target_pkg.importer as importer

    def expect(got, *plain):
        wanted = ("patched", plain) if applied else plain
        assert got == wanted, (got, wanted)
    for thing in (target.Thing, importer.Thing):
        expect(thing().method(1), "method", 1)
        expect(thing.static(1), "static", 1)
        expect(thing().static(1), "static", 1)
        expect(thing.made(1), "Thing", 1)
        expect(thing().prop, "prop", 1)
        expect(thing().inherited(1), "inherited", 1)
        expect(asyncio.run(thing().later(1)), "later", 1)
    assert target.Base().inherited(1) == ("inherited", 1)
    for function in (target.function, importer.renamed, importer.reexport.function):
        expect(function(1), "function", 1)
    expect(importer.call(), "function", 1)
    for coroutine in (target.coroutine, importer.coroutine):
        assert asyncio.iscoroutinefunction(coroutine)
        expect(asyncio.run(coroutine(1)), "coroutine", 1)
    assert target.FLAG is importer.FLAG is (not applied)
    assert importer.OTHER is True
    assert target.LIMITS == importer.LIMITS == {"a": 2 if applied else 1}
    assert [record.verdict for record in registry] == [Verdict.APPLIED] * (len(patches) if applied else 0)
    if applied:
        registry.verify()
        assert not [record for record in registry if record.verdict.bad], [(r.patch.target, r.reason) for r in registry]
        assert all(record.fired > 0 for record in registry if record.patch.kind is Kind.WRAP)
    else:
        assert "inherited" not in vars(target.Thing)
        assert not hasattr(target.function, "__wrapped__")
    assert not any(type(finder).__module__ == "glm5_plugins.imports" for finder in sys.meta_path)
"""
STEPS = ("target", "importer", "apply", "restore", "apply again")


@pytest.mark.parametrize("order", list(permutations(STEPS)), ids="-".join)
def test_state_follows_the_last_step(package, run, order):
    """After any order, everything is patched exactly once, or nothing is and no trace is left."""
    package({"target_pkg/target.py": TARGET, "target_pkg/importer.py": IMPORTER, "target_pkg/reexport.py": REEXPORT})
    code = DRIVER.replace("sys.argv[1]", repr(",".join(order)))
    run(code)
