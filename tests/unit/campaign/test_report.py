"""Reports of made-up campaigns: the tables say what the figures say, and the page stands by itself."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

for _package in ("scipy", "matplotlib", "psutil"):
    pytest.importorskip(_package, reason="the extra `campaign` brings it")

from glm5_plugins.campaign.command import write_reports  # noqa: E402
from glm5_plugins.campaign.comparison import compare, markdown  # noqa: E402
from glm5_plugins.campaign.journal import InForce  # noqa: E402
from glm5_plugins.campaign.report import Report, build, figure_text, load  # noqa: E402
from glm5_plugins.errors import ConfigurationError  # noqa: E402
from tests.unit.campaign.synthetic import campaign, folder, normal, plan, run  # noqa: E402

DIAGNOSIS: Mapping[str, object] = {
    "verdict": "known",
    "name": "ninja is missing",
    "cause": "There is no <ninja> | in PATH.",
    "cure": "pip install ninja.",
    "link": "https://example.org/1",
    "line": 17,
    "evidence": "FileNotFoundError: 'ninja'",
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """One arm that gains 10 %, one that loses 10 %, one that does nothing, one that does not start."""
    of = plan(arms=5, rounds=6, concurrency=(1, 10))
    runs = campaign(of, random.Random(2), normal(0.004), {"arm1": 1.1, "arm2": 0.9}, drift=0.1)
    in_force = InForce(0, "arm1", [{"plugin": "p", "target": "m:f", "verdict": "applied", "fired": 3}])
    return folder(tmp_path / "out", of, runs, failed={"arm4": DIAGNOSIS}, in_force=(in_force,))


@pytest.fixture
def report(out: Path) -> Report:
    return build(load(out))


def test_the_summary_says_what_pays(report: Report) -> None:
    assert report.summary == (
        "**arm1** pays everywhere.",
        "**arm2** pays nowhere.",
        "**arm3** is undecided everywhere.",
        "**arm4** did not start: ninja is missing.",
    )


def test_the_table_has_ratio_interval_and_verdict(report: Report) -> None:
    rows = {row[:2]: row[2:] for row in report.decisions.rows}
    ratio, interval, rounds, verdict, why = rows["arm1", "chat x10"]
    low, high = map(float, interval.split(" to "))
    assert low < 1.1 < high
    assert low <= float(ratio) <= high
    assert (rounds, verdict, why[:7]) == ("6", "pays", "faster,")
    assert rows["arm2", "chat x1"][3] == "does not"
    assert rows["arm3", "chat x1"][3] == "cannot tell"
    assert rows["arm4", "all"] == ("-", "-", "0", "did not start", "see below")


def test_a_failed_start_has_cause_cure_and_place(report: Report) -> None:
    (failure,) = report.failures
    assert failure.cause == "ninja is missing: There is no <ninja> | in PATH."
    assert failure.log == "starts/round-1-arm4/server.log:17"


def test_latencies_are_ratios_that_decide_nothing(report: Report) -> None:
    row = next(row for row in report.latencies.rows if row[:3] == ("arm1", "chat x1", "ITL"))
    assert float(row[3]) == pytest.approx(1 / 1.1, abs=0.01)


def test_what_was_in_force_is_shown(report: Report) -> None:
    assert report.in_force.rows == (("arm1", "p", "applied", "3", "m:f"),)


def test_an_unfinished_campaign_says_so(tmp_path: Path) -> None:
    of = plan(arms=2, rounds=4, concurrency=(1,))
    runs = [run(number, arm, 1, 100.0) for number in range(2) for arm in ("baseline", "arm1")]
    report = build(load(folder(tmp_path / "out", of, runs)))
    assert report.summary[-1].startswith("The campaign is not complete")


def test_other_work_is_no_speed(tmp_path: Path) -> None:
    """Half of the tokens in half of the time is no gain."""
    of = plan(arms=2, rounds=4, concurrency=(1,))
    runs = campaign(of, random.Random(1), normal(0.001), {"arm1": 2.0})
    for one in runs:
        if one.arm == "arm1":
            one.metrics["total_output_tokens"] = 128.0  # type: ignore[index]
    report = build(load(folder(tmp_path / "out", of, runs)))
    assert report.decisions.rows[0][5] == "cannot tell"
    assert "another number of tokens" in report.troubles[0]


class _Reader(HTMLParser):
    """What a browser would fetch, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "data")]
        self.fetched += [value or "" for name, value in attrs if name == "href" and tag != "a"]
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_with_its_plots(out: Path) -> None:
    write_reports(load(out))
    text = (out / "report.html").read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.fetched)
    assert "<script" not in text
    assert len(reader.images) == 2
    assert "arm1 at chat x1: 1.1" in str(reader.images[0]["alt"])
    for image in reader.images:
        svg = base64.b64decode(str(image["src"]).partition(",")[2]).decode()
        assert svg.lstrip().startswith("<?xml")
        assert "<script" not in svg
    assert "There is no &lt;ninja&gt; | in PATH." in text
    assert sorted(path.name for path in out.glob("report.*")) == ["report.html", "report.md"]


