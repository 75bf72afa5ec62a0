"""Commands as people type them: taken apart into variables, the program and the server's flags."""

from __future__ import annotations

import shlex

import pytest

from glm5_plugins import command
from glm5_plugins.command import CommandError, read

FLAGS = ("--model-path", "X", "--port=30000")

MODEL_CARD = """\
NCCL_IB_DISABLE=1 NCCL_P2P_LEVEL=PHB OMP_NUM_THREADS=8 \\
python3 -m sglang.launch_server \\
  --model lukealonso/GLM-5-NVFP4 \\
  --tp 8 --kv-cache-dtype bf16 \\
  --model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 16}' \\
  --port 5000 2>&1 | tee server.log
"""

DOCKER = """\
docker run --gpus all --shm-size=32g -p 30000:30000 \\
  -e GLM5_PLUGINS=ep -e "NOTE=two words" --env=NCCL_P2P_LEVEL=SYS \\
  -v ~/.cache:/root/.cache lmsysorg/sglang:v0.5.10.post1-cu130 \\
  python3 -m sglang.launch_server --model-path=X --host=0.0.0.0 --port=$PORT --tensor-parallel-size=$TP
"""


@pytest.mark.parametrize(
    "typed",
    [
        "python -m sglang.launch_server",
        "/opt/venv/bin/python3.12 -u -m sglang.launch_server",
        "sglang serve",
        "/usr/local/bin/sglang serve",
        "python -m sglang serve",
        "python -m glm5_plugins.launch sglang.launch_server",
        "python /opt/sglang/launch_server.py",
        "nohup numactl --cpunodebind=0 python -m sglang.launch_server",
        "cd /srv && exec python -m sglang.launch_server",
    ],
)
def test_ways_to_start_a_server(typed: str) -> None:
    for words in ([*typed.replace("&&", ";").split(), *FLAGS], [f"{typed} {' '.join(FLAGS)}"]):
        assert read(words).flags == FLAGS


def test_a_model_card() -> None:
    """One text, with line continuations, variables in front, a JSON argument with spaces, and a pipe behind."""
    found = read([MODEL_CARD])
    assert found.environment == {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "PHB", "OMP_NUM_THREADS": "8"}
    assert found.flags[-4:] == (
        "--model-loader-extra-config",
        '{"enable_multithread_load": true, "num_threads": 16}',
        "--port",
        "5000",
    )
    assert read(shlex.split(MODEL_CARD.partition(" 2>&1")[0])).flags == found.flags


def test_docker() -> None:
    found = read([DOCKER])
    assert found.environment == {"GLM5_PLUGINS": "ep", "NOTE": "two words", "NCCL_P2P_LEVEL": "SYS"}
    assert found.version == "0.5.10.post1"
    assert found.in_container
    assert found.flags == ("--model-path=X", "--host=0.0.0.0", "--port=$PORT", "--tensor-parallel-size=$TP")


@pytest.mark.parametrize("typed", ["GLM5_PLUGINS=ep A=1 docker {}", "export GLM5_PLUGINS=ep A=1\ndocker {}"])
def test_variables_outside_of_a_container(typed: str) -> None:
    """Docker sees them, the server does not, unless `-e` without a value hands them on."""
    server = "IMAGE sglang serve --model X"
    lost = read([typed.format(f"run -e B=2 {server}")])
    assert lost.environment == {"B": "2"}
    assert [(one.level, one.what, one.mend) for one in lost.findings] == [
        ("error", "GLM5_PLUGINS is set outside of the container.", "Hand it in: -e GLM5_PLUGINS=ep")
    ]
    handed = read([typed.format(f"run -e GLM5_PLUGINS --env A {server}")])
    assert (handed.environment, handed.findings) == ({"GLM5_PLUGINS": "ep", "A": "1"}, ())


def test_pip_in_front_names_the_version() -> None:
    assert read(["pip install 'sglang[all]==0.5.10.post1' && sglang serve --model X"]).version == "0.5.10.post1"


def test_windows_line_ends() -> None:
    assert read([MODEL_CARD.replace("\n", "\r\n")]).flags == read([MODEL_CARD]).flags


def test_a_backslash_with_a_space_behind_it_is_noted() -> None:
    found = read(["sglang serve --model X \\ \n --tp 8"])
    assert found.flags == ("--model", "X", "--tp", "8")
    assert [(one.level, one.what) for one in found.findings] == [
        ("error", "A backslash has something behind it: the line does not go on there.")
    ]
    assert read(["sglang", "serve", "--model", "X", " "]).findings == found.findings


SCRIPT = """\
#!/bin/bash
# start it's server
export NCCL_P2P_LEVEL=SYS
cd /srv && \\
A=1 python3 -m sglang.launch_server --model-path X\\
   --tp 8 \\
   > server.log --lora-paths a=<b> --port=$PORT  # eight GPUs
sleep 1
curl "http://localhost:$PORT"
"""


