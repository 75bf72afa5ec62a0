"""The layer beside other SGLang plugins, in the plugin system of the SGLang that is installed; no server is started.

SGLang runs the plugins in turn and swallows what they raise, then applies the hooks they registered. Each test is a
process of its own, forked from this one, which has SGLang's plugin loader imported and no plugin loaded.
"""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import STANDINS

pytestmark = pytest.mark.sglang(">=0.5.11", reason="no plugin system before")

ENGINE = """
    from functools import lru_cache
    class Engine:
        def step(self, x): return [*x, "engine"]
        @staticmethod
        def static(x): return [*x, "engine"]
        @classmethod
        def klass(cls, x): return [*x, "engine"]
    def run(x): return [*x, "engine"]
"""
USER = "from field_engine.core import run\n"

OURS = """
    from glm5_plugins import Kind, Patch, hookimpl
    def wrap(old):
        def ours(*args): return [*old(*args), "ours"]
        return ours
    def instead(*args): return [*args[-1], "ours"]
    @hookimpl
    def glm5_patches():
        for path in PATHS:
            if REPLACE:
                yield Patch(f"field_engine.core:{path}", instead, "to see it", kind=Kind.REPLACE)
            else:
                yield Patch(f"field_engine.core:{path}", wrap, "to see it")
"""

HOOK = """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def around(original, *args): return [*original(*args), "theirs"]
    def before(*args): return (*args[:-1], [*args[-1], "theirs"]), {}
    def after(result, *args): return [*result, "theirs"]
    def replace(*args): return [*args[-1], "theirs"]
    def register():
        for path in PATHS:
            HookRegistry.register(f"field_engine.core.{path}", globals()[KIND], HookType[KIND.upper()])
"""

REPORT = """
    import sys
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from glm5_plugins import bootstrap
    layer = bootstrap._layer
    try:
        import field_engine.core as core, field_engine.user as user
        if layer is not None:
            layer.verify()
        made = {"run": core.run([]), "from-import": user.run([]), "step": core.Engine().step([]),
                "static": core.Engine.static([]), "klass": core.Engine.klass([])}
    finally:
        rows = {} if layer is None else {record.patch.target.partition(":")[2]: record for record in layer.registry}
        told = {path: (one.verdict.value, one.reason, one.notes, one.fired) for path, one in rows.items()}
"""

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _plugin_loader() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDINS)
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        import sglang.srt.plugins

        assert not sglang.srt.plugins._plugins_loaded
        yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Load plugins in a fork of this process, call what they patch, and return what came of it.

    Args of the returned function: `ours` and `theirs`, source of a plugin of this layer and of SGLang plugins by name;
    `platforms`, the names of those whose distribution brings a platform too; `first`, whether SGLang runs them before
    this layer or after it; and variables.
    """

    def distribution(name: str, group: str, source: str, more: str = "") -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        value = f"{name}_module" + (":register" if group.startswith("sglang") else "")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n{more}")
        (tmp_path / f"{name}_module.py").write_text(textwrap.dedent(source))

    def run_plugins(
        ours: str = "",
        theirs: dict[str, str] | None = None,
        platforms: tuple[str, ...] = (),
        first: bool = True,
        **env: str,
    ) -> dict[str, Any]:
        for file, text in {"__init__": "", "core": ENGINE, "user": USER}.items():
            path = tmp_path / "field_engine" / f"{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        if ours:
            distribution("ours", "glm5_plugins", ours)
            env = {"GLM5_PLUGINS": "ours", **env}
        for name, source in (theirs or {}).items():
            brings = f"[sglang.srt.platforms]\n{name}_platform = {name}_module:platform\n" if name in platforms else ""
            distribution(name, "sglang.srt.plugins", source, brings)
        return in_fork(tmp_path, env, first)

    return run_plugins


def in_fork(folder: Path, env: dict[str, str], first: bool) -> dict[str, Any]:
    """Run `REPORT` in a fork that sees a folder and some variables."""
    answer, question = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        said, result = io.StringIO(), {}
        try:
            for name in [name for name in os.environ if name.startswith(("GLM5_", "SGLANG_PL"))]:
                del os.environ[name]
            os.environ.update(env)
            sys.path.insert(0 if first else len(sys.path), str(folder))
            names: dict[str, Any] = {}
            with redirect_stderr(said):
                exec(textwrap.dedent(REPORT), names)
            result = {"made": names["made"], "told": names["told"], "exit": ""}
        except BaseException as error:
            result = {"made": {}, "told": names.get("told", {}), "exit": f"{type(error).__name__}: {error}"}
        finally:
            with os.fdopen(question, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
    os.close(question)
    with os.fdopen(answer) as pipe:
        result = json.load(pipe)
    os.waitpid(pid, 0)
    return dict(result)


def wrapping(*paths: str, replace: bool = False) -> str:
    return f"PATHS, REPLACE = {paths!r}, {replace}\n" + textwrap.dedent(OURS)


def hooking(*paths: str, kind: str = "around") -> str:
    return f"PATHS, KIND = {paths!r}, {kind!r}\n" + textwrap.dedent(HOOK)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["around", "before", "after"])
@pytest.mark.parametrize("path", ["run", "Engine.step", "Engine.static", "Engine.klass"])
def test_a_hook_of_theirs_goes_around_our_patch(run: Run, path: str, kind: str, first: bool) -> None:
    found = run(wrapping(path), {"theirs": hooking(path, kind=kind)}, first=first)
    order = ["theirs", "engine", "ours"] if kind == "before" else ["engine", "ours", "theirs"]
    assert found["made"][path.rpartition(".")[2]] == order
    verdict, _, notes, fired = found["told"][path]
    assert (verdict, notes, fired) == ("applied", [f"the SGLang plugin 'theirs' hooks it too ({kind})"], fired)
    assert fired >= 1


def test_from_imports_go_through_both(run: Run) -> None:
    imports_it = "import field_engine.user\ndef register(): ...\n"
    found = run(wrapping("run"), {"imports": imports_it, "theirs": hooking("run")})
    assert found["made"]["from-import"] == found["made"]["run"] == ["engine", "ours", "theirs"]


AT_ONCE = "def register():\n    add()\n    HookRegistry.apply_hooks()\ndef add():"


def test_hooks_that_are_in_place_before_ours_stay(run: Run) -> None:
    """Some plugins apply their hooks themselves, before SGLang does."""
    found = run(wrapping("run"), {"theirs": hooking("run").replace("def register():", AT_ONCE)})
    assert found["told"]["run"][0] == "applied"
    assert found["made"]["from-import"] == found["made"]["run"] == ["engine", "theirs", "ours"]


def test_a_hook_of_theirs_goes_around_our_replacement(run: Run) -> None:
    found = run(wrapping("run", replace=True), {"theirs": hooking("run")})
    assert found["made"]["run"] == ["ours", "theirs"]
    assert found["told"]["run"][0] == "applied"


@pytest.mark.parametrize("ours", [wrapping("run"), wrapping("run", replace=True)], ids=["wrap", "replace"])
def test_a_replacement_of_theirs_is_a_conflict_that_stops_the_launch(run: Run, ours: str) -> None:
    found = run(ours, {"theirs": hooking("run", kind="replace")})
    assert found["told"]["run"][0] == "conflict"
    assert "the SGLang plugin 'theirs' replaces field_engine.core:run" in found["exit"]
    assert found["exit"].startswith("SystemExit: glm5-plugins: The plugin 'ours' is not in force in the main process: ")


def test_under_warn_the_replacement_of_theirs_runs_and_ours_is_withdrawn(run: Run) -> None:
    found = run(wrapping("run"), {"theirs": hooking("run", kind="replace")}, GLM5_ON_ERROR="warn")
    assert found["exit"] == ""
    assert found["told"]["run"][0] == "conflict"
    assert found["made"]["run"] == ["theirs"]


NEW_CLASS = """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def register():
        from field_engine.core import Engine
        class Mine(BASE):
            BODY
            @staticmethod
            def static(x): return x
            @classmethod
            def klass(cls, x): return x
        HookRegistry.register("field_engine.core.Engine", Mine, HookType.REPLACE)
