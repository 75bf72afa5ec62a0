"""What an error suggests in place of an unknown name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from glm5_plugins import errors, flags
from glm5_plugins.errors import did_you_mean

FLAGS = sorted({option for flag in flags.of("0.5.23") for option in flag.options})


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("--enable-msclpp", FLAGS, "Did you mean '--enable-mscclpp'?"),
        ("--TP_SIZES", FLAGS, "Did you mean '--tp-size'?"),
        ("moe-runner", ["moe_runner", "ep"], "Did you mean 'moe_runner'?"),
        ("zzz", ["b", "a"], "Known: a, b."),
        ("zzz", [], "Known: none."),
    ],
)
def test_the_nearest_name_or_all(name: str, known: list[str], says: str) -> None:
    assert did_you_mean(name, known) == says


@pytest.mark.parametrize(
    ("start", "lists"),
    [
        ("--", "`python -m sglang.launch_server --help`"),
        ("GLM5_", "`glm5-plugins env`"),
        ("", "`glm5-plugins list`"),
    ],
)
def test_of_many_names_ten_are_told_and_where_all_are(start: str, lists: str) -> None:
    known = [f"{start}{letter}" for letter in "abcdefghijklmno"]
    said = did_you_mean("zzzzzzzz", known)
    assert said == f"Known: {', '.join(known[:10])} and 5 more, which {lists} shows."


def test_few_of_many_names_are_compared_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 50 µs for each, and a command may have hundreds of unknown flags."""
    compared: list[str] = []

    def close(word: str, possibilities: Iterable[str], **more: float) -> list[str]:
        compared.extend(possibilities)
        return []

    monkeypatch.setattr(errors, "get_close_matches", close)
    did_you_mean("--enable-msclpp", FLAGS)
    assert len(compared) <= 10
    assert "__enable_mscclpp" in compared
