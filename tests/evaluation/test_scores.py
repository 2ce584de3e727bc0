"""Closed-form cases of the text scores, the statistics, retrieval and the curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.writer import StoreWriter
from mmldlm.evaluation.bounds import (
    Answers,
    calibration_error,
    equal_mass,
    equal_width,
    reliability,
    time_curve,
)
from mmldlm.evaluation.context import choose
from mmldlm.evaluation.inversion import length_groups
from mmldlm.evaluation.report import mark_differences
from mmldlm.evaluation.retrieval import ranks
from mmldlm.statistics import (
    MORE,
    Quantity,
    aligned_tokens,
    bleu_counts,
    bleu_of_sums,
    bleu_signature,
    bootstrap,
    exact_match,
    jackknife_estimate,
    spearman,
    token_accuracy,
    token_f1,
)
from tests.stores import write_store


def corpus_bleu(true: list[str], decoded: list[str]) -> float:
    """BLEU of all documents together, by sacrebleu itself."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU().corpus_score(decoded, [true]).score)


def tokens(*values: int) -> np.ndarray:
    return np.array(values)


@pytest.mark.parametrize(
    ("true", "found", "accuracy", "f1", "exact"),
    [
        (tokens(1, 2, 3, 4), tokens(1, 2, 3, 4), 1.0, 1.0, 1.0),
        (tokens(1, 2, 3, 4), tokens(4, 3, 2, 1), 0.0, 1.0, 0.0),
        (tokens(1, 2, 3, 4), tokens(1, 2, 9, 9), 0.5, 0.5, 0.0),
        (tokens(1, 2), tokens(1, 2, 3, 4), 0.5, 2 / 3, 0.0),  # surplus tokens are wrong
        (tokens(1, 2, 3, 4), tokens(1), 0.25, 0.4, 0.0),  # missing ones too
        (tokens(7, 7, 7), tokens(7, 8, 8), 1 / 3, 1 / 3, 0.0),  # a repeat counts as often as it is shared
    ],
)
def test_token_scores(true: np.ndarray, found: np.ndarray, accuracy: float, f1: float, exact: float) -> None:
    assert token_accuracy(true, found) == pytest.approx(accuracy)
    assert token_f1(true, found) == pytest.approx(f1)
    assert exact_match(true, found) == exact


def slow_alignment(true: np.ndarray, found: np.ndarray) -> tuple[int, int]:
    """Fewest edits, and the most right tokens with so few; cell by cell."""
    table = {(0, 0): (0, 0)}
    for i in range(len(true) + 1):
        for j in range(len(found) + 1):
            ways = [table[0, 0]] if i == j == 0 else []
            if i and j:
                edits, wrong = table[i - 1, j - 1]
                same = true[i - 1] == found[j - 1]
                ways.append((edits + (not same), wrong - same))
            ways += [(table[i - 1, j][0] + 1, table[i - 1, j][1])] if i else []
            ways += [(table[i, j - 1][0] + 1, table[i, j - 1][1])] if j else []
            table[i, j] = min(ways)
    return table[len(true), len(found)][0], -table[len(true), len(found)][1]


def test_tokens_right_after_alignment() -> None:
    rng = np.random.default_rng(0)
    true = [rng.integers(0, 4, size) for size in rng.integers(1, 9, 60)]
    found = [rng.integers(0, 4, size) for size in rng.integers(1, 9, 60)]
    expected = [slow_alignment(*pair)[1] for pair in zip(true, found, strict=True)]
    assert aligned_tokens(true, found).tolist() == expected
    one_word_short = tokens(1, 3, 4, 5, 6)
    assert aligned_tokens([tokens(1, 2, 3, 4, 5, 6)], [one_word_short]).tolist() == [5]
    assert token_accuracy(tokens(1, 2, 3, 4, 5, 6), one_word_short) == pytest.approx(1 / 6)
    assert len(aligned_tokens([], [])) == 0


def test_bleu_of_known_cases() -> None:
    text = ["the cat sat on the mat", "we the people of the united states"]
    assert corpus_bleu(text, text) == pytest.approx(100.0)
    assert corpus_bleu(text, ["x y z", "q"]) < 5.0
    # 1- to 4-gram precisions 3/4, 2/3, 1/2, and 0 of 1 smoothed to 1/2; no brevity penalty
    expected = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    assert corpus_bleu(["a b c d"], ["a b c e"]) == pytest.approx(expected)
    assert "tok:13a" in bleu_signature()


