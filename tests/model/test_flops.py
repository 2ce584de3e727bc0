"""Operations of a step: counted by hand, and against PyTorch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.config import ModelConfig, resolve_model
from mmldlm.model.denoiser import DataShape
from mmldlm.model.flops import step_flops
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents

WORK = {"tokens": 100, "documents": 7, "squares": 900, "scored": 40}


def test_what_was_measured_by_hand_for_the_reference_shape():
    model, data = resolve_model(ModelConfig(preset="reference")), DataShape(30522, 1, 32, 2048)
    more = step_flops(model, data, tokens=1, documents=0, squares=0, scored=0)
    assert more == 6 * 24 * (4 * 1024 * 512 + 8 * 1024 * 1024)
    assert step_flops(model, data, tokens=0, documents=0, squares=9, scored=0) == 12 * 24 * 512 * 9
    assert step_flops(model, data, tokens=0, documents=0, squares=0, scored=5) == 6 * 5 * 1024 * 30522


def test_the_forward_pass_agrees_with_the_counter_of_pytorch():
    denoiser = small_denoiser()
    noisy = small_corruption().corrupt(batch_of(small_documents(lengths=(5, 9, 12))))
    denoiser.kernels = denoiser.kernels._replace(attention="reference")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        denoiser(noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    expected = step_flops(denoiser.config, SHAPE, tokens=26, documents=3, squares=0, scored=0) / 3
    assert products == expected
