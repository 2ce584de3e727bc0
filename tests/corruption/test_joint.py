from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.config import MODES, CorruptionConfig, ModeWeights
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import draw_times
from mmldlm.layout import Caps
from mmldlm.types import Times
from tests.batches import SHAPE, batch_of, small_corruption, small_documents

POSITIONS, KEYS = np.arange(3000), np.arange(3000).astype(np.uint64)


def pinned(count: int, text: float, latent: float) -> Times:
    yes = np.ones(count, dtype=bool)
    return Times(np.full(count, text, np.float32), np.full(count, latent, np.float32), yes, yes)


def test_corruption_at_time_0_is_exactly_the_identity():
    batch = batch_of(small_documents())
    noisy = small_corruption().corrupt_at(batch, pinned(6, 0.0, 0.0))
    assert torch.equal(noisy.noisy_tokens, batch.tokens)
    assert torch.equal(noisy.noisy_latents, batch.latents)
    assert not noisy.scored_real.any()


def test_corruption_at_time_1_leaves_nothing():
    batch = batch_of(small_documents())
    noisy = small_corruption().corrupt_at(batch, pinned(6, 1.0, 1.0))
    assert (noisy.noisy_tokens == SHAPE.vocab_size).all()
    assert torch.equal(noisy.noisy_latents, noisy.latent_noise)


def test_noise_of_a_document_does_not_depend_on_its_batch():
    documents = small_documents()
    corruption, chosen = small_corruption(), np.array([4, 1, 3])
    whole = corruption.corrupt(batch_of(documents))
    part = corruption.corrupt(batch_of(documents, chosen, Caps(64, 8, 12)))
    starts = np.cumsum(documents.lengths) - documents.lengths
    place = 0
    for row, document in enumerate(chosen):
        length = documents.lengths[document]
        there = whole.noisy_tokens[starts[document] : starts[document] + length]
        assert torch.equal(part.noisy_tokens[place : place + length], there)
        assert torch.equal(part.noisy_latents[row], whole.noisy_latents[document])
        assert part.text_time[row] == whole.text_time[document]
        place += length


def test_share_of_masked_tokens_is_the_schedule():
    documents = small_documents(lengths=(12,) * 400)
    for name in ("linear", "cosine"):
        corruption = small_corruption(text_schedule=name)
        noisy = corruption.corrupt_at(batch_of(documents), pinned(400, 0.3, 0.0))
        expected = corruption.text.schedule.mask_probability(torch.tensor(0.3)).item()
        share = (noisy.noisy_tokens == SHAPE.vocab_size).float().mean().item()
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 4800)


def test_modes_pin_their_conditions_and_choose_their_targets():
    only = {
        mode: CorruptionConfig(ModeWeights(**{m: float(m == mode) for m in MODES}), condition_dropout=0.0)
        for mode in MODES
    }
    l2t, t2l, joint = (draw_times(POSITIONS, KEYS, only[mode], seed=0) for mode in MODES)
    assert (l2t.latent_time == 0).all()
    assert l2t.text_is_target.all()
    assert not l2t.latent_is_target.any()
    assert (t2l.text_time == 0).all()
    assert t2l.latent_is_target.all()
    assert not t2l.text_is_target.any()
    assert joint.text_is_target.all()
    assert joint.latent_is_target.all()
    for drawn in (l2t.text_time, t2l.latent_time, joint.text_time, joint.latent_time):
        assert drawn.min() > 0
        assert abs(drawn.mean() - 0.5) < 0.01
        assert abs(drawn.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(joint.text_time, joint.latent_time)[0, 1]) < 0.03


def test_latent_times_follow_their_power_and_text_times_do_not():
    modes = ModeWeights(0.0, 0.0, 1.0)
    plain = draw_times(POSITIONS, KEYS, CorruptionConfig(modes, 0.0), seed=1)
    late = draw_times(POSITIONS, KEYS, CorruptionConfig(modes, 0.0, latent_time_power=0.5), seed=1)
    np.testing.assert_allclose(late.latent_time, np.sqrt(plain.latent_time), rtol=1e-6)
    assert np.array_equal(late.text_time, plain.text_time)


def test_mode_shares_are_the_weights_and_times_stay_uniform_inside_a_mode():
    times = draw_times(POSITIONS, KEYS, CorruptionConfig(ModeWeights(3.0, 1.0, 0.0), 0.0), seed=4)
    assert abs(times.text_is_target.mean() - 0.75) < 0.005
    inside = np.sort(times.text_time[times.text_is_target])
    assert np.abs(inside - np.linspace(0, 1, len(inside))).max() < 0.02


def test_with_every_condition_dropped_no_trace_of_a_latent_is_left():
    config = CorruptionConfig(ModeWeights(1.0, 0.0, 0.0), condition_dropout=1.0)
    batch = batch_of(small_documents())
    first, second = (
        Corruption(config, vocab_size=SHAPE.vocab_size, seed=0).corrupt(replace(batch, latents=latents))
        for latents in (batch.latents, 3.0 - batch.latents)
    )
    assert torch.equal(first.noisy_latents, second.noisy_latents)
    assert torch.equal(first.noisy_tokens, second.noisy_tokens)
    assert (first.latent_time == 1).all()


def test_dropped_conditions_are_pure_noise_and_are_not_scored():
    config = CorruptionConfig(ModeWeights(1.0, 1.0, 0.0), condition_dropout=0.25)
    times = draw_times(POSITIONS, KEYS, config, seed=0)
    latent_condition = times.latent_time[~times.latent_is_target]
    assert set(latent_condition) == {0.0, 1.0}
    assert abs(latent_condition.mean() - 0.25) < 0.04
    batch = batch_of(small_documents())
    noisy = Corruption(config, vocab_size=SHAPE.vocab_size, seed=0).corrupt_at(
        batch, Times(np.ones(6, np.float32), np.full(6, 0.5, np.float32), np.zeros(6, bool), np.ones(6, bool))
    )
    assert (noisy.noisy_tokens == SHAPE.vocab_size).all()
    assert not noisy.scored_real.any()


@pytest.mark.parametrize("multiple", [1, 16])
def test_scored_rows_are_the_masked_tokens_of_targets_filled_up(multiple):
    batch = batch_of(small_documents(), caps=Caps(64, 9, 12))
    corruption = Corruption(CorruptionConfig(), vocab_size=SHAPE.vocab_size, seed=0, row_multiple=multiple)
    noisy = corruption.corrupt(batch)
    real = noisy.scored[noisy.scored_real]
    times = corruption.times(batch.positions, batch.keys)
    target = torch.from_numpy(times.text_is_target)[batch.layout.document] & batch.layout.real
    expected = torch.nonzero((noisy.noisy_tokens == SHAPE.vocab_size) & target).squeeze(1)
    assert torch.equal(real, expected)
    assert len(noisy.scored) % multiple == 0
    assert (noisy.scored[~noisy.scored_real] == 63).all()  # in rising order, as the last block needs them
