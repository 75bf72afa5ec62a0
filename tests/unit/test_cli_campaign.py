"""The commands campaign, compare and diagnose as they are typed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import sys
from pathlib import Path

import pytest

from glm5_plugins import cli
from tests.unit.conftest import Run

LOG = Path(__file__).parent / "diagnosis" / "logs" / "real" / "ninja-is-missing.log"


def standard_input(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)), encoding="utf-8")


def test_diagnose_names_cause_cure_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(LOG)]) == cli.FINE
    out = capsys.readouterr().out
    assert out.startswith("ninja is missing\n")
    assert f"{LOG}:17 in TP0" in out
    assert "pip install ninja" in out


def test_diagnose_reads_standard_input_and_speaks_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input(b"KeyError: 1\nThe server is fired up and ready to roll!\n"))
    assert cli.main(["diagnose", "--json", str(LOG), "-"]) == cli.FINE
    rows = json.loads(capsys.readouterr().out)
    assert [(row["log"], row["verdict"]) for row in rows] == [(str(LOG), "known"), ("-", "no failure")]


def test_diagnose_says_unknown_by_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text('Traceback (most recent call last):\n  File "x.py", line 1, in f\nKeyError: 1\n')
    assert cli.main(["diagnose", str(log)]) == cli.NOT_IN_FORCE
    assert capsys.readouterr().out.startswith("unknown\n")


def test_diagnose_calls_no_server_healthy_that_was_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text("[2026-05-22 02:11:00 TP0] Load weight begin. avail mem=93.30 GB\n")
    assert cli.main(["diagnose", str(log)]) == cli.NOT_IN_FORCE
    assert "ends before the server was ready" in capsys.readouterr().out


def test_a_log_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "none.log"]) == cli.USAGE
    assert "none.log cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "said", "mend"),
    [
        (gzip.compress(b"KeyError: 1\n"), "is packed by gzip", "gzip -dc"),
        (bz2.compress(b"KeyError: 1\n"), "is packed by bzip2", "bzip2 -dc"),
        (lzma.compress(b"KeyError: 1\n"), "is packed by xz", "xz -dc"),
        (b"\x28\xb5\x2f\xfd\x04\x58", "is packed by zstd", "zstd -dc"),
        (b"PK\x03\x04\x14\x00", "is packed by zip", "unzip -p"),
        (random.Random(0).randbytes(5000), "is no text", "what the server printed"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "zip", "random bytes"],
)
def test_a_log_that_is_no_text_is_wrong_usage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    said: str,
    mend: str,
) -> None:
    log = tmp_path / "server.log.1"
    log.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", standard_input(data))
    for name in (str(log), "-"):
        assert cli.main(["diagnose", name]) == cli.USAGE
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith(f"glm5-plugins: The log {name} {said}.\n  ")
        assert mend in error


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 10_000 + b"KeyError: 1\n",
        "Ein Ger\xe4t fehlt: CUDA out of memory\n".encode("latin-1"),
        "\x1b[32m\u7cfb\u7edf\x1b[0m\n".encode(),
        b"",
    ],
    ids=["emptied while it was written to", "latin-1", "coloured, in Chinese", "empty"],
)
def test_a_log_that_is_a_text_of_an_odd_kind_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", standard_input(data))
    assert cli.main(["diagnose", str(log), "-"]) in (cli.FINE, cli.NOT_IN_FORCE)
    assert capsys.readouterr().err == ""


def test_diagnose_imports_nothing_heavy(run: Run) -> None:
    """It has to work where nothing else does."""
    result = run(f"""
        import sys
        from glm5_plugins import cli
        cli.main(["diagnose", {str(LOG)!r}])
        heavy = {{"torch", "sglang", "numpy", "scipy", "matplotlib", "pydantic", "psutil"}} & set(sys.modules)
        assert not heavy, heavy
    """)
    assert "ninja is missing" in result.stdout


def test_the_example_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["campaign", "--example"]) == cli.FINE
    assert "[[arms]]" in capsys.readouterr().out


def test_a_campaign_without_a_plan_is_told_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["campaign"]) == cli.USAGE
    assert "--example > plan.toml" in capsys.readouterr().err


def test_a_missing_package_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert cli.main(["campaign", str(tmp_path / "plan.toml")]) == cli.NOT_IN_FORCE
    assert "pip install 'glm5-plugins[campaign]'" in capsys.readouterr().err


def test_a_report_is_made_anew_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("scipy", "matplotlib", "psutil"):
        pytest.importorskip(package, reason="the extra `campaign` brings it")
    from tests.unit.campaign.synthetic import campaign, folder, normal, plan

    of = plan(arms=2, rounds=4, concurrency=(1,))
    out = folder(tmp_path / "out", of, campaign(of, random.Random(1), normal(0.002), {"arm1": 1.1}))
    assert cli.main(["campaign", str(out), "--report-only"]) == cli.FINE
    assert "arm1 pays everywhere." in capsys.readouterr().out
    assert (out / "report.html").exists()
    assert cli.main(["compare", str(out), str(out)]) == cli.FINE
    assert "| arm1 | chat x1 | 1.000 |" in capsys.readouterr().out
