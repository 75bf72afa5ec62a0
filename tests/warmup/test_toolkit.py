"""The preflight, on made-up toolkits: each thing that is missing or wrong, and what mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_plugins.environment import Environment
from glm5_plugins.findings import Finding
from glm5_plugins.warmup import toolkit
from glm5_plugins.warmup.toolkit import Toolkit

BIN = os.pathsep.join(["/usr/bin", "/bin"])


def program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def cuda(home: Path, release: str = "13.0", headers: bool = True) -> Path:
    program(home / "bin/nvcc", f"Cuda compilation tools, release {release}, V{release}.88")
    for name in toolkit.HEADERS if headers else ():
        (home / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "include" / name).touch()
    return home


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Run the preflight in a made-up environment: a whole one, but for what is given."""
    monkeypatch.setattr(toolkit, "torch_cuda_version", lambda env: None)
    program(tmp_path / "tools/ninja")

    def run(arch: tuple[int, int] = (12, 0), **environ: str) -> list[Finding]:
        whole = {
            "CUDA_HOME": str(tmp_path / "cuda"),
            "PATH": f"{tmp_path / 'tools'}{os.pathsep}{BIN}",
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        }
        if not (tmp_path / "cuda").exists():
            cuda(tmp_path / "cuda")
        kit = Toolkit({**whole, **environ}, (tmp_path / "site",))
        versions = Environment({"flashinfer-python": "0.6.18", "flashinfer-jit-cache": None, "flashinfer-cubin": None})
        return toolkit.preflight(versions, arch, kit)

    run.tools = f"{tmp_path / 'tools'}{os.pathsep}{BIN}"  # type: ignore[attr-defined]
    return run


def test_a_whole_toolkit_is_fine(check: Callable[..., list[Finding]]) -> None:
    assert check() == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("/nowhere", "does not exist"),
        ("{home}/bin/nvcc", "is a file"),
        ("{home}:/usr/local/cuda", "is a list"),
        ("'{home}'", "has quotes or spaces"),
        ("{home} ", "has quotes or spaces"),
        ("{home}/include", "has no bin/nvcc"),
    ],
)
def test_a_malformed_cuda_home(check: Callable[..., list[Finding]], tmp_path: Path, value: str, said: str) -> None:
    cuda(tmp_path / "cuda")
    findings = check(CUDA_HOME=value.format(home=tmp_path / "cuda"))
    (finding,) = [finding for finding in findings if "CUDA_HOME" in finding.what]
    assert finding.level == "error"
    assert said in finding.what
    assert "Set CUDA_HOME to the folder that has bin/nvcc" in finding.mend


def test_two_variables_that_differ(check: Callable[..., list[Finding]], tmp_path: Path) -> None:
    (finding,) = check(CUDA_PATH=str(cuda(tmp_path / "other")))
    assert finding.level == "warning"
    assert "CUDA_PATH" in finding.what


@pytest.mark.parametrize(
    ("release", "arch", "first"),
    [("12.8", (12, 0), "12.9"), ("12.8", (12, 1), "12.9"), ("12.8", (10, 3), "12.9"), ("12.6", (10, 0), "12.8")],
)
def test_an_nvcc_too_old_for_the_architecture(
    check: Callable[..., list[Finding]], tmp_path: Path, release: str, arch: tuple[int, int], first: str
) -> None:
    cuda(tmp_path / "cuda", release)
    (finding,) = check(arch)
    assert finding.level == "error"
    assert f"is of CUDA {release}, which does not know" in finding.what
    assert f"Install CUDA {first} or later" in finding.mend


def test_another_cuda_than_pytorchs(check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "torch_cuda_version", lambda env: toolkit.Version("12.8"))
    (finding,) = check()
    assert finding.level == "error"
    assert "PyTorch of CUDA 12.8" in finding.what
    monkeypatch.setattr(toolkit, "torch_cuda_version", lambda env: toolkit.Version("13.1"))
    assert [finding.level for finding in check()] == ["warning"]


