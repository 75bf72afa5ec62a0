"""Record in docs/MATRIX.md what environments of `tox -m full` gave, each with its date and commit.

    tox -m full --result-json full.json
    python tools/record_matrix.py full.json

The whole set takes hours, so it may be run in parts: each file of results replaces the rows of the environments in it,
and an environment that has no row was not run.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "MATRIX.md"

HEAD = """\
# The last run of every environment

`tox -m full` is everything that needs no GPU. A row is the last run of one of its environments, from a clean clone of
that commit; it is written by `tools/record_matrix.py` from what tox and pytest printed. A test that is skipped is for
other versions, or says why.

| environment | outcome | passed | skipped | failed | minutes | with | commit | date |
|---|---|---|---|---|---|---|---|---|
"""
NOT_RUN = "not run"
TOLD = ("sglang", "flashinfer-python", "torch")


@dataclass(frozen=True)
class Row:
    """The last run of one environment."""

    environment: str
    outcome: str = NOT_RUN
    passed: str = ""
    skipped: str = ""
    failed: str = ""
    minutes: str = ""
    versions: str = ""
    commit: str = ""
    date: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(vars(self).values())} |"

    @classmethod
    def read(cls, line: str) -> Row:
        """A row of the page."""
        return cls(*(cell.strip() for cell in line.strip().strip("|").split("|")))

    @classmethod
    def of(cls, environment: str, result: dict[str, Any], commit: str, date: str) -> Row:
        """What tox's JSON says of one environment."""
        counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
        for command in result["test"]:
            for key, count in counted(command["output"]).items():
                counts[key] += count
        python = ".".join(map(str, result["python"]["version_info"][:2]))
        versions = dict(one.split("==") for one in result["installed_packages"] if one.count("==") == 1)
        told = [f"Python {python}", *(f"{name} {versions[name]}" for name in TOLD if name in versions)]
        outcome = "passed" if result["result"]["success"] else "failed"
        numbers = [str(count) if any(counts.values()) else "" for count in counts.values()]
        return cls(
            environment, outcome, *numbers, f"{result['result']['duration'] / 60:.1f}", ", ".join(told), commit, date
        )


def counted(output: str) -> dict[str, int]:
    """What the last line of pytest counts; an error counts as a failure."""
    line = next((line for line in reversed(output.splitlines()) if re.match(r"=* ?\d+ \w+.* in [\d.]+s", line)), "")
    found: dict[str, int] = {}
    for count, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)\b", line):
        key = "failed" if word.startswith("error") else word
        found[key] = found.get(key, 0) + int(count)
    return found


def environments() -> list[str]:
    """The environments of the label `full`."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    (full,) = re.findall(r"^full = (.*?)(?=^\w+ = |\Z)", parser["tox"]["labels"], re.M | re.S)
    return re.findall(r"[^\s,\\]+", full)


def rows() -> dict[str, Row]:
    """The rows of the page as it is."""
    if not PAGE.exists():
        return {}
    lines = PAGE.read_text(encoding="utf-8").partition("|---|")[2].splitlines()[1:]
    found = [Row.read(line) for line in lines if line.startswith("|")]
    return {row.environment: row for row in found}


def page(known: dict[str, Row]) -> str:
    """The page, with a row for each environment of the label."""
    return HEAD + "".join(f"{known.get(name, Row(name))}\n" for name in environments())


def recorded(files: Sequence[Path], commit: str) -> Iterator[Row]:
    """The rows that files of results give."""
    for file in files:
        date = time.strftime("%Y-%m-%d", time.gmtime(file.stat().st_mtime))
        for name, result in json.loads(file.read_text(encoding="utf-8"))["testenvs"].items():
            if "result" in result and not name.startswith("."):
                yield Row.of(name, result, commit, date)


def main() -> int:
    """Put the results into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="what `tox --result-json` wrote")
    parser.add_argument("--commit", help="the commit that was run; by default the one that is checked out")
    given = parser.parse_args()
    commit = (
        given.commit
        or subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    PAGE.write_text(page(rows() | {row.environment: row for row in recorded(given.results, commit)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
