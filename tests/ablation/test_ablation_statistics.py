"""Intervals for a few seeds against closed forms."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from mmldlm.ablation.summary import summarise
from mmldlm.ablation.work import Record, Value, make_record, read_record
from mmldlm.evaluation.results import Histogram, Retrieval
from mmldlm.statistics import (
    BETTER,
    LESS,
    MORE,
    SAME,
    UNKNOWN,
    WORSE,
    Estimate,
    holm,
    mean_over_seeds,
    paired_difference,
    verdict,
)
from tests.evaluation.empty_results import empty_evaluation


def test_two_and_three_seeds():
    two = paired_difference({0: 3.0, 1: 5.0}, {0: 1.0, 1: 2.0})
    assert (two.value, two.count) == (2.5, 2)
    margin = math.tan(0.475 * math.pi) * 0.5  # half of the distance between the two differences
    assert (two.low, two.high) == pytest.approx((2.5 - margin, 2.5 + margin))
    assert two.p_value == pytest.approx(1 - 2 / math.pi * math.atan(2.5 / 0.5))
    assert verdict(two, MORE) == SAME
    three = paired_difference({0: 1.0, 1: 2.0, 2: 3.3}, {0: 0.0, 1: 1.0, 2: 2.0, 3: 9.0})
    spread = math.sqrt(((1 - 1.1) ** 2 * 2 + 0.2**2) / 2 / 3)
    assert three.high - three.value == pytest.approx(4.302652729911275 * spread)
    share = 0.95  # closed form of the quantile with two degrees of freedom
    assert stats.t.ppf(0.975, 2) == pytest.approx(share * math.sqrt(2 / (1 - share**2)))
    assert (verdict(three, MORE), verdict(three, LESS)) == (BETTER, WORSE)
    assert mean_over_seeds([1.0, 2.0, 3.0]).standard_error == pytest.approx(1 / math.sqrt(3))


def test_one_seed_has_no_error_bar_and_strangers_no_difference():
    one = paired_difference({0: 2.0, 5: 1.0}, {0: 1.0, 1: 7.0})
    assert (one.value, one.low, one.high, one.p_value) == (1.0, None, None, None)
    assert verdict(one, MORE) == UNKNOWN
    assert mean_over_seeds([4.0]).standard_error is None
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_pairing_takes_out_what_seeds_share():
    first = {seed: 10.0 * seed for seed in range(3)}
    ours = {seed: value + 0.1 + 0.001 * seed for seed, value in first.items()}
    assert verdict(paired_difference(ours, first), MORE) == BETTER


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [
        paired_difference(dict(enumerate(row)), dict.fromkeys(range(3), 0.0))
        for row in rng.normal(1.0, 2.0, (4000, 3))
    ]
    covered = np.mean([one.low <= 1.0 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.011)  # three standard errors
    assert all((one.p_value < 0.05) == (not one.low <= 0.0 <= one.high) for one in found)


def test_holm_steps_down():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_equal_differences_tell_nothing_of_their_spread_unless_they_are_0():
    same = paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.low, same.high, same.p_value) == (0.0, 0.0, 1.0)
    assert verdict(same, MORE) == SAME
    coarse = paired_difference({0: 2.1, 1: 3.1}, {0: 1.1, 1: 2.1})
    assert (coarse.value, coarse.count) == (pytest.approx(1.0), 2)
    assert (coarse.low, coarse.high, coarse.p_value, verdict(coarse, MORE)) == (None, None, None, UNKNOWN)


@pytest.mark.parametrize(("repeats", "collapsed", "agreement", "expected"), [
    ((0.1, 0.1), (None, None), 0.9, BETTER), ((0.1, 0.1), (None, None), 0.3, WORSE),
    ((0.1, 0.3), (None, None), 0.9, "none: arm is less diverse"), ((0.1, 0.3), (None, None), 0.3, WORSE),
    ((0.3, 0.1), (None, None), 0.3, "none: base is less diverse"),
    ((0.1, 0.9), (None, "97 % of its tokens repeat"), 0.9, "none: arm has collapsed"),
    ((0.9, 0.1), ("97 % of its tokens repeat", None), 0.3, "none: base has collapsed"),
])  # fmt: skip
def test_no_arm_wins_figures_of_generated_pairs_by_less_diverse_texts(
    repeats, collapsed, agreement, expected
):
    name, again = "generated/agreement/own", "generated/repeated_1"

    def record(which, seed):
        shift = 0.01 * seed * (1 + 0.1 * which)
        values = {
            name: Value(name, MORE, (0.5, agreement)[which] + shift),
            again: Value(again, LESS, repeats[which] + shift),
        }
        return Record(
            ("base", "arm")[which], seed, {}, values, 1, 1, None,
            collapsed=collapsed[which], repetitive=repeats[which] > 0.2,
        )  # fmt: skip

    arms = [SimpleNamespace(name=name, of=None) for name in ("base", "arm")]
    plan = SimpleNamespace(arms=arms, quantities=[name], evaluation=SimpleNamespace(steps=[16]))
    rows = summarise(plan, [record(which, seed) for which in (0, 1) for seed in range(3)]).rows
    assert rows[1].cells[name].verdict == expected


@pytest.mark.parametrize(("name", "base", "arm", "collapsed", "expected"), [
    ("generated/repeated_1", 0.3, 0.1, None, BETTER),
    ("generated/repeated_1", 0.3, 0.1, "only 3 % of its pairs of tokens differ", "none: arm has collapsed"),
    ("generated/repeated_1", 0.1, 0.05, None, "none: base repeats no more than held-out texts"),
    ("generated/memorised_whole", 0.3, 0.1, None, "none: random words are in no training text either"),
    ("text_bound/right", 0.3, 0.1, "collapsed as a generator", BETTER),
    ("text_bound/shuffled", 0.3, 0.1, None, "none: won by ignoring the condition"),
    ("latent_bound/shuffled", 0.1, 0.3, None, "none: won by ignoring the condition"),
    ("text_bound/shuffled", 0.3, 0.3, None, SAME),
])  # fmt: skip
def test_random_words_collapsed_texts_and_blind_models_win_nothing(name, base, arm, collapsed, expected):
    def record(which, seed):
        value = Value(name, LESS, (base, arm)[which] + 0.01 * seed * (1 + 0.1 * which))
        return Record(
            ("base", "arm")[which], seed, {}, {name: value}, 1, 1, None,
            collapsed=collapsed if which else None, repetitive=value.value > 0.2,
        )  # fmt: skip

    arms = [SimpleNamespace(name=name, of=None) for name in ("base", "arm")]
    plan = SimpleNamespace(arms=arms, quantities=[name], evaluation=SimpleNamespace(steps=[16]))
    rows = summarise(plan, [record(which, seed) for which in (0, 1) for seed in range(3)]).rows
    assert rows[1].cells[name].verdict == expected


@pytest.mark.parametrize(("right", "expected"), [
    ((0.9, 1.15), "none: arm costs more nats"), ((0.9, 0.7), BETTER), ((0.9, 0.9), BETTER),
])  # fmt: skip
def test_what_the_latent_saves_counts_only_beside_the_cost_with_it(right, expected):
    cost, name = "text_bound/right", "text_gain/shuffled"

    def record(which, seed):
        shift = 0.01 * seed * (1 + 0.1 * which)
        values = {
            cost: Value(cost, LESS, right[which] + shift),
            name: Value(name, MORE, (0.15, 0.5)[which] + shift),
        }
        return Record(("base", "arm")[which], seed, {}, values, 1, 1, None)

    arms = [SimpleNamespace(name=name, of=None) for name in ("base", "arm")]
    plan = SimpleNamespace(arms=arms, quantities=[name], evaluation=SimpleNamespace(steps=[16]))
    rows = summarise(plan, [record(which, seed) for which in (0, 1) for seed in range(3)]).rows
    assert rows[1].cells[name].verdict == expected


@pytest.mark.parametrize(("blind", "expected"), [
    ([], BETTER), (["t2l/cosine"], "none: latents of arm do not depend on the text"),
])  # fmt: skip
def test_one_latent_for_all_texts_wins_no_cosine(blind, expected):
    def record(which, seed):
        value = Value("t2l/cosine", MORE, (0.31, 0.37)[which] + 0.001 * seed * (1 + 0.1 * which))
        return Record(
            ("base", "arm")[which], seed, {}, {"t2l/cosine": value}, 1, 1, None, blind=blind if which else []
        )

    arms = [SimpleNamespace(name=name, of=None) for name in ("base", "arm")]
    plan = SimpleNamespace(arms=arms, quantities=None, evaluation=SimpleNamespace(steps=[16]))
    rows = summarise(plan, [record(which, seed) for which in (0, 1) for seed in range(3)]).rows
    assert rows[1].cells["t2l/cosine"].verdict == expected


def test_a_record_keeps_which_cosines_do_not_depend_on_the_text(tmp_path):
    close, near = Estimate(0.37, 0.0, 0.37, 0.37), Estimate(0.05, 0.0, 0.05, 0.05)
    retrieval = Retrieval(close, close, near, near, 0.005, 0.05, 9.0, 200, 200, Histogram([], [], []))
    result = replace(empty_evaluation("arm", {}), retrieval=retrieval)
    record = make_record("arm", 0, {}, result, tmp_path / "no log")
    assert record.blind == ["round_trip/latent/own", "t2l/cosine"]
    (tmp_path / "record.json").write_text(json.dumps(record.to_json()))
    assert read_record(tmp_path, {}) == record
