"""Holders of a patched function: rebound where possible, named where not, left alone where kept on purpose."""

from __future__ import annotations

import pytest

from glm5_plugins import imports
from glm5_plugins.environment import Environment
from glm5_plugins.patching import Kind, Patch, Registry, Verdict

TARGET = "def f(x): return x\ndef g(x): return f(x)\n"


def shout(old):
    def new(x):
        return ("patched", old(x))

    return new


@pytest.fixture
def apply(package):
    def apply_one(source: str, made_of: str = TARGET, **fields: object):
        package({"pkg_r/target.py": made_of, "pkg_r/holder.py": source})
        import pkg_r.holder
        import pkg_r.target

        records = Registry(Environment())
        record = records.add("p", Patch(**{"target": "pkg_r.target:f", "using": shout, "reason": "test", **fields}))
        records.verify()
        return record, pkg_r.target, pkg_r.holder, records

    return apply_one


@pytest.mark.parametrize(
    ("source", "holder"),
    [
        ("from pkg_r import target\nTABLE = {'fast': target.f}", "dict pkg_r.holder:TABLE['fast']"),
        ("from pkg_r import target\nTABLE = {'a': {'b': [target.f]}}", "list in pkg_r.holder:TABLE['a']['b']"),
        ("import functools\nfrom pkg_r import target\np = functools.partial(target.f, 1)", "partial in pkg_r.holder:p"),
        ("from pkg_r import target\nclass C:\n  op = target.f", "class attribute pkg_r.holder:C.op"),
        ("from pkg_r import target\nclass C:\n  op = staticmethod(target.f)", "staticmethod in pkg_r.holder:C.op"),
        ("from pkg_r import target\ndef h(x, op=target.f): return op(x)", "default argument of pkg_r.holder:h"),
        ("from pkg_r import target\ndef h(x, *, op=target.f): return op(x)", "default argument of pkg_r.holder:h"),
        ("from pkg_r import target\nOPS = (target.f, 1)", "tuple in pkg_r.holder:OPS"),
        (
            "from pkg_r import target\ndef make(op):\n  def h(x): return op(x)\n  return h\nh = make(target.f)",
            "closure of pkg_r.holder:make.<locals>.h",
        ),
        (
            "from pkg_r import target\nclass C:\n  def __init__(self): self.op = target.f\nc = C()",
            "attribute 'op' of a pkg_r.holder:C",
        ),
    ],
)
def test_a_holder_that_cannot_be_rebound_makes_the_patch_not_effective(apply, source, holder):
    """Case 7 of the field."""
    record, _, _, records = apply(source)
    assert record.verdict is Verdict.FAILED
    assert record.reason == f"not effective: pkg_r.target:f as it was is still held by {holder}"
    records.restore()


def test_from_imports_are_rebound_and_named_nowhere(apply):
    record, target, holder, records = apply("from pkg_r.target import f as fast, g\nfrom pkg_r import target as t")
    assert record.verdict is Verdict.APPLIED
    assert record.rebound == 1
    assert holder.fast(1) == target.f(1) == target.g(1) == ("patched", 1)
    records.restore()
    assert holder.fast(1) == 1


def test_a_deliberate_stash_is_kept_and_does_not_recurse(apply):
    source = "from pkg_r.target import f as _raw\nfrom pkg_r.target import f\ndef public(x): return _raw(x)"
    record, _, holder, records = apply(
        source, using=lambda old: lambda x: ("patched", __import__("pkg_r.holder").holder.public(x)),
        keep=("pkg_r.holder:_raw",),
    )  # fmt: skip
    assert record.verdict is Verdict.APPLIED
    assert holder.f(1) == ("patched", 1)
    assert holder.public(1) == 1
    records.restore()


def test_without_keep_the_stash_would_recurse_for_ever(apply):
    source = "from pkg_r.target import f as _raw\ndef public(x): return _raw(x)"
    _, target, _, records = apply(source, using=lambda old: lambda x: __import__("pkg_r.holder").holder.public(x))
    with pytest.raises(RecursionError):
        target.f(1)
    records.restore()


def test_a_holder_may_be_kept_by_name(apply):
    record, *_, records = apply(
        "from pkg_r import target\nTABLE = {'fast': target.f}", keep=("dict pkg_r.holder:TABLE['fast']",)
    )
    assert record.verdict is Verdict.APPLIED
    records.restore()


def test_a_constant_is_rebound_only_where_the_source_imports_it(package):
    package(
        {
            "pkg_r/const.py": "LIMIT = True\n",
            "pkg_r/user.py": "from .const import LIMIT as CAP\nMINE = True\ndef cap(): return CAP\n",
        }
    )
    import pkg_r.const
    import pkg_r.user

    records = Registry(Environment())
    record = records.add("p", Patch("pkg_r.const:LIMIT", False, "test", kind=Kind.REPLACE))
    assert record.verdict is Verdict.APPLIED
    assert record.fired is None
    assert (pkg_r.user.cap(), pkg_r.user.MINE, pkg_r.const.LIMIT) == (False, True, False)
    records.restore()
    assert (pkg_r.user.cap(), pkg_r.user.MINE, pkg_r.const.LIMIT) == (True, True, True)


