"""How `glm5-plugins` takes its arguments: what goes behind `--`, the version, `python -m`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
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
    log.write_text("The server is fired up and ready to roll!\n")
    assert cli.main(["diagnose", "--", str(log)]) == cli.FINE
    assert cli.main(["explain", "--", "ep"]) == cli.FINE
    assert cli.main(["report", "--", str(tmp_path)]) == cli.NOT_IN_FORCE
    assert "holds no report" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"glm5-plugins {version('glm5-plugins')}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "glm5_plugins", "explain", "nothing-like-it"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == cli.USAGE
    assert done.stderr.startswith("glm5-plugins: There is no plugin or profile 'nothing-like-it'.")
