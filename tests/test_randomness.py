import numpy as np
import pytest

from mmldlm import randomness


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_permute_is_a_permutation_at_every_size(size):
    shuffled = randomness.permute(np.arange(size), size, randomness.make_key(5, size))
    assert sorted(shuffled) == list(range(size))


def test_permutations_of_different_keys_differ_and_move_things():
    first = randomness.permute(np.arange(500), 500, randomness.make_key(1))
    second = randomness.permute(np.arange(500), 500, randomness.make_key(2))
    assert (first == second).mean() < 0.05
    assert (first == np.arange(500)).mean() < 0.05
    assert abs(np.corrcoef(first, np.arange(500))[0, 1]) < 0.2


def test_every_place_is_equally_likely():
    hits = np.zeros((8, 8))
    for seed in range(4000):
        hits[np.arange(8), randomness.permute(np.arange(8), 8, randomness.make_key(seed))] += 1
    # 500 expected in each cell with a standard deviation of about 21
    assert np.abs(hits - 500).max() < 110


def test_ten_million_documents_are_shuffled_without_a_table():
    import tracemalloc

    tracemalloc.start()
    part = randomness.permute(np.arange(5_000_000, 5_001_000), 10_000_000, randomness.make_key(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(part)) == 1000
    assert part.max() < 10_000_000
    assert peak < 2**20


def test_numbers_depend_on_key_tag_and_index_alone():
    keys = randomness.make_key(3, np.arange(10))
    together = randomness.normal(keys, randomness.LATENT_NOISE, 7)
    alone = np.concatenate(
        [randomness.normal(keys[i : i + 1], randomness.LATENT_NOISE, 7) for i in range(10)]
    )
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, randomness.normal(keys, randomness.TEXT_MASK, 7))


def test_uniform_is_uniform_and_strictly_inside():
    numbers = randomness.uniform(
        randomness.make_key(1, np.arange(100_000)), 1, np.zeros(100_000, dtype=np.int64)
    )
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-square, 19 degrees of freedom, p = 0.0007


def test_the_largest_and_the_smallest_word_stay_inside():
    ends = randomness._to_unit(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert 0 < ends[0] < 1e-6
    assert 1 - 1e-6 < ends[1] < 1


def test_normal_has_the_moments_of_a_normal_and_no_correlation():
    numbers = randomness.normal(randomness.make_key(1, np.arange(20_000)), 1, 6).astype(np.float64)
    assert np.abs(numbers.mean(0)).max() < 0.03
    assert np.abs(numbers.var(0) - 1).max() < 0.05
    assert np.abs((numbers**4).mean(0) - 3).max() < 0.25
    correlation = np.corrcoef(numbers.T) - np.eye(6)
    assert np.abs(correlation).max() < 0.03


@pytest.mark.parametrize("start", [0, 12345, 10**12])
@pytest.mark.parametrize("dimension", range(randomness.LOW_DISCREPANCY_DIMENSIONS))
def test_any_run_of_positions_covers_the_interval(start, dimension):
    numbers = np.sort(randomness.low_discrepancy(np.arange(start, start + 256), dimension, seed=9))
    gaps = np.diff(np.concatenate([[0.0], numbers, [1.0]]))
    # independent draws would leave a gap of about ln(256)/256, six times the even spacing
    assert gaps.max() < 4 / 256