def test_bootstrap_is_deterministic_and_has_the_known_error() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    estimate = Quantity("", MORE, values).estimate(1)
    assert estimate == Quantity("", MORE, values).estimate(1)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.standard_error == pytest.approx(values.std() / 20, rel=0.1)
    assert estimate.low < 3.0 < estimate.high
    assert (estimate.high - estimate.low) / 2 == pytest.approx(1.96 * estimate.standard_error, rel=0.1)
    same = Quantity("", MORE, np.array([2.0, 4.0, 8.0]), np.array([1.0, 2.0, 4.0])).estimate(0)
    assert (same.value, same.low, same.high, same.standard_error) == (2.0, 2.0, 2.0, 0.0)


def test_choice_is_without_repeats_and_zero_means_all() -> None:
    assert len(set(choose(40, 100, seed=0))) == 40
    assert sorted(choose(0, 100, seed=0)) == list(range(100))
    assert sorted(choose(1000, 7, seed=0)) == list(range(7))
    assert np.array_equal(choose(10, 100, seed=0), choose(40, 100, seed=0)[:10])


def test_retrieval_of_perfect_latents_is_1_and_of_random_ones_near_chance(tmp_path: Path) -> None:
    split = write_store(tmp_path / "store", num_train=4, num_valid=300, num_slots=2).split("validation")
    positions = choose(200, 300, seed=0)
    truth = split.read(positions).latents
    assert (ranks(truth, truth, split, positions) == 1).all()
    noise = np.random.default_rng(0).normal(size=truth.shape).astype(np.float32)
    found = ranks(noise, truth, split, positions)
    # 200 guesses at 10 of 300: mean 6.7, standard deviation 2.5
    assert (found <= 10).sum() < 20
    assert abs(found.mean() - 150.5) < 4 * 300 / np.sqrt(12 * 200)
    assert (ranks(np.zeros_like(truth), truth, split, positions) == 300).all()  # a dead model finds nothing


def test_a_latent_that_two_documents_have_is_not_found(tmp_path: Path) -> None:
    """Equal latents tie, however their products are rounded."""
    rng = np.random.default_rng(0)
    latents = np.tile(rng.normal(size=(100, 1, 384)), (2, 1, 1)).astype(np.float32)
    writer = StoreWriter(tmp_path, vocab_size=9, num_slots=1, num_channels=384, latent_dtype="float32")
    writer.add("train", [np.ones(3, np.int64)] * 200, latents, ids=np.arange(200))
    split = writer.finish().split("train")
    queries = latents + 0.1 * rng.normal(size=latents.shape).astype(np.float32)
    assert (ranks(queries, latents, split, np.arange(200)) == 2).all()


def test_retrieval_reads_candidates_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = write_store(tmp_path / "store", num_train=4, num_valid=60).split("validation")
    positions = np.arange(60)[::-1]
    truth = split.read(positions).latents
    queries = truth + np.random.default_rng(0).normal(size=truth.shape).astype(np.float32)
    whole = ranks(queries, truth, split, positions)
    monkeypatch.setattr("mmldlm.evaluation.retrieval._CANDIDATES_AT_ONCE", 7)
    assert np.array_equal(ranks(queries, truth, split, positions), whole)


def test_curve_buckets() -> None:
    time, nats, correct = (
        np.array([0.0, 0.3, 1.0, 0.26]),
        np.array([1.0, 2.0, 3.0, 4.0]),
        np.array([0, 1, 1, 0]),
    )
    rows = time_curve(Answers(np.zeros(4), np.zeros(4), correct, time, nats), 4)
    assert [row.num_tokens for row in rows] == [1, 2, 0, 1]
    assert rows[1].nats == 3.0
    assert rows[1].accuracy == 0.5
    assert rows[2].nats is None


def test_bleu_from_summed_counts_is_that_of_sacrebleu() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(12)]
    true = [" ".join(rng.choice(words, rng.integers(1, 15))) for _ in range(40)]
    found = [" ".join(rng.choice(words, rng.integers(1, 15))) for _ in range(40)]
    found[:10] = true[:10]
    counts = bleu_counts(true, found)
    for size in (1, 2, 5, 40):
        rows = [rng.integers(0, 40, size) for _ in range(5)]
        for row in rows:
            expected = corpus_bleu([true[i] for i in row], [found[i] for i in row])
            assert bleu_of_sums(counts[row].sum(0)[None])[0] == pytest.approx(expected, abs=1e-6)


