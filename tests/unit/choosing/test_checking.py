"""`glm5-plugins check`, `profiles` and `launch`, as commands, on a machine without SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm5_plugins import checking, enable, flags
from glm5_plugins.checking import Judgement, judge
from glm5_plugins.command import read
from tests.unit.choosing.conftest import VERSIONS
from tests.unit.choosing.test_command import DOCKER, MODEL_CARD


def check(*words: str, sglang: str = "0.5.23", arch: str | None = "sm120", **more: Any) -> Judgement:
    return judge(read(["sglang", "serve", "--model-path", "X", *words]), sglang, arch, **more)


def errors(found: Judgement) -> list[tuple[str, str]]:
    return [(finding.what, finding.mend) for finding in found.findings if finding.level == "error"]


def test_the_table_has_every_version() -> None:
    assert set(VERSIONS) <= set(flags.versions())
    assert all(len(flags.of(version)) > 300 for version in flags.versions())


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("0.5.12+cu130", "0.5.12"),
        ("0.5.10.post1", "0.5.10.post1"),
        ("0.5.10.post2", "0.5.10.post1"),
        ("0.0.0.dev1+gbfefdc52d", "0.5.23"),
        ("0.5.99", "0.5.23"),
        ("0.4.1", "0.5.8"),
        ("main", "0.5.23"),
        (None, "0.5.23"),
    ],
)
def test_a_version_that_is_not_in_the_table(asked: str | None, found: str) -> None:
    """Case 10."""
    assert flags.nearest(asked) == found


def test_what_the_command_gives_by_field() -> None:
    """Case 15."""
    found = check("--tp=8", "--speculative-algo", "NEXTN", "--json-model-override-args", '{"a b": 1}')
    assert found.given == {
        "model_path": "X",
        "tp_size": 8,
        "speculative_algorithm": "NEXTN",
        "json_model_override_args": '{"a b": 1}',
    }
    assert found.sound


def test_a_config_file_counts_as_typed(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("tp-size: 8\nenable-mscclpp: false\nmodel-path: Y\n")
    found = check("--config", str(tmp_path / "server.yaml"))
    assert found.given == {"tp_size": 8, "enable_mscclpp": False, "model_path": "X"}


@pytest.mark.parametrize(
    ("sglang", "words", "what", "mend"),
    [
        ("0.5.23", ["--nsa-prefill-backend", "trtllm"], "it exists from 0.5.8 to 0.5.19", "Use --dsa-prefill-backend."),
        ("0.5.9", ["--dsa-prefill-backend", "trtllm"], "it exists from 0.5.13", "it is called --nsa-prefill-backend"),
        ("0.5.23", ["--disable-piecewise-cuda-graph"], "it exists from 0.5.10 to 0.5.19", "prefill=disabled."),
        ("0.5.23", ["--cuda-graph-max-bs", "8"], "is the start of several flags", "Use --cuda-graph-max-bs-decode."),
        ("0.5.23", ["--enable-flashinfer-autotune"], "nor of any from 0.5.8 on", "it is on unless"),
        ("0.5.23", ["--enable-msclpp"], "nor of any other", "Did you mean '--enable-mscclpp'?"),
        ("0.5.23", ["--fp4-gemm-backend", "b12x"], "exists in no SGLang wheel", "Choose one of: auto, "),
        ("0.5.23", ["--moe-runner-backend=b12x"], "exists in no SGLang wheel", "Choose one of: "),
        ("0.5.23", ["--fp4-gemm-backend", "cutlass"], "cutlass is not a value that this SGLang takes", "Choose one"),
        ("0.5.23", ["--enable-pcie-oneshot-allreduce"], "exists in no SGLang wheel", "Take it out"),
        ("0.5.23", ["--tp", "eight"], "--tp-size eight is no number", "Give a whole number."),
        ("0.5.23", ["--tp"], "expected one argument", "Correct that flag."),
        ("0.5.23", ["stray"], "'stray' belongs to no flag", "Quote it"),
        ("0.5.23", ["--cuda-graph-backend-prefill", "tc_piecewise"], "is not a value", "Choose one of: "),
    ],
)
def test_a_flag_that_the_version_does_not_take(sglang: str, words: list[str], what: str, mend: str) -> None:
    found = [pair for pair in errors(check(*words, sglang=sglang)) if what in pair[0]]
    assert found
    assert mend in found[0][1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_path_is_required(version: str) -> None:
    start = "python -m sglang.launch_server --tp 8"
    missing = f"SGLang {version} needs --model-path, and nothing gives it."
    assert errors(judge(read([start]), version, "sm120")) == [(missing, "Give --model-path.")]
    for given in ("--model X", "--model-path=$MODEL", '"$@"'):
        assert errors(judge(read([f"{start} {given}"]), version, "sm120")) == []
    profile = "glm5-nvfp4-8x-rtx-pro-6000"
    assert not any("--model-path" in what for what, _ in errors(judge(read([start]), version, profile=profile)))


def test_sglang_serve_looks_for_the_model_on_the_command_line_alone(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model-path: X\n")
    for words, profile in ([f"--config {tmp_path}/c.yaml", None], ["--tp 8", "glm5-nvfp4-b200-tp8"]):
        found = judge(read([f"sglang serve {words}"]), "0.5.23", "sm100", profile)
        assert errors(found) == [
            ("`sglang serve` of SGLang 0.5.23 looks for --model-path on the command line alone.", "Give --model-path.")
        ]
        assert judge(read([f"python -m sglang.launch_server {words}"]), "0.5.23", "sm100", profile).sound


@pytest.mark.parametrize(
    ("words", "version", "taken"),
    [
        ("X --tp 8", "0.5.15", False),
        ("X --tp 8", "0.5.16", True),
        ("--model X --model-type llm --tp 8", "0.5.9", False),
        ("--model X --model-type llm --tp 8", "0.5.10", True),
        ("--model-type=llm X --tp 8", "0.5.23", True),
    ],
)
def test_what_sglang_serve_takes_before_its_parser(words: str, version: str, taken: bool) -> None:
    found = judge(read([f"sglang serve {words}"]), version, "sm120")
    assert (errors(found) == []) == taken
    assert found.given["tp_size"] == 8
    assert found.given.get("model_path") == "X" or not taken


def test_a_config_file_in_a_spelling_that_sglang_does_not_see(tmp_path: Path) -> None:
    """It looks for the word `--config`: another spelling is parsed, and the file never read."""
    (tmp_path / "server.yaml").write_text("tp-size: 8\n")
    for words in ([f"--config={tmp_path}/server.yaml"], ["--conf", f"{tmp_path}/server.yaml"]):
        found = check(*words)
        assert found.given == {"model_path": "X"}
        warned = [(one.what, one.mend) for one in found.findings if one.level == "warning"]
        assert warned == [(f"SGLang 0.5.23 never reads {tmp_path}/server.yaml: it looks for the word --config alone.",
                           f"Write --config {tmp_path}/server.yaml.")]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("none.yaml", None, "is no file."),
        ("server.json", "{}", "SGLang takes .yaml and .yml, not '.json'."),
        ("server", "tp-size: 8", "SGLang takes .yaml and .yml, not ''."),
        ("server.yaml", "- 8", "cannot be read:"),
    ],
)
def test_a_config_file_that_sglang_refuses(name: str, content: str | None, what: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert [what in error for error, _ in errors(check("--config", str(tmp_path / name)))] == [True]


def test_a_config_file_is_not_looked_for_where_it_is_not(tmp_path: Path) -> None:
    for typed in ("docker run IMAGE sglang serve --model X --config /etc/c.yaml", "sglang serve --model X --config $C"):
        found = judge(read([typed]), "0.5.23", "sm120")
        assert found.sound
        assert any("is not read" in one.what for one in found.findings)


def test_two_config_files() -> None:
    found = check("--config", "a.yaml", "--config", "b.yaml")
    assert errors(found) == [("SGLang refuses a second --config.", "Give one file.")]


def test_a_gone_flag_that_is_the_start_of_another_is_warned_of() -> None:
    """SGLang itself takes the start of a flag for the flag, whatever it meant once."""
    options = {option for flag in flags.of("0.5.23") for option in flag.options}
    gone = {
        option
        for version in flags.versions()
        for flag in flags.of(version)
        for option in flag.options
        if option.startswith("--") and option not in options
    }
    taken = [one for one in gone if len([option for option in options if option.startswith(one)]) == 1]
    for option in taken:
        assert any("SGLang 0.5.23 reads" in finding.what for finding in check(option, "1").findings), option


def test_variables_of_the_shell_are_not_judged() -> None:
    found = judge(read([DOCKER]), None, "sm100")
    assert found.sound
    assert found.version == "0.5.10.post1"
    assert any(r.what.startswith("--port $PORT is filled in by a shell") for r in found.findings)


@pytest.mark.parametrize(
    "behind",
    ["$ARGS", '"$@"', "${EXTRA}", "--tp $(nproc)", "--tp 8 # eight GPUs", "--tp 8\nsleep 1", "--lora-paths a=<b>"],
)
def test_a_start_script_is_judged_as_far_as_it_goes(behind: str) -> None:
    script = "# start it's server\npython -m sglang.launch_server --model-path X "
    assert errors(judge(read([script + behind]), "0.5.23", "sm120")) == []
    assert len(errors(judge(read([f"{script} --bogus 1 {behind}"]), "0.5.23", "sm120"))) == 1


def test_what_stands_behind_a_part_for_the_shell_is_judged() -> None:
    for part in ("$(nproc)", "`nproc`", "$TP"):
        found = judge(read([f"sglang serve --model X --tp {part} --bogus 1"]), "0.5.23", "sm120")
        assert [what.partition(" ")[0] for what, _ in errors(found)] == ["--bogus"]
        assert any(one.what.startswith(f"--tp-size {part} is filled in by a shell") for one in found.findings)


def test_the_rules_of_the_models_own_profiles() -> None:
    """Case 18, recognised by the model's name."""
    found = judge(read([MODEL_CARD.replace("bf16", "fp8_e4m3")]), "0.5.12", "sm120")
    assert found.rules_of == ["glm5-nvfp4-8x-rtx-pro-6000"]
    assert any("one token and then garbage" in finding.what for finding in found.findings)
    assert judge(read([MODEL_CARD]), "0.5.12", "sm120").findings == []


