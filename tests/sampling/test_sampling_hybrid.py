"""The sampler of hybrid noise with the exact predictor of a known distribution, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_oracles import NUM_LETTERS, TEXT_LENGTH, TEXTS, chi_square, random_model, toy_distribution
from torch import Tensor

from mmldlm.config import CorruptionConfig
from mmldlm.corruption.joint import Corruption
from mmldlm.errors import UserError
from mmldlm.layout import Layout
from mmldlm.sampling.decode import decode_latents, document_keys, encode_tokens
from mmldlm.sampling.draw import draw
from mmldlm.sampling.hybrid import hybrid_step, probability_of
from mmldlm.sampling.joint import run_chain, text_steps
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Prediction
from mmldlm.sampling.steps import Step

JOINT = toy_distribution(1)[0]
NUM_DRAWN = 2000


class Exact:
    """P(letter | the other noisy letters), which is what a network learns from either weighting."""

    def __init__(self, corruption: Corruption, texts: np.ndarray) -> None:
        self.process, self.log_prior = corruption.text, torch.from_numpy(texts).log()
        self.letters = torch.nn.functional.one_hot(torch.from_numpy(TEXTS), NUM_LETTERS).double()
        self.asked: list[Tensor] = []

    def predict(
        self, noisy_tokens: Tensor, noisy_latents: Tensor, text_time: Tensor, latent_time: Tensor,
        layout: Layout, rows: Tensor | None = None,
    ) -> Prediction:  # fmt: skip
        self.asked.append(noisy_tokens)
        seen = noisy_tokens.view(-1, TEXT_LENGTH)
        clean, random, _ = (level.double() for level in self.process.levels(text_time[0]))
        same = seen[:, :, None] == torch.arange(NUM_LETTERS)
        fits = torch.where(same, clean + random / NUM_LETTERS, random / NUM_LETTERS)
        fits = torch.where((seen == self.process.mask_id)[:, :, None], torch.ones_like(fits), fits).log()
        by_text = torch.einsum("nlv,qlv->nlq", fits.clamp(min=-1e4), self.letters)
        others = by_text.sum(1, keepdim=True) - by_text + self.log_prior
        marginal = torch.einsum("nlq,qlv->nlv", others.softmax(-1), self.letters)
        return Prediction(marginal.log().reshape(-1, NUM_LETTERS).float(), noisy_latents)

    def length_logits(self, noisy_latents: Tensor, latent_time: Tensor) -> Tensor:
        raise AssertionError("lengths are given")


def hybrid_corruption(share: float, schedule: str = "linear") -> Corruption:
    config = CorruptionConfig(text_noise="hybrid", uniform_share=share, text_schedule=schedule)
    return Corruption(config, 0, NUM_LETTERS)


def pack_of(tokens: Tensor, count: int, time: float) -> Pack:
    latents, keys = torch.zeros(count, 1, 2), document_keys(3, count)
    lengths = np.full(count, TEXT_LENGTH)
    return Pack(tokens, latents, torch.full((count,), time), torch.zeros(count), lengths, keys)


def options_of(num_steps: int, **changes: float) -> SamplingOptions:
    return SamplingOptions(text_sampler="hybrid", num_sampling_steps=num_steps, **changes)


@pytest.mark.parametrize(("share", "schedule"), [(0.2, "linear"), (0.9, "cosine")])
def test_sampler_reproduces_the_distribution_and_changes_its_mind(share: float, schedule: str) -> None:
    corruption = hybrid_corruption(share, schedule)
    predictor = Exact(corruption, JOINT)
    options = options_of(40)
    start = pack_of(torch.full((NUM_DRAWN * TEXT_LENGTH,), NUM_LETTERS), NUM_DRAWN, 1.0)
    end = run_chain(predictor, start, text_steps(options), corruption, options)
    assert chi_square(end.split_tokens(), JOINT) < 4.0
    assert len(predictor.asked) == 40
    pairs = zip(predictor.asked, [*predictor.asked[1:], end.noisy_tokens], strict=True)
    mended = sum(
        int(((before != after) & (before < NUM_LETTERS) & (after < NUM_LETTERS)).sum())
        for before, after in pairs
    )
    assert mended > 0.02 * NUM_DRAWN * TEXT_LENGTH


def test_shares_on_the_way_are_those_of_the_noise() -> None:
    """After any step the tokens are as if clean texts had been corrupted as far."""
    corruption = hybrid_corruption(0.8)
    start = pack_of(torch.full((NUM_DRAWN * TEXT_LENGTH,), NUM_LETTERS), NUM_DRAWN, 1.0)
    predictor, options = Exact(corruption, JOINT), options_of(20)
    end = run_chain(predictor, start, text_steps(options)[:10], corruption, options)
    clean, random, masked = (float(level) for level in corruption.text.levels(torch.tensor(0.5)))
    assert (end.text_time == 0.5).all()
    found = (end.noisy_tokens == NUM_LETTERS).float().mean()
    assert float(found) == pytest.approx(masked, abs=0.025)
    letters = JOINT @ np.stack([(letter == TEXTS).mean(1) for letter in range(NUM_LETTERS)], axis=1)
    shares = np.bincount(end.noisy_tokens.numpy(), minlength=4)[:3] / len(end.noisy_tokens)
    assert shares == pytest.approx(clean * letters + random / 3, abs=0.025)


def test_a_wrong_token_is_mended() -> None:
    """All texts are one and the same; half-way one letter of each is another."""
    corruption, right = hybrid_corruption(0.2), TEXTS[37]
    only = np.full(len(TEXTS), 1e-9)
    only[37] = 1.0
    wrong = np.tile(right, (200, 1))
    wrong[:, 2] = (wrong[:, 2] + 1) % NUM_LETTERS
    start = pack_of(torch.from_numpy(wrong.reshape(-1)), 200, 0.5)
    options = options_of(10)
    steps = [step for step in text_steps(options) if step.time <= 0.5]
    end = run_chain(Exact(corruption, only / only.sum()), start, steps, corruption, options)
    assert (np.stack(end.split_tokens()) == right).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_step_draws_every_letter_by_itself(temperature: float) -> None:
    corruption, options = hybrid_corruption(0.5), options_of(1, temperature=temperature)
    start = pack_of(torch.full((NUM_DRAWN * TEXT_LENGTH,), NUM_LETTERS), NUM_DRAWN, 1.0)
    end = hybrid_step(Exact(corruption, JOINT), start, corruption.text, Step("text", 1.0, 0.0, 0), options)
    by_position = JOINT.reshape([NUM_LETTERS] * 4)
    parts = [by_position.sum(axis=tuple(j for j in range(4) if j != i)) for i in range(4)]
    if temperature == 0:
        assert (np.stack(end.split_tokens()) == [part.argmax() for part in parts]).all()
    else:
        assert chi_square(end.split_tokens(), np.einsum("a,b,c,d->abcd", *parts).reshape(-1)) < 4.0


@pytest.mark.parametrize("settings", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6), (0.7, 0.8), (0.0, 1.0)])
def test_probability_is_that_of_drawing(settings: tuple[float, float]) -> None:
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).expand(20000, 5)
    uniform = (torch.arange(20000) + 0.5) / 20000
    counts = torch.bincount(draw(logits, uniform, *settings), minlength=5) / 20000
    found = probability_of(logits[:6], torch.arange(6), *settings)
    torch.testing.assert_close(found[:5], counts, atol=2e-4, rtol=0)
    assert found[5] == 0.0


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model = random_model(text_noise="hybrid", uniform_share=0.5)
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(8, 2, 3)).astype(np.float32)
    keys = document_keys(5, 8)
    options = options_of(5, temperature=0.9, top_p=0.95, guidance=1.5)
    together = decode_latents(model, latents, options, keys=keys)
    assert len({len(text) for text in together}) > 2
    assert all(text.max() < 50 for text in together)
    for i in range(8):
        alone = decode_latents(model, latents[i : i + 1], options, keys=keys[i : i + 1])[0]
        assert np.array_equal(together[i], alone)


def test_samplers_and_noise_that_do_not_fit_are_refused_in_a_line() -> None:
    latents, keys = np.zeros((1, 2, 3), np.float32), document_keys(0, 1)
    hybrid, masks = random_model(text_noise="hybrid"), random_model()
    for sampler in ("confidence", "ancestral"):
        with pytest.raises(UserError, match=f"text_sampler={sampler}: assumes .* use text_sampler=hybrid$"):
            decode_latents(hybrid, latents, SamplingOptions(text_sampler=sampler), keys=keys)
    with pytest.raises(UserError, match="text_sampler=hybrid: is for models with"):
        decode_latents(masks, latents, options_of(2), keys=keys)
    encode_tokens(hybrid, [np.array([1, 2])], SamplingOptions(), keys=keys)  # no text is sampled here


def test_a_sick_model_is_refused() -> None:
    model = random_model(text_noise="hybrid")
    with torch.no_grad():
        model.denoiser.token_head.bias[3] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="NaN or infinity"):
            decode_latents(
                model,
                np.zeros((1, 2, 3), np.float32),
                options_of(2, temperature=temperature),
                keys=document_keys(0, 1),
            )
