"""A self-conditioning network is told its own last answer about each document, whatever packs they are in."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_oracles import MASK_SAMPLERS, random_model

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import ModeWeights
from mmldlm.data.store import Documents
from mmldlm.evaluation.latent_bound import latent_errors
from mmldlm.evaluation.likelihood import text_bound
from mmldlm.latents import Normalizer
from mmldlm.sampling.answers import LastAnswers
from mmldlm.sampling.decode import decode_latents, document_keys, encode_tokens, generate
from mmldlm.sampling.options import SamplingOptions
from mmldlm.types import Previous

LENGTHS = np.array([5, 12, 3, 9, 1, 7])
KEYS = document_keys(4, len(LENGTHS))
LATENTS = np.random.default_rng(0).normal(size=(len(LENGTHS), 2, 3)).astype(np.float32)
TEXTS = [np.random.default_rng(i).integers(0, 50, n) for i, n in enumerate(LENGTHS)]


def plain(model: LoadedModel) -> LoadedModel:
    """The same network, never told anything."""
    config = replace(model.config, model=replace(model.config.model, self_conditioning=False))
    return replace(model, config=config)


def recorded(model: LoadedModel) -> list[tuple[tuple, Previous | None, object]]:
    """What the network is asked and told and what it says, as it goes on."""
    record: list[tuple[tuple, Previous | None, object]] = []
    run = model.denoiser.forward

    def forward(*given: object) -> object:
        output = run(*given)  # type: ignore[arg-type]
        record.append((given[:5], given[5] if len(given) > 5 else None, output))  # type: ignore[arg-type]
        return output

    model.denoiser.forward = forward  # type: ignore[method-assign,assignment]
    return record


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("sampler", [*MASK_SAMPLERS, "hybrid"])
def test_texts_do_not_depend_on_packs(sampler: str, guidance: float) -> None:
    noise = "hybrid" if sampler == "hybrid" else "mask"
    model = random_model(self_conditioning=True, text_noise=noise)
    options = SamplingOptions(text_sampler=sampler, num_sampling_steps=6, guidance=guidance, remask_share=0.3)
    found = []
    for batch_tokens in (1, 20, 1000):
        how = replace(options, batch_tokens=batch_tokens)
        found.append(decode_latents(model, LATENTS, how, lengths=LENGTHS, keys=KEYS))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
    untold = decode_latents(plain(model), LATENTS, options, lengths=LENGTHS, keys=KEYS)
    assert any(not np.array_equal(a, b) for a, b in zip(found[0], untold, strict=True))


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m", "heun"])
def test_pairs_do_not_depend_on_packs(sampler: str) -> None:
    model = random_model(self_conditioning=True, prediction_type="noise")
    options = SamplingOptions(latent_sampler=sampler, num_sampling_steps=4, num_latent_steps=4, guidance=1.5)
    found = []
    for batch_tokens in (1, 1000):
        how = replace(options, batch_tokens=batch_tokens)
        found.append(generate(model, len(LENGTHS), how, lengths=LENGTHS, keys=KEYS))
    assert all(np.array_equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3, abs=1e-3)


def test_every_pass_is_told_what_the_last_one_said() -> None:
    model = random_model(self_conditioning=True)
    record = recorded(model)
    options = SamplingOptions(text_sampler="ancestral", num_sampling_steps=3)
    generate(model, 1, replace(options, num_latent_steps=3), lengths=LENGTHS[:1], keys=KEYS[:1])
    assert len(record) > 4
    assert record[0][1] is None
    for (asked, _, said), (_, told, _) in itertools.pairwise(record):
        assert told is not None
        assert torch.equal(told.token_hidden, said.token_hidden)
        process = model.corruption.latent
        clean = process.clean_of_output(said.latent_prediction, asked[1], asked[3])
        assert torch.equal(told.clean_latents, clean)


def test_guidance_remembers_what_it_said_without_the_condition_apart() -> None:
    model = random_model(self_conditioning=True)
    record = recorded(model)
    options = SamplingOptions(text_sampler="confidence", num_sampling_steps=3, guidance=2.0)
    decode_latents(model, LATENTS[1:2], options, lengths=LENGTHS[1:2], keys=KEYS[1:2])
    assert len(record) == 6
    assert [told is None for _, told, _ in record] == [True, True] + [False] * 4
    for (before, _, said), (after, told, _) in zip(record[:-2], record[2:], strict=True):
        assert float(before[3]) == float(after[3])  # with the condition, or without
        assert torch.equal(told.token_hidden, said.token_hidden)


def test_in_one_step_nothing_is_known_before() -> None:
    model = random_model(self_conditioning=True)
    options = SamplingOptions(num_sampling_steps=1, num_encode_steps=1)
    for told, untold in zip(
        decode_latents(model, LATENTS, options, lengths=LENGTHS, keys=KEYS),
        decode_latents(plain(model), LATENTS, options, lengths=LENGTHS, keys=KEYS),
        strict=True,
    ):
        assert np.array_equal(told, untold)
    made = [encode_tokens(each, TEXTS, options, keys=KEYS) for each in (model, plain(model))]
    assert np.array_equal(*made)
    more = replace(options, num_encode_steps=3)
    made = [encode_tokens(each, TEXTS, more, keys=KEYS) for each in (model, plain(model))]
    assert np.abs(made[0] - made[1]).max() > 1e-3


def test_parts_of_a_chain_write_into_one_memory() -> None:
    lengths = np.array([2, 1, 3])
    document = np.repeat(np.arange(3), lengths)
    chain = LastAnswers.of(3, 6)
    assert chain.last() is None
    chosen = np.array([True, False, True])
    part = chain.select(chosen, chosen[document])
    part.keep(Previous(torch.ones(5, 4), torch.ones(2, 1, 2)))
    whole = chain.last()
    assert whole is not None
    assert whole.token_hidden[:, 0].tolist() == [1, 1, 0, 1, 1, 1]
    assert whole.clean_latents[:, 0, 0].tolist() == [1, 0, 1]
    assert chain.seen_as("other").last() is None
    nested = part.select(np.array([False, True]), np.array([False, False, True, True, True]))
    nested.keep(Previous(torch.full((3, 4), 2.0), torch.full((1, 1, 2), 2.0)))
    assert whole.token_hidden[:, 0].tolist() == [1, 1, 0, 2, 2, 2]
    last = part.last()
    assert last is not None
    assert last.clean_latents[:, 0, 0].tolist() == [1, 2]


def test_bounds_ask_twice_and_tell_every_document() -> None:
    """As the same network that is never told, but for the answer of the second pass."""
    model = random_model(self_conditioning=True, modes=ModeWeights())
    documents = Documents(np.concatenate(TEXTS), LENGTHS, LATENTS, np.arange(len(LENGTHS)))
    model.normalizer = Normalizer(np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32))
    how = {"num_draws": 2, "seed": 1}
    record = recorded(model)
    text = text_bound(model, documents, latent="right", batch_tokens=1000, **how)
    assert [told is None for _, told, _ in record] == [True, False]
    assert record[1][1].token_hidden.any(1).all()
    small = text_bound(model, documents, latent="right", batch_tokens=10, **how)
    assert small.nats == pytest.approx(text.nats, rel=1e-4)
    untold = text_bound(plain(model), documents, latent="right", batch_tokens=1000, **how)
    assert untold.nats != pytest.approx(text.nats, rel=1e-3)
    record.clear()
    latent = latent_errors(model, documents, text="right", largest_snr=100.0, batch_tokens=1000, **how)
    assert [told is None for _, told, _ in record] == [True, False]
    small = latent_errors(model, documents, text="right", largest_snr=100.0, batch_tokens=10, **how)
    assert small.parts == pytest.approx(latent.parts, rel=1e-3, abs=1e-5)
