"""`glm5-plugins drift`: whether an upgrade is safe, said from the source of what is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.installation import ENGINE, Installation, with_acme

COMPILE = (
    "def install_torch_compiled(module, *, backend_factory=None, compile_config=None, fullgraph=True, "
    "graph_pool=None, mode=None): ...\n"
)
RUNNER = "class PiecewiseCudaGraphRunner: ...\ninstall_torch_compiled(model, fullgraph=True)\n"
FLASHINFER = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/cpp_ext.py": "def get_cuda_version(): ...\nget_cuda_version()\n",
}
FILES = {
    "sglang/srt/compilation/compile.py": COMPILE,
    "sglang/srt/model_executor/piecewise_cuda_graph_runner.py": RUNNER,
}


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """SGLang 0.5.11 with FlashInfer 0.6.3, and a third-party plugin that patches something else."""
    made = Installation(tmp_path / "site", env={"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")})
    made.sglang("0.5.11", FILES, requires=("flashinfer_python==0.6.3",))
    made.distribution("flashinfer-python", "0.6.3", files=FLASHINFER)
    with_acme(made)
    return made


def wheel(folder: Path, version: str, files: dict[str, str], flashinfer: str = "0.6.3") -> str:
    made = Installation(folder / version)
    made.sglang(version, files, requires=(f"flashinfer_python=={flashinfer}",))
    return str(made.wheel("sglang", version, folder / "wheels"))


def test_an_upgrade_that_changes_nothing_is_safe(installation: Installation, tmp_path: Path) -> None:
    done = installation.run("drift", "--sglang", wheel(tmp_path, "0.5.12", FILES), GLM5_PLUGINS="no_fullgraph,acme")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sglang 0.5.11 -> 0.5.12\nflashinfer-python 0.6.3 -> 0.6.3\n" in done.stdout
    assert "Different there" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Safe: ")


def test_what_is_no_longer_needed_is_safe_and_explained(installation: Installation, tmp_path: Path) -> None:
    found = installation.json("drift", "--sglang", wheel(tmp_path, "0.5.22", FILES), GLM5_PLUGINS="no_fullgraph")
    (change,) = found["changes"]
    assert found["safe"]
    assert change["in_force"]
    (said,) = change["differences"]
    assert said.startswith("sglang.srt.compilation.compile:install_torch_compiled: ready now, not needed then: ")
    assert "no longer compiled by torch.compile" in said


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("compilation/compile", COMPILE.replace("fullgraph", "full_graph"), "does not take `fullgraph`; did you mean"),
        ("compilation/compile", "def install_compiled(): ...\n", "has no `install_torch_compiled`; did you mean"),
        ("compilation/compile", "if True:\n    class C:\n        def install_torch_compiled(): ...\n", "compile.py:3"),
    ],
)
def test_a_target_that_drifted_is_not_safe(
    installation: Installation, tmp_path: Path, file: str, text: str, said: str
) -> None:
    path = wheel(tmp_path, "0.5.12", FILES | {f"sglang/srt/{file}.py": text})
    done = installation.run("drift", "--sglang", path)
    assert done.returncode == 1
    assert said in done.stdout
    assert done.stdout.splitlines()[-1] == "Not safe: no_fullgraph would not be in force."


def test_what_is_different_about_a_target_is_said(installation: Installation, tmp_path: Path) -> None:
    moved = {
        "sglang/srt/compilation/compile.py": "from sglang.srt.graphs import install_torch_compiled\n",
        "sglang/srt/graphs.py": COMPILE.replace("mode=None", "backend='x'"),
        "sglang/srt/model_executor/piecewise_cuda_graph_runner.py": RUNNER.replace("=True", "=flag"),
    }
    found = installation.json("drift", "--sglang", wheel(tmp_path, "0.5.12", moved), GLM5_PLUGINS="no_fullgraph")
    target = "sglang.srt.compilation.compile:install_torch_compiled: "
    assert found["safe"]
    assert found["changes"][0]["differences"] == [
        target + "moved from sglang/srt/compilation/compile.py to sglang/srt/graphs.py",
        target + "no longer takes mode=None",
        target + "takes backend='x'",
        target + "is called by piecewise_cuda_graph_runner.py (fullgraph=flag); "
        "now by piecewise_cuda_graph_runner.py (fullgraph=True)",
    ]


def test_a_seam_that_is_gone_is_not_safe(installation: Installation, tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.5.12", FILES | {"sglang/srt/server_args.py": "class ServerArgs: ...\n"})
    done = installation.run("drift", "--sglang", path, GLM5_PLUGINS="acme")
    assert done.returncode == 1
    assert "arguments: `sglang.srt.server_args:ServerArgs`" in done.stdout
    assert done.stdout.splitlines()[-1] == "Not safe: the layer itself would not be in force."


def test_flashinfer_can_be_judged_alone(installation: Installation, tmp_path: Path) -> None:
    other = Installation(tmp_path / "other")
    other.distribution("flashinfer-python", "0.7.9", files={"flashinfer/__init__.py": "", "flashinfer/jit/x.py": ""})
    path = str(other.wheel("flashinfer-python", "0.7.9", tmp_path / "wheels"))
    done = installation.run("drift", "--flashinfer", path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "Not safe: cuda_version would not be in force."


def test_without_sglang_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    bare = Installation(tmp_path / "site", env={"CUDA_VISIBLE_DEVICES": ""})
    bare.distribution("flashinfer-python", "0.6.3", files=FLASHINFER)
    path = wheel(tmp_path, "0.5.12", FILES)
    done = bare.run("drift", "--sglang", path, GLM5_PLUGINS="no_fullgraph")
    assert done.returncode == 0
    assert done.stdout.startswith("sglang 0.5.12\n")
    done = bare.run("drift", "--sglang", path)  # its source has next to nothing in it
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("Not safe: fp4_custom_op, ")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GLM5_PLUGINS": "no_fulgraph"}, "GLM5_PLUGINS names an unknown plugin 'no_fulgraph'."),
        ({"GLM5_PROFILE": "nope"}, "GLM5_PROFILE names an unknown profile 'nope'."),
    ],
)
def test_what_does_not_exist_is_not_safe(installation: Installation, tmp_path: Path, variables, said) -> None:
    done = installation.run("drift", "--sglang", wheel(tmp_path, "0.5.12", FILES), **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_plugin_that_has_nothing_to_do_here_has_nothing_to_lose(installation: Installation, tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.5.12", FILES)
    done = installation.run("drift", "--sglang", path, GLM5_PLUGINS="fp4_warmup,no_fullgraph")
    assert "not applicable" in done.stdout  # there is no GPU
    assert done.returncode == 0, done.stdout


def test_an_sglang_that_loads_no_plugins_is_not_safe(installation: Installation, tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.5.10", FILES)
    found = installation.json("drift", "--sglang", path, GLM5_PLUGINS="no_fullgraph")
    assert not found["safe"]
    said = "the way in: SGLang 0.5.10 loads no plugins in its {} process; `glm5-plugins enable` brings the layer there"
    assert found["layer"] == [said.format("main"), said.format("scheduler")]


def test_what_the_layer_calls_is_looked_for_too(installation: Installation, tmp_path: Path) -> None:
    gone = {"sglang/srt/distributed/parallel_state.py": "def get_world_group_(): ...\n"}
    found = installation.json("drift", "--sglang", wheel(tmp_path, "0.5.12", FILES | gone), GLM5_PLUGINS="no_fullgraph")
    assert not found["safe"]
    assert [text for text in found["layer"] if text.startswith("agreement: ") and "get_world_group" in text]


@pytest.mark.parametrize(
    ("arguments", "status", "lines"),
    [
        ([], 2, ["drift needs a version to judge.", "  Give --sglang VERSION, --flashinfer VERSION or both."]),
        (["--sglang", "0.5.98"], 1, ["sglang 0.5.98 is neither installed here nor in ", "  Add --download to "]),
        (["--sglang", "no.whl"], 1, ["There is no file no.whl.", "  Give a version, or the path of a wheel."]),
    ],
)
def test_wrong_usage(installation: Installation, arguments: list[str], status: int, lines: list[str]) -> None:
    done = installation.run("drift", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"glm5-plugins: {lines[0]}")
    assert second.startswith(lines[1])


def test_the_engine_of_another_plugin_stays_as_installed(installation: Installation, tmp_path: Path) -> None:
    (installation.folder / "engine" / "core.py").write_text(ENGINE.replace("warm", "hot"))
    done = installation.run("drift", "--sglang", wheel(tmp_path, "0.5.12", FILES), GLM5_PLUGINS="acme")
    assert "does not take `warm`" in done.stdout
