"""A folder of built modules to ship: written on a build host, checked and used on a server without a compiler.

FOLDER/manifest.json
FOLDER/fp4_quantization_120f/fp4_quantization_120f.so
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.version import Version

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError, NotApplicable, NotInForce
from glm5_plugins.warmup.needs import Arch
from glm5_plugins.warmup.specs import Artifact
from glm5_plugins.warmup.toolkit import torch_cuda_version

FORMAT = 1
_MANIFEST = "manifest.json"
# The packages whose version is part of what a module is linked against.
_LINKED = ("flashinfer-python", "apache-tvm-ffi")


@dataclass(frozen=True)
class Bundle:
    """A folder of modules, and what they were built for.

    Args:
        folder: Where it lies.
        arch: The architectures, as FLASHINFER_CUDA_ARCH_LIST spells them.
        cuda: The toolkit's version.
        versions: Versions of the packages the modules are linked against.
        modules: From the name of a module to the SHA-256 of its shared object.
    """

    folder: Path
    arch: str
    cuda: str
    versions: Mapping[str, str]
    modules: Mapping[str, str]

    def library(self, name: str) -> Path:
        """The shared object of a module."""
        return self.folder / name / f"{name}.so"

    def check(self, env: Environment, arch: Arch, torch_cuda: Version | None) -> None:
        """Refuse modules that do not belong to this installation, or that did not arrive whole.

        Args:
            env: The versions installed.
            arch: The GPU's.
            torch_cuda: PyTorch's CUDA; None where it has none, and nothing is loaded.

        Raises:
            NotInForce: They do not fit; the text names both sides.
        """
        mend = "Make it anew with `glm5-plugins warmup --out` on an installation like this one."
        for name in _LINKED:
            here, there = env.version_text(name), self.versions.get(name)
            if here is None or there is None or here.partition("+")[0] != there.partition("+")[0]:
                raise NotInForce(f"The modules in {self.folder} are for {name} {there}, not {here}.", mend)
        if not any(one.rstrip("af") == f"{arch[0]}.{arch[1]}" for one in self.arch.split()):
            raise NotInForce(f"The modules in {self.folder} are for {self.arch}, not {arch[0]}.{arch[1]}.", mend)
        if torch_cuda is not None and Version(self.cuda).major != torch_cuda.major:
            raise NotInForce(f"The modules in {self.folder} are for CUDA {self.cuda}, not {torch_cuda}.", mend)
        for name, digest in self.modules.items():
            library = self.library(name)
            if not library.is_file() or _digest(library) != digest:
                raise NotInForce(f"{library} is not the file that was shipped.", "Copy the folder again.")


def loader(folder: Path, env: Environment) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes FlashInfer load the modules of a folder in place of building them.

    The folder is checked when FlashInfer is imported, once in each process.
    """

    def using(original: Callable[..., Any]) -> Callable[..., Any]:
        if not env.cuda_devices:
            raise NotApplicable("no CUDA device here: no module is loaded")
        import torch

        load: Any = import_module("tvm_ffi").load_module
        bundle = read(folder)
        bundle.check(env, torch.cuda.get_device_capability(), torch_cuda_version(env))

        @functools.wraps(original)
        def build_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.name in bundle.modules:
                return load(str(bundle.library(self.name)))
            return original(self, *args, **kwargs)

        return build_and_load

    return using


def read(folder: Path) -> Bundle:
    """Read what a folder holds; `Bundle.check` says whether it can be used.

    Raises:
        ConfigurationError: The folder is no bundle.
    """
    path = folder / _MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        return Bundle(folder=folder, **found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{folder} is not a folder of modules: {path.name}: {error}.",
            "Name a folder that `glm5-plugins warmup --out` made.",
        ) from error


def write(folder: Path, artifacts: Sequence[Artifact], env: Environment, arch: str, cuda: str) -> Bundle:
    """Copy built modules into a new folder, whole or not at all.

    Raises:
        ConfigurationError: The folder exists and is no bundle, so it is not replaced.
        OSError: The folder cannot be written.
    """
    if folder.exists() and not (folder / _MANIFEST).is_file() and any(folder.iterdir()):
        raise ConfigurationError(f"--out {folder} exists, and is not a folder of modules.", "Name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for artifact in artifacts:
            target = fresh / artifact.name
            target.mkdir()
            shutil.copyfile(artifact.library, target / artifact.library.name)
        modules = {artifact.name: _digest(fresh / artifact.name / artifact.library.name) for artifact in artifacts}
        versions = {name: env.version_text(name) or "" for name in _LINKED}
        bundle = Bundle(folder, arch, cuda, versions, modules)
        document = {"format": FORMAT, **{key: value for key, value in asdict(bundle).items() if key != "folder"}}
        (fresh / _MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return bundle


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
