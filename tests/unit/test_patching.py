"""Patches: what may be declared, how each verdict comes about, what is counted."""

from __future__ import annotations

import sys

import pytest

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError, NotApplicable
from glm5_plugins.patching import Kind, Patch, Registry, Stage, Verdict

TARGET = """
    def f(x, fullgraph=True): return x
    def outer():
        local = 1
        def inner(): return local
        return inner
    class Thing:
        def method(self): return 1
"""


def same(old):
    def new(*args, **kwargs):
        return old(*args, **kwargs)

    return new


def registry(**versions: str | None) -> Registry:
    return Registry(Environment({name.replace("_", "-"): text for name, text in versions.items()}))


@pytest.fixture
def target(package):
    package({"pkg_p/target.py": TARGET})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target": "pkg.mod.f"}, "not of the form"),
        ({"target": "pkg.mod:f:g"}, "not of the form"),
        ({"target": "pkg.mod:"}, "not of the form"),
        ({"target": "pkg:outer.<locals>.inner"}, "Patch pkg:outer itself"),
        ({"using": 3}, "cannot be called"),
        ({"requires": "sglang>=0.5.9,<0.5.22"}, "without saying what ends it"),
        ({"requires": "sglang >= banana"}, "is no version range"),
        ({"requires": "sglang>=1; python_version<'3'"}, "only a name and a version range"),
    ],
)
def test_a_patch_that_makes_no_sense_is_refused_with_the_mend(fields, said):
    with pytest.raises(ConfigurationError, match=said):
        Patch(**{"target": "pkg.mod:f", "using": same, "reason": "test", **fields})


@pytest.mark.parametrize(
    ("installed", "verdict", "reason"),
    [
        (None, Verdict.NOT_APPLICABLE, "sglang is not installed"),
        ("0.5.8", Verdict.NOT_APPLICABLE, "sglang 0.5.8 is older than sglang"),
        ("0.5.22", Verdict.NOT_NEEDED, "sglang 0.5.22: gone upstream"),
        ("0.5.10.post1", Verdict.APPLIED, "test"),
        ("0.5.12+cu130", Verdict.APPLIED, "test"),
        ("0.5.21.post2+cu130", Verdict.APPLIED, "test"),
        ("0.0.0.dev1+gbfefdc52d", Verdict.APPLIED, "test"),
        ("my-fork", Verdict.APPLIED, "test"),
    ],
)
def test_the_version_decides_and_one_that_cannot_be_placed_is_probed(target, installed, verdict, reason):
    """Case 10 of the field: post releases, local versions, dev builds and forks."""
    patch = Patch("pkg_p.target:f", same, "test", requires="sglang>=0.5.9,<0.5.22", ends="gone upstream")
    import pkg_p.target  # noqa: F401

    record = registry(sglang=installed).add("p", patch)
    assert record.verdict is verdict
    assert record.reason.startswith(reason)


def test_a_build_that_cannot_be_placed_and_lacks_the_target_is_drift(target):
    import pkg_p.target  # noqa: F401

    patch = Patch("pkg_p.target:gone", same, "test", requires="sglang>=0.5.9")
    record = registry(sglang="0.0.0.dev1+gbfefdc52d").add("p", patch)
    assert record.verdict is Verdict.DRIFTED
    assert "pkg_p.target has no 'gone' (in sglang 0.0.0.dev1+gbfefdc52d)" in record.reason


@pytest.mark.parametrize(
    ("fields", "verdict", "reason"),
    [
        ({"target": "pkg_p.target:Thing.gone"}, Verdict.DRIFTED, "pkg_p.target.Thing has no 'gone'"),
        ({"target": "pkg_p.target:outer.local"}, Verdict.DRIFTED, "'local' is a local of pkg_p.target.outer()"),
        ({"target": "pkg_p.target:outer.inner"}, Verdict.DRIFTED, "patch pkg_p.target.outer itself"),
        ({"needs": ("fullgraph", "dynamic")}, Verdict.DRIFTED, "no longer takes 'dynamic'"),
        ({"knows": ("x", "dynamic")}, Verdict.DRIFTED, "takes 'fullgraph', which this plugin does not know"),
        ({"unless": lambda env: "cured upstream"}, Verdict.NOT_NEEDED, "cured upstream"),
        ({"refuse": lambda env: "it corrupts"}, Verdict.FAILED, "refused: it corrupts"),
        ({"requires": "sglang>=0.5.9"}, Verdict.APPLIED, "test"),
    ],
)
def test_each_verdict_says_why(target, fields, verdict, reason):
    import pkg_p.target  # noqa: F401

    bad = []
    records = Registry(Environment({"sglang": "0.5.9"}), bad.append)
    record = records.add("p", Patch(**{"target": "pkg_p.target:f", "using": same, "reason": "test", **fields}))
    assert record.verdict is verdict
    assert reason in record.reason
    assert bad == ([record] if verdict.bad else [])


def test_a_using_that_raises_is_failed_and_changes_nothing(target):
    from pkg_p import target as module

    def broken(old):
        raise KeyError("oops")

    before = module.f
    record = registry().add("p", Patch("pkg_p.target:f", broken, "test"))
    assert (record.verdict, record.reason) == (Verdict.FAILED, "KeyError: 'oops'")
    assert module.f is before


