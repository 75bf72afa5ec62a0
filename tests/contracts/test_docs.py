"""docs/COMPATIBILITY.md says of every release at hand what is so."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.tools import tool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "COMPATIBILITY.md").read_text()
RUN = "run: python tools/fetch_wheels.py all && python tools/write_docs.py"


@pytest.fixture(scope="module")
def write_docs() -> ModuleType:
    return tool("write_docs")


@pytest.mark.parametrize(("devices", "heading"), [(1, "with an SM120 GPU"), (0, "without")])
def test_every_row_of_a_release_at_hand_is_current(write_docs: ModuleType, devices: int, heading: str) -> None:
    section = PAGE.partition(f"## SGLang, on a machine {heading}\n")[2].partition("\n## ")[0].splitlines()
    for row in write_docs.sglang_rows(devices):
        assert write_docs.table_row(row) in section, RUN


def test_the_page_is_what_all_releases_give(write_docs: ModuleType) -> None:
    listed = {line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| 0.5.")}
    at_hand = {env.version_text("sglang") for env in write_docs.sglang_environments(0)}
    if not listed <= at_hand:
        pytest.skip(f"{len(listed - at_hand)} of its releases are not at hand: python tools/fetch_wheels.py all")
    assert write_docs.compatibility_page() == PAGE, RUN