def test_what_a_profile_would_add(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check("--tp", "4", sglang="0.5.9", arch=None, profile="glm5-nvfp4-mtp-8x-rtx-pro-6000")
    assert found.architecture == "sm120"
    added = [flag for _, flag in found.added]
    assert "--kv-cache-dtype bf16" in added
    assert "--cuda-graph-max-bs 8" in added
    assert not any(flag.startswith("--tensor-parallel-size") for flag in added)
    assert found.variables["SGLANG_ENABLE_SPEC_V2"] == "True"
    assert found.outcomes["moe_runner"].startswith("applied: ")
    assert "--fp4-gemm-backend flashinfer_cudnn" in added


def test_what_plugins_would_add_and_refuse() -> None:
    """Case 9, and each plugin is asked though another refuses."""
    words = ["GLM5_PLUGINS=ep,mscclpp", "GLM5_EP_SIZE=2", "sglang", "serve", "--model", "X", "--tp", "8"]
    found = judge(read([*words, "--moe-runner-backend", "flashinfer_cutlass"]), "0.5.12", "sm120")
    assert "not 2" in errors(found)[0][0]
    assert found.outcomes["mscclpp"].startswith("applied: MSCCL++")
    assert "GLM5_EP_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("version", "words", "level", "what"),
    [
        ("0.5.12", "--tp 8 --ep 2 --moe-runner-backend flashinfer_cutlass", "error", "size of 1 or 8, not 2"),
        ("0.5.12", "--tp 8 --ep 3", "error", "an expert parallel size of 3 does not divide"),
        ("0.5.12", "--tp 8 --ep 2 --moe-a2a-backend deepep", "warning", "deepep makes the expert parallel size"),
        ("0.5.12", "--tp 4 --enable-mscclpp", "warning", "uses MSCCL++ among 8 or 16 ranks, not among 4"),
        ("0.5.23", "--tp 4 --enable-mscclpp", "", ""),
        ("0.5.12", "--tp 8 --ep 8 --moe-runner-backend flashinfer_cutlass", "", ""),
        ("0.5.12", "--tp $TP --ep 2 --enable-mscclpp", "", ""),
        ("0.5.12", "--ep 2 $ARGS", "", ""),
        ("0.5.12", "--ep 0", "", ""),
    ],
)
def test_what_sglang_makes_of_flags_without_a_plugin(version: str, words: str, level: str, what: str) -> None:
    """Case 9."""
    found = judge(read([f"sglang serve --model X {words}"]), version, "sm120")
    said = [(one.level, one.what) for one in found.findings if one.level != "note"]
    assert [(one, what in text) for one, text in said] == [(level, True)] * bool(level)
    asked = judge(read([f"GLM5_PLUGINS=ep,mscclpp sglang serve --model X {words}"]), version, "sm120")
    assert len([one for one in asked.findings if what in one.what]) == 1 or not what


