"""How `glm5-plugins` takes its arguments: what goes behind `--`."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_plugins import cli

HINT = "put the server's command behind --"


@pytest.mark.parametrize(
    "words",
    [
        ("check", "python", "-m", "sglang.launch_server", "--model", "X"),
        ("launch", "--profile", "X", "--port", "30000"),
        ("launch", "python", "-m", "sglang.launch_server"),
    ],
)
def test_a_forgotten_separator_is_named(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert capsys.readouterr().err.endswith(f"; {HINT}\n")


@pytest.mark.parametrize("words", [("list", "--colour"), ("check", "--colour", "--", "sglang", "serve")])
def test_it_is_not_named_where_it_is_no_remedy(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert capsys.readouterr().err.endswith("unrecognized arguments: --colour\n")


@pytest.mark.parametrize("words", [("doctor", "--", "python", "-m", "x"), ("list", "--", "nonsense")])
def test_nothing_behind_the_separator_is_ignored(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert f"unrecognized arguments: {' '.join(words[1:])}" in capsys.readouterr().err


def test_arguments_of_any_command_may_stand_behind_the_separator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a b.log"
    log.write_text("all is well\n")
    assert cli.main(["diagnose", "--", str(log)]) == cli.FINE
    assert cli.main(["explain", "--", "ep"]) == cli.FINE
    assert cli.main(["report", "--", str(tmp_path)]) == cli.NOT_IN_FORCE
    assert "holds no report" in capsys.readouterr().out
