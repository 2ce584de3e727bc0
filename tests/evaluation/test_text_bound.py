"""The text bound against distributions whose entropy is known, and against the training objective."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.config import ObjectiveConfig
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import calibration_error, equal_mass, equal_width, reliability, time_curve
from mmldlm.evaluation.context import pack_rows, strangers
from mmldlm.evaluation.text_bound import (
    Costs,
    drawn_costs,
    perplexity,
    perplexity_with_end,
    score,
    standard_errors,
    text_costs,
    text_times,
)
from mmldlm.layout import packed_layout
from mmldlm.objective.joint import Objective
from mmldlm.statistics import MORE, Estimate, Quantity
from mmldlm.types import Counts, NoisyBatch, Times
from tests import batches
from tests.evaluation.toys import (
    LENGTH,
    TEXTS,
    VOCAB,
    Priced,
    draw_documents,
    joint_distribution,
    oracle_model,
)

JOINT = joint_distribution()


def bound_of(
    model, documents, latent: str, num_draws: int = 8, seed: int = 3, batch_tokens: int = 4096
) -> Costs:
    return text_costs(
        model, documents, latent=latent, num_draws=num_draws, batch_tokens=batch_tokens, seed=seed
    )


def per_token(costs: Costs) -> Estimate:
    """Nats per token, all documents together."""
    return costs.quantity().estimate(3)


def gain(worse: Costs, better: Costs) -> Estimate:
    """Nats per token that `better` saves, paired."""
    return Quantity("", MORE, worse.nats - better.nats, better.num_tokens).estimate(3)


def masked_batch(time: float, mask: tuple[bool, ...], kind: int) -> NoisyBatch:
    """Every text of the toy world with the same mask."""
    count, hidden = len(TEXTS), np.tile(mask, len(TEXTS))
    tokens = torch.from_numpy(TEXTS.reshape(-1))
    rows = torch.from_numpy(np.flatnonzero(hidden))
    latents = torch.full((count, 1, 2), 2.0 * kind - 1.0)
    return NoisyBatch(
        layout=packed_layout(np.full(count, LENGTH), 1),
        tokens=tokens,
        latents=latents,
        noisy_tokens=tokens.masked_fill(torch.from_numpy(hidden), VOCAB),
        noisy_latents=latents,
        latent_noise=latents,
        text_time=torch.full((count,), time, dtype=torch.float64),
        latent_time=torch.zeros(count),
        latent_target=torch.zeros(count),
        length_target=torch.ones(count),
        scored=rows,
        scored_real=torch.ones(len(rows), dtype=torch.bool),
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_oracle_pays_exactly_the_information_of_each_text(schedule: str) -> None:
    """All masks are summed and time is integrated by Gauss-Legendre; no Monte Carlo is left."""
    model = oracle_model(JOINT, schedule=schedule)
    nodes, node_weights = np.polynomial.legendre.leggauss(40)
    for kind in (0, 1):
        bound = np.zeros(len(TEXTS))
        for node, node_weight in zip((nodes + 1) / 2, node_weights / 2, strict=True):
            share = float(model.corruption.text.schedule.mask_probability(torch.tensor(node)))
            for mask in itertools.product((False, True), repeat=LENGTH):
                if not any(mask):
                    continue
                chance = share ** sum(mask) * (1 - share) ** (LENGTH - sum(mask))
                scores = score(model.denoiser, masked_batch(node, mask, kind), model.corruption.text.schedule)
                bound += node_weight * chance * scores.document_nats(len(TEXTS))
        information = -np.log(JOINT[kind] / JOINT[kind].sum())
        np.testing.assert_allclose(bound, information, atol=1e-6)


def test_the_bound_of_an_oracle_is_the_conditional_entropy_and_without_latent_the_marginal_one() -> None:
    """Monte Carlo over documents and masks: within four standard errors, which are below 0.02 nats."""
    documents, drawn = draw_documents(JOINT, 4000)
    model = oracle_model(JOINT)
    given = JOINT / JOINT.sum(1, keepdims=True)
    exact = {"right": -np.log(given).reshape(-1)[drawn], "none": -np.log(JOINT.sum(0))[drawn % len(TEXTS)]}
    for latent, information in exact.items():
        bound = bound_of(model, documents, latent)
        error = per_token(bound).value - information.mean() / LENGTH
        spread = (bound.nats - information).std() / np.sqrt(len(drawn)) / LENGTH
        assert spread < 0.02
        assert abs(error) < 4 * spread, (latent, error, spread)
    entropy = -(JOINT * np.log(given)).sum() / LENGTH
    right = bound_of(model, documents, "right")
    assert abs(per_token(right).value - entropy) < 4 * per_token(right).standard_error


def draws_of(model, documents, num_draws: int, seed: int = 3, latent: str = "right") -> np.ndarray:
    return drawn_costs(model, documents, latent=latent, num_draws=num_draws, batch_tokens=4096, seed=seed)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("num_draws", [1, 4, 16])
def test_draws_of_a_single_text_have_no_bias_and_know_their_error(schedule: str, num_draws: int) -> None:
    """One text of the toy world, 2,000 times under ids of its own: the mean is its information."""
    kind, text, count = 1, 5, 2000
    model, ids = oracle_model(JOINT, schedule=schedule), np.arange(count) ** 2
    latents = np.full((count, 1, 2), 2.0 * kind - 1.0, np.float32)
    documents = Documents(np.tile(TEXTS[text], count), np.full(count, LENGTH), latents, ids)
    draws = draws_of(model, documents, num_draws)
    assert draws.shape == (count, num_draws)
    assert draws.min() > 0  # something is masked in every draw
    means, errors = draws.mean(1), standard_errors(draws)
    information = -np.log(JOINT[kind, text] / JOINT[kind].sum())
    assert means.mean() == pytest.approx(information, abs=4 * means.std() / np.sqrt(count))
    if num_draws == 1:
        assert np.isnan(errors).all()
    else:
        assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.35)


@pytest.mark.parametrize("name", ["even", "rising", "steep"])
@pytest.mark.parametrize("num_draws", [4, 16])
def test_stated_errors_of_long_texts_are_not_below_the_true_ones(name: str, num_draws: int) -> None:
    """Places of a text differ in cost, and a token costs more the more others are masked."""
    factors = {
        "even": torch.ones_like,
        "rising": lambda share: 0.2 + 1.8 * share,
        "steep": lambda share: 2 * share**3,
    }
    denoiser, count = Priced(np.random.default_rng(0).gamma(0.7, 3.0, 120), factors[name]), 300
    model, length = replace(oracle_model(JOINT), denoiser=denoiser), len(denoiser.costs)
    latents = np.zeros((count, 1, 2), np.float32)
    documents = Documents(
        np.zeros(count * length, np.int64), np.full(count, length), latents, np.arange(count)
    )
    draws = draws_of(model, documents, num_draws)
    means, errors = draws.mean(1), standard_errors(draws)
    assert means.mean() == pytest.approx(denoiser.cost(), abs=4 * means.std() / np.sqrt(count))
    assert np.sqrt((errors**2).mean()) > 0.93 * means.std()
    assert np.mean(np.abs(means - denoiser.cost()) < 2 * errors) > 0.8


def test_draws_of_a_single_text_vary_less_than_with_times_alone() -> None:
    """Nor do they depend on the other texts."""
    documents, _ = draw_documents(JOINT, 400)
    model = oracle_model(JOINT)
    alone, others = (
        draws_of(model, documents, 4).mean(1),
        bound_of(model, documents, "right", num_draws=4).nats,
    )
    exact = draws_of(model, documents, 400).mean(1)
    assert (alone - exact).std() < 0.6 * (others - exact).std()
    assert np.array_equal(draws_of(model, documents.first(7), 4), draws_of(model, documents, 4)[:7])


def test_the_right_latent_beats_a_strangers_and_none_lies_between() -> None:
    documents, _ = draw_documents(JOINT, 600)
    model = oracle_model(JOINT)
    right, shuffled, none = (bound_of(model, documents, latent) for latent in ("right", "shuffled", "none"))
    saved = gain(shuffled, right)
    assert 0 < saved.low < saved.value < saved.high
    assert saved.value == pytest.approx(per_token(shuffled).value - per_token(right).value)
    assert per_token(right).value < per_token(none).value < per_token(shuffled).value


def test_a_denoiser_that_ignores_the_latent_gains_exactly_nothing() -> None:
    documents, _ = draw_documents(JOINT, 200)
    model = oracle_model(JOINT, blind=True)
    right, shuffled = bound_of(model, documents, "right"), bound_of(model, documents, "shuffled")
    assert np.array_equal(right.nats, shuffled.nats)
    saved = gain(shuffled, right)
    assert (saved.value, saved.low, saved.high, saved.standard_error) == (0.0, 0.0, 0.0, 0.0)


def test_numbers_do_not_depend_on_packs() -> None:
    documents, _ = draw_documents(JOINT, 50)
    model = oracle_model(JOINT)
    bound = bound_of(model, documents, "right")
    small = bound_of(model, documents, "right", batch_tokens=7)
    np.testing.assert_allclose(bound.nats, small.nats, rtol=1e-12)
    assert not np.array_equal(bound.nats, bound_of(model, documents, "right", seed=4).nats)


def test_the_bound_is_the_training_objective_at_the_same_times() -> None:
    """Same numbers through `Objective`, which training minimises."""
    documents = batches.small_documents()
    denoiser, corruption = batches.small_denoiser(), batches.small_corruption()
    batch = batches.batch_of(documents)
    count = len(documents.lengths)
    yes = np.ones(count, dtype=bool)
    times = Times(np.linspace(0.1, 1, count, dtype=np.float32), np.zeros(count, np.float32), yes, ~yes)
    noisy = corruption.corrupt_at(batch, times)
    objective = Objective(ObjectiveConfig(text_weighting="bound"), corruption)
    with torch.no_grad():
        terms = objective(denoiser, noisy, Counts(1.0, 1.0, 1.0))
    scores = score(denoiser, noisy, corruption.text.schedule)
    assert scores.document_nats(count).sum() == pytest.approx(float(terms.text), rel=1e-5)
    assert scores.length_nats is not None
    assert scores.length_nats.sum() == pytest.approx(float(terms.length), rel=1e-5)
    assert scores.correct.sum() == float(terms.correct)


def test_a_pack_without_a_masked_token_costs_nothing() -> None:
    documents = batches.small_documents((3, 4))
    corruption, batch = batches.small_corruption(), batches.batch_of(documents)
    yes = np.ones(2, dtype=bool)
    noisy = corruption.corrupt_at(batch, Times(np.zeros(2, np.float32), np.zeros(2, np.float32), yes, ~yes))
    assert score(batches.small_denoiser(), noisy, corruption.text.schedule).document_nats(2).tolist() == [
        0.0,
        0.0,
    ]


def test_times_are_stratified_within_and_over_documents() -> None:
    times = text_times(np.arange(1000), 4, seed=0)
    assert np.array_equal(np.floor(times * 4).astype(int), np.tile(np.arange(4), (1000, 1)))
    gaps = np.diff(np.sort(times[:, 0]), prepend=0.0, append=0.25)
    assert gaps.max() < 8 * 0.25 / 1000


def test_curves_count_every_scored_token_once() -> None:
    documents, _ = draw_documents(JOINT, 300)
    bound = bound_of(oracle_model(JOINT), documents, "right")
    half = 300 * LENGTH * 8 / 2  # half of all, as times are uniform
    assert sum(row.num_tokens for row in time_curve(bound.answers)) == pytest.approx(half, rel=0.05)
    assert bound.length_nats.mean() == pytest.approx(np.log(1 + 4 * np.exp(-2.0)))


def test_the_end_of_a_text_counts_as_a_token_that_costs_what_the_length_does() -> None:
    documents, _ = draw_documents(JOINT, 20)
    bound = bound_of(oracle_model(JOINT), documents, "right")
    alike = replace(bound, nats=bound.num_tokens * np.log(5.0), length_nats=np.full(20, np.log(5.0)))
    assert perplexity_with_end(alike) == pytest.approx(5.0)
    dear = replace(alike, length_nats=np.full(20, 2 * np.log(5.0)))
    assert perplexity_with_end(dear) == pytest.approx(5.0 ** (1 + 1 / (LENGTH + 1)))
    assert perplexity_with_end(replace(alike, length_nats=None)) is None


def test_the_oracle_knows_how_sure_it_may_be_and_an_overconfident_one_does_not() -> None:
    documents, _ = draw_documents(JOINT, 600)
    bound = bound_of(oracle_model(JOINT), documents, "right")
    for edges in (equal_width(), equal_mass(bound.answers.confidence)):
        error = calibration_error(bound.answers, edges, len(documents.lengths), "oracle")
        assert error.estimate(0).value < 0.04
        rows = reliability(bound.answers, edges)
        assert sum(row.num_tokens for row in rows) == len(bound.answers.document)
    document, correct = bound.answers.document, bound.answers.correct
    boast = bound.answers._replace(confidence=np.ones(len(document)))
    found = calibration_error(boast, equal_width(), len(documents.lengths), "boast").estimate(0)
    assert found.value == pytest.approx(1.0 - correct.mean())
    assert found.low < found.value < found.high
    masses = [row.num_tokens for row in reliability(bound.answers, equal_mass(np.arange(1000) / 1000))]
    assert sum(masses) == len(document)


def test_strangers_are_a_permutation_without_a_fixed_point() -> None:
    for count in (2, 3, 10, 257):
        partner = strangers(count, seed=1)
        assert sorted(partner) == list(range(count))
        assert (partner != np.arange(count)).all()


def test_packs_cover_all_and_respect_their_size() -> None:
    lengths = np.array([5, 9, 20, 1, 1, 3, 8])
    packs = [rows for _, rows in pack_rows(lengths, 10)]
    assert np.array_equal(np.concatenate(packs), np.arange(7))
    assert all(lengths[rows].sum() <= 10 or len(rows) == 1 for rows in packs)


def test_wrong_words_and_lengths_are_refused() -> None:
    documents, _ = draw_documents(JOINT, 4)
    model = oracle_model(JOINT)
    with pytest.raises(UserError, match="right, shuffled, none"):
        bound_of(model, documents, "left")
    model.denoiser.shape = replace(model.denoiser.shape, max_length=2)
    with pytest.raises(UserError, match="3 tokens, and this model knows lengths up to 2"):
        bound_of(model, documents, "right")
    assert perplexity(1e4) == np.inf
