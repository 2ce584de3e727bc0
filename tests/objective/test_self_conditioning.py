"""Self-conditioning: two passes of which only the second learns, and documents that leave each other alone."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.config import Config, ObjectiveConfig
from mmldlm.evaluation.validation import validation_loss
from mmldlm.layout import Caps
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.objective.joint import Active, Objective
from mmldlm.objective.self_conditioning import denoise, first_answer, known_to
from mmldlm.types import Counts, NoisyBatch, Previous
from tests.batches import SHAPE, batch_of, small_config, small_corruption, small_denoiser, small_documents

DOCUMENTS, CORRUPTION = small_documents(), small_corruption()
OBJECTIVE = Objective(
    ObjectiveConfig(),
    CORRUPTION.latent,
    Active.of(CORRUPTION.config, ObjectiveConfig(), length_modelled=True),
)
COUNTS = Counts(37.0, 12.0, 6.0)
TOLD = [True, False, True, True, False, False]


def noisy_batch(chosen: list[int] | None = None, **how: object) -> NoisyBatch:
    return CORRUPTION.corrupt(batch_of(DOCUMENTS, None if chosen is None else np.array(chosen), **how))


def inputs(noisy: NoisyBatch) -> tuple:
    return noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout


def with_coins(noisy: NoisyBatch, coins: list[bool]) -> NoisyBatch:
    return replace(noisy, self_conditioned=torch.tensor(coins))


def gradients(denoiser: Denoiser) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in denoiser.named_parameters() if p.grad is not None}


def test_at_the_start_it_is_the_plain_denoiser_to_the_bit() -> None:
    plain, told = (Denoiser(small_config(self_conditioning=on), SHAPE) for on in (False, True))
    for denoiser in (plain, told):
        init_weights(denoiser, 3)
    extra = told.state_dict().keys() - plain.state_dict().keys()
    assert extra == {"token_recall.weight", "latent_recall.weight"}
    noisy = noisy_batch()
    terms = [OBJECTIVE(denoiser, noisy, COUNTS) for denoiser in (plain, told)]
    for term in terms:
        term.loss.backward()
    assert torch.equal(terms[0].loss, terms[1].loss)
    found = gradients(told)
    assert all(torch.equal(gradient, found[name]) for name, gradient in gradients(plain).items())
    assert all(found[name].any() for name in extra)


def test_nothing_said_is_zeros() -> None:
    denoiser, noisy = small_denoiser(self_conditioning=True), noisy_batch()
    nothing = Previous(torch.zeros(len(noisy.tokens), 32), torch.zeros_like(noisy.latents))
    plain, zeros = denoiser(*inputs(noisy)), denoiser(*inputs(noisy), nothing)
    assert torch.equal(plain.token_hidden, zeros.token_hidden)
    assert torch.equal(plain.latent_prediction, zeros.latent_prediction)


def test_only_documents_with_the_coin_are_told() -> None:
    denoiser, noisy = small_denoiser(self_conditioning=True), with_coins(noisy_batch(), TOLD)
    plain, output = denoiser(*inputs(noisy)), denoise(denoiser, noisy, CORRUPTION.latent)
    for document, told in enumerate(TOLD):
        rows = noisy.layout.document == document
        same = torch.allclose(plain.token_hidden[rows], output.token_hidden[rows], rtol=1e-5, atol=1e-5)
        assert same is not told
        latents = plain.latent_prediction[document], output.latent_prediction[document]
        assert torch.allclose(*latents, rtol=1e-5, atol=1e-5) is not told


def test_the_coin_is_fair_and_belongs_to_the_document() -> None:
    many = CORRUPTION.corrupt(batch_of(small_documents(lengths=(1,) * 4000)))
    assert many.self_conditioned.float().mean() == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    whole = noisy_batch().self_conditioned
    assert whole.any()
    assert not whole.all()
    assert torch.equal(noisy_batch([4, 1]).self_conditioned, whole[[4, 1]])
    assert torch.equal(noisy_batch(caps=Caps(64, 8, 12)).self_conditioned[:6], whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_gradient_flows_into_the_first_pass(precision: str) -> None:
    denoiser = small_denoiser(self_conditioning=True)
    noisy = with_coins(noisy_batch(), TOLD)

    def cast() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    with cast():
        OBJECTIVE(denoiser, noisy, COUNTS).loss.backward()
    found = gradients(denoiser)
    denoiser.zero_grad()
    with cast():
        said = first_answer(denoiser, noisy, CORRUPTION.latent)
    assert not said.token_hidden.requires_grad
    assert not said.clean_latents.requires_grad
    constant = known_to(noisy.self_conditioned, Previous(*(x.clone() for x in vars(said).values())), noisy)
    run = denoiser.forward
    denoiser.forward = lambda *given: run(*given[:5], constant)  # type: ignore[method-assign,assignment]
    with cast():  # whatever the objective asks for, each pass is told the same constant
        OBJECTIVE(denoiser, noisy, COUNTS).loss.backward()
    alone = gradients(denoiser)
    assert found.keys() == alone.keys() == dict(denoiser.named_parameters()).keys()
    assert all(torch.equal(found[name], alone[name]) for name in found)


@pytest.mark.parametrize(
    "parts",
    [
        [noisy_batch([3, 1]), noisy_batch([5, 0, 2]), noisy_batch([4])],
        [noisy_batch(caps=Caps(64, 8, 12))],
        [noisy_batch(layout="padded", caps=Caps(72, 6, 12))],
    ],
    ids=["cut", "filler", "padded"],
)
def test_loss_and_gradients_do_not_depend_on_how_documents_are_laid_out(parts: list[NoisyBatch]) -> None:
    denoiser = small_denoiser(self_conditioning=True)
    whole = OBJECTIVE(denoiser, noisy_batch(), COUNTS).loss
    whole.backward()
    expected = gradients(denoiser)
    denoiser.zero_grad()
    losses = [OBJECTIVE(denoiser, part, COUNTS).loss for part in parts]
    sum(losses).backward()  # type: ignore[union-attr]
    total = sum(loss.item() for loss in losses)
    assert total == pytest.approx(whole.item(), rel=1e-5)
    for name, gradient in gradients(denoiser).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-3, atol=1e-5), name


def test_computing_blocks_again_changes_nothing() -> None:
    denoiser, noisy = small_denoiser(self_conditioning=True).train(), noisy_batch()
    OBJECTIVE(denoiser, noisy, COUNTS).loss.backward()
    expected = gradients(denoiser)
    for recomputed, keep in (({0, 1}, "all"), (set(), "products")):
        denoiser.zero_grad()
        denoiser.recomputed, denoiser.kernels = recomputed, denoiser.kernels._replace(keep=keep)
        OBJECTIVE(denoiser, noisy, COUNTS).loss.backward()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(denoiser).items())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "flow"])
@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
def test_the_estimate_is_the_clean_latent_and_always_finite(schedule: str, prediction_type: str) -> None:
    process = small_corruption(latent_schedule=schedule, prediction_type=prediction_type).latent
    output, noisy = torch.randn(2, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0])
    found = process.clean_of_output(output, noisy, time)
    said = process.prediction(output, noisy, time)
    assert torch.allclose(found[1:4], process.to_clean(said, noisy, time)[1:4], atol=1e-5)
    assert torch.equal(found[0], noisy[0])
    assert found.isfinite().all()


def test_validation_takes_both_passes_and_looks_at_the_second() -> None:
    denoiser = small_denoiser(self_conditioning=True)
    active = Active.of(Config().corruption, ObjectiveConfig(), length_modelled=True)
    objective = Objective(ObjectiveConfig(), CORRUPTION.latent, active)

    def loss_of(*parts: NoisyBatch) -> dict[str, float]:
        cpu = torch.device("cpu")
        return validation_loss(denoiser, CORRUPTION, objective, parts, cpu, contextlib.nullcontext)

    whole = loss_of(noisy_batch())
    assert loss_of(noisy_batch([0, 1, 2]), noisy_batch([3, 4, 5])) == pytest.approx(whole, rel=1e-5)
    noisy = noisy_batch()
    said = denoise(denoiser, noisy, CORRUPTION.latent).latent_prediction[noisy.latent_target > 0]
    assert whole["valid_latent_prediction_std"] == pytest.approx(said.std(0).mean().item(), rel=1e-5)
    untold = loss_of(with_coins(noisy, [False] * 6))
    assert untold["valid_text_loss"] != pytest.approx(whole["valid_text_loss"], rel=1e-3)
