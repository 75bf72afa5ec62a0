"""What plugins and profiles take for granted about upstream, each with exactly the releases in which it is so.

A new release that is not like the last one fails here first, and the line says what changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from glm5_plugins import wheels
from glm5_plugins.callers import Use, uses
from glm5_plugins.environment import Environment
from glm5_plugins.source import Missing, find


@dataclass(frozen=True)
class Fact:
    """A statement about the source of one distribution, and the versions of which it is true."""

    text: str
    distribution: str
    versions: str
    holds: Callable[[Path], bool]


def has(target: str, *parameters: str) -> Callable[[Path], bool]:
    def holds(root: Path) -> bool:
        try:
            found = find(target, [root])
        except Missing:
            return False
        return all(found.parameter(name) for name in parameters)

    return holds


def says(path: str, pattern: str) -> Callable[[Path], bool]:
    def holds(root: Path) -> bool:
        file = root / path
        return file.is_file() and re.search(pattern, file.read_text(), re.M) is not None

    return holds


def calls(name: str, like: Callable[[Use], bool] = lambda use: True) -> Callable[[Path], bool]:
    def holds(root: Path) -> bool:
        found = [use for use in uses([name], [root]) if use.call]
        return bool(found) and all(map(like, found))

    return holds


def before(target: str, first: str, second: str) -> Callable[[Path], bool]:
    def holds(root: Path) -> bool:
        names = [parameter.name for parameter in find(target, [root]).parameters or ()]
        return first in names and names.index(first) < names.index(second)

    return holds


SRT = "sglang/srt"
FP4_UTILS = f"{SRT}/layers/quantization/fp4_utils.py"
LOADS_PLUGINS = r"^\s+load_plugins\(\)"
SCHEDULER, DETOKENIZER = f"{SRT}/managers/scheduler.py", f"{SRT}/managers/detokenizer_manager.py"
SERVER_ARGS = "sglang.srt.server_args:ServerArgs"
NEW_HOME = "flashinfer.quantization.fp4_quantization:fp4_quantize"
OLD_HOME = "flashinfer.fp4_quantization:fp4_quantize"
FP4_QUANTIZE = "flashinfer:fp4_quantize"

FACTS = (
    Fact(
        "GLM-5's model class is there",
        "sglang",
        ">=0.5.9",
        lambda root: any("class GlmMoeDsaForCausalLM" in f.read_text() for f in root.glob(f"{SRT}/models/*.py")),
    ),
    Fact("SGLang has plugins", "sglang", ">=0.5.11", has("sglang.srt.plugins:load_plugins")),
    Fact("the scheduler loads plugins", "sglang", ">=0.5.11", says(SCHEDULER, LOADS_PLUGINS)),
    Fact("the detokenizer loads plugins", "sglang", ">=0.5.22", says(DETOKENIZER, LOADS_PLUGINS)),
    Fact("fp4_quantize is SGLang's own operator", "sglang", ">=0.5.12", says(FP4_UTILS, "flashinfer_fp4_quantize")),
    Fact("SGLang keeps a copy of the raw one", "sglang", ">=0.5.12", says(FP4_UTILS, "as _flashinfer_fp4_quantize")),
    Fact("a prefill graph is compiled, <= 0.5.13", "sglang", "<0.5.14", calls("PiecewiseCudaGraphRunner")),
    Fact("a prefill graph is compiled, >= 0.5.14", "sglang", ">=0.5.14,<0.5.22", calls("TcPiecewiseCudaGraphBackend")),
    Fact(
        "the prefill graph's caller insists on fullgraph=True",
        "sglang",
        "<0.5.14",
        calls("install_torch_compiled", lambda use: use.keyword("fullgraph") == "True"),
    ),
    Fact(
        "the prefill graph's caller passes fullgraph on",
        "sglang",
        ">=0.5.14",
        calls("install_torch_compiled", lambda use: use.keyword("fullgraph") == "fullgraph"),
    ),
    Fact(
        "fullgraph is passed by keyword, so a keyword can override it",
        "sglang",
        ">=0.5.8",
        calls("install_torch_compiled", lambda use: use.positional <= 1 and not use.spread),
    ),
    Fact("arguments are resolved apart from construction", "sglang", ">=0.5.19", has(f"{SERVER_ARGS}.resolve_once")),
    Fact(
        "Python calls ServerArgs.__post_init__",
        "sglang",
        "<0.5.20",
        lambda root: any("dataclass" in one for one in find(SERVER_ARGS, [root]).decorators),
    ),
    Fact(
        "--enable-breakable-cuda-graph",
        "sglang",
        ">=0.5.11,<0.5.14",
        says(f"{SRT}/server_args.py", "enable_breakable_cuda_graph"),
    ),
    Fact("--nsa-* is the spelling", "sglang", "<0.5.13", says(f"{SRT}/server_args.py", "nsa_prefill_backend")),
    Fact(
        "fp4 quantization is a package",
        "flashinfer-python",
        ">=0.6.7",
        has(NEW_HOME),
    ),
    Fact(
        "the old module still leads to it",
        "flashinfer-python",
        ">=0.6.1",
        has(OLD_HOME),
    ),
    Fact("fp4_quantize has a backend", "flashinfer-python", ">=0.6.8", has(FP4_QUANTIZE, "backend")),
    Fact(
        "a parameter came in before enable_pdl, so it is passed by keyword",
        "flashinfer-python",
        ">=0.6.11",
        before(FP4_QUANTIZE, "is_global_scale_inversed", "enable_pdl"),
    ),
    Fact(
        "FlashInfer has an operator of the name flashinfer::fp4_quantize",
        "flashinfer-python",
        ">=0.6.12",
        says("flashinfer/quantization/fp4_quantization.py", '"flashinfer::fp4_quantize"'),
    ),
    Fact(
        "register_custom_op registers nothing",
        "flashinfer-python",
        ">=0.6.1",
        lambda root: not says("flashinfer/utils.py", r"^    +return torch\.library\.custom_op")(root)
        and says("flashinfer/utils.py", r"^    +return lambda x: x")(root),
    ),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.text.replace(" ", "-"))
def test_a_fact_is_true_of_exactly_its_versions(fact: Fact) -> None:
    releases = wheels.cached(fact.distribution)
    if not releases:
        pytest.skip(f"no {fact.distribution} is at hand: python tools/fetch_wheels.py")
    true = [release.version for release in releases if fact.holds(release.root)]
    meant = [release.version for release in releases if SpecifierSet(fact.versions).contains(release.version)]
    assert true == meant


def test_sglang_asks_for_a_flashinfer_that_this_project_looks_at(sglang_env: Environment) -> None:
    pinned = sglang_env.version("flashinfer-python")
    assert pinned is not None
    assert pinned >= Version("0.6.1")