def test_calibration_error_by_hand() -> None:
    none = np.zeros(0)
    first = Answers(np.array([0, 0, 1]), np.array([0.15, 0.95, 0.92]), np.array([0.0, 1.0, 0.0]), none, none)
    answers = Answers.join([first, Answers(np.array([1]), np.array([0.12]), np.array([1.0]), none, none)])
    error = calibration_error(answers, equal_width(), 2, "")
    # buckets 0.1 to 0.2: 0.27 sure, 1 right; 0.9 to 1: 1.87 sure, 1 right
    assert error.statistic(np.array([[0, 1]]))[0] == pytest.approx((0.73 + 0.87) / 4)
    assert error.statistic(np.array([[0, 0]]))[0] == pytest.approx((0.15 + 0.05) / 2)
    edges = equal_mass(np.array([0.1, 0.2, 0.3, 0.4]), 2)
    assert edges.tolist() == [0.0, 0.25, 1.0]
    assert equal_mass(np.full(9, 0.5), 4).tolist() == [0.0, 0.5, 1.0]
    assert [row.num_tokens for row in reliability(answers, edges)] == [2, 2]


def test_spearman_of_known_cases() -> None:
    a = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spearman(a, a**3) == pytest.approx(1.0)
    assert spearman(a, -a) == pytest.approx(-1.0)
    assert spearman(a, np.array([2.0, 1.0, 4.0, 3.0, 5.0])) == pytest.approx(1 - 6 * 4 / (5 * 24))
    # ties share their mean rank: ranks 1.5 1.5 3.5 3.5 against 1 2 3 4
    assert spearman(np.array([0.0, 0.0, 1.0, 1.0]), a[:4]) == pytest.approx(4 / np.sqrt(4 * 5))
    assert np.isnan(spearman(a, np.ones(5)))


def test_a_quantity_survives_the_way_through_json() -> None:
    for quantity in (
        Quantity("a", "more", np.array([0.25, 0.5]), np.array([2, 3])),
        Quantity("b", "less", np.array([[1.0, 2.0], [3.0, 5.0]]), kind="spearman"),
        Quantity("c", "more", np.array([True, False])),
    ):
        back = Quantity.from_json(json.loads(json.dumps(quantity.to_json())))
        rows = np.array([[0, 1], [1, 1]])
        np.testing.assert_allclose(back.statistic(rows), quantity.statistic(rows))
        assert (back.title, back.better, back.kind) == (quantity.title, quantity.better, quantity.kind)
    with pytest.raises(ValueError, match="kind"):
        Quantity.from_json(quantity.to_json() | {"kind": "guess"})


def test_many_documents_are_resampled_in_pieces_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap(lambda rows: values[rows].mean(-1), 50, seed=3)
    monkeypatch.setattr("mmldlm.statistics._MOST_AT_ONCE", 0)
    assert np.array_equal(bootstrap(lambda rows: values[rows].mean(-1), 50, seed=3), whole)
    assert len(whole) == 1000


def test_length_groups_cover_every_length_once() -> None:
    assert length_groups([16, 32, 64], 40) == [(1, 16), (17, 32), (33, 64)]
    assert length_groups([16, 32, 64], 100) == [(1, 16), (17, 32), (33, 64), (65, 100)]
    assert length_groups([64, 16], 10) == [(1, 16)]
    assert length_groups([], 10) == []


def test_differences_are_marked_by_words() -> None:
    assert mark_differences("we the people", "We the good people !") == [
        ("We the", True), ("good", False), ("people", True), ("!", False),
    ]  # fmt: skip
    assert mark_differences("a b", "") == []


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=30)
    left_out = (values.sum() - values) / 29
    found = jackknife_estimate(float(values.mean()), left_out)
    assert found.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(30))
    assert (found.low + found.high) / 2 == pytest.approx(values.mean())


def test_equal_values_share_their_mean_rank() -> None:
    left, right = np.array([1.0, 2.0, 2.0, 3.0, 5.0]), np.array([1.0, 9.0, 2.0, 2.0, 2.0])
    by_hand = np.corrcoef([1.0, 2.5, 2.5, 4.0, 5.0], [1.0, 5.0, 3.0, 3.0, 3.0])[0, 1]
    assert spearman(left, right) == pytest.approx(by_hand)
