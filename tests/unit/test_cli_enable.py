"""`glm5-plugins enable` and `disable`, in a virtual environment of their own."""

import errno
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from glm5_plugins import enable
from glm5_plugins.errors import ConfigurationError
from tests.fakes.installation import Installation, with_acme


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment whose site-packages may be written, and that sees what this one has."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    executable = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([executable, "-c", code], text=True).strip())
    here = sysconfig.get_path("purelib")
    (site / "a_parent.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return executable


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.fixture
def own(installation: Installation, python: Path) -> Installation:
    installation.python = str(python)
    return installation


def line_of(own: Installation) -> Path:
    return next(Path(own.python).parent.parent.glob("lib/python*/site-packages")) / "glm5_plugins.pth"


@pytest.fixture(autouse=True)
def clean(own: Installation) -> None:
    line = line_of(own)
    if line.is_dir():
        line.rmdir()
    line.unlink(missing_ok=True)


def test_enable_and_disable_can_be_repeated(own: Installation) -> None:
    line = line_of(own)
    for said in ("Written.", "It was there already."):
        done = own.run("enable")
        assert (done.returncode, done.stdout) == (0, f"{line}\n")
        assert done.stderr.startswith(said)
        assert line.read_text().startswith("import ")
        assert len(line.read_text().splitlines()) == 1
    for said in ("Removed.", "It was not there."):
        done = own.run("disable")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{line}\n", f"{said}\n")
        assert not line.exists()


def test_json(own: Installation) -> None:
    assert own.json("enable")["changed"] is True
    assert own.json("enable") == own.json("enable")
    assert own.json("disable") == {"path": str(line_of(own)), "changed": True}


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("0.5.9", "SGLang 0.5.9 loads no plugins by itself: this line is the way in."),
        ("0.5.11", "the line is not needed, except for the detokenizer and the data-parallel controller."),
        ("0.5.23", "It is not needed with SGLang 0.5.23"),
    ],
)
def test_enable_says_what_it_is_worth(own: Installation, version: str, note: str) -> None:
    own.sglang(version)
    assert note in own.run("enable").stderr


def test_a_folder_that_refuses(own: Installation) -> None:
    line_of(own).mkdir()
    done = own.run("enable")
    assert (done.returncode, done.stdout) == (1, "")
    what, mend = done.stderr.splitlines()
    assert what.startswith(f"glm5-plugins: {line_of(own)} cannot be changed: ")
    assert "python -m glm5_plugins.launch" in mend
    assert not list(line_of(own).parent.glob("*.tmp"))


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to remove a file that is not there, too."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(enable, "path", lambda: tmp_path / "glm5_plugins.pth")
    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(ConfigurationError, match="cannot be changed: Read-only file system"):
        enable.enable()


def test_the_line_does_nothing_without_a_variable(own: Installation) -> None:
    own.run("enable")
    code = "import sys; print(any(n.startswith('glm5_plugins') for n in sys.modules))"
    for env, expected in (({}, "False\n"), ({"GLM5_PLUGINS": ""}, "True\n")):
        assert subprocess.check_output([own.python, "-c", code], env=env, text=True) == expected


def test_doctor_counts_the_line(own: Installation) -> None:
    with_acme(own)
    own.sglang("0.5.9")
    own.run("enable")
    diagnosis = own.json("doctor", GLM5_PLUGINS="acme")
    assert [process["by"] for process in diagnosis["processes"]] == [[".pth line"]] * 4
    assert diagnosis["healthy"]


def test_the_commands_work_where_the_line_would_stop_a_launch(own: Installation) -> None:
    """The line waits for SGLang; looking for its files must not start the layer inside `doctor`."""
    own.sglang("0.5.9")
    own.run("enable")
    done = own.run("doctor", GLM5_PLUGINS="nonsense")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "GLM5_PLUGINS names an unknown plugin 'nonsense'." in done.stdout


@pytest.mark.parametrize("earlier", enable.EARLIER)
def test_a_line_of_an_earlier_version_counts_and_is_renewed(own: Installation, earlier: str) -> None:
    own.sglang("0.5.9")
    line_of(own).write_text(earlier)
    diagnosis = own.json("doctor")
    assert next(way["open"] for way in diagnosis["ways"] if way["name"] == ".pth line")
    assert diagnosis["findings"] == []
    assert own.json("enable")["changed"]
    assert line_of(own).read_text() == enable.LINE


def test_a_line_of_another_version_is_pointed_out(own: Installation) -> None:
    line_of(own).write_text("import os\n")
    (finding,) = own.json("doctor")["findings"]
    assert finding["what"] == f"{line_of(own)} is not the line that this version writes."


def test_this_interpreter_is_left_alone() -> None:
    assert not (Path(sysconfig.get_path("purelib")) / "glm5_plugins.pth").exists(), sys.executable
