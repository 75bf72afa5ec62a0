"""Other versions of SGLang and FlashInfer: which there are on the package index, and the Python files of their wheels.

pip knows the index and its addresses; nothing here does. A wheel is downloaded once and kept as the `.py` files and the
metadata in it, below `~/.cache/glm5-plugins/sources` (or `$XDG_CACHE_HOME`). Nothing of it is ever imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from glm5_plugins import source
from glm5_plugins.environment import Environment
from glm5_plugins.errors import Glm5Error

OLDEST = {"sglang": Version("0.5.8"), "flashinfer-python": Version("0.6.1")}
"""The oldest version of each distribution that this project looks at."""

IMPORTED_AS = {"sglang": "sglang", "flashinfer-python": "flashinfer"}
"""The top-level package of each distribution."""

# Any wheel of a version will do, for its source is read, not run: the first that pip finds.
_PYTHONS = ("3.11", "3.12", "3.13", "3.10")
_MACHINE = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}
_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


class WheelError(Glm5Error):
    """A version is not to be had."""


class NoWheel(WheelError):
    """The index has a version of this number at most as source, or has none."""


@dataclass(frozen=True)
class Release:
    """One version of one distribution, and the folder its source is in.

    Args:
        distribution: Its name on the index, normalized.
        version: As the metadata spells it.
        root: A folder that holds its top-level packages and its `.dist-info`.
    """

    distribution: str
    version: str
    root: Path

    @property
    def parsed(self) -> Version:
        """The version, to compare."""
        return Version(self.version)

    @functools.cached_property
    def pins(self) -> dict[str, str]:
        """The distributions that it requires in exactly one version, on Linux and x86-64."""
        found: dict[str, str] = {}
        for requirement in map(Requirement, self._metadata.requires or ()):
            parts = list(requirement.specifier)
            here = requirement.marker is None or requirement.marker.evaluate(_MACHINE)
            if len(parts) == 1 and parts[0].operator == "==" and here:
                found[canonicalize_name(requirement.name)] = parts[0].version
        return found

    @property
    def _metadata(self) -> metadata.Distribution:
        unpacked = metadata.distributions(name=self.distribution, path=[str(self.root)])
        return next(iter(unpacked), None) or metadata.distribution(self.distribution)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def environment(*releases: Release) -> Environment:
    """The surroundings of a process that has these releases and what they pin, and no other SGLang or FlashInfer."""
    versions: dict[str, str | None] = {}
    for release in reversed(releases):
        versions |= release.pins
    versions |= dict.fromkeys(OLDEST) | {release.distribution: release.version for release in releases}
    return Environment(versions, roots=tuple(release.root for release in releases))


def folder() -> Path:
    """Where sources are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "glm5-plugins" / "sources"


def cached(distribution: str) -> list[Release]:
    """The releases that are at hand, oldest first."""
    name = canonicalize_name(distribution)
    found = []
    for path in folder().glob(f"{name}-*"):
        version = path.name.removeprefix(f"{name}-")
        if _parsed(version) is not None:
            found.append(Release(name, version, path))
    return sorted(found, key=lambda release: release.parsed)


def listed(distribution: str) -> list[str]:
    """The versions that the index has, from `OLDEST` on, oldest first; pre-releases do not count.

    Some versions of pip list those too that have no wheel: `fetch` tells.

    Raises:
        WheelError: pip cannot say.
    """
    name = canonicalize_name(distribution)
    found: set[str] = set()
    for python in _PYTHONS:
        done = _pip("index", "versions", name, *_any_wheel(python))
        match = re.search(r"^Available versions: (.+)$", done.stdout, re.M)
        found.update(match[1].split(", ") if match else ())
    if not found:
        raise WheelError(f"pip finds no version of {name}: {_last_line(done.stderr)}", "Check pip's index and proxy.")
    return sorted((text for text in found if Version(text) >= OLDEST[name]), key=Version)


def fetch(distribution: str, version: str) -> Release:
    """A release from the cache, or else downloaded by pip into it.

    Raises:
        NoWheel: The index has no wheel of it.
        WheelError: pip cannot get it, it cannot be kept, or that is no version.
    """
    name = canonicalize_name(distribution)
    parsed = _parsed(version)
    if parsed is None:
        raise WheelError(f"{version!r} is no version.", "Give one such as 0.5.22, or the path of a wheel.")
    version = str(parsed)
    wanted = folder() / f"{name}-{version}"
    if wanted.is_dir():
        return Release(name, version, wanted)
    with tempfile.TemporaryDirectory() as download:
        for python in _PYTHONS:
            done = _pip("download", "--no-deps", "--quiet", "-d", download, *_any_wheel(python), f"{name}=={version}")
            if done.returncode == 0:
                break
            if (why := _why_no_pip(done.stderr)) is not None:
                raise WheelError(f"pip cannot download a wheel of {name} {version}: {why[0]}.", why[1])
        else:
            known = re.search(r"\(from versions: (?!none)", done.stderr) is not None
            raise (NoWheel if known else WheelError)(
                f"pip cannot download a wheel of {name} {version}: {_last_line(done.stderr)}",
                f"`pip index versions {name}` lists the versions there are.",
            )
        (wheel,) = Path(download).glob("*.whl")
        try:
            return _keep(wheel, name, version)
        except OSError as error:
            what = f"{folder()} cannot be written: {error.strerror}."
            raise WheelError(what, "Set XDG_CACHE_HOME to a folder that can.") from None


