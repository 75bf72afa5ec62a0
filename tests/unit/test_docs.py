"""The generated pages that need no wheel."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_ledger_of_patches_is_current() -> None:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    write_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_docs)
    assert (ROOT / "docs" / "PATCHES.md").read_text() == write_docs.patches_page(), "run: python tools/write_docs.py"
