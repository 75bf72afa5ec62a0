"""The table of `mscclpp`: version x number of ranks, and what each rank is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from glm5_plugins.plugins import mscclpp

from glm5_plugins import Environment
from glm5_plugins.rules import Does, Launch, decide
from tests.unit.choosing.conftest import VERSIONS, Ask

SIZES = (1, 2, 4, 8, 16, 32, 64)


def supported(version: str) -> tuple[int, ...]:
    if VERSIONS.index(version) < VERSIONS.index("0.5.14"):
        return (8, 16)
    return (8, 16, 32) if VERSIONS.index(version) < VERSIONS.index("0.5.21") else (4, 8, 16, 32, 64)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120", "unknown"])
def test_table(ask: Ask, version: str, size: int, arch: str) -> None:
    answer = ask("mscclpp", version, arch, tp_size=size)
    if size in supported(version):
        assert answer.added == {"enable_mscclpp": True}
    else:
        assert f"SGLang {version} uses MSCCL++ among" in answer.refused
        assert f"not among {size} (--tp-size)" in answer.refused


def test_four_ranks_on_0_5_12(ask: Ask) -> None:
    """Case 9: SGLang warns and goes on with NCCL; here the version's own sizes are named."""
    assert "among 8 or 16 ranks, not among 4" in ask("mscclpp", "0.5.12", tp_size=4).refused


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    decision = decide(mscclpp.RULES, Launch(Environment({"sglang": "0.5.23"}), {"tp_size": 8}))
    assert (decision.does, decision.why) == (Does.REFUSE, "MSCCL++ runs on GPUs, and this machine has none")


@pytest.mark.parametrize(("version", "does"), [("0.5.13", Does.ADD), ("0.5.14", Does.REFUSE), ("0.5.23", Does.REFUSE)])
def test_the_package_is_missed_from_0_5_14(version: str, does: Does) -> None:
    decision = decide(mscclpp.RULES, Launch(Environment({"sglang": version}, (12, 0)), {"tp_size": 8}))
    assert decision.does is does
    if does is Does.REFUSE:
        assert "package 'mscclpp', which is not installed" in decision.why


@pytest.mark.parametrize("off", [{"disable_cuda_graph": True}, {"cuda_graph_backend_decode": "disabled"}])
def test_without_graphs_nothing_comes_of_it(ask: Ask, off: dict[str, object]) -> None:
    answer = ask("mscclpp", "0.5.23", tp_size=8, **off)
    assert answer.added == {"enable_mscclpp": True}
    assert answer.said.startswith("applied: in force, no effect expected: ")


@pytest.mark.parametrize("version", VERSIONS)
def test_custom_all_reduce_comes_first_up_to_0_5_13(ask: Ask, version: str) -> None:
    early = VERSIONS.index(version) < VERSIONS.index("0.5.14")
    assert ("beware" in ask("mscclpp", version, tp_size=8).said) == early
    assert "beware" not in ask("mscclpp", version, tp_size=8, disable_custom_all_reduce=True).said


@pytest.mark.parametrize(
    ("communicator", "made"),
    [
        (None, False),
        (SimpleNamespace(disabled=True), False),
        (SimpleNamespace(disabled=True, _context=1), True),  # up to 0.5.13
        (SimpleNamespace(disabled=True, comm=object()), True),  # from 0.5.14
        (SimpleNamespace(disabled=True, available=True, comm=object()), True),  # from 0.5.21
        (SimpleNamespace(disabled=True, available=False, comm=object()), False),
    ],
)
def test_a_rank_knows_whether_its_communicator_was_made(communicator: object, made: bool) -> None:
    assert mscclpp._is_made(communicator) is made
