"""Uses of a name, found in source."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from glm5_plugins.callers import Use, first_uses, uses


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "sglang/__init__.py": "",
        "sglang/install.py": "def install(module, fullgraph=True): ...\n",
        "sglang/runner.py": """
            from sglang.install import install
            install(model, fullgraph=True, *rest)
            hooks = [install]
            runner.install(1, 2)
            install = None
        """,
        "sglang/renamed.py": "from sglang.install import install as put\nput(model, fullgraph=flag)\n",
        "sglang/spoken.py": "# install(model)\nTEXT = 'install(model)'\n",
        "sglang/broken.py": "install(\n",
        "sglang/test/test_install.py": "install()\nonly_tested()\n",
        "other/__init__.py": "install()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def test_every_use_and_how(root: Path) -> None:
    found = sorted(uses(["install"], [root]), key=str)
    assert found == [
        Use("install", root / "sglang/renamed.py", 2, True, 1, (("fullgraph", "flag"),)),
        Use("install", root / "sglang/runner.py", 3, True, 1, (("fullgraph", "True"),), spread=True),
        Use("install", root / "sglang/runner.py", 4),
        Use("install", root / "sglang/runner.py", 5, True, 2),
    ]
    assert found[1].keyword("fullgraph") == "True"
    assert found[3].keyword("fullgraph") is None
    assert str(found[2]) == f"{root}/sglang/runner.py:4"


def test_the_first_use_of_each_that_has_one(root: Path) -> None:
    assert first_uses(["install", "only_tested", "nowhere"], [root]).keys() == {"install"}


def test_a_package_that_is_not_there_has_no_uses(tmp_path: Path) -> None:
    assert list(uses(["install"], [tmp_path])) == []
