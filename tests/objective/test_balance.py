"""Balances of text against latent: closed forms, and the same step however it is cut up."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.config import ObjectiveConfig
from mmldlm.layout import Caps
from mmldlm.objective.joint import Active, GradientNorm, Objective, add_terms, build_balance, norms_of_shared
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents

DOCUMENTS = small_documents(lengths=(3, 12, 1, 7, 5, 9, 2, 11, 4, 8, 6, 10))
EVERYTHING = np.arange(12)
CUTS = [
    [EVERYTHING],
    [np.array([5, 2, 0]), np.array([1, 3, 4, 6]), np.array([7, 8, 9, 10, 11]), np.zeros(0, dtype=np.int64)],
]
CONFIG = ObjectiveConfig(text_weight=1.3, latent_weight=0.7, length_weight=0.2)


def settled(ratio):
    balance = GradientNorm(CONFIG)
    balance.settle(torch.tensor([ratio, 1.0]), 1)
    return balance


def step(denoiser, parts, balance, config=CONFIG, **changes):
    """Terms of a step cut into parts; gradients are left on the parameters."""
    corruption = small_corruption()
    objective = Objective(config, corruption, **changes)
    whole = batch_of(DOCUMENTS)
    times = corruption.times(whole.positions, whole.keys)
    counts = corruption.count(DOCUMENTS.lengths, times, SHAPE.num_slots)
    denoiser.zero_grad()
    total = None
    for part in parts:
        noisy = corruption.corrupt(batch_of(DOCUMENTS, part, Caps(96, 14, 12)))
        terms = objective(denoiser, noisy, counts, balance=balance)
        terms.trained.backward()
        total = add_terms(total, terms)
    return total, torch.cat([parameter.grad.flatten() for parameter in denoiser.parameters()])


@pytest.mark.parametrize("changes", [{}, {"scored_rows": False}, {"chunk_rows": 5}])
def test_one_micro_batch_and_four_give_the_same_step(changes):
    denoiser, balance = small_denoiser(), settled(5.0)
    expected, gradient = step(denoiser, CUTS[0], balance)
    found, other = step(denoiser, CUTS[1], balance, **changes)
    for name in ("loss", "trained", "text", "latent", "length"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(other, gradient, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"scored_rows": False},
        {"config": replace(CONFIG, latent_loss="cosine", text_weighting="uniform")},
    ],
)
def test_what_is_logged_stays_with_fixed_weights_and_length_with_its_own(what):
    denoiser = small_denoiser()
    plain, gradient = step(denoiser, CUTS[0], None, **what)
    gradient = gradient.clone()
    for balance in (settled(5.0), GradientNorm(CONFIG)):
        terms, _ = step(denoiser, CUTS[0], balance, **what)
        for name in ("loss", "text", "latent", "length", "correct", "text_by_time", "latent_by_time"):
            torch.testing.assert_close(getattr(terms, name), getattr(plain, name), rtol=2e-6, atol=1e-6)
    neutral, same = step(denoiser, CUTS[0], GradientNorm(CONFIG), **what)
    torch.testing.assert_close(neutral.trained, plain.loss)
    torch.testing.assert_close(same, gradient, rtol=1e-5, atol=1e-7)


def test_gradient_norm_brings_the_norms_into_the_ratio_of_the_weights():
    denoiser, balance = small_denoiser(), GradientNorm(CONFIG)
    heads = ("token_head", "latent_head", "length_head")

    def gradients(balance, **weights):
        config = replace(
            CONFIG, **({"text_weight": 0.0, "latent_weight": 0.0, "length_weight": 0.0} | weights)
        )
        corruption = small_corruption()
        whole = batch_of(DOCUMENTS)
        times = corruption.times(whole.positions, whole.keys)
        counts = corruption.count(DOCUMENTS.lengths, times, SHAPE.num_slots)
        objective, active = Objective(config, corruption), Active(text=True, latent=True, length=False)
        noisy = corruption.corrupt(whole)
        trained = objective(denoiser, noisy, counts, active=active, balance=balance).trained
        trunk = [p for name, p in denoiser.named_parameters() if not name.startswith(heads)]
        return torch.autograd.grad(trained, trunk, allow_unused=True)

    text, latent = gradients(None, text_weight=1.0), gradients(None, latent_weight=1.0)
    before = norms_of_shared(text, latent)
    balance.settle(before, 1)
    after = norms_of_shared(
        gradients(balance, text_weight=CONFIG.text_weight),
        gradients(balance, latent_weight=CONFIG.latent_weight),
    )
    assert (after[0] / after[1]).item() == pytest.approx(1.3 / 0.7, rel=1e-4)
    assert after.sum().item() == pytest.approx((1.3 * before[0] + 0.7 * before[1]).item(), rel=1e-4)


def test_measurements_are_averaged_then_smoothed_and_bad_ones_change_nothing():
    balance = GradientNorm(replace(CONFIG, balance_every=10))
    assert [step for step in range(12) if balance.due(step)] == [10, 11]
    for ratio in (1.0, 4.0, 16.0):
        balance.settle(torch.tensor([ratio, 1.0]), 0)
    assert balance.log_ratio.item() == pytest.approx(math.log(4.0))
    for bad in ([0.0, 1.0], [1.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]):
        balance.settle(torch.tensor(bad), 0)
    assert (balance.log_ratio.item(), balance.measured.item()) == (pytest.approx(math.log(4.0)), 3.0)
    balance.measured.fill_(50.0)
    balance.settle(torch.tensor([8.0, 1.0]), 0)
    assert balance.log_ratio.item() == pytest.approx(0.9 * math.log(4.0) + 0.1 * math.log(8.0))
    factors = balance.fields()
    assert factors["latent_factor"] / factors["text_factor"] == pytest.approx(
        math.exp(balance.log_ratio.item())
    )


def test_norms_are_due_at_multiples_and_a_late_measurement_does_not_shift_the_next():
    balance, with_both, found = GradientNorm(replace(CONFIG, balance_every=10)), {10, 23, 24, 30, 31, 40}, []
    for step in range(45):
        if step in with_both and balance.due(step):
            balance.settle(torch.tensor([1.0, 1.0]), step)
            found.append(step)
    assert found == [10, 23, 30, 40]


def test_there_is_a_balance_only_where_two_losses_are_to_be_balanced():
    assert build_balance(ObjectiveConfig(), text=True, latent=True) is not None
    assert build_balance(ObjectiveConfig(), text=True, latent=False) is None
    assert build_balance(ObjectiveConfig(balance="fixed"), text=True, latent=True) is None