def test_a_variable_that_every_published_launch_of_the_model_sets() -> None:
    """Case 19."""
    typed = "sglang serve --model lukealonso/GLM-5-NVFP4 --kv-cache-dtype bf16 --speculative-algorithm NEXTN"

    def said(words: str, version: str = "0.5.9") -> list[tuple[str, str, str]]:
        return [(one.level, one.what, one.mend) for one in judge(read([words]), version, "sm120").findings]

    assert said(typed) == [
        (
            "warning",
            "SGLANG_ENABLE_SPEC_V2 is not set: speculative decoding would load the model twice and run out of memory.",
            "Set SGLANG_ENABLE_SPEC_V2=True.",
        )
    ]
    assert said(f"SGLANG_ENABLE_SPEC_V2=1 {typed}") == []
    assert said(typed, "0.5.11") == []
    profiled = check("--speculative-algorithm", "NEXTN", sglang="0.5.9", profile="glm5-nvfp4-8x-rtx-pro-6000")
    assert not any("SPEC_V2" in one.what for one in profiled.findings)


def test_an_unknown_plugin_in_the_command() -> None:
    found = judge(read(["GLM5_PLUGINS=epp sglang serve --model X"]), "0.5.12", None)
    assert errors(found) == [("GLM5_PLUGINS names an unknown plugin 'epp'.", "Did you mean 'ep'?")]


