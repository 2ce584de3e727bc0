"""Both modalities from noise, and the lengths of texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.config import ModeWeights
from mmldlm.errors import UserError
from mmldlm.sampling.chain import sample_latents, sample_text
from mmldlm.sampling.decode import decode_latents, encode_tokens, generate
from mmldlm.sampling.pack import document_keys, group_documents, interleave, latent_noise, make_steps
from tests.sampling.sampling_oracles import (
    chi_square,
    drawing,
    oracle_model,
    random_model,
    spy,
    toy_distribution,
)

JOINT, CENTRES = toy_distribution(2, seed=2), np.array([[-1.0, 1.0], [1.0, -1.0]])


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_joint_distribution_of_text_and_latent_is_reproduced(sampler: str) -> None:
    num = 6000
    model = oracle_model(JOINT, CENTRES)
    options = drawing(text_sampler=sampler, num_sampling_steps=64, num_latent_steps=64, batch_tokens=10**6)
    texts, latents = generate(model, num, options, lengths=np.full(num, 4), keys=document_keys(1, num))
    kind = (latents[:, 0, 0] > 0).astype(int)
    assert latents[:, 0] == pytest.approx(CENTRES[kind], abs=1e-3)  # every latent is one of the two
    assert kind.mean() == pytest.approx(JOINT[1].sum(), abs=0.03)
    for each in (0, 1):
        chosen = [text for text, its in zip(texts, kind, strict=True) if its == each]
        assert chi_square(chosen, JOINT[each] / JOINT[each].sum()) < 5
        assert (
            chi_square(chosen, JOINT[1 - each] / JOINT[1 - each].sum()) > 50
        )  # text and latent belong together


def test_both_chains_take_turns() -> None:
    steps = interleave(make_steps("latent", 2), make_steps("text", 4))
    order = [(step.modality, step.time, step.next_time) for step in steps]
    assert order == [
        ("text", 1.0, 0.75),
        ("latent", 1.0, 0.5),
        ("text", 0.75, 0.5),
        ("text", 0.5, 0.25),
        ("latent", 0.5, 0.0),
        ("text", 0.25, 0.0),
    ]


def test_each_sees_the_other_at_its_time() -> None:
    model = random_model()
    record = spy(model)
    options = drawing(
        text_sampler="ancestral", num_sampling_steps=2, num_latent_steps=2, joint_order="interleaved"
    )
    generate(model, 1, options, lengths=np.array([12]), keys=document_keys(0, 1))
    times = [(float(call.text_time[0]), float(call.latent_time[0])) for call in record]
    assert times == [(1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.5, 0.0)]


def test_joint_sample_does_not_depend_on_its_batch() -> None:
    model, keys = random_model(), document_keys(9, 8)
    options = drawing(num_sampling_steps=4, num_latent_steps=3)
    texts, latents = generate(model, 8, options, keys=keys)
    for i in range(8):
        (text,), latent = generate(model, 1, options, keys=keys[i : i + 1])
        assert np.array_equal(text, texts[i])
        assert latent[0] == pytest.approx(latents[i], abs=1e-4)


def test_lengths_are_drawn_from_the_length_head() -> None:
    probability = np.array([0.0, 0.2, 0.5, 0.3, *[0.0] * 8])
    model = random_model()
    head = model.denoiser.length_head
    assert head is not None
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.bias.copy_(torch.from_numpy(probability).log().clamp(min=-1e9))
    num, latents = 3000, np.zeros((3000, 2, 3), np.float32)
    options = drawing(num_sampling_steps=1)
    texts = decode_latents(model, latents, options, keys=document_keys(0, num))
    shares = np.bincount([len(text) for text in texts], minlength=13)[1:] / num
    assert shares == pytest.approx(probability, abs=0.035)
    sure = drawing(num_sampling_steps=1, temperature=0.0)
    assert {len(text) for text in decode_latents(model, latents[:9], sure, keys=document_keys(0, 9))} == {3}


def test_length_head_sees_the_latent_at_its_time() -> None:
    model, seen = random_model(), []
    head = model.denoiser.length_head
    assert head is not None
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    keys, options = document_keys(0, 2), drawing(num_sampling_steps=1, num_latent_steps=1)
    latents = np.ones((2, 2, 3), np.float32)
    decode_latents(model, latents, options, keys=keys)
    assert torch.equal(seen[0][0], torch.from_numpy(latents))
    assert seen[0][1].tolist() == [0.0, 0.0]
    seen.clear()
    generate(model, 2, options, keys=keys)
    assert torch.equal(seen[0][0], latent_noise(keys, (2, 3)))
    assert seen[0][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("length", ["given", "untrained"])
def test_model_without_lengths_asks_for_them(length: str) -> None:
    model = random_model(length="given" if length == "given" else "modelled")
    if length == "untrained":
        model.config.objective.length_weight = 0.0
    keys, options = document_keys(0, 1), drawing(num_sampling_steps=2, num_latent_steps=2)
    with pytest.raises(UserError, match="pass lengths"):
        decode_latents(model, np.zeros((1, 2, 3), np.float32), options, keys=keys)
    with pytest.raises(UserError, match="pass lengths"):
        generate(model, 1, options, keys=keys)
    texts, _ = generate(model, 1, options, lengths=np.array([5]), keys=keys)
    assert len(texts[0]) == 5


def test_heads_that_were_never_trained_are_refused() -> None:
    options, keys = drawing(), document_keys(0, 1)
    only_text = random_model(modes=ModeWeights(l2t=1, t2l=0, joint=0))
    only_latent = random_model(modes=ModeWeights(l2t=0, t2l=1, joint=0))
    with pytest.raises(UserError, match="not trained to produce latents"):
        encode_tokens(only_text, [np.array([1])], options, keys=keys)
    with pytest.raises(UserError, match="not trained to produce latents"):
        generate(only_text, 1, options, keys=keys)
    with pytest.raises(UserError, match="not trained to produce text"):
        decode_latents(only_latent, np.zeros((1, 2, 3), np.float32), options, keys=keys)


def test_groups_hold_every_document_once_and_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    groups = group_documents(lengths, 2, 64)
    assert sorted(np.concatenate(groups).tolist()) == list(range(200))
    assert all(lengths[group].sum() + 2 * len(group) <= 64 for group in groups)
    assert len(groups) < 200
    assert [group.tolist() for group in group_documents(np.array([100, 3, 100]), 1, 8)] == [[1], [0], [2]]


def test_samplers_for_a_loop_of_ones_own() -> None:
    """A denoiser and its corruption are enough; the samples are those of the whole way."""
    model, lengths = random_model(), np.array([4, 6, 3])
    options = drawing(num_sampling_steps=3, seed=5)
    keys = document_keys(5, 3)
    latents = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)
    expected = decode_latents(model, latents, options, lengths=lengths, keys=keys)
    tokens = sample_text(model.denoiser, model.corruption, torch.from_numpy(latents), lengths, options)
    assert [text.tolist() for text in tokens] == [text.tolist() for text in expected]
    encoded = sample_latents(model.denoiser, model.corruption, tokens, options=options)
    assert encoded.numpy() == pytest.approx(encode_tokens(model, tokens, options, keys=keys), abs=1e-5)
