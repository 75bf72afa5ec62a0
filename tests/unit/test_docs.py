"""The generated pages that need no wheel."""

import json
from pathlib import Path

import pytest

from tests.support.tools import tool

ROOT = Path(__file__).parents[2]


def test_the_ledger_of_patches_is_current() -> None:
    page = tool("write_docs").patches_page()
    assert (ROOT / "docs" / "PATCHES.md").read_text() == page, "run: python tools/write_docs.py"


def test_the_page_of_runs_has_a_row_for_every_environment() -> None:
    matrix = tool("record_matrix")
    assert {"lint", "contracts-all", "server-sglang0.5.11-all", "campaign"} <= set(matrix.environments())
    assert matrix.PAGE.read_text() == matrix.page(matrix.rows()), "run: python tools/record_matrix.py"


def test_a_run_is_recorded_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = tool("record_matrix")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "MATRIX.md")
    result = {
        "python": {"version_info": [3, 11, 7, "final", 0]},
        "installed_packages": ["sglang==0.5.23", "glm5-plugins @ file:///x", "torch==2.13.0+cpu"],
        "result": {"success": False, "exit_code": 1, "duration": 90.0},
        "test": [
            {"output": "two lines\n== 1 failed, 52 passed, 4 skipped, 1 warning, 2 errors in 243.55s (0:04:03) ==\n"},
            {"output": "no tests here, 9 passed to others\n"},
        ],
    }
    results = tmp_path / "r.json"
    results.write_text(json.dumps({"testenvs": {"unit": result, ".pkg": {}, "lint": {}}}))
    (row,) = matrix.recorded([results], "abcd1234")
    kept = matrix.Row("lint", "passed", commit="1234abcd")
    matrix.PAGE.write_text(matrix.page({"unit": row, "lint": kept}))
    assert matrix.rows()["lint"] == kept
    assert matrix.rows()["types"] == matrix.Row("types", "not run")
    assert str(matrix.rows()["unit"]).startswith(
        "| unit | failed | 52 | 4 | 3 | 1.5 | Python 3.11, sglang 0.5.23, torch 2.13.0+cpu | abcd1234 | 20"
    )