MISTAKEN = 'summary = "s"\nsglang = ">=0.5.9"\nhardware = "h"\nsource = []\nplugins = ["fp4_warmup"]\n'


@pytest.mark.parametrize(
    ("typed", "what", "mend"),
    [
        ("GLM5_PLUGIN=ep", "GLM5_PLUGIN is not a variable of glm5-plugins.", "Did you mean 'GLM5_PLUGINS'?"),
        (
            "GLM5_PLUGINS=fp4_warmup GLM5_FP4_WARMUP_TIMEOUT_S=abc",
            "GLM5_FP4_WARMUP_TIMEOUT_S='abc' is not valid: ",
            "Correct the value",
        ),
        ("GLM5_ON_ERROR=loud", "GLM5_ON_ERROR='loud' is not valid: ", "Correct the value"),
        ("GLM5_PLUGINS=fp4_graph_break", "'fp4_graph_break' needs 'no_fullgraph'", "Set GLM5_PLUGINS="),
    ],
)
def test_a_variable_that_stops_the_launch_stops_here_too(typed: str, what: str, mend: str) -> None:
    """Case 8."""
    found = judge(read([f"{typed} sglang serve --model X --tpp 1"]), "0.5.23", "sm120")
    assert len(errors(found)) == 2
    assert what in errors(found)[1][0]
    assert errors(found)[1][1].startswith(mend)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("GLM5_FP4_WARMUP_TIMEOUT", "GLM5_FP4_WARMUP_TIMEOUT is not a variable of glm5-plugins."),
        ("GLM5_FP4_WARMUP_TIMEOUT_S", "The profile's GLM5_FP4_WARMUP_TIMEOUT_S='many' is not valid: "),
    ],
)
def test_a_variable_of_the_profile_that_stops_the_launch(option: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'{MISTAKEN}options = {{ {option} = "many" }}\n')
    assert [what in error for error, _ in errors(check(profile=str(file)))] == [True]


