"""`glm5-plugins warmup` with the real FlashInfer, short of compiling: what it lists, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from glm5_plugins.environment import Environment
from glm5_plugins.errors import NotInForce
from glm5_plugins.warmup import specs
from glm5_plugins.warmup.needs import RULES, Arch, Module
from tests.warmup.conftest import Node


def warmup(node: Node, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["glm5-plugins", "warmup", *arguments]
    return subprocess.run(command, env={**node.env, **env}, capture_output=True, text=True, timeout=120)


def test_it_lists_what_would_be_built_and_builds_nothing(node: Node) -> None:
    done = warmup(node, "--arch", "12.0f", "--moe-runner-backend", "flashinfer_cutlass", "--list", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["module"], row["state"]) for row in rows] == [
        ("fp4_quantization_120f", "not built"),
        ("fp4_gemm_cutlass_sm120", "not built"),
        ("fused_moe_120", "not built"),
    ]
    assert all(row["library"].startswith(str(node.cache)) for row in rows)
    assert node.compiles() == 0


DOWNLOADED = {"trtllm_fused_moe", "trtllm_gemm"}
NEEDING_CUDA_PYTHON = set() if find_spec("cuda") else {"allreduce_fusion"}


@pytest.mark.skipif(not NEEDING_CUDA_PYTHON, reason="cuda-python is installed")
def test_what_flashinfer_itself_lacks_is_named(node: Node) -> None:
    done = warmup(node, "--arch", "10.0", "--modules", "allreduce_fusion", "--list", FLASHINFER_CUDA_ARCH_LIST="10.0a")
    first, second = done.stderr.splitlines()[-2:]
    assert "FlashInfer's flashinfer.comm.trtllm_ar, which the module allreduce_fusion() is of, cannot be" in first
    assert "cuda-python" in first
    assert second == "  Install what it asks for, in the Python that SGLang runs in."


@pytest.mark.parametrize("arch", sorted({arch for rule in RULES for arch in rule.archs}))
def test_every_module_of_every_architecture_is_found_without_a_gpu(node: Node, arch: Arch) -> None:
    """FlashInfer asks the current device for some; there is none."""
    env = Environment()
    families = {rule.name for rule in RULES if arch in rule.archs and rule.fits(env)} - DOWNLOADED - NEEDING_CUDA_PYTHON
    spelled = f"{arch[0]}.{arch[1]}"
    node.env.pop("FLASHINFER_CUDA_ARCH_LIST")
    done = warmup(node, "--arch", spelled, "--modules", ",".join(sorted(families)), "--list", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == len(families)


@pytest.mark.parametrize("stopped_by", [{"https_proxy": "http://127.0.0.1:9"}, {"FLASHINFER_NO_DOWNLOAD": "1"}])
@pytest.mark.parametrize("family", sorted(DOWNLOADED))
def test_kernels_that_flashinfer_downloads_say_so(node: Node, family: str, stopped_by: dict[str, str]) -> None:
    """Where there is no network; the getters ask for the current device first, which must not stop them."""
    node.env.pop("FLASHINFER_CUDA_ARCH_LIST")
    node.env.update(stopped_by, FLASHINFER_CUBIN_DIR=str(node.cache / "cubins"))
    done = warmup(node, "--arch", "10.0", "--modules", family, "--list")
    first, second = done.stderr.splitlines()[-2:]
    assert f"FlashInfer refuses the module {family}(): " in first
    assert "checksums.txt" in first
    assert "install flashinfer-cubin of the same version" in second


@pytest.mark.parametrize("raised", [RuntimeError("No supported CUDA architectures"), AssertionError("No supported")])
def test_other_errors_of_such_a_module_send_nobody_to_the_network(
    monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def refuses() -> None:
        raise raised

    monkeypatch.setattr(specs, "_getter", lambda module: refuses)
    with pytest.raises(NotInForce, match="No supported") as error:
        specs.find(Module("trtllm_gemm", "flashinfer.jit:get_it", ()))
    assert error.value.mend.startswith("Check the architecture")


def test_the_folder_is_the_one_that_a_server_with_that_gpu_looks_into(node: Node) -> None:
    """However the architecture is spelled: FlashInfer names the folder after it."""
    for spelling in ("12.0", "120", "12.0f"):
        node.env.pop("FLASHINFER_CUDA_ARCH_LIST", None)
        done = warmup(node, "--arch", spelling, "--modules", "fp4_quantization", "--list", "--json")
        assert "/120f/cached_ops/fp4_quantization_120f/" in json.loads(done.stdout)[0]["library"]


@pytest.mark.parametrize(
    ("arguments", "said", "mend"),
    [
        ((), "There is no GPU here to build for.", "Say which: --arch 12.0f"),
        (("--arch", "8.0"), "No FP4 module is known for the architecture 8.0.", "Known: 9.0"),
        (("--arch", "12.0", "--modules", "moe"), "--modules names an unknown module 'moe'.", "Known: "),
        (("--arch", "12.0", "--model-path", "/nowhere"), "--model-path /nowhere holds no model", "Name a folder"),
        (("--arch", "9.0"), "on 9.0 uses no FP4 module.", "There is nothing to build"),
    ],
)
def test_a_mistake_ends_in_two_lines(node: Node, arguments: tuple[str, ...], said: str, mend: str) -> None:
    done = warmup(node, *arguments)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()[-2:]
    assert said in first
    assert mend in second


def test_what_stands_in_the_way_is_said_before_anything_is_imported(node: Node) -> None:
    done = warmup(node, "--arch", "12.0", CUDA_HOME="/nowhere", FLASHINFER_DISABLE_JIT="1", FLASHINFER_NVCC="")
    assert done.returncode == 1
    assert "error: CUDA_HOME='/nowhere' does not exist.\n  Set CUDA_HOME to the folder" in done.stderr
    assert "error: FLASHINFER_DISABLE_JIT=1 forbids FlashInfer to build modules." in done.stderr
    assert "Traceback" not in done.stderr
    assert not node.cache.exists()


def test_a_half_written_module_is_listed_as_such(node: Node) -> None:
    done = warmup(node, "--arch", "12.0", "--modules", "fp4_quantization", "--list", "--json")
    library = Path(json.loads(done.stdout)[0]["library"])
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(b"\x7fELF\x02 and not much more")
    done = warmup(node, "--arch", "12.0", "--modules", "fp4_quantization", "--list", "--json")
    assert json.loads(done.stdout)[0]["state"] == "half-written"