def test_something_else_put_in_our_place_is_a_conflict(apply):
    record, target, _, records = apply("")
    target.f = len
    records.verify()
    assert record.verdict is Verdict.CONFLICT
    assert "something else has put its own object in place of pkg_r.target:f" in record.reason


@pytest.mark.parametrize(("base", "verdict"), [("object", Verdict.CONFLICT), ("Thing", Verdict.APPLIED)])
def test_a_class_put_in_the_place_of_ours_keeps_the_change_or_is_a_conflict(package, base, verdict):
    package({"pkg_r/classes.py": "class Thing:\n    def f(self, x): return x\n"})
    import pkg_r.classes as module

    records = Registry(Environment())
    record = records.add("p", Patch("pkg_r.classes:Thing.f", lambda old: lambda self, x: old(self, x), "test"))
    module.Thing = type("Mine", (getattr(module, base, object),), {} if base == "Thing" else {"f": len})
    records.verify()
    assert record.verdict is verdict
    if verdict is Verdict.CONFLICT:
        assert record.reason.endswith("in place of pkg_r.classes:Thing.f")
    records.restore()


def test_a_wrapper_around_ours_is_no_conflict(apply):
    import functools

    record, target, _, records = apply("")
    ours = target.f

    @functools.wraps(ours)
    def theirs(x):
        return ours(x)

    target.f = theirs
    del theirs
    records.verify()
    assert record.verdict is Verdict.APPLIED
    records.restore()


def test_a_stash_that_is_imported_later_is_kept_too(package):
    package(
        {
            "pkg_r/target.py": "def f(x): return x\n",
            "pkg_r/late.py": "from pkg_r.target import f as _raw\nfrom pkg_r.target import f\n",
        }
    )
    import pkg_r.target

    records = Registry(Environment())
    patch = Patch("pkg_r.target:f", lambda old: lambda x: ("patched", x), "test", keep=("pkg_r.late:_raw",))
    assert records.add("p", patch).verdict is Verdict.APPLIED
    import pkg_r.late

    assert (pkg_r.late._raw(1), pkg_r.late.f(1)) == (1, ("patched", 1))
    records.restore()
    assert (pkg_r.late._raw(1), pkg_r.late.f(1)) == (1, 1)


def test_a_stash_is_waited_for_only_until_the_patch_is_undone(package):
    package({"pkg_r/target.py": "def f(x): return x\n", "pkg_r/late.py": "from pkg_r.target import f as _raw\n"})
    import pkg_r.target  # noqa: F401

    records = Registry(Environment())
    records.add("p", Patch("pkg_r.target:f", lambda old: lambda x: x, "test", keep=("pkg_r.late:_raw",)))
    records.restore()
    assert imports._waiting == {}


def test_the_helpers_of_a_decorated_function_are_no_holders(apply):
    """A decorator's wrapper, and helpers in its closure, may refer to the wrapper itself."""
    source = """
import functools
def decorator(function):
    def helper(): return wrapper
    @functools.wraps(function)
    def wrapper(x): return function(x) if helper() else wrapper
    wrapper.twin = lambda: wrapper
    return wrapper
@decorator
def f(x): return x
"""
    record, *_, records = apply("", made_of=source)
    assert record.verdict is Verdict.APPLIED, record.reason
    records.restore()


def test_what_a_plugin_makes_with_another_package_may_hold_the_original(apply):
    """`using` may wrap with a decorator of, say, torch; with or without a counting function around that."""
    record, *_, records = apply("def around(f):\n    def wrapper(x): return f(x)\n    return wrapper\n", using=_around)
    assert record.verdict is Verdict.APPLIED, record.reason
    records.restore()


def _around(old):
    from pkg_r import holder

    return holder.around(old)


def test_a_second_patch_may_find_the_wanted_object_in_place(package):
    package(
        {"pkg_r/target.py": "def f(x): return x\n", "pkg_r/user.py": "from pkg_r.target import f\ndef g(): return f\n"}
    )
    import pkg_r.target
    import pkg_r.user

    def new(x):
        return "patched", x

    records = Registry(Environment())
    count = iter(range(9)).__next__
    first = Patch("pkg_r.target:f", lambda old: new, "test", counter=count)
    second = Patch("pkg_r.user:f", lambda old: old, "test", counter=count)
    found = [records.add("p", patch) for patch in (first, second)]
    records.verify()
    assert [record.verdict for record in found] == [Verdict.APPLIED, Verdict.APPLIED]
    assert pkg_r.user.f is pkg_r.target.f is new
    records.restore()
    assert pkg_r.user.f is pkg_r.target.f is not new