def test_a_using_may_find_that_there_is_nothing_to_do(target):
    import pkg_p.target  # noqa: F401

    def idle(old):
        raise NotApplicable("no CUDA here")

    record = registry().add("p", Patch("pkg_p.target:f", idle, "test"))
    assert (record.verdict, record.reason) == (Verdict.NOT_APPLICABLE, "no CUDA here")


@pytest.mark.parametrize(
    ("version", "verdict", "reason"),
    [
        ("0.0.0.dev1+gbfefdc52d", Verdict.NOT_NEEDED, "the source says so"),
        ("0.5.22rc1", Verdict.NOT_NEEDED, "the source says so"),
        ("0.5.21", Verdict.FAILED, "refused: not here"),
        ("0.5.22", Verdict.NOT_NEEDED, "sglang 0.5.22: it went"),
    ],
)
def test_outside_decides_where_the_version_cannot(version, verdict, reason):
    """Case 10 of the field."""
    fields = {"outside": lambda env: "the source says so", "refuse": lambda env: "not here", "ends": "it went"}
    patch = Patch("pkg_p.target:f", same, "test", requires="sglang>=0.5.8,<0.5.22", **fields)
    assert registry(sglang=version).judge(patch) == (verdict, reason)


def test_two_replacements_of_one_target_are_a_conflict_that_names_both(target):
    import pkg_p.target  # noqa: F401

    records = registry()
    records.add("first", Patch("pkg_p.target:f", same, "test", kind=Kind.REPLACE))
    second = records.add("second", Patch("pkg_p.target:f", len, "test", kind=Kind.REPLACE))
    assert second.verdict is Verdict.CONFLICT
    assert "first replaces pkg_p.target:f too" in second.reason
    records.restore()


def test_wrappers_of_two_plugins_stack_and_come_off_in_reverse(target):
    from pkg_p import target as module

    original = module.f
    records = registry()
    records.add("a", Patch("pkg_p.target:f", lambda old: lambda x: ("a", old(x)), "test"))
    records.add("b", Patch("pkg_p.target:f", lambda old: lambda x: ("b", old(x)), "test"))
    assert module.f(1) == ("b", ("a", 1))
    records.verify()
    assert not any(record.verdict.bad for record in records)
    records.restore()
    assert module.f is original


def test_apply_restore_register_and_apply_wraps_once(target):
    """Case 6 of the field."""
    from pkg_p import target as module

    original = module.f
    patch = Patch("pkg_p.target:f", lambda old: lambda x: old(x) + 1, "test")
    records = registry()
    records.add("p", patch)
    records.restore()
    assert module.f is original
    records.add("p", patch)
    records.add("p", patch)
    assert module.f(1) == 2
    records.restore()
    assert module.f is original


def test_a_patch_whose_target_never_runs_is_dead(target):
    from pkg_p import target as module

    bad = []
    records = Registry(Environment(), bad.append)
    idle = records.add("idle", Patch("pkg_p.target:f", same, "test", must_fire_by=Stage.STARTUP))
    busy = records.add("busy", Patch("pkg_p.target:Thing.method", same, "test", must_fire_by=Stage.STARTUP))
    waiting = records.add("waiting", Patch("pkg_p.never:f", same, "test", must_fire_by=Stage.STARTUP))
    module.Thing().method()
    records.expire(Stage.ARGUMENTS)
    assert bad == []
    records.expire(Stage.STARTUP)
    assert (idle.verdict, busy.verdict, waiting.verdict) == (Verdict.DEAD, Verdict.APPLIED, Verdict.DEAD)
    assert bad == [idle, waiting]
    assert idle.reason == "pkg_p.target:f was not called by the end of startup"


def test_a_plugin_is_taken_back_whole(target):
    from pkg_p import target as module

    original = module.f
    records = registry()
    record = records.add("p", Patch("pkg_p.target:f", same, "test"))
    later = records.add("p", Patch("pkg_p.never:f", same, "test"))
    records.withdraw("p", "the other half failed")
    assert module.f is original
    assert record.verdict is later.verdict is Verdict.SKIPPED
    assert not any(type(finder).__module__ == "glm5_plugins.imports" for finder in sys.meta_path)


def test_the_source_is_asked_about_modules_that_are_not_loaded():
    records = Registry(Environment(), check_source=lambda patch: f"{patch.target} is not in the source")
    record = records.add("p", Patch("pkg_p.absent:f", same, "test"))
    assert (record.verdict, record.reason) == (Verdict.DRIFTED, "pkg_p.absent:f is not in the source")


def test_the_cache_of_a_cached_function_can_still_be_cleared(package):
    package({"pkg_p/cached.py": "import functools\n@functools.cache\ndef f(): return object()\n"})
    from pkg_p import cached

    records = registry()
    record = records.add("p", Patch("pkg_p.cached:f", same, "test"))
    first = cached.f()
    assert cached.f() is first
    cached.f.cache_clear()
    assert cached.f() is not first
    assert record.fired == 3
    records.restore()


def test_a_plugin_may_count_for_itself(target):
    from pkg_p import target as module

    class Operator:
        def __call__(self, x, fullgraph=True):
            return x

    operator = Operator()
    records = registry()
    patch = Patch("pkg_p.target:f", operator, "test", kind=Kind.REPLACE, counter=lambda: 7)
    assert records.add("p", patch).fired == 7
    assert module.f is operator
    records.restore()
