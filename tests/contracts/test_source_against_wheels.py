"""`find` against real wheels: those at hand, and whatever is installed here.

``GLM5_TEST_ATLAS`` names a JSON file of known places, ``{"sglang": {version: {"hook_targets": …}}}``.
"""

import ast
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from glm5_plugins import wheels
from glm5_plugins.environment import Place, Window
from glm5_plugins.fp4.sites import DENSE, LOADING, OWN_OPERATOR, RAW, STASH
from glm5_plugins.source import Definition, find, lacks

ATLAS = Path(os.environ.get("GLM5_TEST_ATLAS", "nowhere"))
COPIES = ("sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",)
"""Modules that hold a function of FlashInfer which they import from another module of SGLang."""
SGLANG = [release.root for release in wheels.cached("sglang")]
FLASHINFER = [release.root for release in wheels.cached("flashinfer-python")]


def bindings(found: Definition) -> Iterator[tuple[Path, int]]:
    """Every place that binds the name: its definitions and the imports that lead to them."""
    for one in (found, *found.alternatives):
        yield one.file, one.line
        for hop in one.through:
            yield hop.file, hop.line


def as_target(root: Path, dotted: str) -> str:
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        path = root.joinpath(*parts[:cut])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:cut]) + ":" + ".".join(parts[cut:])
    raise AssertionError(f"no module of {dotted} is in {root}")


@pytest.mark.skipif(not (SGLANG and ATLAS.is_file()), reason="needs wheels and GLM5_TEST_ATLAS")
@pytest.mark.parametrize("root", SGLANG, ids=lambda root: root.name)
def test_every_known_place_is_found_on_its_line(root: Path) -> None:
    version = json.loads(ATLAS.read_text())["sglang"].get(root.name.removeprefix("sglang-"))
    if version is None:
        pytest.skip("the file does not know this version")
    wrong = []
    for known in version["hook_targets"].values():
        for dotted, place in known.items():
            file, _, line = place.split()[0].partition(":")
            found = find(as_target(root, dotted), [root])
            if (root / "sglang" / file, int(line)) not in bindings(found):
                wrong.append(f"{dotted}: {place}, found {found}")
    assert wrong == []


@pytest.mark.skipif(not FLASHINFER, reason="no wheel is at hand")
@pytest.mark.parametrize("root", FLASHINFER, ids=lambda root: root.name)
def test_fp4_quantize_is_found_through_its_re_exports(root: Path) -> None:
    found = find("flashinfer:fp4_quantize", [root])
    assert found.file.name == "fp4_quantization.py"
    assert found.parameter("global_scale") is not None
    assert any(d.startswith("flashinfer_api") for d in found.decorators)
    assert find("flashinfer.fp4_quantization:fp4_quantize", [root]).line == found.line


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_sglang() -> None:
    found = find("sglang.srt.model_executor.model_runner:ModelRunner.load_model")
    assert found.kind == "function"
    assert [p.name for p in found.parameters or ()][:1] == ["self"]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_installed_flashinfer() -> None:
    assert find("flashinfer:fp4_quantize").kind == "function"


def raw_imports(root: Path) -> set[tuple[str, str]]:
    """(function, module) of every import of an FP4 function from FlashInfer, at any depth."""
    found = set()
    aliases = {"nvfp4_block_scale_interleave": "block_scale_interleave"}
    functions = {raw.function for raw in RAW} | set(aliases)
    for file in sorted((root / "sglang" / "srt").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "flashinfer" not in text or not any(function in text for function in functions):
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flashinfer":
                for alias in node.names:
                    if alias.name in functions:
                        found.add((aliases.get(alias.name, alias.name), module))
    return found


@pytest.mark.skipif(not SGLANG, reason="no wheel is at hand")
@pytest.mark.parametrize("root", SGLANG, ids=lambda root: root.name)
def test_every_raw_fp4_call_is_in_the_table_and_only_those(root: Path) -> None:
    version = Version(root.name.removeprefix("sglang-"))
    imported = {key for key in raw_imports(root) if key[1] not in LOADING}
    listed = {
        (raw.function, site.module)
        for raw in RAW
        for site in raw.sites
        if SpecifierSet(site.sglang).contains(version) and site.module not in COPIES
    }
    assert imported == listed


@pytest.mark.skipif(not SGLANG, reason="no wheel is at hand")
@pytest.mark.parametrize("root", SGLANG, ids=lambda root: root.name)
def test_the_dense_binding_and_sglangs_own_operator(root: Path) -> None:
    version = Version(root.name.removeprefix("sglang-"))
    assert lacks(DENSE, (), [root]) is None
    has_operator = version >= Version("0.5.12")
    assert (lacks(OWN_OPERATOR.target, (), [root]) is None) == has_operator
    assert (lacks(STASH, (), [root]) is None) == has_operator


@pytest.mark.skipif(not FLASHINFER, reason="no wheel is at hand")
@pytest.mark.parametrize("root", FLASHINFER, ids=lambda root: root.name)
def test_every_fp4_function_is_in_every_flashinfer_of_its_window(root: Path) -> None:
    version = Version(root.name.removeprefix("flashinfer-python-"))
    for raw in RAW:
        if Window.parse(raw.requires[1]).place(version) is Place.INSIDE:
            assert lacks(raw.target, (), [root]) is None
