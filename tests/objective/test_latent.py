"""Latent losses against closed forms: values, gradients, what minimises them, and how prediction types relate."""

import pytest
import torch

from mmldlm.config import ObjectiveConfig
from mmldlm.objective.joint import Objective
from mmldlm.objective.losses import latent_loss, slot_errors
from mmldlm.types import Counts
from tests.batches import batch_of, small_corruption, small_denoiser, small_documents

KINDS = ["mse", "cosine", "normalized_mse"]
TYPES = ["clean", "noise", "velocity"]


def errors(kind, prediction, target):
    return slot_errors(prediction, target, ObjectiveConfig(latent_loss=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_right_latent_costs_nothing(kind):
    target = torch.randn(6, 2, 5)
    torch.testing.assert_close(errors(kind, target, target), torch.zeros(6, 2), atol=1e-6, rtol=0)
    for wrong in (2.0 * target, -target, target.roll(1, 0), torch.zeros_like(target)):
        assert (errors(kind, wrong, target) > 0.05).all()


def test_directions_against_the_cosine():
    prediction, target = torch.randn(7, 2, 5).double().float(), torch.randn(7, 2, 5)
    cosine = torch.cosine_similarity(prediction, target, dim=-1)
    size = prediction.square().mean(-1).sqrt()
    best = cosine * target.square().mean(-1).sqrt()
    torch.testing.assert_close(errors("cosine", prediction, target), 1 - cosine + (size - best) ** 2)
    torch.testing.assert_close(
        errors("normalized_mse", prediction, target), 2 - 2 * cosine + (size - best) ** 2
    )


@pytest.mark.parametrize("kind", ["cosine", "normalized_mse"])
def test_direction_turns_and_length_stretches(kind):
    """The gradient has a part along the prediction, which is that of the length alone, and a part across it."""
    prediction, target = torch.randn(1, 1, 5, dtype=torch.float32, requires_grad=True), torch.randn(1, 1, 5)
    (gradient,) = torch.autograd.grad(errors(kind, prediction, target).sum(), prediction)
    size = prediction.square().mean().sqrt()
    best = (prediction / size * target).mean()
    along = (gradient * prediction).sum() / size
    torch.testing.assert_close(along, 2 * (size - best))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", ["prediction", "target", "both"])
def test_zero_vectors_have_a_finite_loss_and_gradient(kind, zero):
    prediction = (0.0 if zero != "target" else 1.0) * torch.randn(2, 1, 4)
    target = (0.0 if zero != "prediction" else 1.0) * torch.randn(2, 1, 4)
    prediction.requires_grad_()
    loss = errors(kind, prediction, target)
    (gradient,) = torch.autograd.grad(loss.sum(), prediction)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    if zero == "prediction":  # it is drawn towards the target
        assert ((gradient * target).sum(-1) < 0).all()


@pytest.mark.parametrize("kind", ["mse", "cosine", "normalized_mse"])
def test_the_best_prediction_of_latents_of_equal_length_is_their_mean(kind):
    """Samplers take the prediction for the mean of the clean latent; so the loss must ask for it, length and all."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(40, 1, 6, generator=generator) + 0.7
    targets = targets / targets.square().mean(-1, keepdim=True).sqrt()
    prediction = torch.randn(1, 1, 6, generator=generator).requires_grad_()
    optimizer = torch.optim.SGD([prediction], lr=0.5)
    for _ in range(400):
        optimizer.zero_grad()
        errors(kind, prediction.expand_as(targets), targets).mean().backward()
        optimizer.step()
    torch.testing.assert_close(prediction.detach()[0], targets.mean(0), atol=1e-4, rtol=0)


def test_documents_without_a_weight_do_not_count():
    assert latent_loss(torch.ones(3, 2), torch.tensor([1.0, 0.0, 0.5])) == 3.0


@pytest.mark.parametrize("prediction_type", TYPES)
def test_the_objective_uses_the_chosen_loss_and_weights(prediction_type):
    """The latent part by hand, document by document."""
    corruption = small_corruption(latent_schedule="flow", prediction_type=prediction_type)
    config = ObjectiveConfig()
    denoiser, noisy = small_denoiser(), corruption.corrupt(batch_of(small_documents()))
    terms = Objective(config, corruption)(denoiser, noisy, Counts(1.0, 1.0, 1.0))
    inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
    output = denoiser(*inputs).latent_prediction
    total = 0.0
    for document in range(6):
        time, clean, noise = (
            noisy.latent_time[document],
            noisy.latents[document],
            noisy.latent_noise[document],
        )
        target = {"clean": clean, "noise": noise, "velocity": noise - clean}[prediction_type]
        found = output[document]
        if prediction_type == "noise":
            found = noisy.noisy_latents[document] + (1 - time) * found
        error = (found - target).square().mean(-1)
        total += noisy.latent_target[document] * error.sum()
    torch.testing.assert_close(terms.latent, total, rtol=1e-4, atol=1e-6)
