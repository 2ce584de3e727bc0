"""Out of memory inside a run: the same step in smaller pieces, the same loss, and back to full size later."""

import json

import pytest
import torch

from mmldlm.config import BatchConfig
from mmldlm.errors import UserError
from mmldlm.metrics import read_log
from mmldlm.training.recovery import Resizing
from tests.runs import make_trainer


def limit_memory(trainer, most_tokens):
    """From now on a micro-batch with room for more tokens than this, at the current step, does not fit."""
    run = trainer.stepper.pass_over

    def pass_over(micro_batch):
        if len(micro_batch.noisy.tokens) > most_tokens(trainer.step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over


def losses(trainer):
    return [line["loss"] for line in read_log(trainer.run.training_log) if "loss" in line]


def events(trainer):
    return [json.loads(line) for line in trainer.run.events.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(store, tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), store, "train.log_every=1")
    trainer.fit()
    return losses(trainer)


def test_the_loss_is_that_of_a_run_with_enough_memory(store, tmp_path, expected):
    trainer = make_trainer(tmp_path, store, "train.log_every=1", "batch.grow_after=3")
    limit_memory(trainer, lambda step: 80 if step in (4, 5, 6) else 10**9)
    trainer.fit()
    torch.testing.assert_close(torch.tensor(losses(trainer)), torch.tensor(expected), atol=2e-4, rtol=2e-4)
    told = [(event["event"], event["step"]) for event in events(trainer) if "micro_tokens_after" in event]
    assert told == [("out_of_memory", 4), ("out_of_memory", 4), ("grown", 7), ("grown", 10)]
    assert trainer.resizing.halvings == 0


def test_a_resumed_run_keeps_its_size_until_the_user_gives_another(store, tmp_path):
    first = make_trainer(tmp_path, store, "train.steps=8")
    limit_memory(first, lambda step: 150)
    first.fit()
    told = len(events(first))
    second = make_trainer(tmp_path, store, "train.steps=10")
    limit_memory(second, lambda step: 150)
    second.fit()
    assert second.resizing.halvings == 1
    assert "out_of_memory" not in [event["event"] for event in events(second)[told:]]
    third = make_trainer(tmp_path, store, "batch.micro_tokens=100")
    third.fit()
    assert third.resizing.halvings == 0


def test_memory_that_runs_out_in_the_update_ends_the_run_and_nothing_is_applied_twice(store, tmp_path):
    trainer = make_trainer(tmp_path, store)

    def update(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    trainer.stepper._update = update
    with pytest.raises(
        UserError, match=r"out of memory in the update of step 1 .CUDA out of memory.*ema_decay=0"
    ):
        trainer.fit()


@pytest.mark.parametrize(("words", "told"), [
    ([], "with micro-batches of 24 tokens .*activation_checkpointing=block.*shorter documents"),
    (["batch.adapt=false"], "with micro-batches of 272 tokens .*batch.adapt=true"),
])  # fmt: skip
def test_what_cannot_be_made_smaller_is_told(store, tmp_path, words, told):
    trainer = make_trainer(tmp_path, store, *words)
    limit_memory(trainer, lambda step: 5)
    with pytest.raises(UserError, match=f"out of memory at step 1 {told}"):
        trainer.fit()


def test_growing_too_early_waits_twice_as_long_next_time():
    resizing = Resizing(BatchConfig(grow_after=10))
    resizing.halve()
    waited = []
    for _ in range(3):
        steps = 1
        while not resizing.step_done():
            steps += 1
        waited.append(steps)
        resizing.halve()  # it still does not fit
    assert waited == [10, 20, 40]
    assert resizing.halvings == 1


def test_growing_can_be_switched_off():
    resizing = Resizing(BatchConfig(grow_after=0))
    resizing.halve()
    assert not any(resizing.step_done() for _ in range(5000))
