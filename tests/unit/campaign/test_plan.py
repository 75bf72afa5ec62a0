"""Plans: what they may say, and that a wrong one is refused in two lines before anything starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from glm5_plugins.campaign.plan import EXAMPLE, Cell, Plan, read
from glm5_plugins.errors import ConfigurationError
from tests.unit.campaign.synthetic import plan

GOOD = """
name = "good"
[server]
model = "/models/x"
[bench]
concurrency = [10, 1]
[[bench.shapes]]
name = "chat"
input = 10
output = 5
[[arms]]
name = "baseline"
[[arms]]
name = "other"
args = "--disable-radix-cache --json '{\\"a\\": 1}'"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_is_a_plan(tmp_path: Path) -> None:
    example = read(written(tmp_path, EXAMPLE))
    assert [arm.name for arm in example.arms] == ["baseline", "cuda_version", "no-shared-fusion"]
    assert example.arms[1].plugins == ("cuda_version",)


def test_defaults_and_what_follows_from_a_plan(tmp_path: Path) -> None:
    good = read(written(tmp_path, GOOD))
    assert good.base.name == "baseline"
    assert good.cells == (Cell("chat", 1), Cell("chat", 10))
    assert good.arms[1].args == ("--disable-radix-cache", "--json", '{"a": 1}')
    assert (good.bench.requests(1), good.bench.requests(10)) == (8, 40)
    assert not good.arms[1].uses_layer


@pytest.mark.parametrize(
    ("old", "new", "what", "mend"),
    [
        ("concurrency =", "concurency =", "unknown key bench.concurency", "Did you mean 'concurrency'?"),
        ('args = "--d', 'arg = "--d', "unknown key arms[other].arg", "Did you mean 'args'?"),
        ('model = "/models/x"', "", "lacks server.model", "--example"),
        ("[10, 1]", "[10, 0]", "bench.concurrency[1] = 0: Input should be greater than or equal to 1", "Correct it"),
        ("[10, 1]", "[10, 10]", "bench.concurrency = [10, 10]: a value stands there twice", "Correct it"),
        ('name = "other"', 'name = "baseline"', "two arms are called 'baseline'", "Correct it"),
        ('name = "other"', 'name = "../x"', "arms[../x].name = '../x': a name of letters", "Correct it"),
        ("--disable-radix-cache", "--port=1", "--port is set by the campaign", "Correct it"),
        ("--disable-radix-cache", "--model-path /x", "--model-path is set by model = ... of [server]", "Correct it"),
        ('args = "--d', 'env = { GLM5_PLUGINS = "ep" }\n#', "GLM5_PLUGINS is set by plugins = [...]", "Correct it"),
        ('model = "/models/x"', 'model = "x"\nenv = { GLM5_PLUGINS = "ep" }', "in the baseline, too", "Correct it"),
        ('args = "--d', 'env = { GLM5_ON_ERROR = "warn" }\n#', "does nothing in an arm without plugins", "Correct it"),
        ('args = "--d', 'plugins = ["cuda_versoin"]\n#', "'other' names an unknown plugin", "'cuda_version'?"),
        ('name = "good"', 'name = "good"\nbaseline = "nobody"', "baseline = 'nobody' is no arm", "Correct it"),
        ('name = "good"', "name = ", "is not TOML", "toml.io"),
        ("--disable-radix-cache", "'", "No closing quotation", "Correct it"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, what: str, mend: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigurationError) as refused:
        read(written(tmp_path, GOOD.replace(old, new, 1)))
    assert what in refused.value.what
    assert mend in refused.value.mend
    assert str(refused.value).count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml cannot be read: No such file"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize("arms", [2, 3, 5])
def test_no_arm_is_favoured_by_when_it_runs(arms: int) -> None:
    """Over two turns each arm stands at each place twice, and every round has every arm once."""
    of = plan(arms=arms)
    rounds = [[arm.name for arm in of.order(number)] for number in range(2 * arms)]
    assert all(sorted(names) == sorted(arm.name for arm in of.arms) for names in rounds)
    assert set(Counter((place, name) for names in rounds for place, name in enumerate(names)).values()) == {2}


def test_a_plan_survives_its_folder() -> None:
    """`campaign.json` holds the plan; what is read from it is the same."""
    of = plan()
    assert Plan.model_validate(of.model_dump(mode="json")) == of
