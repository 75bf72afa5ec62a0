"""Wheels of other versions: listed and fetched by a real pip from a folder, kept as source, looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_plugins import wheels
from glm5_plugins.wheels import Release, WheelError
from tests.fakes.installation import Installation


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "glm5-plugins" / "sources"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that pip can see: SGLang 0.5.7, 0.5.8, 0.5.10 and 0.5.99, and an sdist of 0.6.0."""
    folder = tmp_path / "index"
    for version in ("0.5.7", "0.5.10", "0.5.8", "0.5.99"):
        made = Installation(tmp_path / version)
        pins = (
            "flashinfer_python[cu13]==0.6.3",
            "torch==2.9.1",
            "numpy>=1",
            "av==16.1; sys_platform == 'win32'",
            "tilelang==0.1.8; platform_machine == 'x86_64'",
        )
        files = {"sglang/__init__.py": "", "sglang/data.json": "{}", "sglang/deep/module.py": "x = 1"}
        made.distribution("sglang", version, files=files, requires=pins)
        made.wheel("sglang", version, folder)
    (folder / "sglang-0.6.0.tar.gz").write_bytes(b"")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_what_is_listed_is_not_too_old(index: Path) -> None:
    """Some versions of pip list 0.6.0 too, which has no wheel."""
    listed = wheels.listed("sglang")
    assert listed[:3] == ["0.5.8", "0.5.10", "0.5.99"]
    assert listed[3:] in ([], ["0.6.0"])


def test_a_version_without_a_wheel_is_told_from_an_index_that_is_out_of_reach(index: Path) -> None:
    with pytest.raises(wheels.NoWheel):
        wheels.fetch("sglang", "0.6.0")
    with pytest.raises(WheelError) as failure:
        wheels.fetch("flashinfer-python", "0.6.3")
    assert type(failure.value) is WheelError


def test_what_pip_cannot_list_is_an_error(index: Path) -> None:
    with pytest.raises(WheelError, match="pip finds no version of flashinfer-python: "):
        wheels.listed("flashinfer_python")


def test_a_fetched_release_is_kept_as_source(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = wheels.fetch("sglang", "0.5.10")
    assert release == Release("sglang", "0.5.10", cache / "sglang-0.5.10")
    kept = sorted(str(file.relative_to(release.root)) for file in release.root.rglob("*") if file.is_file())
    assert kept == ["sglang-0.5.10.dist-info/METADATA", "sglang/__init__.py", "sglang/deep/module.py"]
    monkeypatch.setattr(wheels, "_pip", None)
    assert wheels.fetch("sglang", "0.5.10") == release


def test_what_pip_cannot_fetch_is_an_error_and_leaves_nothing(index: Path, cache: Path) -> None:
    with pytest.raises(WheelError, match=r"a wheel of sglang 0\.5\.98: No matching distribution") as failure:
        wheels.fetch("sglang", "0.5.98")
    assert "pip index versions sglang" in failure.value.mend
    assert not cache.exists()


def test_an_index_that_is_out_of_reach_is_said_so_at_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(WheelError, match="the package index cannot be reached") as failure:
        wheels.fetch("sglang", "0.5.10")
    assert "pip config list" in failure.value.mend


def test_a_python_without_pip_is_said_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho /x/python: No module named pip >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(python))
    with pytest.raises(WheelError, match="this Python has no pip") as failure:
        wheels.fetch("sglang", "0.5.10")
    assert f"{python} -m ensurepip" in failure.value.mend


def test_a_cache_that_cannot_be_written_is_an_error(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(WheelError, match=r"cannot be written: Not a directory") as failure:
        wheels.fetch("sglang", "0.5.10")
    assert "XDG_CACHE_HOME" in failure.value.mend


@pytest.mark.parametrize("text", ["0.5.*", "0.5.8,<1", "newest"])
def test_what_is_no_version_is_refused_and_leaves_nothing(index: Path, tmp_path: Path, cache: Path, text: str) -> None:
    with pytest.raises(WheelError, match="is no version"):
        wheels.find("sglang", text, tmp_path, download=True)
    assert not cache.exists()


def test_a_version_is_kept_under_its_own_spelling(index: Path, tmp_path: Path, cache: Path) -> None:
    assert wheels.fetch("sglang", "v0.5.10").root == cache / "sglang-0.5.10"
    assert str(wheels.find("sglang", "v0.5.10", tmp_path)) == "sglang 0.5.10"
    (cache / "sglang-0.5.*").mkdir()  # of an earlier version of this project
    assert [str(release) for release in wheels.cached("sglang")] == ["sglang 0.5.10"]


def test_a_local_version_is_found_by_its_public_one(index: Path, tmp_path: Path, cache: Path) -> None:
    (cache / "flashinfer-python-0.6.18+cu130").mkdir(parents=True)
    assert str(wheels.find("flashinfer-python", "0.6.18", tmp_path)) == "flashinfer-python 0.6.18+cu130"


def test_pins_are_what_a_server_requires_in_one_version(index: Path) -> None:
    pins = wheels.fetch("sglang", "0.5.8").pins
    assert pins == {"flashinfer-python": "0.6.3", "torch": "2.9.1", "tilelang": "0.1.8"}


def test_cached_releases_are_in_order(index: Path) -> None:
    for version in ("0.5.99", "0.5.10", "0.5.8"):
        wheels.fetch("sglang", version)
    assert [str(release) for release in wheels.cached("sglang")] == ["sglang 0.5.8", "sglang 0.5.10", "sglang 0.5.99"]
    assert wheels.cached("flashinfer-python") == []


def test_surroundings_have_what_is_given_and_its_pins(index: Path) -> None:
    release = wheels.fetch("sglang", "0.5.8")
    env = wheels.environment(release)
    assert (env.version_text("sglang"), env.version_text("torch")) == ("0.5.8", "2.9.1")
    assert env.version_text("flashinfer-python") is None
    assert env.roots == (release.root,)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("sglang-0.5.8-py3-none-any.whl", None, "There is no file"),
        ("sglang-0.5.8-py3-none-any.whl", b"half", "cannot be read as a wheel: File is not a zip file"),
        ("sglang.whl", b"", "cannot be read as a wheel: Invalid wheel filename"),
    ],
)
def test_a_bad_wheel_is_an_error(tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WheelError, match=text):
        wheels.unpack(tmp_path / name, tmp_path / "out")


def test_a_release_is_found_in_the_cache_by_path_or_by_download(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=r"sglang 0\.5\.99 is neither installed here nor in ") as failure:
        wheels.find("sglang", "0.5.99", tmp_path)
    assert "--download" in failure.value.mend
    by_path = wheels.find("sglang", str(index / "sglang-0.5.99-py3-none-any.whl"), tmp_path)
    assert by_path.root.is_relative_to(tmp_path)
    downloaded = wheels.find("sglang", "0.5.99", tmp_path, download=True)
    assert wheels.find("sglang", "0.5.99", tmp_path) == downloaded


def test_a_wheel_of_something_else_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=r"is a wheel of sglang, not of flashinfer-python"):
        wheels.find("flashinfer-python", str(index / "sglang-0.5.99-py3-none-any.whl"), tmp_path)
