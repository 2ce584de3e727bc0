from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmldlm.config import CorruptionConfig, ModeWeights, ObjectiveConfig
from mmldlm.layout import Caps
from mmldlm.objective.joint import Active, Objective, add_terms
from mmldlm.objective.losses import text_loss
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents

DOCUMENTS = small_documents(lengths=(3, 12, 1, 7, 5, 9, 2, 11, 4, 8, 6, 10))
EVERYTHING = np.arange(12)


def objective_of(corruption, **changes):
    config = ObjectiveConfig(text_weight=1.3, latent_weight=0.7, length_weight=0.2, text_weighting="bound")
    return Objective(config, corruption, **changes)


def step_loss(
    denoiser, parts, *, prediction_type="clean", caps=None, layout="packed", row_multiple=1, **changes
):
    """Loss and gradient of one step over the given micro-batches of documents."""
    corruption = replace(small_corruption(prediction_type=prediction_type), row_multiple=row_multiple)
    objective = objective_of(corruption, **changes)
    whole = batch_of(DOCUMENTS)
    counts = corruption.count(
        DOCUMENTS.lengths, corruption.times(whole.positions, whole.keys), SHAPE.num_slots
    )
    denoiser.zero_grad()
    total = None
    for part in parts:
        terms = objective(denoiser, corruption.corrupt(batch_of(DOCUMENTS, part, caps, layout)), counts)
        terms.loss.backward()
        total = add_terms(total, terms)
    return total, torch.cat([parameter.grad.flatten() for parameter in denoiser.parameters()])


SPLITS = [
    [EVERYTHING[::-1].copy()],
    [np.array([5, 2, 0, 11]), np.array([1, 3, 4, 6, 7]), np.array([8, 9, 10])],
    [np.array([i]) for i in range(12)],
    [EVERYTHING, np.zeros(0, dtype=np.int64)],
]


@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
@pytest.mark.parametrize("parts", SPLITS, ids=["reversed", "three", "alone", "one empty"])
def test_loss_is_the_same_for_any_split_and_any_order(parts, prediction_type):
    denoiser = small_denoiser()
    expected, expected_grad = step_loss(denoiser, [EVERYTHING], prediction_type=prediction_type)
    caps = Caps(96, 14, 12)
    found, grad = step_loss(denoiser, parts, prediction_type=prediction_type, caps=caps)
    for name in ("loss", "text", "latent", "length", "correct", "scored"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("changes", [
    {"scored_rows": False}, {"chunk_rows": 5}, {"chunk_rows": 1}, {"row_multiple": 64},
    {"row_multiple": 64, "caps": Caps(96, 14, 12)},
    {"scored_rows": False, "layout": "padded", "caps": Caps(144, 12, 12)},
])  # fmt: skip
def test_scoring_rows_or_chunks_is_only_faster(changes):
    denoiser = small_denoiser()
    expected, expected_grad = step_loss(denoiser, [EVERYTHING])
    found, grad = step_loss(denoiser, [EVERYTHING], **changes)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2e-5, atol=1e-6)
    assert (found.correct, found.scored) == (expected.correct, expected.scored)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-4, atol=2e-6)


def test_loss_is_what_the_formula_says():
    """The text part by hand: sum over masked tokens of -log p / t, over the tokens of all documents that are scored."""
    denoiser, corruption = small_denoiser(), small_corruption()
    batch = batch_of(DOCUMENTS)
    noisy = corruption.corrupt(batch)
    times = corruption.times(batch.positions, batch.keys)
    counts = corruption.count(DOCUMENTS.lengths, times, SHAPE.num_slots)
    terms = objective_of(corruption)(denoiser, noisy, counts)
    out = denoiser(noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
    log_p = denoiser.token_logits(out.token_hidden).log_softmax(-1)
    text = latent = length = 0.0
    for token, document in enumerate(batch.layout.document.tolist()):
        if times.text_is_target[document] and noisy.noisy_tokens[token] == SHAPE.vocab_size:
            text -= log_p[token, batch.tokens[token]].item() / float(times.text_time[document])
    for document in range(12):
        if times.latent_is_target[document]:
            latent += (
                (out.latent_prediction[document] - batch.latents[document]).square().mean(-1).sum().item()
            )
        if times.text_is_target[document]:
            length -= out.length_logits[document].log_softmax(-1)[DOCUMENTS.lengths[document] - 1].item()
    assert terms.text.item() == pytest.approx(text / DOCUMENTS.lengths[times.text_is_target].sum(), rel=1e-5)
    assert terms.latent.item() == pytest.approx(latent / (2 * times.latent_is_target.sum()), rel=1e-5)
    assert terms.length.item() == pytest.approx(length / times.text_is_target.sum(), rel=1e-5)
    expected = 1.3 * terms.text + 0.7 * terms.latent + 0.2 * terms.length
    torch.testing.assert_close(terms.loss, expected)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 50])
def test_head_cross_entropy_is_the_plain_one_in_value_and_gradient(chunk_rows):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 64), torch.randn(9, 8, requires_grad=True)
    targets, weights = torch.randint(0, 37, (9,)), torch.rand(9) * 5
    weights[4] = 0.0
    plain = (F.cross_entropy(head(hidden)[:, :37], targets, reduction="none") * weights).sum()
    inputs = (hidden, head.weight, head.bias)
    expected = torch.autograd.grad(3.0 * plain, inputs)
    found = text_loss(head, hidden, targets, weights, vocab_size=37, chunk_rows=chunk_rows)
    torch.testing.assert_close(found.weighted, plain)
    for ours, theirs in zip(torch.autograd.grad(3.0 * found.weighted, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    hits = (head(hidden)[:, :37].argmax(-1) == targets) & (weights > 0)
    assert (found.correct.item(), found.rows.item()) == (hits.sum().item(), 8)
    with torch.no_grad():
        again = text_loss(head, hidden, targets, weights, vocab_size=37, chunk_rows=chunk_rows)
    torch.testing.assert_close(again.weighted, plain)


@pytest.mark.parametrize(("modes", "without"), [
    (ModeWeights(1, 0, 0), {"latent_head"}),
    (ModeWeights(0, 1, 0), {"token_head", "length_head"}),
    (ModeWeights(1, 1, 0), set()),
])  # fmt: skip
def test_a_head_that_no_mode_uses_is_not_trained(modes, without):
    active = Active.of(CorruptionConfig(modes), ObjectiveConfig(), length_modelled=True)
    heads = {"token_head": active.text, "latent_head": active.latent, "length_head": active.length}
    assert {head for head, trained in heads.items() if not trained} == without
