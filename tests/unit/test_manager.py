"""The plugin manager: which plugins there are, how they fit together, whose error it was."""

from __future__ import annotations

import pytest

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError, NotInForce, PluginError
from glm5_plugins.manager import BUNDLED, Plugin, PluginManager

HEADER = "from glm5_plugins import Patch, hookimpl\n"
METADATA = "Metadata-Version: 2.1\nName: third-party\nVersion: 1.2\n"


@pytest.fixture
def third_party(package):
    """Install third-party plugins, each a module of a distribution `third-party 1.2`."""

    def install(**plugins: str) -> PluginManager:
        points = "".join(f"{name} = pkg_m.{name}\n" for name in plugins)
        package(
            {
                "third_party-1.2.dist-info/METADATA": METADATA,
                "third_party-1.2.dist-info/entry_points.txt": f"[glm5_plugins]\n{points}",
                **{f"pkg_m/{name}.py": HEADER + source for name, source in plugins.items()},
            }
        )
        return PluginManager()

    return install


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_plugin_loads_and_says_what_it_is(name):
    plugin = PluginManager.find(name)
    assert plugin.summary
    assert plugin.origin == "bundled"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("no_fulgraph", "Did you mean 'no_fullgraph'?"),
        ("NO_FULLGRAPH", "Did you mean 'no_fullgraph'?"),
        ("no-fullgraph", "Did you mean 'no_fullgraph'?"),
        ("zzz", "Known: cuda_version, "),
        ("os.system", "Known: "),
        ("glm5_plugins.plugins.cuda_version", "cuda_version"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, suggestion):
    """Case 8 of the field; an import path from the environment is just an unknown name."""
    with pytest.raises(ConfigurationError) as caught:
        PluginManager().load([name])
    assert caught.value.what == f"GLM5_PLUGINS names an unknown plugin {name!r}."
    assert suggestion in caught.value.mend


def test_a_third_party_plugin_is_found_by_its_entry_point(third_party):
    manager = third_party(theirs="def _(): pass\n@hookimpl\ndef glm5_patches():\n    yield Patch('m:f', _, 'why')\n")
    assert "theirs" in manager.known()
    manager.load(["theirs"])
    assert manager.plugins[0].origin == "third-party 1.2"
    assert [(plugin.name, patch.target) for plugin, patch in manager.patches(Environment())] == [("theirs", "m:f")]


def test_a_third_party_plugin_may_not_take_a_bundled_name(third_party):
    manager = third_party(cuda_version="")
    with pytest.raises(ConfigurationError, match=r"third-party 1\.2 brings a plugin 'cuda_version'"):
        manager.load(["cuda_version"])


def test_a_broken_third_party_plugin_is_named_with_its_distribution(third_party):
    manager = third_party(broken="import no_such_module_here")
    with pytest.raises(NotInForce, match=r"plugin 'broken' of third-party 1\.2 does not import: ModuleNotFoundError"):
        manager.load(["broken"])


def test_requires_and_conflicts(third_party):
    manager = third_party(needy="requires = ('other',)", other="", enemy="conflicts = ('other',)")
    with pytest.raises(ConfigurationError) as caught:
        manager.load(["needy"])
    assert caught.value.what == "The plugin 'needy' needs 'other', which is not requested."
    assert caught.value.mend == "Set GLM5_PLUGINS=needy,other"
    with pytest.raises(ConfigurationError, match="'enemy' and 'other' exclude each other"):
        PluginManager().load(["other", "enemy"])
    PluginManager().load(["other", "needy"])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("@hookimpl\ndef glm5_pathces(): pass", "glm5_pathces"),
        ("@hookimpl\ndef glm5_patches(environment): pass", "environment"),
        ("@hookimpl\ndef glm5_model_load(model_runner): pass", "without wrapper=True"),
    ],
)
def test_a_hook_that_cannot_work_is_refused(third_party, source, said):
    manager = third_party(odd=source)
    with pytest.raises(ConfigurationError, match=said) as caught:
        manager.load(["odd"])
    assert "'odd'" in caught.value.what


WRAPPER = """
@hookimpl(wrapper=True)
def glm5_model_load(model_runner):
    model_runner.append("{name} in")
    result = yield
    model_runner.append("{name} out")
    return result
"""


def test_the_first_named_is_the_outermost(third_party):
    manager = third_party(a=WRAPPER.format(name="a"), b=WRAPPER.format(name="b"))
    manager.load(["b", "a"])
    log: list[str] = []
    assert manager.model_load(log, lambda: log.append("load")) is None
    assert log == ["b in", "a in", "load", "a out", "b out"]
    assert manager.calls["glm5_model_load"] == 1
    assert manager.wrapping_hooks(manager.plugins[0]) == ["glm5_model_load"]


