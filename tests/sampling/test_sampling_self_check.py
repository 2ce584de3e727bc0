"""Decoding that checks itself: it never gets worse, finds what hurts, and says what it cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import ModeWeights, SamplingConfig
from mmldlm.latents import cosine
from mmldlm.sampling import judge
from mmldlm.sampling.decode import READ_TIME, decode_latents, encode_tokens, likely_lengths
from mmldlm.sampling.judge import NUM_REPLACEMENTS, Checked, probed_places
from mmldlm.sampling.options import SamplingOptions, for_joint, lengths_tried
from mmldlm.sampling.pack import document_keys, latent_noise
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.sampling.self_check import (
    LENGTH_PRIOR,
    READ_PRIOR,
    checked_stages,
    decode_checked,
    decode_unknown_length,
)
from tests.sampling.sampling_oracles import drawing, random_model, spy

OPTIONS = drawing(num_sampling_steps=3, batch_tokens=60)
LENGTHS = np.array([5, 9, 2, 1, 12, 7])
LATENTS = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
KEYS = document_keys(4, 6)


def check(model: LoadedModel, **settings: object) -> Checked:
    return decode_checked(model, LATENTS, OPTIONS, keys=KEYS, lengths=LENGTHS, **settings)  # type: ignore[arg-type]


def test_one_candidate_is_plain_decoding() -> None:
    model = random_model()
    plain = decode_latents(model, LATENTS, OPTIONS, lengths=LENGTHS, keys=KEYS)
    found = check(model)
    assert all(map(np.array_equal, plain, found.tokens))
    own = encode_tokens(model, plain, OPTIONS, keys=KEYS)
    assert found.cosine == pytest.approx(cosine(own, LATENTS), abs=1e-5)


def test_candidates_and_rounds_only_help() -> None:
    model = random_model()
    one, four = check(model), check(model, num_candidates=4)
    both = check(model, num_candidates=4, num_rounds=3)
    assert (four.cosine >= one.cosine).all()
    assert (four.cosine > one.cosine).any()
    assert (both.cosine >= four.cosine).all()
    assert (both.cosine > four.cosine).any()
    assert (both.first_cosine == one.cosine).all()
    assert ((both.cosine > four.cosine) == (both.num_accepted > 0)).all()
    assert [len(text) for text in both.tokens] == LENGTHS.tolist()
    assert max(text.max() for text in both.tokens) < 50
    again = cosine(encode_tokens(model, both.tokens, OPTIONS, keys=KEYS), LATENTS)
    assert both.cosine == pytest.approx(again, abs=1e-4)  # the text is the one that the cosine speaks of


def misread(model: LoadedModel, texts: list[np.ndarray]) -> np.ndarray:
    """Mean square of what the network misses of each latent at READ_TIME beside its text, one document at a time."""
    process, predictor = model.corruption.latent, ModelPredictor.of(model)
    errors = []
    for text, clean, key in zip(texts, torch.from_numpy(LATENTS), KEYS, strict=True):
        time = torch.tensor([READ_TIME])
        noisy = process.corrupt(clean[None], latent_noise(np.array([key]), clean.shape), time)
        layout = predictor.arrange(np.array([len(text)]), len(clean))
        inputs = (torch.from_numpy(text), noisy, torch.zeros(1), time)
        errors.append(float((predictor.predict(*inputs, layout).latents() - clean).square().mean()))
    return np.array(errors)


def test_texts_of_likely_lengths_are_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for noise and predictions does not grow with the number of latents; nothing else changes."""
    model, sizes = random_model(), []
    greedy = SamplingOptions(num_sampling_steps=3, batch_tokens=60, temperature=0.0)
    whole = decode_checked(model, LATENTS, greedy, keys=KEYS, num_candidates=3)
    read = judge.read_errors
    monkeypatch.setattr(judge, "CHUNK_TOKENS", 20)
    monkeypatch.setattr(
        judge,
        "read_errors",
        lambda *args, **more: (sizes.append(sum(map(len, args[1]))), read(*args, **more))[1],
    )
    parts = decode_checked(model, LATENTS, greedy, keys=KEYS, num_candidates=3)
    assert len(sizes) > 1
    assert max(sizes) <= 20
    assert all(map(np.array_equal, whole.tokens, parts.tokens))
    assert (whole.passes == parts.passes).all()


