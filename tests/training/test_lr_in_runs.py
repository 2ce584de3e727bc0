"""Schedules in a run: reductions on a plateau survive stopping and rollbacks to the bit; runs can be made longer."""

import pytest

from mmldlm.errors import Interrupted, UserError
from tests.runs import make_trainer
from tests.stores import write_store
from tests.training.test_loop import StopAt, curve, same, weights
from tests.training.test_rollback import events, poison

BY_LOG = ("optim.schedule=plateau", "optim.plateau_patience=4", "optim.plateau_threshold=0.9", "train.valid_every=0",
          "train.steps=18", "train.log_every=2")  # fmt: skip
"""A loss that must fall to a tenth is on a plateau at once: reductions after steps 10 and 14."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), store, *BY_LOG)
    trainer.fit()
    return trainer


def test_reductions_are_in_the_ledger_and_in_the_rate(whole):
    # warm-up ends at step 5; 10 is the first line after four more steps
    reduced = events(whole, "lr_reduced")
    assert [event["step"] for event in reduced] == [10, 14, 18]
    assert [(event["lr_before"], event["lr_after"]) for event in reduced[:2]] == [
        (3e-3, 1.5e-3),
        (1.5e-3, 7.5e-4),
    ]
    assert {event["judged"] for event in reduced} == {"loss"}
    rates = {line["step"]: line["lr"] for line in curve(whole) if "lr" in line}
    assert [rates[step] for step in (6, 10, 12, 14, 16, 18)] == [3e-3, 3e-3, 1.5e-3, 1.5e-3, 7.5e-4, 7.5e-4]


@pytest.mark.parametrize("at", [9, 10])
def test_a_run_stopped_around_a_reduction_ends_bit_identical(store, whole, tmp_path, at):
    first = make_trainer(tmp_path, store, *BY_LOG)
    first.hooks.reporter = StopAt(first, at)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path, store, *BY_LOG)
    second.fit()
    assert same(weights(second), weights(whole))
    assert curve(second) == curve(whole)
    assert second.plateau.state_dict() == whole.plateau.state_dict()


def test_validation_is_judged_where_a_run_validates(store, tmp_path):
    words = [word for word in BY_LOG if not word.startswith("train.valid")]
    trainer = make_trainer(tmp_path, store, *words, "train.valid_every=3", "optim.plateau_threshold=0.01")
    losses = {3: 3.0, 6: 2.0, 9: 1.0, 12: 1.0, 15: 1.0}
    trainer.hooks.validate = lambda denoiser: {"valid_loss": losses.get(trainer.step, 0.5)}
    trainer.fit()
    (reduced,) = events(trainer, "lr_reduced")
    assert (reduced["step"], reduced["judged"], reduced["best"]) == (15, "valid_loss", 1.0)


def test_a_rollback_takes_the_schedule_back_with_the_weights(store, tmp_path):
    """The checkpoint of step 8 lies before the reduction of step 10, which the rollback at step 12 undoes."""
    words = (*BY_LOG, "train.skip_budget=2", "train.checkpoint_every=8", "optim.plateau_patience=5")
    trainer = make_trainer(tmp_path, store, *words, "train.steps=20")
    poison(trainer, lambda where: trainer.step in (10, 11) and not trainer.rollbacks.count)
    trainer.fit()
    (rollback,) = events(trainer, "rolled_back")
    assert (rollback["from_step"], rollback["step"]) == (12, 8)
    reduced = events(trainer, "lr_reduced")
    assert [(event["step"], event["lr_before"]) for event in reduced] == [
        (10, 3e-3),
        (10, 3e-3),
        (16, 1.5e-3),
    ]
    assert trainer.plateau.reduction == 0.25


def test_a_checkpoint_from_before_the_schedule_still_loads(store, whole, tmp_path):
    snapshot = whole.snapshot()
    del snapshot.meta["plateau"]
    other = make_trainer(tmp_path, store, *BY_LOG)
    other.checkpoints.restore(other.parts, snapshot)
    assert other.step == whole.step
    assert other.plateau.reduction == 1.0


def test_a_schedule_is_part_of_what_a_run_is(store, tmp_path):
    first = make_trainer(tmp_path, store, *BY_LOG)
    first.fit()
    with pytest.raises(UserError, match=r"optim.plateau_patience: 4 -> 5"):
        make_trainer(tmp_path, store, *BY_LOG, "optim.plateau_patience=5").fit()
    longer = make_trainer(tmp_path, store, *BY_LOG, "train.steps=20")
    longer.fit()
    assert longer.step == 20


def test_a_floor_above_the_rate_is_refused(store, tmp_path):
    with pytest.raises(UserError, match=r"optim.plateau_min_lr=0.1: less than optim.lr=0.003"):
        make_trainer(tmp_path, store, *BY_LOG, "optim.plateau_min_lr=0.1")


@pytest.mark.parametrize("words", [
    ("corruption.mode_choice=batch",),
    ("corruption.mode_schedule=[{until: 4, mode_weights: {l2t: 1}}]",),
])  # fmt: skip
def test_training_losses_of_changing_modes_are_not_judged(store, tmp_path, words):
    with pytest.raises(UserError, match=r"train.valid_every=0 must be from 1 to 17"):
        make_trainer(tmp_path, store, *BY_LOG, *words)
    make_trainer(tmp_path, store, *BY_LOG, *words, "train.valid_every=6")


@pytest.mark.parametrize("schedule", ["wsd", "restarts"])
def test_a_run_made_longer_in_time_is_the_longer_run(store, tmp_path, schedule):
    words = (f"optim.schedule={schedule}", "optim.restart_period=4", "train.valid_every=0")
    first = make_trainer(tmp_path / "first", store, *words, "train.steps=12")
    first.hooks.reporter = StopAt(first, 7)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path / "first", store, *words, "train.steps=16")
    second.fit()
    whole = make_trainer(tmp_path / "whole", store, *words, "train.steps=16")
    whole.fit()
    assert same(weights(second), weights(whole))
    assert curve(second) == curve(whole)