def unpack(wheel: Path, into: Path) -> Release:
    """Unpack the Python files and the metadata of a wheel below `into`.

    Raises:
        WheelError: There is no such file, or it is no wheel.
    """
    try:
        wheel.stat()
        name, version, _, _ = parse_wheel_filename(wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.namelist() if one.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(into, members)
    except FileNotFoundError:
        raise WheelError(f"There is no file {wheel}.", "Give a version, or the path of a wheel.") from None
    except (InvalidWheelFilename, zipfile.BadZipFile, OSError) as error:
        raise WheelError(f"{wheel} cannot be read as a wheel: {error}", "Download it again.") from None
    return Release(name, str(version), into)


def _keep(wheel: Path, name: str, version: str) -> Release:
    """Move the source of a wheel into the cache in one step, so that nobody sees half of it."""
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".") as parent:
        made = Path(parent) / "source"
        unpack(wheel, made)
        wanted = folder() / f"{name}-{version}"
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(wanted)
    return Release(name, version, wanted)


def installed(distribution: str) -> Release | None:
    """The release that is installed here, editable or not; None where there is none or its source is not found."""
    try:
        version = metadata.version(distribution)
        file = source.find(IMPORTED_AS[canonicalize_name(distribution)]).file
    except (metadata.PackageNotFoundError, source.Missing):
        return None
    return Release(canonicalize_name(distribution), version, file.parent.parent)


def find(distribution: str, wanted: str, scratch: Path, download: bool = False) -> Release:
    """A release by version or by the path of its wheel: the one installed, one from the cache, or a download.

    Args:
        distribution: Its name.
        wanted: A version, or the path of a `.whl`.
        scratch: A folder to unpack a wheel into.
        download: Whether pip may fetch it.

    Raises:
        WheelError: It is not at hand; the text says how to get it.
    """
    name = canonicalize_name(distribution)
    if wanted.endswith(".whl"):
        release = unpack(Path(wanted), Path(tempfile.mkdtemp(dir=scratch)))
        if release.distribution != name:
            raise WheelError(f"{wanted} is a wheel of {release.distribution}, not of {name}.", f"Give one of {name}.")
        return release
    here = installed(name)
    at_hand = ([] if here is None else [here]) + cached(name)
    closest_first: tuple[Callable[[str], object], ...] = (_text, _parsed, _public)
    for same in closest_first:  # FlashInfer 0.6.18+cu130 is 0.6.18 where nothing is closer
        for release in at_hand:
            if (version := same(wanted)) is not None and same(release.version) == version:
                return release
    if _parsed(wanted) is None:
        raise WheelError(f"{wanted!r} is no version.", "Give one such as 0.5.22, or the path of a wheel.")
    if download:
        return fetch(name, wanted)
    raise WheelError(
        f"{name} {wanted} is neither installed here nor in {folder()}.",
        "Add --download to fetch its wheel with pip, or give the path of a wheel in place of the version.",
    )


def _text(version: str) -> str:
    return version


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _public(version: str) -> str | None:
    parsed = _parsed(version)
    return None if parsed is None else parsed.public


def _why_no_pip(said: str) -> tuple[str, str] | None:
    """Why no other wheel would do either, and what to do about it, where pip itself or its index is the trouble."""
    if "No module named pip" in said:
        return "this Python has no pip", f"Run `{sys.executable} -m ensurepip`, or give the path of a wheel."
    if "Retrying (" in said or "connection" in _last_line(said).lower():
        return "the package index cannot be reached", "Check the network, and pip's index and proxy: `pip config list`."
    return None


def _any_wheel(python: str) -> Iterator[str]:
    yield from ("--only-binary=:all:", "--python-version", python)
    for platform in _PLATFORMS:
        yield from ("--platform", platform)


def _pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line: Sequence[str] = (sys.executable, "-m", "pip", command, "--disable-pip-version-check", *arguments)
    return subprocess.run(line, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith("WARNING")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")