@pytest.mark.parametrize("judge_of", ["model", "encoder"])
def test_without_lengths_the_candidates_are_the_texts_of_the_likeliest_lengths(judge_of: str) -> None:
    model = random_model()
    greedy = SamplingOptions(num_sampling_steps=3, batch_tokens=60, temperature=0.0)
    likely = likely_lengths(model, LATENTS, 3)
    turned = np.roll(LATENTS, 1, axis=2)

    def encode(tokens: list[np.ndarray]) -> np.ndarray:
        return np.stack([turned[len(text) % 6] for text in tokens])

    texts, scores = [], []
    for lengths, nats in zip(likely.lengths.T, likely.log_probabilities.T, strict=True):
        texts.append(decode_latents(model, LATENTS, greedy, lengths=lengths, keys=KEYS))
        if judge_of == "model":
            scores.append(READ_PRIOR * nats - np.log(misread(model, texts[-1])))
        else:
            scores.append(cosine(encode(texts[-1]), LATENTS) + LENGTH_PRIOR * nats)
    own = encode if judge_of == "encoder" else None
    checked = decode_checked(model, LATENTS, greedy, keys=KEYS, num_candidates=3, encode=own)
    best = np.argmax(scores, axis=0)
    assert len(set(best)) > 1
    for document, choice in enumerate(best):
        assert np.array_equal(checked.tokens[document], texts[choice][document])
    plain = decode_latents(model, LATENTS, greedy, keys=KEYS)
    assert all(map(np.array_equal, plain, texts[0]))
    whole = np.exp(likely_lengths(model, LATENTS, 1000).log_probabilities).sum(1)
    assert whole == pytest.approx(1.0, abs=1e-5)


def test_the_best_of_three_likely_lengths_is_the_default_at_temperature_0() -> None:
    greedy = SamplingOptions(num_sampling_steps=3, temperature=0.0)
    model = random_model()
    expected = decode_checked(model, LATENTS, greedy, keys=KEYS, num_candidates=3).tokens
    plain = decode_latents(model, LATENTS, greedy, keys=KEYS)
    assert not all(map(np.array_equal, expected, plain))
    assert all(map(np.array_equal, expected, decode_unknown_length(model, LATENTS, greedy, keys=KEYS)))
    one = replace(greedy, num_lengths=1)
    assert all(map(np.array_equal, plain, decode_unknown_length(model, LATENTS, one, keys=KEYS)))
    assert lengths_tried(model, greedy) == 3
    assert lengths_tried(model, OPTIONS) == 1  # lengths are drawn
    assert lengths_tried(random_model(modes=ModeWeights(l2t=1, t2l=0, joint=0)), greedy) == 1  # reads no text


def test_joint_sampling_has_settings_of_its_own() -> None:
    config = SamplingConfig(text_sampler="margin", temperature=0.0)
    joint = for_joint(config)
    assert (joint.text_sampler, joint.temperature, joint.joint_order) == ("ancestral", 1.0, "text_first")
    own = for_joint(replace(config, joint_sampler="margin", joint_temperature=0.5))
    assert (own.text_sampler, own.temperature) == ("margin", 0.5)


def test_cost_is_what_the_network_was_asked() -> None:
    model = random_model()
    record = spy(model)
    found = check(model, num_candidates=2, num_rounds=2)
    assert found.passes.sum() == sum(call.layout.num_documents for call in record)
    # 2 candidates, and in at least one round each text with each replacement in each of its places
    assert (found.num_encoded >= 2 + NUM_REPLACEMENTS * LENGTHS).all()


