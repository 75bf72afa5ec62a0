"""`glm5-plugins` with streams that cannot take every text, that are closed, full or interrupted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_plugins import cli

FAILED = b"Traceback (most recent call last):\nKeyError: 1\n"


def command(
    *words: str | bytes,
    stdin: bytes = b"",
    encoding: str = "utf-8:strict",
    redirect: str = "",
    unbuffered: str = "",
) -> subprocess.CompletedProcess[bytes]:
    """Run the command by a shell that redirects streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "glm5_plugins.cli", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": unbuffered},
        input=stdin,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("diagnose", "-"), b"\xa9 The server is fired up and ready to roll!\n"),
        (("check",), b"\xa9 sglang serve --model-path X --tp 8\n"),
    ],
)
def test_input_that_begins_within_a_character(words: tuple[str, ...], text: bytes) -> None:
    """As `tail -c 100 server.log` gives it."""
    done = command(*words, stdin=text)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    log = os.fsencode(tmp_path / "a") + b"\xff.log"
    with open(log, "wb") as file:
        file.write(FAILED)
    done = command("diagnose", log)
    assert (done.returncode, done.stderr) == (1, b"")
    assert rb"a\udcff.log:2" in done.stdout
    done = command("check", "--", "sglang", "serve", b"--m\xff")
    assert (done.returncode, done.stderr) == (1, b"")
    assert rb"--m\udcff is not a flag" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [("doctor",), ("--help",)])
def test_output_that_cannot_hold_every_letter(encoding: str, words: tuple[str, ...]) -> None:
    done = command(*words, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u2026" in done.stdout


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "status"), [(("profiles",), 0), (("diagnose", "-"), 1), (("check",), 1)])
def test_closed_streams(redirect: str, words: tuple[str, ...], status: int) -> None:
    done = command(*words, redirect=redirect)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told(unbuffered: str) -> None:
    done = command("profiles", redirect="> /dev/full", unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (1, b"glm5-plugins: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_that_cannot_be_told_keep_their_status(unbuffered: str) -> None:
    done = command("explain", "nothing", redirect="2> /dev/full", unbuffered=unbuffered)
    assert done.returncode == cli.USAGE


@pytest.mark.parametrize("word", ["list", "--help"])
def test_nobody_reads_on(word: str) -> None:
    """As in `glm5-plugins list | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "glm5_plugins.cli", word]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Interrupted())))
    assert cli.main(["diagnose", "-"]) == 130
    assert capsys.readouterr() == ("", "")
