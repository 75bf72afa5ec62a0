"""`glm5-plugins list` and `explain`."""

from pathlib import Path

import pytest

from glm5_plugins.manager import BUNDLED
from tests.fakes.installation import ACME, Installation, with_acme


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def test_list_shows_every_plugin_on_a_line_of_its_own(installation: Installation) -> None:
    with_acme(installation)
    done = installation.run("list")
    head, *rows = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert head.split() == ["PLUGIN", "FROM", "VERDICT", "HERE", "WHAT", "IT", "DOES"]
    assert [row.split()[0] for row in rows] == sorted([*BUNDLED, "acme"])
    assert rows[0].strip().startswith("acme")
    assert "acme-glm5 0.3" in rows[0]
    assert "ready" in rows[0]
    assert rows[0].endswith("Warms the acme engine.")


def test_list_marks_what_is_requested_and_fails_when_a_launch_would(installation: Installation) -> None:
    with_acme(installation, "class Engine: ...\n")
    assert installation.run("list").returncode == 0
    done = installation.run("list", GLM5_PLUGINS="acme")
    assert done.returncode == 1
    assert installation.run("list", GLM5_PLUGINS="acme", GLM5_ON_ERROR="warn").returncode == 0
    assert any(line.startswith("*  acme") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("version", "verdict", "reason"),
    [
        ("2.0", "ready", "the engine starts cold"),
        ("2.0+cu130", "ready", "the engine starts cold"),
        ("0.9", "not applicable", "acme-engine 0.9 is older than acme-engine"),
        ("3.1", "not needed", "acme-engine 3.1: it warms itself up"),
    ],
)
def test_the_verdict_follows_the_version(installation: Installation, version: str, verdict: str, reason: str) -> None:
    with_acme(installation, version=version)
    row = installation.json("explain", "acme")
    assert row["verdict"] == verdict
    assert row["reason"].startswith(reason)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("class Engine:\n    def start(self): ...\n", "does not take `warm`"),
        ("class Engine:\n    def begin(self): ...\n    def starts(self): ...\n", "did you mean `starts`?"),
        ("def make():\n    class Engine: ...\n", "`Engine` is a local of `make`"),
        ("class Engine: ...\nclass Motor:\n    def start(self): ...\n", "; `start` is defined in engine/core.py:4"),
    ],
)
def test_a_target_that_moved_is_drifted(installation: Installation, engine: str, reason: str) -> None:
    with_acme(installation, engine)
    row = installation.json("explain", "acme", GLM5_PLUGINS="acme")
    assert row["verdict"] == "drifted"
    assert reason in row["reason"]


def test_explain_says_all_about_a_plugin(installation: Installation) -> None:
    with_acme(installation)
    done = installation.run("explain", "acme", GLM5_PLUGINS="acme", GLM5_ACME_TIMEOUT_S="7")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "acme (acme-glm5 0.3)",
        "It takes a while.",
        "requested     yes, in GLM5_PLUGINS",
        "wrap engine.core:Engine.start",
        "why           the engine starts cold",
        f"found at      {installation.folder}/engine/core.py:3",
        "what ends it  it warms itself up",
        "relies on     warm",
        "upstream      https://example.org/acme/1",
        "fate          delete with acme 2",
    ):
        assert text in done.stdout
    options = [line.split(maxsplit=5) for line in done.stdout.splitlines() if line.startswith("GLM5_ACME")]
    assert options[0] == [
        "GLM5_ACME_TIMEOUT_S",
        "float",
        "7.0",
        "environment",
        "30.0",
        "Seconds to wait for the engine.",
    ]
    assert options[1] == ["GLM5_ACME_MODE", "str|unset", "default"]


def test_an_unknown_name_is_wrong_usage(installation: Installation) -> None:
    with_acme(installation)
    done = installation.run("explain", "acne")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["glm5-plugins: There is no plugin or profile 'acne'.", "  Did you mean 'acme'?"]


@pytest.mark.parametrize("arguments", [(), ("dance",), ("list", "--colour")])
def test_wrong_usage_has_status_2(installation: Installation, arguments: tuple[str, ...]) -> None:
    done = installation.run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: glm5-plugins")


def test_a_plugin_that_does_not_import_is_broken_and_the_others_are_listed(installation: Installation) -> None:
    with_acme(installation, plugin="import nothing_there\n")
    rows = {row["name"]: row for row in installation.json("list")}
    assert rows["acme"]["verdict"] == "broken"
    assert "nothing_there" in rows["acme"]["reason"]
    assert set(rows) == {*BUNDLED, "acme"}


def test_a_probe_that_raises_is_a_failure_of_the_plugin(installation: Installation) -> None:
    with_acme(installation, plugin=ACME.replace("fate=", "unless=lambda env: 1 / 0, fate="))
    row = installation.json("explain", "acme")
    assert row["verdict"] == "failed"
    assert "ZeroDivisionError" in row["reason"]


def test_text_wraps_to_the_terminal(installation: Installation) -> None:
    with_acme(installation)
    done = installation.run("explain", "acme", COLUMNS="60")
    paths = str(installation.folder)
    assert max(len(line) for line in done.stdout.splitlines() if paths not in line) <= 60
