"""Text samplers against a distribution that is known exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.corruption.joint import TEXT_SCHEDULES
from mmldlm.errors import UserError
from mmldlm.layout import Layout
from mmldlm.model.layers import Kernels
from mmldlm.sampling.decode import decode_latents, generate
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.sampling.recording import PassInputs, Recordings, rounded_layout
from tests.sampling.sampling_oracles import (
    NUM_LETTERS,
    chi_square,
    drawing,
    oracle_model,
    random_model,
    spy,
    toy_distribution,
)

JOINT = toy_distribution(2)
CENTRES = np.array([[-1.0, 0.5], [1.0, -0.5]])
NUM_DRAWN = 12000
LIMIT = 4.0
"""Standard deviations; what is wrong is hundreds away."""


def drawn_texts(kind: int, options: SamplingOptions, **settings: str) -> list[np.ndarray]:
    model = oracle_model(JOINT, CENTRES, **settings)
    latents = np.broadcast_to(CENTRES[kind].astype(np.float32), (NUM_DRAWN, 1, 2))
    lengths = np.full(NUM_DRAWN, 4)
    return decode_latents(model, latents, options, lengths=lengths, keys=document_keys(3, NUM_DRAWN))


@pytest.mark.parametrize(
    ("sampler", "num_steps", "schedule"),
    [
        ("confidence", 4, "linear"),
        ("confidence", 64, "cosine"),
        ("ancestral", 200, "linear"),
        ("ancestral", 200, "cosine"),
    ],
)
@pytest.mark.parametrize("kind", [0, 1])
def test_sampler_reproduces_the_distribution(sampler: str, num_steps: int, schedule: str, kind: int) -> None:
    options = drawing(text_sampler=sampler, num_sampling_steps=num_steps, batch_tokens=10**6)
    texts = drawn_texts(kind, options, text_schedule=schedule)
    assert chi_square(texts, JOINT[kind] / JOINT[kind].sum()) < LIMIT
    assert (
        chi_square(texts, JOINT[1 - kind] / JOINT[1 - kind].sum()) > 100
    )  # the other latent means another text


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
def test_one_step_draws_every_letter_by_itself(sampler: str) -> None:
    """Which is not the distribution, but the product of its marginals: the test above can fail."""
    options = drawing(text_sampler=sampler, num_sampling_steps=1, batch_tokens=10**6)
    texts = drawn_texts(0, options)
    conditional = JOINT[0] / JOINT[0].sum()
    assert chi_square(texts, conditional) > 100
    by_position = conditional.reshape([NUM_LETTERS] * 4)
    parts = [by_position.sum(axis=tuple(j for j in range(4) if j != i)) for i in range(4)]
    assert chi_square(texts, np.einsum("a,b,c,d->abcd", *parts).reshape(-1)) < LIMIT


def test_ancestral_masks_as_the_schedule_says() -> None:
    model = random_model(text_schedule="cosine")
    record = spy(model)
    options = drawing(text_sampler="ancestral", num_sampling_steps=5, batch_tokens=8192)
    num, length = 400, 10
    latents = np.zeros((num, 2, 3), np.float32)
    decode_latents(model, latents, options, lengths=np.full(num, length), keys=document_keys(0, num))
    schedule = TEXT_SCHEDULES["cosine"]
    shares = [float((call.tokens == 50).float().mean()) for call in record]
    times = torch.linspace(1, 0, 6)[:-1]
    assert [float(call.text_time[0]) for call in record] == pytest.approx(times.tolist())
    # 4000 tokens: a standard deviation is below 0.008; documents that are skipped are few, for 10 tokens each
    assert shares[:3] == pytest.approx(schedule.mask_probability(times)[:3].tolist(), abs=0.04)


def test_network_is_asked_about_each_ancestral_token_once() -> None:
    model = random_model()
    record = spy(model)
    lengths = np.array([3, 8, 1, 12])
    options = drawing(text_sampler="ancestral", num_sampling_steps=40)
    decode_latents(model, np.zeros((4, 2, 3), np.float32), options, lengths=lengths, keys=document_keys(0, 4))
    assert sum(call.rows for call in record) == lengths.sum()
    assert len(record) <= lengths.sum()
    assert any(call.layout.num_documents < 4 for call in record)


@pytest.mark.parametrize(("length", "num_steps"), [(7, 3), (12, 12), (2, 9), (1, 1), (12, 1), (5, 4)])
def test_confidence_is_done_after_its_steps(length: int, num_steps: int) -> None:
    model = random_model()
    record = spy(model)
    options = drawing(num_sampling_steps=num_steps)
    keys = document_keys(0, 1)
    texts = decode_latents(
        model, np.zeros((1, 2, 3), np.float32), options, lengths=np.array([length]), keys=keys
    )
    assert texts[0].shape == (length,)
    assert texts[0].max() < 50
    masked = [int((call.tokens == 50).sum()) for call in record]
    assert masked[0] == length
    assert masked == sorted(set(masked), reverse=True)  # never asked twice about the same text
    assert len(masked) == min(length, num_steps)
    steps = -np.diff([*masked, 0])
    assert steps.max() - steps.min() <= 1  # evenly spread
    assert [call.rows for call in record] == masked  # logits only where something is masked


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_confidence_tells_the_time_of_the_masked_share(schedule: str) -> None:
    model = random_model(text_schedule=schedule)
    record = spy(model)
    keys, lengths = document_keys(0, 3), np.array([4, 9, 12])
    options = drawing(num_sampling_steps=6)
    decode_latents(model, np.zeros((3, 2, 3), np.float32), options, lengths=lengths, keys=keys)
    assert len(record) == 6
    for call in record:
        share = torch.zeros(len(call.text_time)).index_add(
            0, call.layout.document, (call.tokens == 50).float()
        )
        masked = TEXT_SCHEDULES[schedule].mask_probability(call.text_time)
        assert torch.allclose(masked, share / call.layout.lengths, atol=1e-5)


def test_confidence_takes_the_surest_first() -> None:
    model = random_model()
    record = spy(model)
    options = drawing(num_sampling_steps=8)
    keys, latents = document_keys(0, 1), np.ones((1, 2, 3), np.float32)
    decode_latents(model, latents, options, lengths=np.array([8]), keys=keys)
    for call, after in zip(record, [*record[1:]], strict=False):
        inputs = (call.tokens, call.latents, call.text_time, call.latent_time, call.layout)
        sure = model.denoiser.token_logits(model.denoiser.forward(*inputs).token_hidden).softmax(-1).amax(-1)
        record.pop()  # the question just asked by the test itself
        sure[call.tokens != 50] = 0
        assert (call.tokens != after.tokens).nonzero().item() == int(sure.argmax())


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_does_not_depend_on_its_batch(sampler: str, temperature: float) -> None:
    model = random_model()
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(12, 2, 3)).astype(np.float32)
    keys = document_keys(5, rng.integers(0, 2**60, 12))
    options = drawing(
        text_sampler=sampler, num_sampling_steps=5, temperature=temperature, top_p=0.95, guidance=1.5
    )
    together = decode_latents(model, latents, options, keys=keys)
    assert len({len(text) for text in together}) > 2
    alone = [decode_latents(model, latents[i : i + 1], options, keys=keys[i : i + 1])[0] for i in range(12)]
    order = rng.permutation(12)
    small = drawing(**{**vars(options), "batch_tokens": 20})
    shuffled = decode_latents(model, latents[order], small, keys=keys[order])
    for i in range(12):
        assert np.array_equal(together[i], alone[i])
        assert np.array_equal(together[order[i]], shuffled[i])


def test_same_keys_same_text_other_keys_other_text() -> None:
    model = random_model()
    latents = np.zeros((4, 2, 3), np.float32)
    options, lengths = drawing(num_sampling_steps=4), np.full(4, 12)
    first = decode_latents(model, latents, options, lengths=lengths, keys=document_keys(0, 4))
    again = decode_latents(model, latents, options, lengths=lengths, keys=document_keys(0, 4))
    other = decode_latents(model, latents, options, lengths=lengths, keys=document_keys(1, 4))
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))
    assert not np.array_equal(first[0], first[1])  # one latent, two documents, two texts
    assert np.array_equal(document_keys(0, 4), document_keys(0, np.arange(4)))


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_limits_of_temperature_and_top_p_are_the_most_probable_text(
    sampler: str, options: dict[str, float]
) -> None:
    """In one step, every letter is the most probable one of its position."""
    made = drawing(text_sampler=sampler, num_sampling_steps=1, batch_tokens=10**6, **options)
    texts = np.stack(drawn_texts(1, made))
    by_position = (JOINT[1] / JOINT[1].sum()).reshape([NUM_LETTERS] * 4)
    best = [by_position.sum(axis=tuple(j for j in range(4) if j != i)).argmax() for i in range(4)]
    assert (texts == np.array(best)).all()


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sick_model_is_refused(sampler: str, temperature: float, value: float) -> None:
    model = random_model()
    with torch.no_grad():
        model.denoiser.token_head.bias[3] = value
    options, keys = drawing(text_sampler=sampler, temperature=temperature), document_keys(0, 1)
    with pytest.raises(UserError, match="NaN or infinity"):
        decode_latents(model, np.zeros((1, 2, 3), np.float32), options, keys=keys)


def test_nothing_in_nothing_out() -> None:
    model = random_model()
    assert decode_latents(model, np.zeros((0, 2, 3), np.float32), drawing(), keys=document_keys(0, 0)) == []


def test_filled_up_packs_give_the_same_texts_and_latents() -> None:
    """What a recorded pass works on: layouts of a few sizes, with tokens and documents that nobody reads."""
    model, keys = random_model(), document_keys(3, 7)
    model.denoiser.kernels = Kernels("reference")
    lengths = np.array([1, 12, 5, 3, 9, 9, 2])
    options = drawing(text_sampler="margin", num_sampling_steps=4, num_latent_steps=3, guidance=1.5)
    plain = generate(model, 7, options, lengths=lengths, keys=keys)
    filled, sizes = ModelPredictor.of(model), set()
    filled.recordings = Recordings(broken="no GPU")

    def run(inputs: PassInputs, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.add((layout.num_tokens, layout.num_documents, len(inputs.tokens), len(inputs.latents)))
        return ModelPredictor._run(filled, inputs, layout)

    filled._run = run  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelPredictor, "of", lambda model: filled)
        texts, latents = generate(model, 7, options, lengths=lengths, keys=keys)
    assert sizes == {(64, 64, 64, 64)}
    assert all(map(np.array_equal, texts, plain[0]))
    assert np.allclose(latents, plain[1], atol=1e-5)


@pytest.mark.parametrize("count", [1, 64, 65, 1000, 4097, 30000])
def test_packs_are_filled_up_by_little(count: int) -> None:
    layout = rounded_layout(np.array([10] * (count // 10) + [count % 10] * (count % 10 > 0)), 1)
    assert count <= layout.num_tokens <= max(64, count * 1.125 + 1)
    assert layout.num_documents <= max(64, -(-count // 10) * 1.25 + 1)
