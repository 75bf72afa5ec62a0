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


def test_pip_in_front_names_the_version() -> None:
    assert read(["pip install 'sglang[all]==0.5.10.post1' && sglang serve --model X"]).version == "0.5.10.post1"


def test_windows_line_ends() -> None:
    assert read([MODEL_CARD.replace("\n", "\r\n")]).flags == read([MODEL_CARD]).flags


def test_a_backslash_with_a_space_behind_it_is_noted() -> None:
    found = read(["sglang serve --model X \\ \n --tp 8"])
    assert found.flags == ("--model", "X", "--tp", "8")
    assert found.notes == ("a backslash has something behind it: the line does not go on there",)


def test_flags_alone() -> None:
    assert read(["--model", "X"]).flags == ("--model", "X")


def test_what_would_run_has_the_layer_in_front() -> None:
    found = read(["A=1", "python", "-m", "sglang.launch_server", "--model", "X"])
    assert found.program == ["python", "-m", "glm5_plugins.launch", "sglang.launch_server", "--model", "X"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "There is no launch of SGLang in 'nothing'"),
        (["vllm serve X"], "There is no launch of SGLang in 'vllm serve X'"),
        (["sglang serve --model 'X"], "cannot be taken apart: No closing quotation"),
        (["sglang serve " + "x" * command.LARGEST], "is longer than"),
    ],
)
def test_what_is_no_launch(words: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says) as refused:
        read(words)
    assert refused.value.mend
