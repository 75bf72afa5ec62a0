"""FlashInfer's JIT specs behind its getters: where a module lies, whether it is whole and up to date, loading it."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from glm5_plugins.errors import NotInForce
from glm5_plugins.warmup.needs import Arch, Module


class State(str, Enum):
    """What lies in the cache for a module."""

    PREBUILT = "prebuilt"
    CACHED = "cached"
    STALE = "out of date"
    BROKEN = "half-written"
    MISSING = "not built"

    @property
    def ready(self) -> bool:
        """Whether the module can be loaded without a compiler run."""
        return self in (State.PREBUILT, State.CACHED)


@dataclass(frozen=True)
class Artifact:
    """A module as the installed FlashInfer would build and load it.

    Args:
        module: How the runtime asks for it.
        spec: FlashInfer's `JitSpec`.
    """

    module: Module
    spec: Any

    @property
    def name(self) -> str:
        """FlashInfer's own name, which is that of the file: `fp4_quantization_120f`."""
        return str(self.spec.name)

    @property
    def prebuilt(self) -> bool:
        """Whether a package brings the module, so that nothing is built."""
        return bool(self.spec.is_aot)

    @property
    def library(self) -> Path:
        """The shared object that is loaded."""
        return Path(self.spec.aot_path if self.prebuilt else self.spec.jit_library_path)

    def state(self) -> State:
        """Look at the files; writes the build file as FlashInfer itself does before every load.

        Only a process that holds the build lock gets an answer that lasts.
        """
        if self.prebuilt:
            return State.PREBUILT if is_whole(self.library) else State.BROKEN
        if not self.library.exists():
            return State.MISSING
        if not is_whole(self.library):
            return State.BROKEN
        return State.CACHED if self._up_to_date() else State.STALE

    def _up_to_date(self) -> bool:
        """Ask ninja, which decides in FlashInfer too, without letting it build."""
        self.spec.write_ninja()
        command = self.ninja("-n")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.returncode == 0 and "no work to do" in done.stdout

    def ninja(self, *options: str) -> list[str]:
        """The command that FlashInfer's `run_ninja` runs: in another folder ninja would not know what it has built."""
        return ["ninja", *options, "-C", str(self.library.parent.resolve()), "-f", str(self.spec.ninja_path.resolve())]

    def discard_broken(self) -> list[Path]:
        """Delete what is half-written, so that ninja makes it again; returns what was deleted."""
        found = [*self.library.parent.glob("*.o"), self.library]
        broken = [path for path in found if path.exists() and not is_whole(path)]
        for path in broken:
            path.unlink()
        return broken

    def load(self) -> None:
        """Load the module into this process by the runtime's own call, so that the runtime finds it loaded."""
        _getter(self.module)(*self.module.arguments)


def find(module: Module) -> Artifact:
    """Find the spec behind a module; nothing is built or loaded.

    Raises:
        NotInForce: The installed FlashInfer does not have the getter, or the getter builds nothing.
    """
    getter = _getter(module)
    with _intercepted() as caught:
        try:
            getter(*module.arguments)
        except _Caught:
            return Artifact(module, caught[0])
        except Exception as error:
            mend = "Check the architecture and the CUDA toolkit: `glm5-plugins warmup --list`."
            if _is_of_download(error):
                mend = (
                    "FlashInfer downloads the kernels of this module: let this machine reach them, or install "
                    "flashinfer-cubin of the same version."
                )
            raise NotInForce(
                f"FlashInfer refuses the module {module}: {type(error).__name__}: {error}", mend
            ) from error
    raise NotInForce(f"{module.getter} built nothing for {module}: it was loaded in this process already.")


def _is_of_download(error: BaseException) -> bool:
    """Whether a getter failed for a file that it could not get.

    FlashInfer asserts that a file has come ("Failed to get checksums.txt", "….h not found"), and refuses in
    `cubin_loader` where FLASHINFER_NO_DOWNLOAD is set.
    """
    if isinstance(error, AssertionError):
        return "Failed to get" in str(error) or "not found" in str(error)
    return "flashinfer.jit.cubin_loader" in (
        frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)
    )


