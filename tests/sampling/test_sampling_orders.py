"""The other text samplers: their order of tokens, their cost, and the distribution they draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.corruption.joint import TEXT_SCHEDULES
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.orders import draw
from mmldlm.sampling.pack import Pack, document_keys, make_steps
from mmldlm.sampling.predictor import ModelPredictor
from tests.sampling.sampling_oracles import (
    MASK_SAMPLERS,
    chi_square,
    drawing,
    oracle_model,
    random_model,
    spy,
    toy_distribution,
)

JOINT, CENTRES = toy_distribution(2), np.array([[-1.0, 0.5], [1.0, -0.5]])
LIMIT = 4.0
ORDERS = ("margin", "block", "first_hitting")


def decode(model: LoadedModel, options: SamplingOptions, lengths: Any, seed: int = 0) -> list[np.ndarray]:
    lengths = np.asarray(lengths)
    shape = model.denoiser.shape
    latents = np.ones((len(lengths), shape.num_slots, shape.num_channels), np.float32)
    return decode_latents(model, latents, options, lengths=lengths, keys=document_keys(seed, len(lengths)))


@pytest.mark.parametrize(
    ("sampler", "num_steps", "schedule", "settings"),
    [
        ("first_hitting", 4, "linear", {}),
        ("first_hitting", 9, "cosine", {}),
        ("margin", 4, "linear", {}),
        ("block", 4, "linear", {"block_length": 1}),
        ("block", 4, "linear", {"block_length": 3}),
    ],
)
def test_one_token_at_a_time_reproduces_the_distribution(
    sampler: str, num_steps: int, schedule: str, settings: dict[str, Any]
) -> None:
    num = 8000
    model = oracle_model(JOINT, CENTRES, text_schedule=schedule)
    options = drawing(text_sampler=sampler, num_sampling_steps=num_steps, batch_tokens=10**6, **settings)
    latents = np.broadcast_to(CENTRES[0].astype(np.float32), (num, 1, 2))
    texts = decode_latents(model, latents, options, lengths=np.full(num, 4), keys=document_keys(3, num))
    assert chi_square(texts, JOINT[0] / JOINT[0].sum()) < LIMIT
    assert chi_square(texts, JOINT[1] / JOINT[1].sum()) > 100


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_first_hitting_times_are_those_of_the_continuous_chain(schedule: str) -> None:
    """The masking probability at the k-th hit of L tokens is the (L+1-k)-th of L ordered uniform numbers."""
    model = random_model(text_schedule=schedule)
    record = spy(model)
    num, length = 2000, 5
    options = drawing(text_sampler="first_hitting", num_sampling_steps=5, batch_tokens=10**6)
    decode(model, options, np.full(num, length))
    assert len(record) == length  # one pass a token
    for k, call in enumerate(record):
        assert int((call.tokens == 50).sum()) == num * (length - k)
        level = TEXT_SCHEDULES[schedule].mask_probability(call.text_time).double().numpy()
        mean = (length - k) / (length + 1)
        variance = mean * (1 - mean) / (length + 2)
        assert level.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / num))
        assert level.var() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize(("length", "num_steps"), [(12, 5), (7, 7), (3, 40)])
def test_first_hitting_asks_about_each_token_once_in_equal_groups(length: int, num_steps: int) -> None:
    model = random_model(text_schedule="cosine")
    record = spy(model)
    options = drawing(text_sampler="first_hitting", num_sampling_steps=num_steps)
    decode(model, options, [length])
    sizes = [call.rows for call in record]
    assert sum(sizes) == length
    assert len(sizes) == min(length, num_steps)
    assert max(sizes) - min(sizes) <= 1
    times = [float(call.text_time[0]) for call in record]
    assert times == sorted(times, reverse=True)


def margin(probability: Tensor) -> Tensor:
    ordered = probability.sort(-1).values
    return ordered[:, -1] - ordered[:, -2]


def largest(probability: Tensor) -> Tensor:
    return probability.amax(-1)


@pytest.mark.parametrize(("sampler", "measure"), [("confidence", largest), ("margin", margin)])
def test_the_surest_comes_first_by_its_own_measure(sampler: str, measure: Callable[[Tensor], Tensor]) -> None:
    model = random_model()
    record = spy(model)
    decode(model, drawing(text_sampler=sampler, num_sampling_steps=8), [8])
    for call, after in zip(record, [*record[1:]], strict=False):
        inputs = (call.tokens, call.latents, call.text_time, call.latent_time, call.layout)
        hidden = model.denoiser.forward(*inputs).token_hidden
        sure = measure(model.denoiser.token_logits(hidden).softmax(-1))
        record.pop()  # the question just asked by the test itself
        sure[call.tokens != 50] = -torch.inf
        assert (call.tokens != after.tokens).nonzero().item() == int(sure.argmax())


def test_blocks_are_filled_from_left_to_right() -> None:
    model = random_model()
    record = spy(model)
    options = drawing(text_sampler="block", num_sampling_steps=12, block_length=4)
    decode(model, options, [12, 10])
    for call in record:
        for document in range(call.layout.num_documents):
            masked = call.tokens[call.layout.document == document] == 50
            block = masked.nonzero()[0].item() // 4
            assert not masked[: 4 * block].any()
            assert masked[4 * (block + 1) :].all()
    assert max(call.rows for call in record) <= 8  # logits of the present block of two documents, no more


@pytest.mark.parametrize(("block_length", "num_steps"), [(2, 4), (5, 3), (3, 2)])
def test_a_step_goes_on_into_the_next_block_only_when_the_present_one_is_full(
    block_length: int, num_steps: int
) -> None:
    """Where a block ends inside a step, no later block is begun while the one before it holds a mask."""
    model = random_model()
    record = spy(model)
    options = drawing(text_sampler="block", num_sampling_steps=num_steps, block_length=block_length)
    decode(model, options, [12])
    assert len(record) == num_steps
    for call in record[1:]:
        masked = call.tokens == 50
        begun = torch.arange(12)[~masked].max().item() // block_length
        assert not masked[: begun * block_length].any()


def test_a_block_as_long_as_the_text_is_plain_confidence() -> None:
    model = random_model()
    lengths = [12, 7, 9, 1]
    for num_steps in (1, 3, 12):
        plain = decode(model, drawing(num_sampling_steps=num_steps), lengths)
        options = drawing(text_sampler="block", num_sampling_steps=num_steps, block_length=12)
        assert all(map(np.array_equal, plain, decode(model, options, lengths)))


@pytest.mark.parametrize("sampler", ORDERS)
def test_sample_does_not_depend_on_its_batch(sampler: str) -> None:
    model = random_model()
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(8, 2, 3)).astype(np.float32)
    keys = document_keys(5, rng.integers(0, 2**60, 8))
    settings: dict[str, Any] = {"text_sampler": sampler, "num_sampling_steps": 5, "guidance": 1.5}
    settings |= {"block_length": 3, "top_p": 0.95}
    together = decode_latents(model, latents, drawing(**settings), keys=keys)
    assert len({len(text) for text in together}) > 2
    order = rng.permutation(8)
    small = drawing(**settings, batch_tokens=20)
    shuffled = decode_latents(model, latents[order], small, keys=keys[order])
    for i in range(8):
        (alone,) = decode_latents(model, latents[i : i + 1], drawing(**settings), keys=keys[i : i + 1])
        assert np.array_equal(together[i], alone)
        assert np.array_equal(together[order[i]], shuffled[i])


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
def test_every_sampler_is_done_after_any_number_of_steps(sampler: str) -> None:
    model = random_model()
    lengths = [1, 2, 5, 12]
    for num_steps in (1, 2, 30):
        options = drawing(text_sampler=sampler, num_sampling_steps=num_steps, block_length=2)
        record = spy(model)
        texts = decode(model, options, lengths)
        assert [len(text) for text in texts] == lengths
        assert max(text.max() for text in texts) < 50
        assert len(record) <= num_steps


def test_ancestral_is_the_same_as_asking_about_everything_at_every_step() -> None:
    model, lengths, num_steps = random_model(), np.array([3, 12, 1, 7]), 25
    record = spy(model)
    options = drawing(text_sampler="ancestral", num_sampling_steps=num_steps)
    cached = np.concatenate(decode(model, options, lengths))
    asked = sum(call.layout.num_documents for call in record)
    assert asked < 4 * num_steps / 2
    keys, order = document_keys(0, 4), np.argsort(lengths)
    pack = Pack(
        torch.full((int(lengths.sum()),), 50), torch.ones(4, 2, 3), torch.ones(4), torch.zeros(4),
        lengths[order], keys[order],
    )  # fmt: skip
    tokens, index = pack.noisy_tokens.numpy().copy(), (pack.keys[pack.document], pack.position)
    for step in make_steps("text", num_steps):
        times = (torch.full((4,), step.time), pack.latent_time)
        inputs = (torch.from_numpy(tokens), pack.noisy_latents, *times, pack.layout)
        logits = ModelPredictor.of(model).predict(*inputs).logits(torch.arange(len(tokens)))
        values = draw(
            logits,
            torch.from_numpy(randomness.uniform(index[0], randomness.TOKEN_CHOICE, index[1])),
            1.0,
            1.0,
        ).numpy()
        chance = randomness.uniform(randomness.make_key(index[0], step.step_idx), randomness.UNMASK, index[1])
        hit = (tokens == 50) & (chance < 1 - step.next_time / step.time)
        tokens[hit] = values[hit]
    texts = np.split(tokens, np.cumsum(lengths[order])[:-1])
    assert np.array_equal(np.concatenate([texts[place] for place in np.argsort(order)]), cached)