"""


def test_a_class_of_theirs_that_leaves_our_method_out_is_a_conflict(run: Run) -> None:
    body = 'def step(self, x): return [*x, "theirs"]'
    theirs = NEW_CLASS.replace("BASE", "").replace("BODY", body)
    found = run(wrapping("Engine.step"), {"theirs": theirs})
    assert found["told"]["Engine.step"][0] == "conflict"
    assert "the SGLang plugin 'theirs' replaces field_engine.core:Engine" in found["exit"]


def test_a_class_of_theirs_that_inherits_our_method_is_none(run: Run) -> None:
    theirs = NEW_CLASS.replace("BASE", "Engine").replace("BODY", "pass")
    found = run(wrapping("Engine.step"), {"theirs": theirs})
    assert found["told"]["Engine.step"][0] == "applied"
    assert found["made"]["step"] == ["engine", "ours"]


@pytest.mark.parametrize("broken", ["def register(): raise RuntimeError('theirs')\n", "import nothing_of_that_name\n"])
@pytest.mark.parametrize("first", [True, False])
def test_a_plugin_of_theirs_that_raises_takes_nothing_from_ours(run: Run, first: bool, broken: str) -> None:
    found = run(wrapping("run"), {"theirs": broken}, first=first)
    assert (found["exit"], found["made"]["run"]) == ("", ["engine", "ours"])


def test_a_plugin_of_ours_that_cannot_be_in_force_stops_the_launch_beside_theirs(run: Run) -> None:
    found = run(wrapping("walk"), {"theirs": hooking("run")})
    assert found["exit"].startswith("SystemExit: glm5-plugins: The plugin 'ours' is not in force in the main process: ")
    assert "did you mean" in found["exit"] or "has no `walk`" in found["exit"]


def test_a_hook_of_theirs_that_cannot_be_applied_takes_nothing_from_ours(run: Run) -> None:
    found = run(wrapping("run"), {"theirs": hooking("walk", "run")})
    assert found["made"]["run"] == ["engine", "ours", "theirs"]


def test_sglang_plugins_leaves_out_who_is_not_named(run: Run) -> None:
    """Case 11 of the field: SGLang drops this layer without a word; `doctor` and the other ways in say so."""
    theirs = {"theirs": hooking("run")}
    assert run(wrapping("run"), theirs, SGLANG_PLUGINS="theirs")["made"]["run"] == ["engine", "theirs"]


def test_sglang_plugins_that_names_us_alone(run: Run) -> None:
    found = run(wrapping("run"), {"theirs": hooking("run")}, SGLANG_PLUGINS="glm5")
    assert found["made"]["run"] == ["engine", "ours"]


def test_sglang_platform_leaves_out_the_plugins_of_other_platforms_and_not_ours(run: Run) -> None:
    theirs = {"chosen": hooking("run"), "other": hooking("run", kind="replace")}
    found = run(wrapping("run"), theirs, platforms=("chosen", "other"), SGLANG_PLATFORM="chosen_platform")
    assert found["made"]["run"] == ["engine", "ours", "theirs"]
    assert found["told"]["run"][0] == "applied"


def test_without_a_variable_theirs_run_as_if_we_were_not_there(run: Run) -> None:
    found = run(theirs={"theirs": hooking("run")})
    assert (found["made"]["run"], found["told"]) == (["engine", "theirs"], {})
