"""Noise of masks and random tokens: its shares, its forward steps and its reverse posterior by Bayes' rule."""

import itertools

import numpy as np
import pytest
import torch

from mmldlm import randomness
from mmldlm.corruption.schedule import TEXT_SCHEDULES
from mmldlm.corruption.text import TextProcess
from mmldlm.types import Times
from tests.batches import SHAPE, batch_of, small_corruption, small_documents

V = 3
PROCESSES = [TextProcess(TEXT_SCHEDULES[name], V, share) for name in TEXT_SCHEDULES for share in (0.1, 0.9)]


def marginal(process: TextProcess, predicted: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """(V + 1,) q_t(.|x) for a distribution x of clean tokens; the mask is last."""
    clean, random, masked = process.levels(time)
    return torch.cat([clean * predicted + random / V, masked[None]])


def transition(process: TextProcess, time: torch.Tensor, next_time: torch.Tensor) -> torch.Tensor:
    """(V + 1, V + 1) q(z at time | y at the earlier next_time) as [y, z], from the marginals alone."""
    nothing = torch.zeros(V, dtype=torch.float64)
    kept = process.levels(time)[0] / process.levels(next_time)[0]
    noise = marginal(process, nothing, time) - kept * marginal(process, nothing, next_time)
    return kept * torch.eye(V + 1, dtype=torch.float64) + noise


@pytest.mark.parametrize("process", PROCESSES)
def test_every_forward_step_is_a_distribution_and_leads_to_the_marginals(process):
    times = torch.linspace(0, 1, 21, dtype=torch.float64)
    token = torch.eye(V, dtype=torch.float64)[1]
    for next_time, time in itertools.pairwise(times):
        step = transition(process, time, next_time)
        assert (step >= 0).all()
        torch.testing.assert_close(step.sum(1), torch.ones(V + 1, dtype=torch.float64))
        torch.testing.assert_close(marginal(process, token, next_time) @ step, marginal(process, token, time))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(
    ("next_time", "time"), [(0.0, 0.02), (0.3, 0.5), (0.3, 1.0), (0.0, 1.0), (0.97, 0.98)]
)
def test_the_reverse_posterior_is_that_of_bayes(process, next_time, time):
    """For a sure prediction (one clean token) and for an unsure one."""
    time, next_time = torch.tensor(time, dtype=torch.float64), torch.tensor(next_time, dtype=torch.float64)
    step = transition(process, time, next_time)
    for predicted in (torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.2, 0.7, 0.1])):
        predicted = predicted.double()
        before, after = marginal(process, predicted, next_time), marginal(process, predicted, time)
        for z in range(V + 1):
            if after[z] < 1e-12:  # at time 1 only masks exist
                continue
            bayes = before * step[:, z] / after[z]
            own = predicted[z] if z < V else torch.tensor(0.0, dtype=torch.float64)
            renewal = process.renewal_probability(torch.tensor(z), own, time, next_time)
            found = renewal * before
            found[z] += 1 - renewal
            torch.testing.assert_close(found, bayes, atol=1e-9, rtol=1e-7)


def test_the_ends_are_exact_and_the_shares_are_those_of_the_levels():
    documents = small_documents(lengths=(12,) * 1000)
    batch, yes = batch_of(documents), np.ones(1000, dtype=bool)
    corruption = small_corruption(text_noise="hybrid", uniform_share=0.8)
    for time in (0.0, 0.4, 1.0):
        at = Times(np.full(1000, time, np.float32), np.zeros(1000, np.float32), yes, ~yes)
        noisy = corruption.corrupt_at(batch, at).noisy_tokens
        kept, masked = noisy == batch.tokens, noisy == SHAPE.vocab_size
        wrong = ~kept & ~masked
        if time in (0.0, 1.0):
            assert (kept if time == 0 else masked).all()
            continue
        clean, random, mask = (float(x) for x in corruption.text.levels(torch.tensor(time)))
        stray = random / SHAPE.vocab_size
        for found, expected in ((kept, clean + stray), (wrong, random - stray), (masked, mask)):
            assert abs(float(found.float().mean()) - expected) < 4 * np.sqrt(expected / 12000)
        counts = np.bincount(noisy[wrong].numpy(), minlength=SHAPE.vocab_size)
        expected = wrong.sum().item() / SHAPE.vocab_size
        freedom = SHAPE.vocab_size - 1
        assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom)


def test_noise_belongs_to_the_document_and_masks_of_both_noises_agree():
    documents = small_documents()
    chosen, places = np.array([4, 1]), np.repeat([4, 1], documents.lengths[[4, 1]])
    hybrid = small_corruption(text_noise="hybrid", uniform_share=0.5)
    whole, part = hybrid.corrupt(batch_of(documents)), hybrid.corrupt(batch_of(documents, chosen))
    owner = np.repeat(np.arange(6), documents.lengths)
    for document in chosen:
        there = whole.noisy_tokens[torch.from_numpy(owner == document)]
        assert torch.equal(part.noisy_tokens[torch.from_numpy(places == document)], there)
    plain = small_corruption().corrupt(batch_of(documents))
    changed = whole.noisy_tokens == SHAPE.vocab_size
    assert (plain.noisy_tokens[changed] == SHAPE.vocab_size).all()


@pytest.mark.parametrize("weighting", ["bound", "uniform"])
def test_all_tokens_of_noisy_targets_are_scored_and_no_clean_text_is(weighting):
    batch = batch_of(small_documents())
    corruption = small_corruption(text_noise="hybrid")
    object.__setattr__(corruption, "text_weighting", weighting)
    time = np.array([0.0, 0.2, 0.5, 1.0, 0.7, 0.3], np.float32)
    target = np.array([1, 1, 0, 1, 1, 1], dtype=bool)
    noisy = corruption.corrupt_at(batch, Times(time, np.zeros(6, np.float32), target, ~target))
    wanted = torch.from_numpy((time > 0) & target)[batch.layout.document]
    assert torch.equal(noisy.scored, torch.nonzero(wanted).squeeze(1))
    weight = 1.0 / noisy.text_time[batch.layout.document[noisy.scored]]
    torch.testing.assert_close(
        noisy.scored_weight, weight if weighting == "bound" else torch.ones_like(weight)
    )


def test_whole_numbers_are_spread_evenly_up_to_their_limit():
    keys = randomness.make_key(3, np.arange(60000))
    drawn = randomness.below(keys, randomness.TEXT_REPLACEMENT, np.zeros_like(keys), 7)
    counts = np.bincount(drawn, minlength=7)
    assert len(counts) == 7
    assert ((counts - 60000 / 7) ** 2 / (60000 / 7)).sum() < 25
