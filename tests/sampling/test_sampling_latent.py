"""The latent sampler with the exact denoiser of a known distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import CorruptionConfig
from mmldlm.corruption.joint import Corruption
from mmldlm.errors import UserError
from mmldlm.sampling.chain import encode_steps
from mmldlm.sampling.decode import encode_tokens
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys, latent_noise
from tests.sampling.sampling_oracles import TEXTS, oracle_model, random_model, spy, toy_distribution

TYPES, SCHEDULES = ("clean", "noise", "velocity"), ("cosine", "linear", "flow")
CENTRE = np.array([[0.7, -1.5]])
ONE_KIND = toy_distribution(1)
NUM_DRAWN = 4000


def encode(model: LoadedModel, text: np.ndarray, num_steps: int, count: int = NUM_DRAWN) -> np.ndarray:
    options = SamplingOptions(num_encode_steps=num_steps, num_latent_steps=num_steps, batch_tokens=10**6)
    return encode_tokens(model, [text] * count, options, keys=document_keys(7, count))[:, 0].astype(
        np.float64
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction_type", TYPES)
def test_gaussian_is_reproduced(prediction_type: str, schedule: str) -> None:
    model = oracle_model(
        ONE_KIND, CENTRE, spread=0.6, prediction_type=prediction_type, latent_schedule=schedule
    )
    latents = encode(model, TEXTS[5], 100)
    assert latents.mean(0) == pytest.approx(CENTRE[0], abs=0.04)  # 4 standard deviations of the mean
    assert latents.std(0) == pytest.approx([0.6, 0.6], rel=0.06)
    assert abs(np.corrcoef(latents.T)[0, 1]) < 0.06


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction_type", TYPES)
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_path_is_that_of_ddim(prediction_type: str, schedule: str, num_steps: int) -> None:
    """Against the formula written out in float64, with the linear denoiser that a Gaussian has."""
    model = oracle_model(
        ONE_KIND, CENTRE, spread=0.6, prediction_type=prediction_type, latent_schedule=schedule
    )
    found = encode(model, TEXTS[0], num_steps, count=20)
    x = latent_noise(document_keys(7, 20), (1, 2))[:, 0].double().numpy()
    times = np.linspace(0.999 if prediction_type == "noise" else 1.0, 0.0, num_steps + 1)
    for time, next_time in itertools.pairwise(times):
        (signal, sigma), (next_signal, next_sigma) = levels(schedule, time), levels(schedule, next_time)
        clean = CENTRE + signal * 0.36 / (signal**2 * 0.36 + sigma**2) * (x - signal * CENTRE)
        x = next_signal * clean + next_sigma * (x - signal * clean) / sigma
    # a noise prediction near time 1 is divided by a signal of 0.0016 (cosine), and its rounding with it
    assert found == pytest.approx(x, abs=2e-3 if prediction_type == "noise" else 1e-5)


def levels(schedule: str, time: float) -> tuple[float, float]:
    if schedule == "cosine":
        return np.cos(np.pi * time / 2), np.sin(np.pi * time / 2)
    if schedule == "flow":
        return 1 - time, time
    return np.sqrt(1 - time), np.sqrt(time)


@pytest.mark.parametrize("prediction_type", TYPES)
def test_mixture_given_a_text_is_reproduced(prediction_type: str) -> None:
    """The text says how probable each kind is; the latents must come in that proportion and width."""
    joint, centres = toy_distribution(2, seed=4), np.array([[-1.5, 0.0], [1.0, 0.5]])
    model = oracle_model(joint, centres, spread=0.3, prediction_type=prediction_type)
    given = joint / joint.sum(0)
    index = int(np.abs(given[0] - 0.3).argmin())
    latents = encode(model, TEXTS[index], 60)
    first = latents[:, 0] < -0.25
    share = given[0, index]
    assert 0.1 < share < 0.9
    assert first.mean() == pytest.approx(share, abs=0.03)
    for chosen, centre in ((first, centres[0]), (~first, centres[1])):
        assert latents[chosen].mean(0) == pytest.approx(centre, abs=0.06)
        assert latents[chosen].std(0) == pytest.approx([0.3, 0.3], rel=0.12)


@pytest.mark.parametrize("prediction_type", ["clean", "velocity"])
def test_one_step_is_the_mean_given_the_text(prediction_type: str) -> None:
    joint, centres = toy_distribution(2), np.array([[-1.0, 0.0], [1.0, 0.5]])
    model = oracle_model(joint, centres, spread=0.3, prediction_type=prediction_type)
    for index in (0, 17, 80):
        given = joint[:, index] / joint[:, index].sum()
        assert encode(model, TEXTS[index], 1, count=3) == pytest.approx(
            np.tile(given @ centres, (3, 1)), abs=1e-5
        )


def test_text_is_given_clean_and_the_latent_at_its_time() -> None:
    model = random_model()
    record = spy(model)
    tokens = [np.array([3, 1, 4]), np.array([1, 5])]
    encode_tokens(model, tokens, SamplingOptions(num_encode_steps=4), keys=document_keys(0, 2))
    assert [call.latent_time.tolist() for call in record] == [[t, t] for t in (1.0, 0.75, 0.5, 0.25)]
    assert all(call.text_time.tolist() == [0.0, 0.0] for call in record)
    assert all(call.tokens.tolist() == [1, 5, 3, 1, 4] for call in record)  # shorter documents first
    assert all(call.rows == 0 for call in record)  # no logits are computed
    assert torch.equal(record[0].latents, latent_noise(document_keys(0, 2)[::-1], (2, 3)))


def test_latent_does_not_depend_on_its_batch() -> None:
    model = random_model()
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50, length) for length in rng.integers(1, 13, 10)]
    keys = document_keys(5, 10)
    options = SamplingOptions(num_encode_steps=3, guidance=2.0)
    together = encode_tokens(model, tokens, options, keys=keys)
    order = rng.permutation(10)
    small = SamplingOptions(num_encode_steps=3, guidance=2.0, batch_tokens=25)
    shuffled = encode_tokens(model, [tokens[i] for i in order], small, keys=keys[order])
    assert shuffled == pytest.approx(together[order], abs=1e-4)
    assert np.array_equal(together, encode_tokens(model, tokens, options, keys=keys))
    assert np.abs(together - encode_tokens(model, tokens, options, keys=document_keys(6, 10))).max() > 0.1


def test_a_sick_model_is_refused() -> None:
    model = random_model()
    with torch.no_grad():
        model.denoiser.latent_embed.bias[0] = torch.nan
    with pytest.raises(UserError, match="NaN or infinity"):
        encode_tokens(model, [np.array([1, 2])], SamplingOptions(), keys=document_keys(0, 1))


def test_t2l_takes_more_steps_where_the_first_one_says_little():
    clean, noise = (
        Corruption(CorruptionConfig(prediction_type=kind), vocab_size=5) for kind in ("clean", "noise")
    )
    assert len(encode_steps(SamplingOptions(), clean)) == 1
    assert len(encode_steps(SamplingOptions(), noise)) == 16
    assert len(encode_steps(SamplingOptions(num_encode_steps=3), noise)) == 3
