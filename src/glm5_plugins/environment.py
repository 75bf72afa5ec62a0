"""What this process is and has: versions, process role, CUDA devices. Everything is looked up when first asked for."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class Role(str, Enum):
    """What a process does for the server."""

    MAIN = "main"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    DP_CONTROLLER = "dp-controller"
    WORKER = "worker"


# The functions that SGLang gives to multiprocessing.Process, in every version 0.5.8-0.5.23.
_ROLE_OF_TARGET = {
    "run_scheduler_process": Role.SCHEDULER,
    "run_detokenizer_process": Role.DETOKENIZER,
    "run_data_parallel_controller_process": Role.DP_CONTROLLER,
}


class Place(Enum):
    """Where an installed version stands against a window of versions."""

    INSIDE = "inside"
    BELOW = "below"
    ABOVE = "above"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Window:
    """A range of versions of one distribution, as in `sglang>=0.5.9,<0.5.22`."""

    requirement: Requirement

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read a PEP 508 requirement.

        Raises:
            ValueError: The text is no requirement, or has a marker, extra or address.
        """
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise ValueError(f"{text!r} is no version range such as 'sglang>=0.5.9,<0.5.22'") from error
        if requirement.marker or requirement.extras or requirement.url:
            raise ValueError(f"{text!r}: only a name and a version range are meant")
        return cls(requirement)

    @property
    def has_end(self) -> bool:
        """Whether the range has an upper bound."""
        return any(part.operator in ("<", "<=", "==", "~=", "===") for part in self.requirement.specifier)

    def place(self, version: Version) -> Place:
        """Say where `version` stands; local parts (`+cu130`) do not count, pre-releases do.

        A pre-release of a bound may or may not have the change that set the bound: that is unknown. So it is of
        `0.5.12.post2.dev70`, 70 commits after 0.5.12.post1 on the way to 0.5.13.
        """
        public = Version(version.public)
        bounds = {part.version for part in self.requirement.specifier}
        *first, last = version.release
        nearing = {version.base_version, ".".join(map(str, (*first, last + 1))) if version.is_postrelease else ""}
        if version.is_prerelease and nearing & bounds:
            return Place.UNKNOWN
        if self.requirement.specifier.contains(public, prereleases=True):
            return Place.INSIDE
        lower = SpecifierSet(",".join(str(part) for part in self.requirement.specifier if part.operator in (">", ">=")))
        return Place.ABOVE if lower.contains(public, prereleases=True) else Place.BELOW

    def __str__(self) -> str:
        parts = sorted(map(str, self.requirement.specifier), reverse=True)  # the lower bound first
        return f"{self.requirement.name}{','.join(parts)}"


@dataclass
class Environment:
    """The surroundings of one process; cheap to make, and every look-up is done once.

    Args:
        versions: Version texts by distribution name that stand in for what is installed (for tests and for
            asking about a version one does not have).
        capability: A compute capability that stands in for that of the GPU, such as (12, 0).
        elsewhere: The question is about another machine: the GPUs and packages of this one do not count.
        roots: Folders whose packages' source stands in for that of what is installed; given with `versions`.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    elsewhere: bool = False
    roots: tuple[Path, ...] | None = None

    def version_text(self, distribution: str) -> str | None:
        """Return the installed version as its metadata spells it, or None when it is not installed."""
        if distribution not in self.versions and self.elsewhere:
            return None
        if distribution not in self.versions:
            try:
                self.versions[distribution] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                self.versions[distribution] = None
        return self.versions[distribution]

    def version(self, distribution: str) -> Version | None:
        """Return the installed version, or None when it is absent or PEP 440 cannot place it.

        A source checkout without tags calls itself `0.0.0.dev1+g…` or `0.1.dev1+g…`: that is no version either.
        """
        text = self.version_text(distribution)
        if text is None:
            return None
        try:
            version = Version(text)
        except InvalidVersion:
            return None
        untagged = not any(version.release) or (version.is_devrelease and version.release == (0, 1))
        return None if untagged else version

    def public_version(self, distribution: str) -> str:
        """Return the version without its local part (`+cu130`), or all of one that cannot be placed, or `absent`."""
        version = self.version(distribution)
        return version.public if version is not None else self.version_text(distribution) or "absent"

    def place(self, window: Window) -> Place:
        """Say where the installed version stands against `window`."""
        name = window.requirement.name
        if self.version_text(name) is None:
            return Place.ABSENT
        version = self.version(name)
        return Place.UNKNOWN if version is None else window.place(version)

    @property
    def role(self) -> Role:
        """What this process does; a child does not know before it has begun its work, and is a worker then."""
        process = multiprocessing.current_process()
        target = getattr(process, "_target", None)
        if target is not None:
            name = getattr(target, "__name__", "")
            return _ROLE_OF_TARGET.get(name, Role.WORKER)
        return Role.WORKER if self.is_child else Role.MAIN

    @property
    def is_child(self) -> bool:
        """Whether multiprocessing started this process."""
        return multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv

    @cached_property
    def cuda_devices(self) -> int:
        """How many NVIDIA GPUs this process may use, asked of the driver; no CUDA context is made."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
            return 0
        with contextlib.suppress(OSError), _nvml() as nvml:
            count = ctypes.c_uint()
            if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
                return count.value
        return len(list(Path("/dev").glob("nvidia[0-9]*")))

    @cached_property
    def compute_capability(self) -> tuple[int, int] | None:
        """The compute capability of the first GPU this process may use, such as (12, 0); None without one.

        Asked of the driver; no CUDA context is made.
        """
        if self.capability is not None:
            return self.capability
        if self.elsewhere or self.cuda_devices == 0:
            return None
        with contextlib.suppress(OSError), _nvml() as nvml:
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if (
                _first_visible(nvml, device)
                and nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
            ):
                return major.value, minor.value
        return None

    @property
    def sglang_plugins(self) -> frozenset[str] | None:
        """The names in `SGLANG_PLUGINS`, or None when it is unset and SGLang loads every plugin."""
        value = os.environ.get("SGLANG_PLUGINS", "")
        names = frozenset(name.strip() for name in value.split(",") if name.strip())
        return names or None


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    """The driver's management library, initialised.

    Raises:
        OSError: There is none, or it finds no driver.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() != 0:
        raise OSError("NVML finds no driver")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _first_visible(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> bool:
    """Fill in the handle of the first entry of `CUDA_VISIBLE_DEVICES`: an index, or the start of a UUID."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return bool(nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(device)) == 0)
    index = int(first) if first.isdigit() else 0
    return bool(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0)
