"""Weights of times in closed form; sums per time bucket against a plain loop, and their place in the log."""

import numpy as np
import pytest
import torch

from mmldlm.corruption.joint import TEXT_SCHEDULES
from mmldlm.metrics import read_log
from mmldlm.objective.losses import NUM_BUCKETS, means, sums_by_time, text_weights
from tests.runs import make_trainer
from tests.stores import write_store


@pytest.mark.parametrize("name", TEXT_SCHEDULES)
def test_weights_of_times(name):
    schedule, time = TEXT_SCHEDULES[name], torch.linspace(0.0, 1.0, 1001, dtype=torch.float64)[1:]
    real = torch.ones(1000, dtype=torch.bool)
    real[:10] = False
    bound, uniform = (text_weights(kind, schedule, time, real) for kind in ("bound", "uniform"))
    assert not bound[:10].any()
    assert not uniform[:10].any()
    share = schedule.mask_probability(time)
    slope = torch.gradient(share, spacing=(time,))[0]
    torch.testing.assert_close(bound[10:-1], (slope / share)[10:-1], rtol=1e-3, atol=0)
    assert float((uniform.double() * share).sum() / 1000) == pytest.approx(1.0, rel=5e-3)


def test_sums_and_means_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    losses, time = rng.random(200, dtype=np.float32), rng.random(200, dtype=np.float32)
    time[:3] = (0.0, 1.0, 0.125)
    time[time > 0.6] = 0.9  # leaves a bucket empty
    scored = rng.random(200) < 0.7
    scored[:3] = True
    losses[~scored] = np.nan  # what is not scored must not matter
    found = sums_by_time(*(torch.from_numpy(array) for array in (losses, scored, time)))
    for bucket in range(NUM_BUCKETS):
        inside = [i for i in range(200) if scored[i] and min(7, int(time[i] * 8)) == bucket]
        assert found[1, bucket] == len(inside)
        assert found[0, bucket].item() == pytest.approx(sum(float(losses[i]) for i in inside), rel=1e-5)
    assert means(found)[5] is None
    assert means(found)[0] == pytest.approx(found[0, 0].item() / found[1, 0].item())


@pytest.mark.parametrize(
    "change", ["batch.micro_tokens=64", "speed.scored_rows=false", "speed.layout=padded"]
)
def test_the_buckets_of_a_run_add_up_to_its_losses_however_it_is_computed(tmp_path, change):
    store = write_store(tmp_path / "store", num_train=120, num_slots=2).path
    words = ("objective.text_weighting=uniform", "train.steps=6", "train.checkpoint_every=6")
    lines = []
    for number, more in enumerate([(), (change,)]):
        trainer = make_trainer(tmp_path / str(number), store, *words, *more)
        steps = trainer.batches
        for _ in range(3):
            trainer.train_step(next(steps), 0.0)
        sums = trainer.window.sums
        # unweighted nats of all scored tokens, and errors of all scored slots
        latent = sums["latent_by_time"]
        assert latent[0].sum().item() / latent[1].sum().item() == pytest.approx(
            sums["latent"].item() / 3, rel=0.05
        )
        assert sums["text_by_time"][1].sum() == sums["scored"]
        lines.append(trainer.window.fields())
    for key in ("text_loss_by_time", "latent_loss_by_time"):
        assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-4, nan_ok=True)


def test_a_line_of_the_log_has_both_lists(tmp_path):
    trainer = make_trainer(tmp_path, write_store(tmp_path / "store", num_train=120).path, "train.steps=3")
    trainer.fit()
    line = next(line for line in read_log(trainer.run.training_log) if "loss" in line)
    for key in ("text_loss_by_time", "latent_loss_by_time"):
        assert len(line[key]) == NUM_BUCKETS
        assert all(value is None or value > 0 for value in line[key])