def test_no_nvcc_names_the_wheels(check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "SYSTEM_HOME", Path("/nowhere"))
    (finding,) = check(CUDA_HOME="", PATH=check.tools)  # type: ignore[attr-defined]
    assert finding.what.startswith("There is no nvcc")
    assert "pip install nvidia-cuda-nvcc nvidia-nvvm" in finding.mend
    monkeypatch.setattr(toolkit, "torch_cuda_version", lambda env: toolkit.Version("13.0"))
    (finding,) = check(CUDA_HOME="", PATH=check.tools)  # type: ignore[attr-defined]
    assert "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'" in finding.mend


def test_an_nvcc_and_headers_of_two_cudas(check: Callable[..., list[Finding]], tmp_path: Path) -> None:
    """PyTorch's wheel pins its CUDA headers; `pip install nvidia-cuda-nvcc` brings the newest compiler beside them."""
    home = cuda(tmp_path / "site" / toolkit.WHEEL_HOME, "13.5")
    header = home / "include/cuda_runtime_api.h"
    header.write_text("#pragma once\n#define CUDART_VERSION  13050\n")
    assert check(CUDA_HOME=str(home)) == []
    header.write_text("#pragma once\n#define CUDART_VERSION  13000\n")
    (finding,) = check(CUDA_HOME=str(home))
    assert finding.level == "error"
    assert "is of CUDA 13.5, and the headers in" in finding.what
    assert finding.what.endswith("of CUDA 13.0: they must be of one.")
    assert finding.mend.startswith("Make them one: pip install 'nvidia-cuda-nvcc==13.0.*'")


def test_headers_that_nobody_has_name_their_wheels(check: Callable[..., list[Finding]], tmp_path: Path) -> None:
    home = cuda(tmp_path / "cuda")
    (home / "include/cublasLt.h").unlink()
    (home / "include/curand_kernel.h").unlink()
    (finding,) = check()
    assert "cublasLt.h, curand_kernel.h" in finding.what
    assert finding.mend == "pip install nvidia-cublas nvidia-curand"
    wheel = tmp_path / "site" / toolkit.WHEEL_HOME / "include"
    wheel.mkdir(parents=True)
    (wheel / "cublasLt.h").touch()
    (wheel / "curand_kernel.h").touch()
    assert check() == []


