"""when_imported: now if loaded, else right after the first import, and no trace afterwards."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import runpy
import sys

import pytest

from glm5_plugins import imports
from glm5_plugins.imports import before_import, when_imported


@pytest.fixture
def module(package):
    package({"pkg_i/mod.py": "VALUE = 1\nLOADER = __loader__\nSPEC_LOADER = __spec__.loader\n"})


def test_a_loaded_module_calls_back_at_once(module):
    import pkg_i.mod

    seen = []
    when_imported("pkg_i.mod", seen.append)
    assert seen == [pkg_i.mod]


def test_a_later_import_calls_back_once_in_order_after_the_code_ran(module):
    seen = []
    when_imported("pkg_i.mod", lambda module: seen.append(("first", module.VALUE)))
    when_imported("pkg_i.mod", lambda module: seen.append(("second", module.VALUE)))
    assert seen == []
    mod = importlib.import_module("pkg_i.mod")
    assert seen == [("first", 1), ("second", 1)]
    importlib.reload(mod)
    assert len(seen) == 2
    assert imports._finder not in sys.meta_path


def test_the_module_sees_its_own_loader_and_keeps_its_source(module):
    when_imported("pkg_i.mod", lambda module: None)
    import pkg_i.mod

    assert type(pkg_i.mod.LOADER).__module__ != "glm5_plugins.imports"
    assert pkg_i.mod.LOADER is pkg_i.mod.__spec__.loader is pkg_i.mod.SPEC_LOADER
    assert "VALUE = 1" in inspect.getsource(pkg_i.mod)


def test_a_wait_that_is_called_off_leaves_no_finder(module):
    seen = []
    call_off = when_imported("pkg_i.mod", seen.append)
    call_off()
    call_off()
    assert imports._finder not in sys.meta_path
    import pkg_i.mod  # noqa: F401

    assert seen == []


def test_what_the_callback_raises_the_import_raises(module):
    def refuse(module):
        raise SystemExit("not in force")

    when_imported("pkg_i.mod", refuse)
    with pytest.raises(SystemExit, match="not in force"):
        import pkg_i.mod  # noqa: F401


def test_a_package_and_its_module_may_both_be_waited_for(module):
    seen = []
    when_imported("pkg_i", lambda module: seen.append(module.__name__))
    when_imported("pkg_i.mod", lambda module: seen.append(module.__name__))
    import pkg_i.mod  # noqa: F401

    assert seen == ["pkg_i", "pkg_i.mod"]


def test_a_callback_may_wait_for_another_module(package):
    package({"pkg_i/a.py": "", "pkg_i/b.py": ""})
    seen = []
    when_imported("pkg_i.a", lambda module: when_imported("pkg_i.b", lambda other: seen.append(other.__name__)))
    import pkg_i.a
    import pkg_i.b  # noqa: F401

    assert seen == ["pkg_i.b"]


def test_python_dash_m_still_runs_a_module_that_is_waited_for(package):
    package({"pkg_i/main.py": "RESULT = __name__\n"})
    when_imported("pkg_i.main", lambda module: None)
    assert runpy.run_module("pkg_i.main", run_name="__main__")["RESULT"] == "__main__"


def test_a_module_that_does_not_exist_is_still_not_found():
    when_imported("pkg_i_absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pkg_i_absent")


def test_a_module_whose_code_raises_may_be_imported_again(package):
    root = package({"pkg_i/broken.py": "raise ValueError('first')\n"})
    seen = []
    when_imported("pkg_i.broken", lambda module: seen.append(module.VALUE))
    with pytest.raises(ValueError, match="first"):
        importlib.import_module("pkg_i.broken")
    (root / "pkg_i/broken.py").write_text("VALUE = 2\n# another size\n")
    importlib.invalidate_caches()
    importlib.import_module("pkg_i.broken")
    assert seen == [2]


def test_before_import_runs_once_before_the_module_and_not_for_a_look(package):
    package({"pkg_i/first.py": "import builtins\nSEEN = list(builtins.glm5_log)\n"})
    log = builtins.glm5_log = []
    before_import("pkg_i.first", lambda: log.append("before"))
    assert importlib.util.find_spec("pkg_i.first") is not None
    assert log == []
    first = importlib.import_module("pkg_i.first")
    importlib.reload(first)
    assert (first.SEEN, log) == (["before"], ["before"])
    assert imports._finder not in sys.meta_path
    before_import("pkg_i.first", lambda: log.append("again"))
    assert imports._finder not in sys.meta_path
    del builtins.glm5_log