def test_an_option_that_a_plugin_reads_at_once_is_complained_of_once() -> None:
    found = judge(read(["GLM5_PLUGINS=ep GLM5_EP_SIZE=0 sglang serve --model X"]), "0.5.23", "sm120")
    assert ["GLM5_EP_SIZE='0'" in error for error, _ in errors(found)] == [True]


def test_plugins_are_not_asked_about_a_command_line_that_is_not_understood() -> None:
    found = judge(read(["GLM5_PLUGIN=ep GLM5_PLUGINS=mscclpp sglang serve --model X --tp"]), "0.5.23", "sm120")
    assert (len(errors(found)), found.outcomes) == (2, {})


@pytest.mark.parametrize(
    ("typed", "version", "level", "what"),
    [
        ("GLM5_PLUGINS=ep {}", "0.5.9", "error", "SGLang 0.5.9 loads no plugins by itself"),
        ("GLM5_PROFILE=glm5-nvfp4-8x-rtx-pro-6000 {}", "0.5.10.post1", "error", "loads no plugins by itself"),
        ("docker run -e GLM5_PLUGINS=ep IMAGE {}", "0.5.9", "warning", "SGLang 0.5.9 loads no plugins by itself"),
        ("SGLANG_PLUGINS=other GLM5_PLUGINS=ep {}", "0.5.23", "error", "SGLANG_PLUGINS=other leaves out 'glm5'"),
    ],
)
def test_plugins_that_nothing_brings_in(
    typed: str, version: str, level: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 11, and SGLang that has no entry points."""

    def said(server: str) -> list[str]:
        found = judge(read([typed.format(f"python -m {server} --model X --tp 8")]), version, "sm120")
        return [one.level for one in found.findings if what in one.what]

    monkeypatch.setattr(enable, "enabled", lambda: False)
    assert said("sglang.launch_server") == [level]
    assert said("glm5_plugins.launch sglang.launch_server") == []
    monkeypatch.setattr(enable, "enabled", lambda: True)
    assert "error" not in said("sglang.launch_server")


def test_plugins_are_brought_in_by_sglang_itself_where_it_can() -> None:
    for typed in ("GLM5_PLUGINS=ep SGLANG_PLUGINS=a,glm5 sglang serve --model X --tp 8", "sglang serve --model X"):
        assert judge(read([typed]), "0.5.11", "sm120").sound
    assert judge(read(["SGLANG_PLUGINS=other sglang serve --model X"]), "0.5.9", "sm120").findings == []
    assert "SGLANG_PLUGINS" not in os.environ


def test_the_whole_command_can_be_pasted() -> None:
    found = judge(read(["A='b c' python -m sglang.launch_server --model X --port $PORT"]), "0.5.23", "sm120")
    assert found.command == "A='b c' python -m sglang.launch_server --model X --port $PORT"


def test_every_capability_is_a_choice_of_the_command() -> None:
    from glm5_plugins.cli import ARCHITECTURES

    assert tuple(checking.CAPABILITIES) == ARCHITECTURES


# --- the command itself --------------------------------------------------------------------------------------


def cli(*words: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "glm5_plugins.cli", *words],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("GLM5_")}, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--", "sglang", "serve", "--model", "X", "--tp=8"], 0),
        (["--", "sglang", "serve", "--model", "X", "--tpp=8"], 1),
        (["sglang serve --model X"], 0),
        (["--sglang", "0.5.9", "--", "--model", "X", "--dsa-prefill-backend", "trtllm"], 1),
        (["--profile", "none.toml", "--", "--model", "X"], 1),
        (["--", "vllm", "serve"], 1),
    ],
)
def test_exit_status_and_json(words: Sequence[str], status: int) -> None:
    plain = cli("check", *words)
    assert plain.returncode == status, plain.stderr
    if plain.stdout:
        document = json.loads(cli("check", "--json", *words).stdout)
        assert document["sound"] == (status == 0)


@pytest.mark.parametrize(
    ("option", "value", "status", "says"),
    [
        ("--sglang", "abc", 2, "--sglang 'abc' is no version."),
        ("--sglang", "", 2, "--sglang '' is no version."),
        ("--profile", "", 1, "GLM5_PROFILE names an unknown profile ''."),
    ],
)
def test_an_option_that_names_nothing(option: str, value: str, status: int, says: str) -> None:
    done = cli("check", option, value, "--", "sglang", "serve", "--model", "X")
    assert (done.returncode, done.stdout, says in done.stderr) == (status, "", True)


def test_a_pasted_command_from_standard_input() -> None:
    done = cli("check", "--arch", "sm120", "--sglang", "0.5.12", stdin=MODEL_CARD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing here stops the launch." in done.stdout


def test_profiles_and_explain() -> None:
    assert "glm5-nvfp4-8x-rtx-pro-6000" in cli("profiles").stdout
    assert {one["name"] for one in json.loads(cli("profiles", "--json").stdout)} >= {"glm5.2-nvfp4-8x-rtx-pro-6000"}
    assert "SGLANG_ENABLE_SPEC_V2  True" in cli("explain", "glm5-nvfp4-mtp-8x-rtx-pro-6000").stdout
    wrong = cli("explain", "glm5-nvfp4-8x-rtx-pro")
    assert (wrong.returncode, "Did you mean 'glm5-nvfp4-8x-rtx-pro-6000'?" in wrong.stderr) == (2, True)


def test_launch_prints_the_command_it_stands_for() -> None:
    """Whole: the layer, the profile and what else is set for it are in it, so that it can be pasted anywhere."""
    words = ["--profile", "glm5-nvfp4-b200-tp8", "--print", "--", "--port", "30000", "--tp", "4"]
    done = cli("launch", *words, env={"GLM5_ON_ERROR": "warn"})
    assert done.returncode == 0, done.stderr
    front = "GLM5_ON_ERROR=warn GLM5_PROFILE=glm5-nvfp4-b200-tp8 python -m glm5_plugins.launch sglang.launch_server"
    assert done.stdout.startswith(f"{front} --port 30000 --tp 4 ")
    assert "--flashinfer-allreduce-fusion-backend auto" in done.stdout
    assert cli("check", "--arch", "sm100", "--", *done.stdout.split()).returncode == 0


def test_launch_prints_a_start_script_as_one() -> None:
    typed = "cd /srv && A=1 python -m sglang.launch_server --model X --port $PORT > log &\nsleep 1"
    done = cli("launch", "--print", "--", typed, env={"GLM5_PLUGINS": "ep"})
    front = "cd /srv && A=1 GLM5_PLUGINS=ep python -m glm5_plugins.launch sglang.launch_server"
    assert done.stdout == f"{front} --model X --port $PORT > log &\nsleep 1\n"


def test_launch_runs_what_was_typed_with_the_profile_in_force(tmp_path: Path) -> None:
    """The program is stood in for; it sees the profile's variables and the flags as typed."""
    program = tmp_path / "sglang"
    program.write_text('#!/bin/sh\necho "$GLM5_PROFILE $OMP_NUM_THREADS $A" "$@"\n')
    program.chmod(0o755)
    words = ["A=1", str(program), "serve", "--model", "X Y"]
    done = cli("launch", "--profile", "glm5-nvfp4-8x-rtx-pro-6000", "--", *words, env={"OMP_NUM_THREADS": "3"})
    assert done.stdout == "glm5-nvfp4-8x-rtx-pro-6000 3 1 serve --model X Y\n"


PROFILE = ("--profile", "glm5-nvfp4-8x-rtx-pro-6000", "--")
IMAGE = "lmsysorg/sglang:v0.5.12"
SERVER = ("python3", "-m", "sglang.launch_server", "--model-path", "X")


@pytest.fixture
def shown(tmp_path: Path) -> str:
    """A docker that shows its words, one on a line."""
    program = tmp_path / "docker"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_launch_hands_a_profile_into_the_container(shown: str) -> None:
    options = ["run", "--gpus", "all", "-e", "HF_TOKEN=x", "--env", "NCCL_P2P_LEVEL=3", "--env=Y=1"]
    done = cli("launch", *PROFILE, shown, *options, IMAGE, *SERVER, env={"GLM5_ON_ERROR": "warn", "NCCL_X": "1"})
    layer = ["python3", "-m", "glm5_plugins.launch", "sglang.launch_server", "--model-path", "X"]
    words, behind = done.stdout.splitlines(), [*options[1:], IMAGE, *layer]
    assert (words[0], words[-len(behind) :]) == ("run", behind)
    handed = words[2 : -len(behind) : 2]
    assert {*words[1 : -len(behind) : 2]} == {"-e"}
    assert {"GLM5_ON_ERROR=warn", "GLM5_PROFILE=glm5-nvfp4-8x-rtx-pro-6000", "OMP_NUM_THREADS=8"} <= {*handed}
    assert not any(word.startswith(("NCCL_P2P_LEVEL", "NCCL_X")) for word in handed)
    printed = cli("launch", "--print", *PROFILE, "docker", *options, IMAGE, *SERVER, env={"GLM5_ON_ERROR": "warn"})
    assert printed.stdout.startswith("docker run -e GLM5_ON_ERROR=warn -e GLM5_PROFILE=glm5-nvfp4-8x-rtx-pro-6000 -e ")
    assert f" --env=Y=1 {IMAGE} python3 -m glm5_plugins.launch sglang.launch_server --model-path X --" in printed.stdout


def test_launch_leaves_a_container_without_a_profile_as_it_is(shown: str) -> None:
    done = cli("launch", "--", "A=1", shown, "run", "-e", "B=2", IMAGE, "sglang", "serve", "--model", "X")
    assert done.stdout.split() == ["run", "-e", "B=2", IMAGE, "sglang", "serve", "--model", "X"]


def test_launch_leaves_env_to_its_work() -> None:
    done = cli("launch", "--", "env", "-u", "A", "B=2", "sh", "-c", 'echo "[$A$B]"', *SERVER[1:], env={"A": "1"})
    assert done.stdout == "[2]\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nosuchpython", *SERVER[1:]], "nosuchpython cannot be run: No such file or directory."),
        (["/tmp", *SERVER[1:]], "/tmp cannot be run: Permission denied."),
        (["cd /tmp && " + " ".join(SERVER)], "runs one program, and 'cd /tmp' takes a shell."),
        (["export FOO=1; " + " ".join(SERVER)], "runs one program, and 'export FOO=1' takes a shell."),
        ([" ".join(SERVER) + " > log"], "runs one program, and '>log' takes a shell."),
        ([" ".join(SERVER) + " --port $PORT"], "runs one program, and '$PORT' takes a shell."),
        ([" ".join(SERVER) + ' --port "$PORT"'], "takes a shell."),
        ([" ".join(SERVER) + " &"], "runs one program, and '&' takes a shell."),
        (["docker", "run", IMAGE, "bash", "-c", " ".join(SERVER)], "The launch stands inside 'python3 -m sglang"),
        (["kubectl", "exec", "pod", "--", *SERVER], "cannot be handed into the container by 'kubectl'."),
    ],
)
def test_launch_says_what_it_cannot_run(words: list[str], says: str) -> None:
    done = cli("launch", *PROFILE[:2], "--arch", "sm120", "--", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.startswith("glm5-plugins: ")


def test_launch_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    done = cli(
        "launch", "--profile", "glm5-nvfp4-8x-rtx-pro-6000", "--", "false", "-m", "sglang.launch_server", "--tpp"
    )
    assert done.returncode == 1
    assert "--tpp is not a flag of SGLang" in done.stderr