def test_no_ninja(check: Callable[..., list[Finding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    for name in ("c++", "cc"):
        (tmp_path / "few").mkdir(exist_ok=True)
        program(tmp_path / "few" / name)
    (finding,) = check(PATH=str(tmp_path / "few"))
    assert finding.mend == "pip install ninja"
    program(tmp_path / "scripts/ninja")
    assert check(PATH=str(tmp_path / "few")) == [], "the one beside this Python is put on PATH"


def test_no_compiler(check: Callable[..., list[Finding]]) -> None:
    (finding,) = check(CXX="no-such-c++")
    assert "'no-such-c++'" in finding.what


def test_a_cache_folder_below_a_file(check: Callable[..., list[Finding]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = check(FLASHINFER_WORKSPACE_BASE=str(tmp_path / "file"))
    assert "cannot be made" in finding.what
    assert "FLASHINFER_WORKSPACE_BASE" in finding.mend


def test_a_cache_folder_without_space(check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "NEEDED_BYTES", 1 << 60)
    (finding,) = check()
    assert finding.level == "warning"
    assert "MiB free" in finding.what


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLASHINFER_CUDA_ARCH_LIST", "12.0,9.0", "is not a list such as"),
        ("FLASHINFER_CUDA_ARCH_LIST", "120", "is not a list such as"),
        ("FLASHINFER_CUDA_ARCH_LIST", "9.0a 10.0a", "leaves out 12.0"),
        ("FLASHINFER_DISABLE_JIT", "1", "forbids FlashInfer to build"),
        ("FLASHINFER_NVCC", "/nowhere/nvcc", "is not a program"),
        ("FLASHINFER_JIT_DEBUG", "1", "without optimisation"),
        ("FLASHINFER_JIT_VERBOSE", "1", "without optimisation"),
        ("MAX_JOBS", "many", "is not a number"),
    ],
)
def test_variables_that_stand_in_the_way(
    check: Callable[..., list[Finding]], variable: str, value: str, said: str
) -> None:
    (finding,) = check(**{variable: value})
    assert said in finding.what
    assert variable in finding.what
    assert finding.mend


def test_packages_of_another_version() -> None:
    versions = Environment(
        {"flashinfer-python": "0.6.18", "flashinfer-jit-cache": "0.6.17+cu130", "flashinfer-cubin": "0.6.18"}
    )
    found = [f for f in toolkit.preflight(versions) if "jit-cache" in f.what or "cubin" in f.what]
    assert [finding.mend for finding in found] == ["pip install flashinfer-jit-cache==0.6.18"]


# --- completing a toolkit from wheels ------------------------------------------------------------------------


def test_wheels_are_a_toolkit_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = cuda(tmp_path / "site" / toolkit.WHEEL_HOME)
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.13").touch()
    monkeypatch.setattr(toolkit, "SYSTEM_HOME", Path("/nowhere"))
    found = Toolkit({"PATH": BIN}, (tmp_path / "site",))
    assert found.chosen
    assert found.to_load_with()["CUDA_HOME"] == str(home)


def test_a_wrapper_script_on_path_leads_to_the_toolkit_behind_it(tmp_path: Path) -> None:
    """FlashInfer takes the folder above the wrapper's, where there are no headers."""
    home = cuda(tmp_path / "cuda-13.0")
    wrapper = tmp_path / "usr/local/bin/nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = Toolkit({"PATH": f"{wrapper.parent}{os.pathsep}{BIN}"}, ())
    assert found.home == home
    assert found.to_load_with()["CUDA_HOME"] == str(home)


def test_headers_of_wheels_are_searched_after_those_of_the_toolkit(tmp_path: Path) -> None:
    home, wheels = cuda(tmp_path / "cuda", "13.0"), cuda(tmp_path / "site" / toolkit.WHEEL_HOME, "13.5")
    for folder, version in ((home, "13000"), (wheels, "13050")):
        (folder / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION {version}\n")
    (wheels / "include/of_the_wheels_alone.h").touch()
    found = Toolkit({"PATH": BIN, "CUDA_HOME": str(home)}, (tmp_path / "site",)).to_build_with(tmp_path / "made")
    source = tmp_path / "a.cpp"
    source.write_text(
        "#include <of_the_wheels_alone.h>\n#include <cuda_runtime_api.h>\nstatic_assert(CUDART_VERSION == 13000);\n"
    )
    done = subprocess.run(
        ["c++", "-fsyntax-only", "-isystem", str(home / "include"), str(source)],
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_libraries_to_link_with_are_made_where_nobody_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "_SYSTEM_LIBRARIES", ())
    home = cuda(tmp_path / "cuda")
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.13").touch()
    found = Toolkit({"PATH": BIN, "CUDA_HOME": str(home)}, ()).to_build_with(tmp_path / "made")
    assert found["LIBRARY_PATH"].split(os.pathsep)[-1] == str(tmp_path / "made")
    assert (tmp_path / "made/libcudart.so").resolve() == home / "lib/libcudart.so.13"
    assert b"libcuda.so.1" in (tmp_path / "made/libcuda.so").read_bytes(), "the name that a driver goes by"


def test_nothing_heavy_is_imported_for_the_preflight() -> None:
    code = "import sys; from glm5_plugins.warmup import toolkit; from glm5_plugins import Environment; "
    code += "toolkit.preflight(Environment(), (12, 0)); "
    code += "print([m for m in ('torch', 'flashinfer', 'sglang', 'filelock') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
