"""Settings: what GLM5_* variables may hold, and how a wrong one is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from glm5_plugins.settings.model import HostSettings, read, variables_of
from pydantic import Field, SecretStr

from glm5_plugins import PluginSettings
from glm5_plugins.bootstrap import check_variables
from glm5_plugins.errors import ConfigurationError


class Options(PluginSettings, plugin="fp4_warmup"):
    """Options of a plugin that tests made up."""

    timeout_s: float = 1800.0
    mode: str = "auto"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("ep,ep", ("ep",)),
        ("ep,", ("ep",)),
        (" sbo , ep ,,", ("sbo", "ep")),
        ("", ()),
        ("EP", ("EP",)),
    ],
)
def test_the_plugin_list_is_a_set_in_order(monkeypatch, value, names):
    """Case 12 of the field; an upper-case name is refused later, with the right spelling."""
    monkeypatch.setenv("GLM5_PLUGINS", value)
    assert read(HostSettings).plugins == names


def test_options_have_the_plugin_in_their_variable(monkeypatch):
    monkeypatch.setenv("GLM5_FP4_WARMUP_TIMEOUT_S", "12.5")
    assert read(Options).timeout_s == 12.5
    assert variables_of(Options) == {"GLM5_FP4_WARMUP_TIMEOUT_S": "timeout_s", "GLM5_FP4_WARMUP_MODE": "mode"}


def test_the_default_serves_where_nothing_is_set():
    assert read(HostSettings) == HostSettings(plugins=(), on_error="strict", report=None)
    assert read(Options).timeout_s == 1800.0


@pytest.mark.parametrize(
    ("variable", "value", "model"),
    [
        ("GLM5_FP4_WARMUP_TIMEOUT_S", "abc", Options),
        ("GLM5_ON_ERROR", "ignore", HostSettings),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_variable(monkeypatch, variable, value, model):
    """Case 8 of the field."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        read(model)
    assert f"{variable}={value!r} is not valid" in caught.value.what
    assert "unset the variable" in caught.value.mend


def test_all_that_may_be_set_is_told_of_a_value_that_does_not_fit(monkeypatch):
    from glm5_plugins.plugins.ep import Options

    monkeypatch.setenv("GLM5_EP_SIZE", "three")
    with pytest.raises(ConfigurationError, match="Input should be 'auto'; or: Input should be a valid integer"):
        read(Options)


def test_a_secret_that_does_not_fit_is_not_shown(monkeypatch):
    class Secretive(PluginSettings, plugin="secretive"):
        token: SecretStr = Field(SecretStr(""), max_length=3)

    monkeypatch.setenv("GLM5_SECRETIVE_TOKEN", "hunter2")
    with pytest.raises(ConfigurationError) as caught:
        read(Secretive)
    assert caught.value.what.startswith("GLM5_SECRETIVE_TOKEN=… is not valid")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "suggestion"),
    [
        ("GLM5_PLUGIN", "Did you mean 'GLM5_PLUGINS'?"),
        ("GLM5_REPROT", "Did you mean 'GLM5_REPORT'?"),
        ("GLM5_CUDA_VERSION_X", "GLM5_PLUGINS"),
        ("GLM5_QQQQQQQQQQQQQQQQ", "Known: GLM5_"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(variable, suggestion):
    with pytest.raises(ConfigurationError) as caught:
        check_variables({variable: "ep", "HOME": "/", "GLM5": "1"})
    assert caught.value.what == f"{variable} is not a variable of glm5-plugins."
    assert suggestion in caught.value.mend


def test_known_variables_pass():
    check_variables({"GLM5_PLUGINS": "ep", "GLM5_REPORT": "r", "GLM5_ON_ERROR": "warn", "PATH": ""})


def test_the_report_is_a_path(monkeypatch):
    monkeypatch.setenv("GLM5_REPORT", "reports")
    assert read(HostSettings).report == Path("reports")