def cache_folder() -> Path:
    """The folder of this FlashInfer version and architecture, in which the modules lie."""
    return Path(import_module("flashinfer.jit.env").FLASHINFER_WORKSPACE_DIR)


def _getter(module: Module) -> Any:
    place, _, name = module.getter.partition(":")
    try:
        return getattr(import_module(place), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError):
            is_gone = f"{place}.".startswith(f"{error.name}.")
        else:
            is_gone = isinstance(error, AttributeError)
        if is_gone:
            raise NotInForce(
                f"FlashInfer has no {module.getter}: {error}.",
                "This FlashInfer is not one that fp4_warmup is made for; take fp4_warmup out of GLM5_PLUGINS.",
            ) from error
        raise NotInForce(
            f"FlashInfer's {place}, which the module {module} is of, cannot be imported: {str(error).rstrip('.')}.",
            "Install what it asks for, in the Python that SGLang runs in.",
        ) from error


class _Caught(Exception):
    """Leaves a getter at the point where it would build; `functools.cache` keeps no exception."""


@contextmanager
def _intercepted() -> Iterator[list[Any]]:
    spec_class: Any = import_module("flashinfer.jit.core").JitSpec
    caught: list[Any] = []

    def build_and_load(self: Any) -> None:
        caught.append(self)
        raise _Caught

    original = spec_class.build_and_load
    spec_class.build_and_load = build_and_load
    try:
        yield caught
    finally:
        spec_class.build_and_load = original


def is_whole(path: Path) -> bool:
    """Whether a 64-bit ELF file (a shared object, or an object file) is all there.

    A linker writes the table of section headers last, at the very end: a file that was cut short, or whose
    end never reached the disk, does not have it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(64)
            if len(header) < 64 or header[:5] != b"\x7fELF\x02":
                return False
            (table,) = struct.unpack_from("<Q", header, 0x28)
            entry, count, names = struct.unpack_from("<HHH", header, 0x3A)
            if table == 0 or table + entry * count > size or names >= count:
                return False
            file.seek(table + entry * names)
            section = file.read(entry)
    except OSError:
        return False
    kind, offset, length = struct.unpack_from("<4xI16xQQ", section)
    return bool(kind == 3 and offset + length <= size)  # the names of the sections: SHT_STRTAB


def arch_list() -> str:
    """The architectures FlashInfer builds for in this process, as FLASHINFER_CUDA_ARCH_LIST spells them."""
    context = import_module("flashinfer.jit.core").current_compilation_context
    return " ".join(f"{major}.{minor}" for major, minor in sorted(context.TARGET_CUDA_ARCHS))


def cuda_home() -> str | None:
    """The toolkit FlashInfer uses in this process, or None where it finds none."""
    try:
        return str(import_module("flashinfer.jit.cpp_ext").get_cuda_path())
    except (RuntimeError, OSError):
        return os.environ.get("CUDA_HOME")


def assume_gpu(arch: Arch) -> None:
    """Let PyTorch answer as beside a GPU of this architecture; for processes that only compile.

    FlashInfer's TRT-LLM getters ask for the current device's (from 0.6.16), to tell Rubin from Blackwell.
    """
    cuda: Any = import_module("torch.cuda")
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: arch
    cuda.get_device_properties = lambda device=None: SimpleNamespace(major=arch[0], minor=arch[1])


def assume_cuda_build() -> None:
    """Let a PyTorch without CUDA pass for one of the toolkit's version; for processes that only compile.

    FlashInfer asks PyTorch for the CUDA version when it chooses between "120" and "120f".
    """
    torch_version: Any = import_module("torch.version")
    if torch_version.cuda is None:
        torch_version.cuda = str(import_module("flashinfer.jit.cpp_ext").get_cuda_version())
