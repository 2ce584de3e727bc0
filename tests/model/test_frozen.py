"""The denoiser that a CPU samples with against `Denoiser.forward`."""

import gc
import weakref

import numpy as np
import pytest
import torch

from mmldlm.config import ModelConfig
from mmldlm.layout import packed_layout
from mmldlm.model import frozen as module
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.frozen import FrozenDenoiser, frozen

SHAPE = DataShape(vocab_size=50, num_slots=2, num_channels=5, max_length=12)
LENGTHS = np.array([3, 3, 7, 1, 1, 1, 12, 3])


def network(**changes) -> Denoiser:
    config = ModelConfig(
        depth=3, width=32, latent_width=24, num_heads=2, head_width=8, time_width=16, **changes
    )
    denoiser, generator = Denoiser(config, SHAPE), torch.Generator().manual_seed(1)
    with torch.no_grad():  # gates start at zero, where branches would not count
        for parameter in denoiser.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return denoiser.eval().requires_grad_(False)


def inputs(times: str):
    generator, num = torch.Generator().manual_seed(2), len(LENGTHS)
    tokens = torch.randint(0, SHAPE.vocab_size + 1, (int(LENGTHS.sum()),), generator=generator)
    latents = torch.randn(num, SHAPE.num_slots, SHAPE.num_channels, generator=generator)
    text_time, latent_time = torch.full((num,), 0.7), torch.zeros(num)
    if times == "several":
        text_time, latent_time = torch.rand(2, num, generator=generator).mul(3).round().div(3)
    return tokens, latents, text_time, latent_time, packed_layout(LENGTHS, SHAPE.num_slots)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("times", ["same", "several"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"tied_embedding": True}])
def test_it_predicts_what_the_denoiser_does(changes, times, ordered, monkeypatch):
    monkeypatch.setattr(module, "COLUMNS", 7)
    if not ordered:
        monkeypatch.setattr(module, "_is_x86", lambda: False)
    denoiser, given = network(**changes), inputs(times)
    expected = denoiser(*given)
    ours = FrozenDenoiser(denoiser, torch.float32)
    hidden = ours(*given)
    rows = torch.tensor([30, 0, 4, 7, 8, 8])  # in any order, and more than once
    torch.testing.assert_close(hidden.tokens(rows), expected.token_hidden[rows], atol=1e-4, rtol=1e-4)
    latents = hidden.latents().view_as(expected.latent_prediction)
    torch.testing.assert_close(latents, expected.latent_prediction, atol=1e-4, rtol=1e-4)
    logits = torch.cat(list(ours.logit_blocks(hidden.tokens(rows))), 1)
    torch.testing.assert_close(
        logits, denoiser.token_logits(expected.token_hidden[rows]), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(hidden.latents(), hidden.latents())  # asking changes nothing


def test_bf16_is_as_near_as_automatic_casts_are():
    denoiser, given = network(), inputs("several")
    rows = torch.arange(int(LENGTHS.sum()))
    exact = denoiser(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = denoiser(*given)
    hidden = FrozenDenoiser(denoiser, torch.bfloat16)(*given)

    def error(ours, theirs):
        return float((ours.float() - theirs).norm() / theirs.norm())

    assert hidden.tokens(rows).dtype == torch.bfloat16
    assert error(hidden.tokens(rows), exact.token_hidden) < 1.5 * error(cast.token_hidden, exact.token_hidden)
    latents = hidden.latents().view_as(exact.latent_prediction)
    assert error(latents, exact.latent_prediction) < 1.5 * error(
        cast.latent_prediction, exact.latent_prediction
    )


def test_prepared_once_and_again_when_a_weight_changes():
    denoiser = network()
    first = frozen(denoiser, torch.float32)
    assert frozen(denoiser, torch.float32) is first
    with torch.no_grad():
        denoiser.token_head.bias.add_(1.0)
    second = frozen(denoiser, torch.float32)
    assert second is not first
    denoiser.token_head.bias = torch.nn.Parameter(denoiser.token_head.bias + 1, requires_grad=False)
    assert frozen(denoiser, torch.float32) is not second


def test_not_used_where_somebody_trains_or_watches():
    denoiser = network().requires_grad_(True)
    assert frozen(denoiser, torch.float32) is None
    denoiser.requires_grad_(False)
    handle = denoiser.blocks[1].register_forward_hook(lambda *args: None)
    assert frozen(denoiser, torch.float32) is None
    handle.remove()
    assert frozen(denoiser, torch.float32) is not None


def test_nothing_is_kept_of_a_denoiser_that_is_gone():
    denoiser = network()
    alive = weakref.ref(frozen(denoiser, torch.float32))
    del denoiser
    gc.collect()
    assert alive() is None