def test_the_markdown_holds_its_tables(out: Path) -> None:
    write_reports(load(out))
    text = (out / "report.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)(?:^\|.*\|$\n?)+", text)
    assert len(tables) == 5
    for lines in (table.splitlines() for table in tables):
        assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1


def test_a_campaign_without_a_single_run_has_a_report(tmp_path: Path) -> None:
    out = folder(tmp_path / "out", plan(arms=2), [], failed={"baseline": DIAGNOSIS})
    write_reports(load(out))
    assert "What did not start" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (9.996, "10"), (123.4, "123"), (1234.5, "1,234"), (25231.0, "25,231")]
)
def test_figures_have_no_exponent(value: float, text: str) -> None:
    assert figure_text(value) == text


def test_a_hopelessly_noisy_campaign_has_a_readable_report(tmp_path: Path) -> None:
    """Rounds that differ hundredfold: intervals without end, in the table and in the picture."""
    of = plan(arms=2, rounds=3, concurrency=(1,))
    figures = {"baseline": (100.0, 100.0, 100.0), "arm1": (1000.0, 10.0, 101.0)}
    runs = [run(number, arm, 1, value) for arm, values in figures.items() for number, value in enumerate(values)]
    out = folder(tmp_path / "out", of, runs)
    write_reports(load(out))
    (row,) = build(load(out)).decisions.rows
    assert row[3] == "<0.01 to >100"
    assert row[6].endswith("more than 100 rounds would tell")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no folder of a campaign"):
        load(tmp_path)


def test_two_campaigns_are_compared_with_what_else_differs(tmp_path: Path) -> None:
    of = plan(arms=3, rounds=6, concurrency=(1,))
    before = folder(tmp_path / "a", of, campaign(of, random.Random(1), normal(0.005)))
    after = folder(tmp_path / "b", of, campaign(of, random.Random(2), normal(0.005), {"arm1": 1.2}))
    about = (after / "campaign.json").read_text(encoding="utf-8")
    (after / "campaign.json").write_text(about.replace('"sglang": "0.5.23"', '"sglang": "0.5.24"'), encoding="utf-8")
    both = compare(load(before), load(after))
    assert {change.arm: change.verdict for change in both.changes} == {
        "baseline": "cannot tell",
        "arm1": "faster",
        "arm2": "cannot tell",
    }
    assert both.differs == (("sglang", "0.5.23", "0.5.24"),)
    text = markdown(both, "a", "b")
    assert "# b against a" in text
    assert "| sglang | 0.5.23 | 0.5.24 |" in text


def test_two_campaigns_without_anything_in_common_are_refused(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", plan(concurrency=(1,)), [])
    second = folder(tmp_path / "b", plan(concurrency=(2,)), [])
    with pytest.raises(ConfigurationError, match="no shape at the same concurrency"):
        compare(load(first), load(second))
