"""Medians, intervals and verdicts with answers known in closed form."""

import math

import numpy as np
import pytest

from mmldlm.benchmark.comparison import (
    FASTER,
    SAME,
    SLOWER,
    Ratio,
    loss_difference,
    ratio,
    spread,
    verdict,
)


def test_the_spread_is_median_and_quartiles_over_all_blocks():
    found = spread([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert (found.low, found.median, found.high) == (3, 5, 7)


def test_without_variation_the_interval_is_the_ratio():
    assert ratio([[6.0] * 4] * 3, [[2.0] * 4] * 3, seed=1) == Ratio(3.0, 3.0, 3.0)


def test_a_change_of_unit_changes_no_more_than_the_scale():
    rng = np.random.default_rng(0)
    ours, theirs = rng.uniform(1, 2, (3, 4)), rng.uniform(1, 2, (3, 4))
    once = ratio(ours.tolist(), theirs.tolist(), seed=3)
    scaled = ratio((8 * ours).tolist(), theirs.tolist(), seed=3)
    assert (scaled.value, scaled.low, scaled.high) == (8 * once.value, 8 * once.low, 8 * once.high)
    assert once.low < once.value < once.high


def test_differences_between_processes_widen_the_interval_however_alike_their_blocks_are():
    same = [[100.0 + block for block in range(5)]] * 3
    apart = [[100.0 * scale + block for block in range(5)] for scale in (0.8, 1.0, 1.2)]
    narrow, wide = ratio(same, same, seed=0), ratio(apart, same, seed=0)
    assert wide.low < 0.85
    assert wide.high > 1.15
    assert narrow.high - narrow.low < 0.05


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(150):
        ours, theirs = rng.normal(110, 5, (1, 40)), rng.normal(100, 5, (1, 40))
        found = ratio(ours.tolist(), theirs.tolist(), seed=trial)
        hits += found.low <= 1.1 <= found.high
    assert 0.88 <= hits / 150 <= 1.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.11, 1.3, FASTER), (1.05, 1.3, SAME), (0.95, 1.05, SAME), (0.5, 0.89, SLOWER), (0.5, 0.95, SAME)],
)
def test_a_difference_counts_only_beyond_the_noise(low, high, expected):
    noise = Ratio(1.0, 1 / 1.1, 1.02)
    assert noise.margin == pytest.approx(1.1)
    assert verdict(Ratio((low + high) / 2, low, high), noise) == expected


def test_the_loss_difference_is_a_mean_of_relative_differences():
    assert loss_difference([11.0, 18.0], [10.0, 20.0]) == pytest.approx(0.1)
    assert loss_difference([3.0], [3.0]) == 0.0
    assert math.isinf(loss_difference([None, 18.0], [10.0, 20.0]))
    assert math.isinf(loss_difference([], []))
