"""Texts with blanks, guidance away from a latent, variation of a latent, and the count of passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.config import ModeWeights
from mmldlm.corruption.joint import TEXT_SCHEDULES
from mmldlm.errors import UserError
from mmldlm.sampling.decode import decode_latents, encode_tokens, infill_tokens, vary
from mmldlm.sampling.pack import document_keys
from tests.sampling.sampling_oracles import (
    MASK_SAMPLERS,
    NUM_LETTERS,
    TEXTS,
    chi_square,
    drawing,
    oracle_model,
    random_model,
    spy,
    toy_distribution,
)

JOINT, CENTRES = toy_distribution(2), np.array([[-1.0, 0.5], [1.0, -0.5]])
BLANK = NUM_LETTERS
GIVEN = np.array([BLANK, 2, BLANK, BLANK])
ONE_BY_ONE = {"ancestral": 200}
"""Steps after which a sampler has drawn three blanks one by one."""


def conditional(probability: np.ndarray) -> np.ndarray:
    """The distribution of texts, given those letters of GIVEN that are no blank."""
    fits = ((GIVEN == BLANK) | (GIVEN == TEXTS)).all(1)
    return (probability * fits + 1e-12) / (probability * fits + 1e-12).sum()


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
@pytest.mark.parametrize("with_latent", [True, False])
def test_blanks_follow_the_distribution_given_the_rest(sampler: str, with_latent: bool) -> None:
    num = 4000
    options = drawing(
        text_sampler=sampler, num_sampling_steps=ONE_BY_ONE.get(sampler, 3), batch_tokens=10**6,
        block_length=2,
    )  # fmt: skip
    latents = np.broadcast_to(CENTRES[1].astype(np.float32), (num, 1, 2)) if with_latent else None
    model = oracle_model(JOINT, CENTRES)
    texts = infill_tokens(model, [GIVEN] * num, options, latents=latents, keys=document_keys(3, num))
    assert (np.stack(texts)[:, 1] == 2).all()
    # 27 texts are possible: chance has 26 degrees of freedom, here measured in the units of 80
    expected = conditional(JOINT[1] if with_latent else JOINT.sum(0))
    assert abs(chi_square(texts, expected) + 4.3) < 3.0
    assert chi_square(texts, conditional(JOINT[0])) > 20


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
def test_given_tokens_stay_and_no_blank_is_left(sampler: str) -> None:
    model, rng = random_model(), np.random.default_rng(1)
    texts = [rng.integers(0, 50, length) for length in (12, 3, 7, 1, 9)]
    blanks = [rng.random(len(text)) < 0.5 for text in texts]
    for blank in blanks:
        blank[0] = True
    given = [np.where(blank, 50, text) for text, blank in zip(texts, blanks, strict=True)]
    options = drawing(text_sampler=sampler, num_sampling_steps=4, block_length=3, batch_tokens=20)
    filled = infill_tokens(model, given, options, keys=document_keys(0, 5))
    for text, blank, found in zip(texts, blanks, filled, strict=True):
        assert np.array_equal(found[~blank], text[~blank])
        assert found.max() < 50


@pytest.mark.parametrize("sampler", ["confidence", "first_hitting", "ancestral"])
def test_the_network_is_told_the_time_of_the_masked_share(sampler: str) -> None:
    model = random_model(text_schedule="cosine")
    record = spy(model)
    num = 400
    given = np.array([50, 1, 2, 50, 50, 3, 50, 4, 5, 6])
    options = drawing(text_sampler=sampler, num_sampling_steps=4, batch_tokens=10**6)
    infill_tokens(model, [given] * num, options, keys=document_keys(0, num))
    assert len(record) == 4
    call = record[1]
    told = TEXT_SCHEDULES["cosine"].mask_probability(call.text_time).mean()
    share = float((call.tokens == 50).float().mean())
    # the second of four hits comes, on average, when three fifths of the blanks would be masked
    expected = 0.4 * 3 / 5 if sampler == "first_hitting" else share
    assert float(told) == pytest.approx(expected, abs=0.04)


def test_blanks_everywhere_are_plain_decoding() -> None:
    model, keys = random_model(), document_keys(0, 3)
    latents = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)
    lengths = np.array([5, 9, 12])
    for sampler in MASK_SAMPLERS:
        options = drawing(text_sampler=sampler, num_sampling_steps=4)
        plain = decode_latents(model, latents, options, lengths=lengths, keys=keys)
        blanks = [np.full(length, 50) for length in lengths]
        assert all(
            map(np.array_equal, plain, infill_tokens(model, blanks, options, latents=latents, keys=keys))
        )


def test_blanks_without_a_latent_need_a_model_that_knows_such_texts() -> None:
    keys, options = document_keys(0, 1), drawing()
    always = random_model(modes=ModeWeights(1, 1, 0), condition_dropout=0.0)
    with pytest.raises(UserError, match="always saw a latent"):
        infill_tokens(always, [np.array([50, 1])], options, keys=keys)


@pytest.mark.parametrize("guidance", [2.0, 0.5, -1.0])
def test_guidance_away_from_a_latent(guidance: float) -> None:
    """Letters of one position: p(letter | latent)^w p(letter | other latent)^(1-w), normalised."""
    num = 6000
    options = drawing(num_sampling_steps=1, guidance=guidance, batch_tokens=10**6)
    wanted, other = (np.broadcast_to(c.astype(np.float32), (num, 1, 2)) for c in CENTRES)
    texts = decode_latents(
        oracle_model(JOINT, CENTRES), wanted, options, lengths=np.full(num, 4), keys=document_keys(0, num),
        against=other,
    )  # fmt: skip
    first = TEXTS[:, 0][:, None] == np.arange(3)
    here, there = ((JOINT[kind] @ first) / JOINT[kind].sum() for kind in (0, 1))
    expected = here**guidance * there ** (1 - guidance)
    found = np.bincount(np.stack(texts)[:, 0], minlength=3) / num
    assert found == pytest.approx(expected / expected.sum(), abs=0.025)


@pytest.mark.parametrize(("strength", "share"), [(0.0, 1.0), (1.0, None)])
def test_variation_of_a_latent_at_both_ends(strength: float, share: float | None) -> None:
    """Strength 0 decodes the latent itself, strength 1 makes a pair from nothing."""
    num = 3000
    options = drawing(num_sampling_steps=32, num_latent_steps=32, batch_tokens=10**6)
    latents = np.broadcast_to(CENTRES[1].astype(np.float32), (num, 1, 2))
    texts, made = vary(
        oracle_model(JOINT, CENTRES), latents, options, strength=strength, lengths=np.full(num, 4),
        keys=document_keys(1, num),
    )  # fmt: skip
    kind = made[:, 0, 0] > 0
    assert kind.mean() == pytest.approx(JOINT[1].sum() if share is None else share, abs=0.04)
    chosen = [text for text, its in zip(texts, kind, strict=True) if its]
    assert chi_square(chosen, JOINT[1] / JOINT[1].sum()) < 5


def test_variation_keeps_the_tokens_that_are_given() -> None:
    model, keys = random_model(), document_keys(0, 2)
    given = [np.array([1, 50, 3]), np.array([50, 5])]
    latents = np.ones((2, 2, 3), np.float32)
    options = drawing(num_sampling_steps=2, num_latent_steps=2)
    texts, made = vary(model, latents, options, strength=0.5, tokens=given, keys=keys)
    assert (texts[0][0], texts[0][2], texts[1][1]) == (1, 3, 5)
    assert np.abs(made - latents).max() > 0.01


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_passes_are_counted_for_each_document(guidance: float) -> None:
    model = random_model()
    record = spy(model)
    lengths = np.array([3, 8, 1, 12])
    passes = np.zeros(4, np.int64)
    options = drawing(num_sampling_steps=6, guidance=guidance, batch_tokens=14)
    texts = decode_latents(
        model, np.zeros((4, 2, 3), np.float32), options, lengths=lengths, keys=document_keys(0, 4),
        passes=passes,
    )  # fmt: skip
    assert passes.tolist() == (np.minimum(lengths, 6) * guidance).astype(int).tolist()
    assert passes.sum() == sum(call.layout.num_documents for call in record)
    encode_tokens(model, texts, drawing(num_encode_steps=3), keys=document_keys(0, 4), passes=passes)
    assert passes.sum() == sum(call.layout.num_documents for call in record)
    assert torch.equal(record[-1].latent_time.unique(), torch.tensor([1 / 3]))
