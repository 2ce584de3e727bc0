"""Guidance: its formula, its cost, and what the unconditional prediction sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.config import ModeWeights
from mmldlm.errors import UserError
from mmldlm.sampling.decode import decode_latents, encode_tokens, generate, infill_tokens, vary
from mmldlm.sampling.pack import Pack, document_keys, latent_noise
from mmldlm.sampling.predictor import Logits, ModelPredictor, Prediction, guided_latents, guided_logits
from tests.sampling.sampling_oracles import TEXTS, drawing, oracle_model, random_model, spy, toy_distribution

JOINT, CENTRES = toy_distribution(2), np.array([[-1.0, 0.5], [1.0, -0.5]])
MASK = 3


def toy_pack(num: int = 6, latent_time: float = 0.0) -> Pack:
    latents = torch.from_numpy(np.tile(CENTRES, (num // 2, 1)).astype(np.float32))[:, None]
    tokens = torch.tensor([MASK, 1, MASK, MASK] * num)
    return Pack(
        tokens,
        latents,
        torch.full((num,), 0.7),
        torch.full((num,), latent_time),
        np.full(num, 4),
        document_keys(0, num),
    )


def predict(predictor: ModelPredictor, pack: Pack, **changes: torch.Tensor) -> Prediction:
    inputs = {
        "noisy_tokens": pack.noisy_tokens, "noisy_latents": pack.noisy_latents, "text_time": pack.text_time,
        "latent_time": pack.latent_time, "layout": pack.layout, **changes,
    }  # fmt: skip
    return predictor.predict(**inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("guidance", [0.0, 0.5, 2.0, 7.0])
def test_formula_for_text(guidance: float) -> None:
    predictor, pack = ModelPredictor.of(oracle_model(JOINT, CENTRES)), toy_pack()
    rows = torch.tensor([0, 2, 3, 6, 23])
    conditional = predict(predictor, pack).logits(rows)
    noise = latent_noise(pack.keys, (1, 2))
    unconditional = predict(predictor, pack, noisy_latents=noise, latent_time=torch.ones(6)).logits(rows)
    assert not torch.allclose(conditional, unconditional, atol=0.1)
    expected = (1 - guidance) * unconditional + guidance * conditional
    assert torch.allclose(guided_logits(predictor, pack, guidance)(rows), expected, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_blocks_of_columns_are_the_whole(
    guidance: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmldlm.model.frozen.COLUMNS", 7)
    model = replace(random_model(), precision=precision)
    shape, num = model.denoiser.shape, 3
    latents = torch.randn(num, shape.num_slots, shape.num_channels)
    time, tokens = torch.zeros(num), torch.full((12,), shape.vocab_size)
    pack = Pack(tokens, latents, time + 1, time, np.full(num, 4), document_keys(0, num))
    logits = guided_logits(ModelPredictor.of(model), pack, guidance)
    rows = torch.tensor([0, 5, 11])
    assert isinstance(logits, Logits)
    blocks = torch.cat([block.clone() for block in logits.blocks(rows)], 1)
    assert torch.allclose(blocks, logits(rows).float(), atol=1e-5 if precision == "fp32" else 0.1)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("guidance", [0.0, 0.5, 2.0])
def test_formula_for_latents(guidance: float) -> None:
    predictor, pack = ModelPredictor.of(oracle_model(JOINT, CENTRES, spread=0.5)), toy_pack(latent_time=0.8)
    conditional = predict(predictor, pack).latents()
    masks = torch.full_like(pack.noisy_tokens, MASK)
    unconditional = predict(predictor, pack, noisy_tokens=masks, text_time=torch.ones(6)).latents()
    assert not torch.allclose(conditional, unconditional, atol=0.01)
    expected = (1 - guidance) * unconditional + guidance * conditional
    assert torch.allclose(guided_latents(predictor, pack, guidance, MASK), expected, atol=1e-5)


def test_guidance_1_is_the_network_itself_in_one_pass() -> None:
    predictor, pack = ModelPredictor.of(oracle_model(JOINT, CENTRES)), toy_pack()
    rows = torch.tensor([0, 2])
    calls = predictor.denoiser.calls  # type: ignore[attr-defined]
    logits, latents = guided_logits(predictor, pack, 1.0)(rows), guided_latents(predictor, pack, 1.0, MASK)
    assert len(calls) == 2
    assert torch.equal(logits, predict(predictor, pack).logits(rows))
    assert torch.equal(latents, predict(predictor, pack).latents())


def test_unconditional_pass_sees_the_condition_as_training_drops_it() -> None:
    model = random_model()
    record = spy(model)
    keys, options = (
        document_keys(0, 2),
        drawing(num_sampling_steps=1, num_latent_steps=1, guidance=2.0),
    )
    latents = np.ones((2, 2, 3), np.float32)
    decode_latents(model, latents, options, lengths=np.array([3, 4]), keys=keys)
    assert [call.latent_time.tolist() for call in record] == [[0.0, 0.0], [1.0, 1.0]]
    assert torch.equal(record[1].latents, latent_noise(keys, (2, 3)))
    record.clear()
    encode_tokens(model, [np.array([1, 2])] * 2, options, keys=keys)
    assert [call.text_time.tolist() for call in record] == [[0.0, 0.0], [1.0, 1.0]]
    assert (record[1].tokens == 50).all()
    assert torch.equal(record[0].latents, record[1].latents)


@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
def test_guidance_works_with_every_prediction_type_and_jointly(prediction_type: str) -> None:
    model = random_model(prediction_type=prediction_type)
    options = drawing(num_sampling_steps=3, num_latent_steps=2, guidance=1.5)
    texts, latents = generate(model, 3, options, lengths=np.array([2, 5, 3]), keys=document_keys(0, 3))
    assert [len(text) for text in texts] == [2, 5, 3]
    assert np.isfinite(latents).all()
    assert (
        len(decode_latents(model, latents, options, lengths=np.array([2, 5, 3]), keys=document_keys(0, 3)))
        == 3
    )


def test_guidance_sharpens_what_the_latent_says() -> None:
    """Letters of one position alone: the guided share is p(letter | latent)^w p(letter)^(1-w), normalised."""
    model = oracle_model(JOINT, CENTRES, spread=0.0)
    num, guidance = 6000, 3.0
    options = drawing(num_sampling_steps=1, guidance=guidance, batch_tokens=10**6)
    latents = np.broadcast_to(CENTRES[1].astype(np.float32), (num, 1, 2))
    texts = np.stack(
        decode_latents(model, latents, options, lengths=np.full(num, 4), keys=document_keys(0, num))
    )
    first = TEXTS[:, 0][:, None] == np.arange(3)
    conditional, marginal = (JOINT[1] @ first) / JOINT[1].sum(), JOINT.sum(0) @ first
    expected = conditional**guidance * marginal ** (1 - guidance)
    found = np.bincount(texts[:, 0], minlength=3) / num
    assert found == pytest.approx(expected / expected.sum(), abs=0.025)
    assert np.abs(found - conditional).max() > 0.05


def test_guidance_is_refused_where_training_never_left_the_condition_out() -> None:
    """It would compare with what an untrained input gives; away from another latent it needs no such input."""
    model, keys = random_model(modes=ModeWeights(1, 1, 0), condition_dropout=0.0), document_keys(0, 1)
    latents, lengths, text = np.zeros((1, 2, 3), np.float32), np.array([4]), np.array([50, 1, 2])
    options = drawing(num_sampling_steps=2, guidance=2.0)
    for call in (
        lambda: decode_latents(model, latents, options, lengths=lengths, keys=keys),
        lambda: infill_tokens(model, [text], options, latents=latents, keys=keys),
        lambda: encode_tokens(model, [np.array([1, 2])], options, keys=keys),
        lambda: vary(model, latents, options, strength=0.5, tokens=[text], keys=keys),
        lambda: generate(model, 1, options, lengths=lengths, keys=keys),
    ):
        with pytest.raises(UserError, match=r"guidance=2: .* never trained"):
            call()
    found = decode_latents(model, latents, options, lengths=lengths, keys=keys, against=latents + 1)
    assert found[0].shape == (4,)
    for seen in ({"condition_dropout": 0.1, "modes": ModeWeights(1, 1, 0)}, {"condition_dropout": 0.0}):
        decode_latents(random_model(**seen), latents, options, lengths=lengths, keys=keys)
