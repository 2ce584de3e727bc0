"""Operations of a step: counted by hand, and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.config import ModelConfig, resolve_model
from mmldlm.model.denoiser import DataShape, step_flops
from mmldlm.model.weights import unused_parameters
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents

WORK = {"tokens": 100, "documents": 7, "squares": 900, "scored": 40}


def test_what_was_measured_by_hand_for_the_reference_shape():
    model, data = resolve_model(ModelConfig(preset="reference")), DataShape(30522, 1, 32, 2048)
    more = step_flops(model, data, tokens=1, documents=0, squares=0, scored=0)
    ending = 1024 * 512 + 8 * 1024 * 1024  # of the last block, which only scored tokens meet
    assert more == 6 * (24 * (4 * 1024 * 512 + 8 * 1024 * 1024) - ending)
    assert step_flops(model, data, tokens=0, documents=0, squares=9, scored=0) == 12 * 24 * 512 * 9
    scored = step_flops(model, data, tokens=0, documents=0, squares=0, scored=5)
    assert scored == 6 * 5 * (1024 * 30522 + ending)


def test_the_forward_pass_agrees_with_the_counter_of_pytorch():
    denoiser = small_denoiser()
    noisy = small_corruption().corrupt(batch_of(small_documents(lengths=(5, 9, 12))))
    denoiser.kernels = denoiser.kernels._replace(attention="reference")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
        hidden = denoiser(*inputs, noisy.scored).token_hidden
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    scored = len(noisy.scored)
    assert 0 < scored < 26
    assert hidden.shape == (scored, denoiser.config.width)
    expected = step_flops(denoiser.config, SHAPE, tokens=26, documents=3, squares=0, scored=scored) / 3
    assert products == expected - 2 * scored * denoiser.config.width * SHAPE.vocab_size


@pytest.mark.parametrize("without", ["text", "latent", "length"])
def test_what_no_loss_depends_on_is_not_counted(without):
    """The weights that are declared unused, met once a token, slot or document, six operations each; those of the text
    after the last attention once a scored token."""
    denoiser, losses = small_denoiser(), {"text": True, "latent": True, "length": True} | {without: False}
    unused, rows = (
        unused_parameters(denoiser, **losses),
        {"text": 100, "latent": 7 * SHAPE.num_slots, "length": 0},
    )
    saved = 0
    for name, parameter in denoiser.named_parameters():
        dead = parameter if name in unused.names else parameter[unused.rows.get(name, slice(0, 0))]
        per_document = "modulation" in name or "final" in name or name.startswith("length_head")
        if parameter.ndim == 2 and not name.startswith("token_head"):  # which costs by scored rows
            ending = without == "text" and any(part in name for part in ("attention_out", "mlp"))
            saved += dead.numel() * (7 if per_document else WORK["scored"] if ending else rows[without])
    whole, part = (step_flops(denoiser.config, SHAPE, **WORK, **kinds) for kinds in ({}, losses))
    assert whole - part == 6 * saved > 0