def test_sample_does_not_depend_on_its_batch() -> None:
    model = random_model()
    together = check(model, num_candidates=3, num_rounds=2)
    for i in range(6):
        part = slice(i, i + 1)
        alone = decode_checked(
            model,
            LATENTS[part],
            OPTIONS,
            keys=KEYS[part],
            lengths=LENGTHS[part],
            num_candidates=3,
            num_rounds=2,
        )
        assert np.array_equal(alone.tokens[0], together.tokens[i])
        assert alone.passes[0] == together.passes[i]


def test_the_encoder_may_be_the_judge() -> None:
    """A judge that counts a token: candidates and rounds drive it out, since it is found by leaving it out."""
    model = random_model()
    unwanted = np.arange(25)

    def encode(texts: list[np.ndarray]) -> np.ndarray:
        bad = np.array([np.isin(text, unwanted).mean() for text in texts])
        return (LATENTS[:1] * 0 + 1.0) * np.stack([1 - bad, bad, bad], 1)[:, None, :].astype(np.float32)

    target = np.zeros((6, 2, 3), np.float32)
    target[:, :, 0] = 1.0
    record = spy(model)
    found = decode_checked(
        model, target, OPTIONS, keys=KEYS, lengths=LENGTHS, num_candidates=2, num_rounds=6, encode=encode
    )
    share = [float(np.isin(text, unwanted).mean()) for text in found.tokens]
    first = [float(np.isin(text, unwanted).mean()) for text in decode_latents(
        model, target, OPTIONS, lengths=LENGTHS, keys=KEYS
    )]  # fmt: skip
    assert np.mean(share) < 0.5 * np.mean(first)
    assert all((call.latent_time == 0).all() for call in record)  # the model's own t2l side was never asked


def test_probes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_PROBED", 4)
    owner, place = probed_places([np.arange(9), np.arange(1), np.arange(3)], document_keys(0, 3))
    assert owner.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert len(set(place[:4])) == 4
    assert place[4:].tolist() == [0, 0, 1, 2]
    other, _ = probed_places([np.arange(9)], document_keys(0, 1))
    assert other.tolist() == [0] * 4


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    check(random_model(), num_candidates=2, num_rounds=1, progress=lambda *pair: seen.append(pair))
    shares = [done / total for done, total in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_stages_are_what_each_number_of_candidates_gives_alone() -> None:
    model, counts = random_model(), [3, 1]
    greedy = SamplingOptions(num_sampling_steps=3, batch_tokens=60, temperature=0.0)
    stages = list(
        checked_stages(model, LATENTS, OPTIONS, keys=KEYS, lengths=LENGTHS, counts=counts, num_rounds=1)
    )
    assert [(stage.num_candidates, stage.num_rounds) for stage in stages] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for stage in stages:
        alone = check(model, num_candidates=stage.num_candidates, num_rounds=stage.num_rounds)
        assert all(map(np.array_equal, alone.tokens, stage.checked.tokens))
        assert alone.passes.tolist() == stage.checked.passes.tolist()
        assert alone.cosine.tolist() == stage.checked.cosine.tolist()
    first, *_ = checked_stages(
        model, LATENTS, greedy, keys=KEYS, lengths=LENGTHS, counts=[1, 2], drawn=OPTIONS
    )
    plain = decode_latents(model, LATENTS, greedy, lengths=LENGTHS, keys=KEYS)
    assert all(map(np.array_equal, plain, first.checked.tokens))


def test_the_judge_reads_a_text_as_it_stands_whatever_the_guidance() -> None:
    model = random_model()
    guided = SamplingOptions(num_sampling_steps=3, batch_tokens=60, guidance=2.0)
    found = decode_checked(model, LATENTS, guided, keys=KEYS, lengths=LENGTHS)
    own = encode_tokens(model, found.tokens, OPTIONS, keys=KEYS)
    assert found.cosine == pytest.approx(cosine(own, LATENTS), abs=1e-5)
