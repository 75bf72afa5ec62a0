"""A folder to ship: what it says, and what it refuses to be used for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from glm5_plugins import Environment, NotApplicable
from glm5_plugins.errors import ConfigurationError, NotInForce
from glm5_plugins.warmup import bundle
from glm5_plugins.warmup.bundle import Bundle

VERSIONS: dict[str, str | None] = {"flashinfer-python": "0.6.18", "apache-tvm-ffi": "0.1.11"}


@pytest.fixture
def made(tmp_path: Path) -> Bundle:
    library = tmp_path / "cache/fp4_quantization_120f.so"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF and so on")
    artifact: Any = SimpleNamespace(name="fp4_quantization_120f", library=library)
    return bundle.write(tmp_path / "ship", [artifact], Environment(dict(VERSIONS)), "12.0f", "13.0")


def check(made: Bundle, *, arch: tuple[int, int] = (12, 0), cuda: str | None = "13.0", **versions: str) -> None:
    env = Environment({**VERSIONS, **{name.replace("_", "-"): text for name, text in versions.items()}})
    bundle.read(made.folder).check(env, arch, Version(cuda) if cuda else None)


def test_it_fits_where_it_was_made_for(made: Bundle) -> None:
    assert bundle.read(made.folder) == made
    assert made.library("fp4_quantization_120f").is_file()
    check(made)
    check(made, flashinfer_python="0.6.18+cu130", cuda="13.1")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"flashinfer_python": "0.6.17"}, "for flashinfer-python 0.6.18, not 0.6.17"),
        ({"apache_tvm_ffi": "0.1.9"}, "for apache-tvm-ffi 0.1.11, not 0.1.9"),
        ({"arch": (12, 1)}, "for 12.0f, not 12.1"),
        ({"arch": (9, 0)}, "for 12.0f, not 9.0"),
        ({"cuda": "12.9"}, "for CUDA 13.0, not 12.9"),
    ],
)
def test_another_installation_is_refused(made: Bundle, other: dict[str, Any], said: str) -> None:
    with pytest.raises(NotInForce) as refused:
        check(made, **other)
    assert said in refused.value.what
    assert "glm5-plugins warmup --out" in refused.value.mend


def test_a_file_that_did_not_arrive_whole_is_refused(made: Bundle) -> None:
    made.library("fp4_quantization_120f").write_bytes(b"\x7fELF and")
    with pytest.raises(NotInForce, match="is not the file that was shipped"):
        check(made)
    made.library("fp4_quantization_120f").unlink()
    with pytest.raises(NotInForce, match="is not the file that was shipped"):
        check(made)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "arch": "12.0f"}'])
def test_a_folder_that_is_no_bundle_is_refused(made: Bundle, text: str) -> None:
    (made.folder / "manifest.json").write_text(text)
    with pytest.raises(ConfigurationError, match="is not a folder of modules"):
        bundle.read(made.folder)


def test_making_it_again_replaces_it(made: Bundle, tmp_path: Path) -> None:
    document = json.loads((made.folder / "manifest.json").read_text())
    assert document["modules"].keys() == {"fp4_quantization_120f"}
    again = bundle.write(made.folder, [], Environment(dict(VERSIONS)), "12.0f", "13.0")
    assert again == replace(made, modules={})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "letters").touch()
    with pytest.raises(ConfigurationError, match="is not a folder of modules"):
        bundle.write(tmp_path, [], Environment(dict(VERSIONS)), "12.0f", "13.0")


def test_without_a_gpu_nothing_is_loaded_from_it(made: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "cuda_devices", 0)
    with pytest.raises(NotApplicable, match="no CUDA device"):
        bundle.loader(made.folder, Environment())(lambda spec: None)
