"""The statistics, on made-up campaigns whose truth is known."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from glm5_plugins.campaign.plan import Cell, Plan
from glm5_plugins.campaign.verdicts import compare, compare_campaigns, decide, level_of_arm, mean_interval
from tests.unit.campaign.synthetic import Noise, campaign, heavy_tailed, normal, plan, run, skewed

pytest.importorskip("scipy", reason="the extra `campaign` brings it")

CAMPAIGNS = 400
CELL = Cell(shape="chat", concurrency=1)


def false_pays(of: Plan, noise: Noise, drift: float = 0.0) -> float:
    """The share of campaigns without any difference in which some arm is said to pay."""
    generator = random.Random(20260101)
    wrong = 0
    for _ in range(CAMPAIGNS):
        rows = compare(of, campaign(of, generator, noise, drift=drift))
        wrong += any(row.verdict == "pays" for row in rows)
    return wrong / CAMPAIGNS


@pytest.mark.parametrize("rounds", [3, 5, 10])
@pytest.mark.parametrize(
    "noise", [normal(0.005), normal(0.05), heavy_tailed(0.02), skewed(0.02)], ids=["quiet", "loud", "heavy", "skewed"]
)
def test_no_difference_rarely_pays(rounds: int, noise: Noise) -> None:
    """In eight comparisons at once, at most one campaign in twenty has a false "pays"."""
    assert false_pays(plan(arms=3, rounds=rounds), noise) <= 0.05


@pytest.mark.parametrize(("arms", "concurrency"), [(2, (1,)), (6, (1, 10, 256, 1024))])
def test_that_holds_for_few_and_for_many_comparisons(arms: int, concurrency: tuple[int, ...]) -> None:
    assert false_pays(plan(arms=arms, concurrency=concurrency), normal(0.02)) <= 0.05


def test_what_drifts_between_rounds_does_not_matter() -> None:
    """Rounds that differ by a fifth hide nothing, as each is compared within itself."""
    of, generator = plan(arms=2, concurrency=(1, 10)), random.Random(7)
    rows = compare(of, campaign(of, generator, normal(0.005), {"arm1": 1.05}, drift=0.2))
    assert [row.verdict for row in rows] == ["pays", "pays"]
    assert false_pays(plan(), normal(0.02), drift=0.2) <= 0.05


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03], ids=["quiet", "usual", "loud"])
def test_three_percent_are_found_or_undecided(noise: float) -> None:
    """Never refuted: a gain of 3 % is not called "does not" in more than 5 % of campaigns."""
    of, generator = plan(arms=2), random.Random(3)
    verdicts = Counter(
        row.verdict for _ in range(300) for row in compare(of, campaign(of, generator, normal(noise), {"arm1": 1.03}))
    )
    assert verdicts["does not"] / sum(verdicts.values()) <= 0.05 / len(of.cells)
    if noise == 0.002:
        assert verdicts["pays"] / sum(verdicts.values()) > 0.99


def test_more_rounds_find_more() -> None:
    """At a noise of 1 %, a gain of 3 % is found in ten rounds nearly always, in three hardly ever."""
    found = {}
    for rounds in (3, 5, 10):
        of, generator = plan(arms=2, rounds=rounds), random.Random(11)
        rows = [row for _ in range(200) for row in compare(of, campaign(of, generator, normal(0.01), {"arm1": 1.03}))]
        found[rounds] = sum(row.verdict == "pays" for row in rows) / len(rows)
    assert found[3] < found[5] < found[10]
    assert found[10] > 0.9


def test_a_slower_arm_does_not_pay() -> None:
    of = plan(arms=2)
    rows = compare(of, campaign(of, random.Random(1), normal(0.005), {"arm1": 0.9}))
    assert {(row.verdict, row.why.partition(",")[0]) for row in rows} == {("does not", "slower")}


def test_a_gain_that_is_not_worth_having_does_not_pay() -> None:
    """It is certain that the gain is below one percent: that is an answer, not a doubt."""
    row = decide("a", CELL, [0.004, 0.0041, 0.0039, 0.004], 0.99, worth=0.01)
    assert row.verdict == "does not"
    assert row.ratio is not None
    assert row.ratio.low > 1


def test_two_rounds_say_nothing() -> None:
    row = decide("a", CELL, [0.5, 0.5], 0.95, worth=0.01)
    assert (row.verdict, row.ratio, row.why) == ("cannot tell", None, "2 of at least 3 rounds")


def test_an_undecided_row_says_how_many_rounds_it_would_take() -> None:
    row = decide("a", CELL, [0.03, -0.01, 0.05, 0.02, 0.0], 0.99, worth=0.01)
    assert row.verdict == "cannot tell"
    assert row.rounds_to_tell is not None
    assert 6 <= row.rounds_to_tell <= 40


def test_the_interval_is_students() -> None:
    """Mean 2, deviation 1, three values: 2 +- 4.303 / sqrt(3)."""
    interval = mean_interval([1.0, 2.0, 3.0], 0.95)
    assert interval.value == 2
    assert interval.high - interval.value == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_failed_runs_and_lonely_rounds_do_not_count() -> None:
    """A round in which one of the two failed is no pair."""
    of = plan(arms=2, concurrency=(1,))
    runs = [run(number, arm, 1, 100.0 + number) for number in range(4) for arm in ("baseline", "arm1")]
    runs += [run(4, "baseline", 1, 1.0), run(5, "baseline", 1, 1.0), run(5, "arm1", 1, 900.0, ok=False)]
    (row,) = compare(of, runs)
    assert row.pairs == 4
    assert row.ratio is not None
    assert row.ratio.value == pytest.approx(1)


def test_repetitions_on_one_server_are_not_rounds() -> None:
    """Ten runs on one start are one observation: what differs between starts would be missed."""
    of = plan(arms=2, concurrency=(1,))
    runs = [run(0, arm, 1, 100.0 + shift) for _ in range(10) for arm, shift in (("baseline", 0), ("arm1", 5))]
    (row,) = compare(of, runs)
    assert (row.pairs, row.verdict) == (1, "cannot tell")


def test_an_arm_that_was_never_measured_has_a_row() -> None:
    of = plan(arms=3, concurrency=(1,))
    rows = compare(of, [run(number, arm, 1, 100.0) for number in range(3) for arm in ("baseline", "arm1")])
    assert [(row.arm, row.why) for row in rows if row.ratio is None] == [("arm2", "no round has figures of both")]


def test_the_level_of_an_arm_is_in_its_own_unit() -> None:
    level = level_of_arm([run(0, "a", 1, 100.0), run(1, "a", 1, 400.0)], "a", CELL, "output_throughput", 0.95)
    assert level is not None
    assert level.value == pytest.approx(200)
    assert level.low < 200 < level.high
    assert level_of_arm([], "a", CELL, "output_throughput", 0.95) is None


def test_two_campaigns_that_do_not_differ_rarely_seem_to() -> None:
    of, generator = plan(arms=3), random.Random(5)
    wrong = 0
    for _ in range(CAMPAIGNS):
        pair = [(of, campaign(of, generator, normal(0.02))) for _ in range(2)]
        wrong += any(row.verdict != "cannot tell" for row in compare_campaigns(*pair, confidence=0.95))
    assert wrong / CAMPAIGNS <= 0.05


def test_two_campaigns_that_differ_are_told_apart() -> None:
    of, generator = plan(arms=2), random.Random(5)
    before = (of, campaign(of, generator, normal(0.01)))
    after = (of, campaign(of, generator, normal(0.01), {"arm1": 1.2}))
    verdicts = {row.arm: row.verdict for row in compare_campaigns(before, after, confidence=0.95)}
    assert verdicts == {"baseline": "cannot tell", "arm1": "faster"}
