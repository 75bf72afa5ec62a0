"""The table of `sbo`: version x GPU x all-to-all x runner."""

from __future__ import annotations

import pytest

from tests.unit.choosing.conftest import NVFP4, VERSIONS, Ask

NOTHING = "applied: in force, no effect expected: "

# GPU, all-to-all, runner -> whether the overlap can happen.
TABLE = [
    ("sm100", "deepep", "flashinfer_cutedsl", True),
    ("sm100", "deepep", "flashinfer_cutlass", False),
    ("sm100", "deepep", "deep_gemm", False),
    ("sm100", "none", "flashinfer_cutedsl", False),
    ("sm120", "deepep", "flashinfer_cutlass", False),
    ("sm120", "none", "flashinfer_cutlass", False),
    ("sm90", "deepep", "deep_gemm", True),
    ("sm90", "deepep", "triton", False),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("arch", "all_to_all", "runner", "overlaps"), TABLE)
def test_table(ask: Ask, version: str, arch: str, all_to_all: str, runner: str, overlaps: bool) -> None:
    answer = ask("sbo", version, arch, tp_size=8, moe_a2a_backend=all_to_all, moe_runner_backend=runner)
    if arch == "sm90" and VERSIONS.index(version) >= VERSIONS.index("0.5.13"):
        assert f"SGLang {version} has no single batch overlap for SM90" in answer.refused
        return
    assert answer.added == {"enable_single_batch_overlap": True}
    assert answer.said.startswith(NOTHING) is not overlaps


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("backend", "since"), [("deepep_v2", "0.5.19"), ("megamoe", "0.5.21")])
def test_backends_that_refuse_it(ask: Ask, version: str, backend: str, since: str) -> None:
    answer = ask("sbo", version, "sm100", tp_size=8, moe_a2a_backend=backend)
    assert bool(answer.refused) == (VERSIONS.index(version) >= VERSIONS.index(since))


def test_the_runner_is_named(ask: Ask) -> None:
    """SBO with flashinfer_cutlass on Blackwell: accepted, and it cannot help."""
    answer = ask("sbo", "0.5.23", "sm120", tp_size=8, moe_a2a_backend="flashinfer", **NVFP4)
    assert "not with flashinfer_cutlass" in answer.said


def test_given_by_the_user(ask: Ask) -> None:
    flags = {"moe_a2a_backend": "deepep", "moe_runner_backend": "flashinfer_cutedsl"}
    answer = ask("sbo", "0.5.23", "sm100", enable_single_batch_overlap=True, **flags)
    assert (answer.added, answer.said) == ({}, "not needed: --enable-single-batch-overlap was given")