def test_a_start_script() -> None:
    """Comments, lines that go on, a redirection in the middle, a gap to fill in, and commands around it."""
    found = read([SCRIPT])
    assert found.environment == {"NCCL_P2P_LEVEL": "SYS", "A": "1"}
    assert found.front == ("A=1", "python3", "-m", "sglang.launch_server")
    assert found.flags == ("--model-path", "X", "--tp", "8", "--lora-paths", "a=<b>", "--port=$PORT")
    assert found.findings == ()


def test_a_start_script_is_written_as_it_was() -> None:
    before, _, after = SCRIPT.partition("A=1")
    text = read([SCRIPT]).setting({"B": "2 3"}).adding(["--x", "{}"]).text
    assert text.startswith(f"{before}A=1 B='2 3' python3 -m sglang.launch_server --model-path X --tp 8 --lora-paths")
    assert text.endswith(
        f" a=<b> --port=$PORT --x '{{}}' >server.log  # eight GPUs{after.partition('GPUs')[2].rstrip()}"
    )


@pytest.mark.parametrize(
    ("typed", "flags"),
    [
        ("--tp $(nproc --all) --bogus 1", ["--tp", "$(nproc --all)", "--bogus", "1"]),
        ("--tp `nproc --all` --bogus 1", ["--tp", "`nproc --all`", "--bogus", "1"]),
        ('--tp "${TP:-$(nproc)}" "$@" $ARGS', ["--tp", "${TP:-$(nproc)}", "$@", "$ARGS"]),
        ("--lora-paths a=<b> --bogus 1", ["--lora-paths", "a=<b>", "--bogus", "1"]),
        ("--tp 8 # eight GPUs, it's enough", ["--tp", "8"]),
        ("--tag a#b '#c' \\# 'd'e\"f\"", ["--tag", "a#b", "#c", "#", "def"]),
        ("--tp 8 > log 2>&1 < /dev/null --port 1 &", ["--tp", "8", "--port", "1"]),
        ("--tp 8\nsleep 1", ["--tp", "8"]),
        ("--tp 8 || exit 1", ["--tp", "8"]),
        ("--tp 8)", ["--tp", "8"]),
        ("--tp 8 \\\n  # --ep 8 \\\n", ["--tp", "8"]),
        ("--tp 8 \\", ["--tp", "8"]),
    ],
)
def test_what_a_shell_makes_of_a_line(typed: str, flags: list[str]) -> None:
    found = read([f"python -m sglang.launch_server {typed}"])
    assert found.flags == tuple(flags)
    assert found.findings == ()


def test_a_redirection_ends_with_its_line() -> None:
    assert read([">\nsglang serve --model X"]).flags == ("--model", "X")


def test_a_line_that_stands_alone_is_said() -> None:
    """The backslash is missing, or a comment ends what it would go on with."""
    for typed in ("sglang serve --model X\n  --tp 8", "sglang serve --model X \\\n # --ep 8 \\\n --tp 8"):
        found = read([typed])
        assert found.flags == ("--model", "X")
        assert [(one.level, "begins with '--tp'" in one.what) for one in found.findings] == [("warning", True)]


@pytest.mark.parametrize(
    "words",
    [
        ["docker", "run", "-e", "A=1", "lmsysorg/sglang:v0.5.12", "bash", "-c", "B=2 sglang serve --model X > log"],
        ['docker run -e A=1 lmsysorg/sglang:v0.5.12 sh -c "cd /srv && B=2 sglang serve --model X"'],
        ["docker run -e A=1 lmsysorg/sglang:v0.5.12 sh -c 'sh -c \"export B=2; sglang serve --model X\"'"],
    ],
)
def test_a_launch_inside_a_word(words: list[str]) -> None:
    found = read(words)
    assert found.environment == {"A": "1", "B": "2"}
    assert found.flags == ("--model", "X")
    assert found.version == "0.5.12"
    assert found.in_container
    assert "sglang serve" in found.inside


def test_flags_alone() -> None:
    assert read(["--model", "X"]).flags == ("--model", "X")


def test_a_line_of_flags_is_no_launch_where_there_is_one() -> None:
    assert read(["--model Y\nsglang serve --model X"]).flags == ("--model", "X")
    assert read(["\n--model Y\n"]).flags == ("--model", "Y")
    assert read(["--model", "Y", "--name", "sglang serve --model X"]).flags[:2] == ("--model", "Y")


def test_what_would_run_has_the_layer_in_front() -> None:
    found = read(["A=1", "python", "-m", "sglang.launch_server", "--model", "X"]).with_layer()
    assert found.program == ["python", "-m", "glm5_plugins.launch", "sglang.launch_server", "--model", "X"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "There is no launch of SGLang in 'nothing'"),
        (["vllm serve X"], "There is no launch of SGLang in 'vllm serve X'"),
        (["sglang serve --model 'X"], "cannot be taken apart: a quote is not closed"),
        (["sglang serve " + "x" * command.LARGEST], "is longer than"),
    ],
)
def test_what_is_no_launch(words: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says) as refused:
        read(words)
    assert refused.value.mend
