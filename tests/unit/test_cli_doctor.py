"""`glm5-plugins doctor` and `env`: what is wrong here, without importing what it looks at."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.installation import EXPLODES, Installation, with_acme


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def errors(diagnosis: dict[str, Any], level: str = "error") -> list[tuple[str, str]]:
    return [(f["what"], f["mend"]) for f in diagnosis["findings"] if f["level"] == level]


@pytest.fixture
def served(installation: Installation) -> Installation:
    """SGLang 0.5.11 and the plugin acme."""
    with_acme(installation)
    installation.sglang("0.5.11")
    return installation


def test_a_healthy_installation(served: Installation) -> None:
    done = served.run("doctor", GLM5_PLUGINS="acme")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Every requested plugin would be in force." in done.stdout
    assert f"{served.folder}/engine/core.py:3" in done.stdout


def test_nothing_requested_is_fine(installation: Installation) -> None:
    done = installation.run("doctor")
    assert done.returncode == 0
    assert "none: GLM5_PLUGINS is not set" in done.stdout


def test_it_imports_nothing_it_looks_at(served: Installation) -> None:
    served.distribution("flashinfer-python", "0.6.8", files={"flashinfer/__init__.py": EXPLODES})
    served.distribution("torch", "2.11.0", files={"torch/__init__.py": EXPLODES})
    code = (
        "import sys; from glm5_plugins.cli import main\n"
        "from glm5_plugins.manager import BUNDLED\n"
        "for command in (['list'], ['doctor'], ['env'], *(['explain', name] for name in [*BUNDLED, 'acme'])):\n"
        "    main([*command, '--json'])\n"
        "heavy = {'torch', 'sglang', 'flashinfer', 'engine', 'triton', 'transformers'}\n"
        "assert not heavy & {name.partition('.')[0] for name in sys.modules}\n"
        "print('clean')"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(served.folder), "GLM5_PLUGINS": "acme"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("clean\n"), done.stderr


def test_a_requested_plugin_that_would_not_be_in_force(installation: Installation) -> None:
    with_acme(installation, "class Engine: ...\n")
    installation.sglang("0.5.23")
    done = installation.run("doctor", "--json", GLM5_PLUGINS="acme")
    assert done.returncode == 1
    ((what, mend),) = errors(json.loads(done.stdout))
    assert what.startswith("The plugin 'acme' would not be in force: drifted: engine.core:Engine.start: ")
    assert "glm5-plugins explain acme" in mend


def test_what_cannot_be_in_force_is_a_warning_where_the_launch_goes_on(installation: Installation) -> None:
    """As `GLM5_ON_ERROR=warn` has it: tests/unit/test_bootstrap.py shows the same of a launch."""
    with_acme(installation, "class Engine: ...\n")
    installation.sglang("0.5.23")
    done = installation.run("doctor", "--json", GLM5_PLUGINS="acme", GLM5_ON_ERROR="warn")
    assert done.returncode == 0
    assert errors(json.loads(done.stdout)) == []
    ((what, _),) = errors(json.loads(done.stdout), "warning")
    assert what.startswith("The plugin 'acme' would not be in force: drifted: ")


def test_a_plugin_with_nothing_to_do_here_stops_nothing(installation: Installation) -> None:
    with_acme(installation, version="0.9")
    installation.sglang("0.5.23")
    done = installation.run("doctor", GLM5_PLUGINS="acme")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The plugin 'acme' has nothing to do here: acme-engine 0.9 is older than" in done.stdout
    assert "Every requested plugin would be in force, besides acme." in done.stdout


@pytest.mark.parametrize("version", ["0.5.12", "0.5.13", "0.5.23"])
@pytest.mark.parametrize(
    ("plugin", "env", "verdict", "reason"),
    [
        ("moe_autotune", {}, "not needed", "tunes flashinfer_cutlass by itself from 0.5.13"),
        ("moe_autotune", {"GLM5_MOE_AUTOTUNE_ENABLED": "false"}, "ready", "by glm5_server_args"),
        ("mscclpp", {"CUDA_VISIBLE_DEVICES": ""}, "refused", "MSCCL++ runs on GPUs, and this machine has none"),
        ("sbo", {"CUDA_VISIBLE_DEVICES": ""}, "ready", "by glm5_server_args"),
        ("ep", {}, "ready", "by glm5_server_args"),
    ],
)
def test_what_is_plain_before_there_is_a_launch(
    installation: Installation, version: str, plugin: str, env: dict[str, str], verdict: str, reason: str
) -> None:
    """A plugin that chooses arguments is ready, unless the machine and the versions alone decide."""
    installation.sglang(version)
    if plugin == "moe_autotune" and not env and version == "0.5.12":
        verdict, reason = "drifted", "_should_run_flashinfer_autotune"  # the made-up SGLang has no such method
    for on_error in ("strict", "warn"):
        done = installation.run("doctor", "--json", GLM5_PLUGINS=plugin, GLM5_ON_ERROR=on_error, **env)
        (row,) = json.loads(done.stdout)["plugins"]
        assert row["verdict"] == verdict
        assert reason in row["reason"]
        assert done.returncode == int(verdict == "refused" or (verdict, on_error) == ("drifted", "strict"))


def test_no_sglang(installation: Installation) -> None:
    with_acme(installation)
    assert "SGLang is not installed in this environment." in dict(
        errors(installation.json("doctor", GLM5_PLUGINS="acme"))
    )


@pytest.mark.parametrize(
    ("version", "reached"),
    [
        ("0.5.9", []),
        ("0.5.10.post1", []),
        ("0.5.11", ["main", "scheduler"]),
        ("0.5.12+cu130", ["main", "scheduler"]),
        ("0.5.22", ["main", "scheduler", "detokenizer", "data-parallel controller"]),
    ],
)
def test_the_processes_reached(installation: Installation, version: str, reached: list[str]) -> None:
    with_acme(installation)
    installation.sglang(version)
    diagnosis = installation.json("doctor", GLM5_PLUGINS="acme")
    assert [process["role"] for process in diagnosis["processes"] if process["by"]] == reached
    assert diagnosis["healthy"] is bool(reached)
    if not reached:
        ((what, mend),) = errors(diagnosis)
        assert what == "Plugins are requested, and nothing brings the layer into the server's processes."
        assert "`glm5-plugins enable`" in mend


def test_a_development_build_is_judged_by_its_source(installation: Installation) -> None:
    with_acme(installation)
    installation.sglang("0.0.0.dev1+gbfefdc52d", like="0.5.23")
    diagnosis = installation.json("doctor", GLM5_PLUGINS="acme")
    assert all(process["by"] for process in diagnosis["processes"])
    assert diagnosis["healthy"]


def test_a_seam_that_is_gone(installation: Installation) -> None:
    installation.sglang("0.5.11", {"sglang/srt/model_executor/model_runner.py": "class ModelRunner: ...\n"})
    diagnosis = installation.json("doctor")
    assert any("model load" in what and "load_model" in what for what, _ in errors(diagnosis))


def test_an_sglang_that_the_layer_is_not_made_for(installation: Installation) -> None:
    installation.distribution("sglang", "0.5.7", files={"sglang/__init__.py": ""})
    (error, *_) = errors(installation.json("doctor"))
    assert "(every step): no function of SGLang 0.5.7 is known to it; it is made for 0.5.8 and later" in error[0]


def test_a_step_of_a_development_build_that_no_function_is_known_for(installation: Installation) -> None:
    files = {"sglang/srt/model_executor/model_runner.py": "class ModelRunner: ...\n"}
    installation.sglang("0.0.0.dev1+gbfefdc52d", files, like="0.5.11")
    found = [what for what, _ in errors(installation.json("doctor"))]
    assert "The layer itself would not be in force (model load): no function of this SGLang is known for it." in found


def test_sglang_plugins_leaves_the_layer_out(served: Installation) -> None:
    """Case 11."""
    diagnosis = served.json("doctor", GLM5_PLUGINS="acme", SGLANG_PLUGINS="other")
    assert errors(diagnosis) == [
        (
            "SGLANG_PLUGINS=other leaves out 'glm5': SGLang drops this layer without a word.",
            "Set SGLANG_PLUGINS=other,glm5",
        )
    ]
    assert served.json("doctor", GLM5_PLUGINS="acme", SGLANG_PLUGINS="other, glm5")["healthy"]


@pytest.mark.parametrize(
    ("variable", "value", "what", "mend"),
    [
        ("GLM5_PLUGINS", "acem", "GLM5_PLUGINS names an unknown plugin 'acem'.", "Did you mean 'acme'?"),
        ("GLM5_PLUGINS", "ACME", "GLM5_PLUGINS names an unknown plugin 'ACME'.", "Did you mean 'acme'?"),
        ("GLM5_PLUGIN", "acme", "GLM5_PLUGIN is not a variable of glm5-plugins.", "Did you mean 'GLM5_PLUGINS'?"),
        (
            "GLM5_ACME_TIMEOUT",
            "3",
            "GLM5_ACME_TIMEOUT is not a variable of glm5-plugins.",
            "Did you mean 'GLM5_ACME_TIMEOUT_S'?",
        ),
        ("GLM5_ACME_TIMEOUT_S", "abc", "GLM5_ACME_TIMEOUT_S='abc' is not valid", "unset the variable"),
        ("glm5_plugins", "acme", "glm5_plugins is not read: environment variables have capital", "Set GLM5_PLUGINS."),
        ("GLM5_ON_ERROR", "loud", "GLM5_ON_ERROR='loud' is not valid", "unset the variable"),
    ],
)
def test_wrong_settings_are_named(served: Installation, variable: str, value: str, what: str, mend: str) -> None:
    """Case 8."""
    done = served.run("doctor", "--json", **{variable: value})
    assert done.returncode == 1
    found = errors(json.loads(done.stdout))
    assert any(said.startswith(what) and mend in hint for said, hint in found), found


def test_a_wrong_option_of_a_requested_plugin_is_named_once(served: Installation) -> None:
    ((what, mend),) = errors(served.json("doctor", GLM5_PLUGINS="acme", GLM5_ACME_TIMEOUT_S="abc"))
    assert what.startswith("GLM5_ACME_TIMEOUT_S='abc' is not valid: ")
    assert mend == "Correct the value, or unset the variable for the default."


def test_a_required_option_that_nobody_set_is_named(served: Installation) -> None:
    options = served.folder / "acme_options.py"
    options.write_text(
        "from glm5_plugins import PluginSettings\nclass Options(PluginSettings, plugin='needy'):\n    where: str\n"
    )
    point = "[glm5_plugins]\nneedy = acme_options\n"
    served.distribution("needy", "1", entry_points=point)
    found = errors(served.json("doctor", GLM5_PLUGINS="needy"))
    assert any("GLM5_NEEDY_WHERE" in what for what, _ in found), found


def test_wrong_options_of_a_profile_are_named(served: Installation, tmp_path: Path) -> None:
    profile = tmp_path / "own.toml"
    head = (
        'summary = "x"\nsglang = ">=0.5.9"\nhardware = "none"\nsource = ["https://example.org"]\nplugins = ["acme"]\n'
    )
    profile.write_text(head + '[options]\nGLM5_ACME_TIMEUOT_S = "1"\n')
    found = errors(served.json("doctor", GLM5_PROFILE=str(profile)))
    assert ("GLM5_ACME_TIMEUOT_S is not a variable of glm5-plugins.", "Did you mean 'GLM5_ACME_TIMEOUT_S'?") in found


@pytest.mark.parametrize("command", ["list", "env"])
def test_other_commands_name_wrong_plugins_too(served: Installation, command: str) -> None:
    done = served.run(command, GLM5_PLUGINS="acem")
    assert done.returncode == 1
    assert "GLM5_PLUGINS names an unknown plugin 'acem'." in done.stdout


def test_names_are_a_set_in_order(served: Installation) -> None:
    """Case 12."""
    diagnosis = served.json("doctor", GLM5_PLUGINS=" acme,acme, ")
    assert [plugin["name"] for plugin in diagnosis["plugins"]] == ["acme"]
    assert diagnosis["healthy"]


def user_site(installation: Installation) -> Path:
    code = "import site; print(site.getusersitepackages())"
    env = {"HOME": str(installation.folder / "home")}
    return Path(subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip())


@pytest.mark.parametrize("name", ["glm5-plugins", "acme-tools"])
def test_a_user_install_that_is_not_seen(served: Installation, name: str) -> None:
    """Case 16."""
    folder = user_site(served)
    hidden = Installation(folder)
    hidden.distribution(name, "9.9", "[glm5_plugins]\ntools = acme_tools\n")
    diagnosis = served.json("doctor", PYTHONNOUSERSITE="1")
    ((what, mend),) = errors(diagnosis, "warning")
    assert what.startswith(f"{name} 9.9 is in {folder}, which is not read because PYTHONNOUSERSITE=1 is set")
    assert f"-m pip install {name}" in mend
    assert "unset PYTHONNOUSERSITE" in mend


def test_other_sglang_plugins_and_what_they_share_with_ours(served: Installation) -> None:
    served.distribution(
        "rival",
        "1.2",
        "[sglang.srt.plugins]\nrival = rival:register\n",
        {"rival.py": EXPLODES + 'TARGET = "engine.core.Engine.start"\n'},
    )
    diagnosis = served.json("doctor", GLM5_PLUGINS="acme")
    assert diagnosis["others"] == ["rival (rival 1.2)"]
    (what,) = [what for what, _ in errors(diagnosis, "warning")]
    assert what == "The SGLang plugin rival (rival 1.2) names engine.core:Engine.start, which 'acme' patches too."


def test_env_shows_values_and_their_sources(served: Installation) -> None:
    document = served.json("env", GLM5_PLUGINS="acme", GLM5_ACME_MODE="fast")
    shown = {v["variable"]: (v["value"], v["source"]) for v in document["variables"]}
    assert shown["GLM5_PLUGINS"] == ("acme", "environment")
    assert shown["GLM5_ON_ERROR"] == ("strict", "default")
    assert next(one["type"] for one in document["variables"] if one["variable"] == "GLM5_EP_SIZE") == "auto|int"
    assert shown["GLM5_ACME_MODE"] == ("fast", "environment")
    assert shown["GLM5_ACME_TIMEOUT_S"] == ("30.0", "default")
    assert served.run("env").returncode == 0


def test_env_names_what_nothing_reads(served: Installation) -> None:
    done = served.run("env", GLM5_REPROT="x")
    assert done.returncode == 1
    assert "GLM5_REPROT is not a variable of glm5-plugins." in done.stdout
    assert "Did you mean 'GLM5_REPORT'?" in done.stdout


def test_a_closed_pipe_is_no_error(served: Installation) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(served.folder)}
    with subprocess.Popen(
        [sys.executable, "-m", "glm5_plugins.cli", "doctor"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
