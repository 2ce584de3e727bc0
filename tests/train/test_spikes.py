"""Jumps are judged per bucket against the run's own history: found when real, quiet when not."""

import json

import numpy as np

from mmldlm.train.spikes import SpikeWatch
from tests.runs import make_trainer
from tests.stores import write_store


def line(rng, scale=1.0, bucket_scale=None):
    """Easy early times, hard late ones, with noise of a tenth."""
    values = [0.5 + bucket + 0.1 * (0.5 + bucket) * rng.normal() for bucket in range(8)]
    for bucket, factor in (bucket_scale or {}).items():
        values[bucket] *= factor
    return {"text_loss_by_time": [scale * value for value in values], "latent_loss_by_time": [None] * 8}


def test_a_long_quiet_run_gives_no_alarm_and_a_jump_in_one_bucket_does():
    rng, watch = np.random.default_rng(0), SpikeWatch()
    falling = [watch.judge(line(rng, scale=2.0 * 0.999**step)) for step in range(2000)]
    assert not any(falling)
    found = watch.judge(line(rng, scale=2.0 * 0.999**2000, bucket_scale={2: 4.0}))
    assert [(jump["loss"], jump["bucket"]) for jump in found] == [("text_loss_by_time", 2)]
    assert 2.5 < found[0]["value"] / found[0]["usual"] < 5.5


def test_times_drawn_late_are_no_jump():
    """The mean would jump threefold; no bucket does."""
    rng, watch = np.random.default_rng(1), SpikeWatch()
    for _ in range(100):
        watch.judge(line(rng))
    late = line(rng)
    late["text_loss_by_time"][:5] = [None] * 5
    assert watch.judge(late) == []


def test_nothing_is_judged_before_there_is_a_history():
    rng, watch = np.random.default_rng(2), SpikeWatch()
    for _ in range(19):
        assert watch.judge(line(rng)) == []
    assert watch.judge(line(rng, scale=50.0)) == []


def test_a_level_that_lasts_becomes_usual():
    rng, watch = np.random.default_rng(3), SpikeWatch()
    for _ in range(60):
        watch.judge(line(rng))
    alarms = [bool(watch.judge(line(rng, scale=3.0))) for _ in range(200)]
    assert alarms[0]
    assert not any(alarms[100:])


def test_a_run_tells_a_jump_in_its_ledger_also_after_a_resume(tmp_path, caplog):
    store = write_store(tmp_path / "store", num_train=120).path
    words = (
        "train.log_every=1",
        "train.checkpoint_every=35",
        "batch.tokens_per_step=2048",
        "train.valid_every=0",
    )
    make_trainer(tmp_path, store, *words, "train.steps=35").fit()
    trainer = make_trainer(tmp_path, store, *words, "train.steps=37")
    judged = trainer.interval.fields

    def fields():
        found = judged()
        if trainer.step == 36:
            found["latent_loss_by_time"] = [value and 20 * value for value in found["latent_loss_by_time"]]
        return found

    trainer.interval.fields = fields
    trainer.fit()
    told = [json.loads(text) for text in trainer.run.events.read_text().splitlines()]
    spikes = [event for event in told if event["event"] == "loss_spike"]
    assert [event["step"] for event in spikes] == [36]
    assert {jump["loss"] for jump in spikes[0]["jumps"]} == {"latent_loss_by_time"}
    assert "step 36: the loss jumped in" in caplog.text