@pytest.mark.parametrize("value", [None, False, 0, "result", (1,), (1, 2)])
def test_the_result_of_sglang_comes_through_whatever_it_is(third_party, value):
    manager = third_party(a=WRAPPER.format(name="a"))
    manager.load(["a"])
    assert manager.model_load([], lambda: value) is value


def test_an_error_of_sglang_passes_untouched(third_party):
    """Case 20 of the field."""
    manager = third_party(a=WRAPPER.format(name="a"))
    manager.load(["a"])
    error = RuntimeError("CUDA out of memory")

    def proceed():
        raise error

    with pytest.raises(RuntimeError) as caught:
        manager.model_load([], proceed)
    assert caught.value is error


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_of_a_plugin_is_attributed_to_it(third_party, when):
    """Case 20 of the field."""
    source = {
        "before": "@hookimpl(wrapper=True)\ndef glm5_model_load():\n  raise RuntimeError('oops')\n  yield",
        "after": "@hookimpl(wrapper=True)\ndef glm5_model_load():\n  yield\n  raise RuntimeError('oops')",
    }[when]
    manager = third_party(good=WRAPPER.format(name="good"), bad=source)
    manager.load(["good", "bad"])
    with pytest.raises(PluginError) as caught:
        manager.model_load([], lambda: None)
    assert caught.value.what == "The plugin 'bad' failed in glm5_model_load: RuntimeError: oops"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_plugin_that_hides_an_error_of_sglang_behind_its_own_is_named(third_party):
    source = (
        "@hookimpl(wrapper=True)\ndef glm5_model_load():\n  try: yield\n  except ValueError: raise KeyError('mine')"
    )
    manager = third_party(bad=source)
    manager.load(["bad"])

    def proceed():
        raise ValueError("SGLang's")

    with pytest.raises(PluginError, match="'bad' failed"):
        manager.model_load([], proceed)


def test_a_wrapper_that_loses_the_result_is_refused(third_party):
    manager = third_party(loser="@hookimpl(wrapper=True)\ndef glm5_model_load():\n  yield")
    manager.load(["loser"])
    with pytest.raises(PluginError, match="returned None in place of what its yield gave"):
        manager.model_load([], lambda: "weights")


def test_an_error_while_patches_are_collected_is_attributed(third_party):
    manager = third_party(bad="@hookimpl\ndef glm5_patches():\n  yield 1 / 0")
    manager.load(["bad"])
    with pytest.raises(PluginError, match="'bad' failed in glm5_patches: ZeroDivisionError"):
        manager.patches(Environment())


def test_each_plugin_sees_what_the_others_add(third_party):
    third_party(
        a="seen = []\n@hookimpl\ndef glm5_server_args(given): seen.append(dict(given)); return {'ep_size': 4}",
        b="@hookimpl\ndef glm5_server_args(given): return {'moe_runner_backend': 'x', 'tp_size': 9}",
    )
    manager = PluginManager()
    manager.load(["a", "b"])
    wanted = manager.server_args(Environment(), {"tp_size": 2})
    assert {name: value for name, (_, value) in wanted.items()} == {"ep_size": 4, "moe_runner_backend": "x"}
    assert manager.plugins[0].body.seen == [{"tp_size": 2}, {"tp_size": 2, "moe_runner_backend": "x"}]


def test_server_args_of_several_plugins(third_party):
    manager = third_party(
        a="@hookimpl\ndef glm5_server_args(given): return {'ep_size': 4, 'tp_size': 8}",
        b="@hookimpl\ndef glm5_server_args(given): return {'ep_size': 4}",
        c="@hookimpl\ndef glm5_server_args(given): return {'ep_size': 2}",
    )
    manager.load(["a", "b"])
    wanted = manager.server_args(Environment(), {"tp_size": 2})
    assert {name: value for name, (_, value) in wanted.items()} == {"ep_size": 4}
    other = PluginManager()
    other.load(["a", "c"])
    with pytest.raises(ConfigurationError) as caught:
        other.server_args(Environment(), {})
    assert caught.value.what == "The plugins 'a' and 'c' want ep_size=4 and ep_size=2."
    other.server_args(Environment(), {"ep_size": 1})


def test_an_object_may_be_a_plugin():
    class Body:
        """In one line."""

    assert Plugin("x", Body(), "here").summary == "In one line."
