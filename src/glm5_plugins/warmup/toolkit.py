"""What compiles the modules: nvcc, ninja, headers and libraries; found, checked, and completed from wheels.

Judged from files and `nvcc --version` alone: neither PyTorch nor FlashInfer is imported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from glm5_plugins.environment import Environment
from glm5_plugins.findings import Finding
from glm5_plugins.warmup.needs import Arch

# The wheels of CUDA 13 install below site-packages/nvidia/cu13, laid out as a toolkit.
WHEEL_HOME = "nvidia/cu13"
# These have the version of the CUDA they are of, and must be of one.
NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")

# A header that FlashInfer's sources include, and the wheel that brings it.
HEADERS = {
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "crt/host_config.h": "nvidia-cuda-crt",
    "cublasLt.h": "nvidia-cublas",
    "curand_kernel.h": "nvidia-curand",
}

# The first CUDA whose nvcc knows an architecture with what FlashInfer appends to it.
FIRST_CUDA: dict[Arch, tuple[str, str]] = {
    (12, 0): ("12.9", "120f"),
    (12, 1): ("12.9", "121a"),
    (10, 0): ("12.8", "100a"),
    (10, 3): ("12.9", "103a"),
    (9, 0): ("12.0", "90a"),
}

# Where FlashInfer looks last.
SYSTEM_HOME = Path("/usr/local/cuda")

NEEDED_BYTES = 1 << 30


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit that FlashInfer would take in this environment.

    Args:
        environ: The environment.
        site: Folders with installed wheels.
    """

    environ: Mapping[str, str]
    site: tuple[Path, ...]

    @classmethod
    def here(cls) -> Toolkit:
        """The toolkit of this process."""
        sites = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec("nvidia")
            sites += [str(Path(place).parent) for place in (spec.submodule_search_locations if spec else None) or ()]
        return cls(os.environ, tuple(dict.fromkeys(map(Path, sites))))

    @property
    def given(self) -> tuple[str, str] | None:
        """The variable that names a toolkit, and its value; FlashInfer asks for them in this order."""
        for name in ("CUDA_HOME", "CUDA_PATH"):
            if self.environ.get(name):
                return name, self.environ[name]
        return None

    @cached_property
    def wheels(self) -> tuple[Path, ...]:
        """The folders of CUDA wheels, the first one with an nvcc first."""
        found = [folder / WHEEL_HOME for folder in self.site if (folder / WHEEL_HOME).is_dir()]
        return tuple(sorted(found, key=lambda home: not (home / "bin/nvcc").is_file()))

    @cached_property
    def home(self) -> Path | None:
        """The toolkit: what a variable names, what FlashInfer finds by PATH, what the wheels bring."""
        if self.given is not None:
            return Path(self.given[1])
        found = shutil.which("nvcc", path=self.environ.get("PATH"))
        if found is not None:
            for home in (Path(found).parent.parent, Path(found).resolve().parent.parent, _behind_wrapper(Path(found))):
                if home is not None and (home / "include/cuda_runtime.h").is_file():
                    return home
        if (SYSTEM_HOME / "bin/nvcc").is_file():
            return SYSTEM_HOME
        for home in self.wheels:
            if (home / "bin/nvcc").is_file():
                return home
        return None if found is None else Path(found).parent.parent

    @property
    def chosen(self) -> bool:
        """Whether `home` is another folder than FlashInfer would take by itself, so that CUDA_HOME must be set."""
        if self.given is not None or self.home is None:
            return False
        found = shutil.which("nvcc", path=self.environ.get("PATH"))
        return self.home != (Path(found).parent.parent if found else SYSTEM_HOME)

    @cached_property
    def nvcc(self) -> Path | None:
        """The compiler, or None where there is none."""
        if self.environ.get("FLASHINFER_NVCC"):
            return _file(shutil.which(self.environ["FLASHINFER_NVCC"]))
        return None if self.home is None else _file(str(self.home / "bin/nvcc"))

    @cached_property
    def version(self) -> Version | None:
        """The release that nvcc says it is."""
        if self.nvcc is None:
            return None
        try:
            done = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r"release (\d+\.\d+)", done.stdout)
        return Version(found[1]) if found else None

    @cached_property
    def headers_version(self) -> Version | None:
        """The CUDA of the toolkit's own headers; None where it has none, or they don't say."""
        if self.home is None:
            return None
        try:
            text = (self.home / "include/cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.M)
        return Version(f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}") if found else None

    @cached_property
    def ninja(self) -> Path | None:
        """The ninja on PATH, or the one beside this Python, which `python -m` does not put on PATH."""
        found = shutil.which("ninja", path=self.environ.get("PATH"))
        return _file(found) or _file(str(Path(sysconfig.get_path("scripts")) / "ninja"))

    def lacking_headers(self) -> dict[str, str]:
        """Headers that no folder has, and the wheels that bring them."""
        folders = [*_paths(self.environ, "CPATH"), *_paths(self.environ, "CPLUS_INCLUDE_PATH")]
        folders += [home / "include" for home in ((self.home,) if self.home else ())]
        folders += [home / "include" for home in self.wheels]
        folders += [folder / "cccl" for folder in folders]  # where a toolkit of CUDA 13 keeps them
        return {name: wheel for name, wheel in HEADERS.items() if not any((f / name).is_file() for f in folders)}

    def to_load_with(self) -> dict[str, str]:
        """What must be set in a process that builds or loads: FlashInfer runs ninja before every load.

        CUDA_HOME is part of the build file, so a process that loads must have the one that was built with.
        """
        found: dict[str, str] = {}
        if self.chosen:
            found["CUDA_HOME"] = str(self.home)
        if self.ninja is not None and shutil.which("ninja", path=self.environ.get("PATH")) is None:
            found["PATH"] = os.pathsep.join([str(self.ninja.parent), self.environ.get("PATH", os.defpath)])
        return found

    def to_build_with(self, folder: Path) -> dict[str, str]:
        """What a compiler needs besides: the headers of wheels, and libraries to link with.

        Args:
            folder: Where links to libraries may be made, of those that nothing else has.

        Raises:
            OSError: The folder cannot be written.
        """
        found = self.to_load_with()
        includes = [home / "include" for home in self.wheels if home != self.home]
        if includes:
            # Not CPATH: compilers search that before the toolkit's own folder, and may find headers of another CUDA.
            given = map(str, _paths(self.environ, "CPLUS_INCLUDE_PATH"))
            found["CPLUS_INCLUDE_PATH"] = os.pathsep.join([*given, *map(str, includes)])
        libraries = list(self._completed_libraries(folder))
        if libraries:
            before = map(str, _paths(self.environ, "LIBRARY_PATH"))
            found["LIBRARY_PATH"] = os.pathsep.join([*before, *map(str, libraries)])
        return found

    def _completed_libraries(self, folder: Path) -> Iterator[Path]:
        homes = [home for home in (self.home, *self.wheels) if home is not None]
        seen = [home / sub for home in homes for sub in ("lib64", "lib64/stubs", "lib", "lib/stubs")]
        seen += [*_paths(self.environ, "LIBRARY_PATH"), *_SYSTEM_LIBRARIES]
        if not any((one / "libcudart.so").is_file() for one in seen):
            runtime = next((f for one in seen for f in sorted(one.glob("libcudart.so.*"))), None)
            if runtime is not None:
                _link(runtime, folder / "libcudart.so")
                yield folder
        if not any((one / "libcuda.so").is_file() for one in seen):
            # The driver's library, which a machine without a GPU lacks: an empty one of the same name to link with.
            _make_stub(folder / "libcuda.so")
            yield folder


_SYSTEM_LIBRARIES = tuple(map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")))


def _make_stub(path: Path) -> None:
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or "c++"
    command = [compiler, "-shared", "-nostdlib", "-x", "c", "-Wl,-soname,libcuda.so.1", "-o", str(fresh), os.devnull]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    os.replace(fresh, path)


def _link(target: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(target)
    os.replace(fresh, path)


def _behind_wrapper(nvcc: Path) -> Path | None:
    """The toolkit that a small shell script on PATH starts."""
    try:
        text = nvcc.read_bytes()[:4096]
    except OSError:
        return None
    found = re.search(rb"(/[\w./+-]+)/bin/nvcc", text) if text.startswith(b"#!") else None
    return Path(os.fsdecode(found[1])) if found else None


def _file(name: str | None) -> Path | None:
    return Path(name) if name and Path(name).is_file() and os.access(name, os.X_OK) else None


def _paths(environ: Mapping[str, str], name: str) -> list[Path]:
    return [Path(part) for part in environ.get(name, "").split(os.pathsep) if part]


# --- the preflight -------------------------------------------------------------------------------------------


def preflight(env: Environment, arch: Arch | None = None, toolkit: Toolkit | None = None) -> list[Finding]:
    """Check all that a build needs, for one architecture where it is known.

    Returns:
        What is wrong, and how to mend it; nothing where a build can begin.
    """
    kit = Toolkit.here() if toolkit is None else toolkit
    return [
        *_about_home(kit),
        *_about_nvcc(kit, env, arch),
        *_about_tools(kit),
        *_about_cache(kit.environ),
        *_about_variables(kit.environ, arch),
        *_about_packages(env, kit.environ),
    ]


def _about_home(kit: Toolkit) -> Iterator[Finding]:
    if kit.given is None:
        return
    name, value = kit.given
    mend = f"Set {name} to the folder that has bin/nvcc, or unset it."
    if value != value.strip() or value.strip("'\"") != value:
        yield Finding("error", f"{name}={value!r} has quotes or spaces around the path.", mend)
    elif os.pathsep in value:
        yield Finding("error", f"{name}={value!r} is a list; one folder is meant.", mend)
    elif Path(value).is_file():
        yield Finding("error", f"{name}={value!r} is a file; the toolkit's folder is meant.", mend)
    elif not Path(value).is_dir():
        yield Finding("error", f"{name}={value!r} does not exist.", mend)
    elif _file(f"{value}/bin/nvcc") is None and not kit.environ.get("FLASHINFER_NVCC"):
        yield Finding("error", f"{name}={value!r} has no bin/nvcc.", mend)
    other = kit.environ.get("CUDA_PATH", value)
    if name == "CUDA_HOME" and other and Path(other) != Path(value):
        yield Finding(
            "warning", f"CUDA_HOME={value} and CUDA_PATH={other} differ; FlashInfer takes CUDA_HOME.", "Unset one."
        )


def _about_nvcc(kit: Toolkit, env: Environment, arch: Arch | None) -> Iterator[Finding]:
    if kit.nvcc is None:
        if kit.environ.get("FLASHINFER_NVCC"):
            what = f"FLASHINFER_NVCC={kit.environ['FLASHINFER_NVCC']!r} is not a program."
            yield Finding("error", what, "Set it to an nvcc, or unset it.")
        elif kit.given is None:
            yield Finding(
                "error",
                "There is no nvcc: not on PATH, not in /usr/local/cuda, not among the installed wheels.",
                f"Install a CUDA toolkit, or the wheels: {_pip_install(torch_cuda_version(env))}",
            )
        return
    if kit.version is None:
        yield Finding("error", f"{kit.nvcc} --version gives no version.", "Install a whole CUDA toolkit.")
        return
    first, name = FIRST_CUDA.get(arch, ("0", "")) if arch is not None else ("0", "")
    if kit.version < Version(first):
        yield Finding(
            "error",
            f"{kit.nvcc} is of CUDA {kit.version}, which does not know {name}.",
            f"Install CUDA {first} or later, or set CUDA_HOME to it.",
        )
    torch_cuda = torch_cuda_version(env)
    if kit.headers_version not in (None, kit.version):
        yield Finding(
            # The C++ libraries of CUDA 13, which FlashInfer brings too, refuse to be compiled with two.
            "error" if kit.version.major >= 13 else "warning",
            f"{kit.nvcc} is of CUDA {kit.version}, and the headers in {kit.home} of CUDA {kit.headers_version}: "
            "they must be of one.",
            f"Make them one: {_pip_install(kit.headers_version)}"
            if kit.home in kit.wheels
            else "Set CUDA_HOME to a whole CUDA toolkit.",
        )
    if torch_cuda is not None and torch_cuda.major != kit.version.major:
        yield Finding(
            "error",
            f"{kit.nvcc} is of CUDA {kit.version}, and PyTorch of CUDA {torch_cuda}: "
            f"modules would need another libcudart than the one in the process.",
            f"Set CUDA_HOME to a CUDA {torch_cuda.major} toolkit.",
        )
    elif torch_cuda is not None and torch_cuda > kit.version:
        what = f"{kit.nvcc} is of CUDA {kit.version}, older than PyTorch's CUDA {torch_cuda}."
        yield Finding("warning", what, f"A toolkit of CUDA {torch_cuda} or later is what it was made with.")


def _pip_install(cuda: Version | None) -> str:
    """How to get a toolkit as wheels, of the CUDA that is wanted where it is known."""
    of = f"=={cuda.major}.{cuda.minor}.*" if cuda is not None and cuda.major >= 13 else ""
    return " ".join(["pip install", *(f"'{name}{of}'" if of else name for name in NVCC_WHEELS), *_ANY_VERSION])


_ANY_VERSION = ("nvidia-cuda-cccl", "nvidia-cublas", "nvidia-curand")


def _about_tools(kit: Toolkit) -> Iterator[Finding]:
    if kit.ninja is None:
        yield Finding("error", "There is no ninja on PATH or beside this Python.", "pip install ninja")
    compiler = kit.environ.get("CXX", "c++")
    if shutil.which(compiler, path=kit.environ.get("PATH")) is None:
        mend = "Install g++, or set CXX to a C++ compiler."
        yield Finding("error", f"There is no C++ compiler {compiler!r} on PATH, which nvcc needs.", mend)
    if kit.nvcc is not None and (lacking := kit.lacking_headers()):
        wheels = " ".join(dict.fromkeys(lacking.values()))
        yield Finding("error", f"No folder has the headers {', '.join(lacking)}.", f"pip install {wheels}")


def workspace(environ: Mapping[str, str]) -> Path:
    """The folder that FlashInfer keeps its cache in."""
    return Path(environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache/flashinfer"


def _about_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    folder = workspace(environ)
    mend = "Set FLASHINFER_WORKSPACE_BASE to a folder that can be written."
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield Finding("error", f"The cache folder {folder} cannot be made: {place} is a file.", mend)
        return
    status = os.statvfs(place)
    if status.f_flag & os.ST_RDONLY or not os.access(place, os.W_OK):
        yield Finding("error", f"The cache folder {folder} cannot be written: {place} is read-only.", mend)
    free = status.f_bavail * status.f_frsize
    if free < NEEDED_BYTES:
        what = (
            f"The disk of the cache folder {folder} has {free >> 20} MiB free; the modules of a launch may need 1 GiB."
        )
        yield Finding("warning", what, "Free space, or set FLASHINFER_WORKSPACE_BASE to another disk.")


def _about_variables(environ: Mapping[str, str], arch: Arch | None) -> Iterator[Finding]:
    given = environ.get("FLASHINFER_CUDA_ARCH_LIST")
    if given is not None:
        if not re.fullmatch(r"\d+\.\d[a-z]?( \d+\.\d[a-z]?)*", given):
            yield Finding(
                "error",
                f"FLASHINFER_CUDA_ARCH_LIST={given!r} is not a list such as '12.0f' or '10.0a 12.0f'.",
                "Separate architectures by single spaces, major and minor by a dot.",
            )
        elif arch is not None and not re.search(rf"\b{arch[0]}\.{arch[1]}[a-z]?\b", given):
            what = f"FLASHINFER_CUDA_ARCH_LIST={given!r} leaves out {arch[0]}.{arch[1]}, which the modules are for."
            yield Finding("error", what, f"Add {arch[0]}.{arch[1]} to it, or unset it.")
    if environ.get("FLASHINFER_DISABLE_JIT"):
        what = f"FLASHINFER_DISABLE_JIT={environ['FLASHINFER_DISABLE_JIT']} forbids FlashInfer to build modules."
        yield Finding("error", what, "Unset it, or install flashinfer-jit-cache.")
    if environ.get("FLASHINFER_JIT_DEBUG", environ.get("FLASHINFER_JIT_VERBOSE")) == "1":
        name = "FLASHINFER_JIT_DEBUG" if "FLASHINFER_JIT_DEBUG" in environ else "FLASHINFER_JIT_VERBOSE"
        what = f"{name}=1 makes FlashInfer compile without optimisation: the kernels are slow."
        yield Finding("warning", what, f"Unset {name}, and build again.")
    if (jobs := environ.get("MAX_JOBS")) is not None and not (jobs.isdigit() and int(jobs) > 0):
        yield Finding(
            "warning", f"MAX_JOBS={jobs!r} is not a number, and is ignored.", "Set it to a number, or unset it."
        )


def _about_packages(env: Environment, environ: Mapping[str, str]) -> Iterator[Finding]:
    own = env.version_text("flashinfer-python")
    if own is None:
        yield Finding("error", "FlashInfer is not installed.", "pip install flashinfer-python")
        return
    for package in ("flashinfer-jit-cache", "flashinfer-cubin"):
        other = env.version_text(package)
        if other is None or environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
            continue
        if other.partition("+")[0] != own.partition("+")[0]:
            yield Finding(
                "error",
                f"{package} {other} is not of flashinfer-python {own}.",
                f"pip install {package}=={own.partition('+')[0]}",
            )


def torch_cuda_version(env: Environment) -> Version | None:
    """The CUDA that the installed PyTorch was made with, read from its files; None for a build without CUDA."""
    if env.version_text("torch") is None:
        return None
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations if spec else None) or ():
        with contextlib.suppress(OSError, SyntaxError, InvalidVersion):
            for node in ast.parse((Path(place) / "version.py").read_text(encoding="utf-8")).body:
                match node:
                    case ast.AnnAssign(target=ast.Name(id="cuda"), value=ast.Constant(value=str(text))):
                        return Version(text)
    return None
