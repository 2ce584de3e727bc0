"""Too many skipped updates: back to the last good checkpoint, past the data, and exactly so after a crash too."""

import itertools
import json

import numpy as np
import pytest
import torch

from mmldlm.checkpoint.files import published
from mmldlm.checkpoint.load import load_checkpoint
from mmldlm.errors import UserError
from mmldlm.metrics import read_log
from tests.runs import curve, make_trainer, same, weights

SETTINGS = ("train.steps=24", "train.log_every=2", "train.skip_budget=4", "train.checkpoint_every=3")


def poison(trainer, is_bad):
    """Steps whose range of documents is bad have a gradient that is not finite."""
    run = trainer.train_step

    def one_step(batch, waited):
        if is_bad(batch.where):
            batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        run(batch, waited)

    trainer.train_step = one_step


def events(trainer, kind):
    lines = [json.loads(line) for line in trainer.run.events.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def positions(trainer):
    """First and last document of ten steps from the start of the run."""
    from mmldlm.data.loader import plan_steps

    setup = trainer.setup
    steps = plan_steps(setup.order, setup.train_split.lengths, setup.plan, 0)
    return [(where.start, where.end) for where, _ in zip(steps, range(12), strict=False)]


@pytest.fixture(scope="module")
def halved(store, tmp_path_factory):
    """A run that went back once, with half the learning rate, and was not disturbed otherwise."""
    trainer = make_trainer(
        tmp_path_factory.mktemp("halved"), store, *SETTINGS, "train.rollback_lr_factor=0.5"
    )
    poison_stretch(trainer)
    trainer.fit()
    return trainer


def poison_stretch(trainer):
    """Steps 7 to 10, four in a row."""
    planned = positions(trainer)
    poison(trainer, lambda where: planned[6][0] <= where.start < planned[9][1])


def test_a_bad_stretch_of_data_is_left_out_and_the_run_ends(halved):
    trainer, planned = halved, positions(halved)
    bad = range(planned[6][0], planned[9][1])
    assert trainer.step == 24
    (rollback,) = events(trainer, "rolled_back")
    # noticed at the line of step 10; the checkpoint of step 9 was saved amid skipped updates, that of step 6 was not
    assert (rollback["from_step"], rollback["step"], rollback["lr_factor"]) == (10, 6, 0.5)
    assert rollback["left_out"] == [planned[6][0], planned[9][1]]
    skipped = events(trainer, "skipped")
    assert [step for event in skipped for step in event["steps"]] == [7, 8, 9, 10]
    wanted = trainer.setup.train_split.read(trainer.setup.order.documents(np.array(bad))).ids
    assert [number for event in skipped for number in event["documents"]] == wanted.tolist()
    lines = [line for line in read_log(trainer.run.training_log) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(2, 25, 2))  # rewound, then written again
    assert sum(line["skipped_steps"] for line in lines) == 0
    assert len(events(trainer, "rolled_back")) == trainer.rollbacks.count == 1


@pytest.mark.parametrize(
    "words",
    [(), ("corruption.mode_schedule=[{until: 8, mode_weights: {l2t: 1}}]",)],
    ids=["plain", "across a change of the modes"],
)
def test_after_a_rollback_the_run_is_that_of_one_which_never_saw_the_data(store, tmp_path, words):
    """An oracle: the same settings, started by hand from the good checkpoint at the later position."""
    trainer = make_trainer(tmp_path / "faulty", store, *SETTINGS, *words)
    planned = positions(trainer)
    poison_stretch(trainer)
    trainer.fit()
    assert [event["step"] for event in events(trainer, "modes")] == ([8, 8] if words else [])
    clean = make_trainer(tmp_path / "clean", store, *SETTINGS, *words)
    save = clean.save

    def save_and_jump(*, wait):
        save(wait=wait)
        if clean.step == 6:
            clean.continue_at(planned[9][1])

    clean.save = save_and_jump
    clean.fit()
    assert same(weights(trainer), weights(clean))
    assert curve(trainer) == curve(clean)


def die_at_step(trainer, at):
    """At a step after the rollback; 6 is the very moment after it."""
    run = trainer.train_step

    def one_step(batch, waited):
        if trainer.rollbacks.count and trainer.step == at:
            raise RuntimeError("the machine died")
        run(batch, waited)

    trainer.train_step = one_step


def die_before_its_save(trainer, at):
    save = trainer.save

    def dying(*, wait):
        if trainer.rollbacks.count:
            raise RuntimeError("the machine died")
        save(wait=wait)

    trainer.save = dying


def die_after_its_save(trainer, at):
    def rewind(step):
        raise RuntimeError("the machine died")

    run = trainer._loop

    def train():
        trainer.log.rewind = rewind
        run()

    trainer._loop = train


@pytest.mark.parametrize(
    ("die", "at"), [(die_at_step, 6), (die_at_step, 13), (die_before_its_save, 0), (die_after_its_save, 0)]
)
def test_a_run_that_dies_around_a_rollback_ends_bit_identical(store, tmp_path, halved, die, at):
    words = (*SETTINGS, "train.rollback_lr_factor=0.5")
    first = make_trainer(tmp_path / "first", store, *words)
    poison_stretch(first)
    die(first, at)
    with pytest.raises(RuntimeError, match="the machine died"):
        first.fit()
    second = make_trainer(tmp_path / "first", store, *words)
    poison_stretch(second)
    second.fit()
    assert second.rollbacks.state_dict() == halved.rollbacks.state_dict()
    assert same(weights(second), weights(halved))
    assert curve(second) == curve(halved)


def test_where_the_newest_checkpoint_does_not_help_an_older_one_is_taken_until_the_budget_ends(
    store, tmp_path
):
    trainer = make_trainer(tmp_path, store, *SETTINGS, "train.max_rollbacks=3", "train.keep_checkpoints=10")
    poison(trainer, lambda where: trainer.step >= 10)
    with pytest.raises(
        UserError, match=r"up to step \d+ .*train.skip_budget=4.*after 3 rollbacks.*optim.lr=0.001"
    ):
        trainer.fit()
    # 9 did not help, so 6; the 9 that was trained from there is another one
    assert [event["step"] for event in events(trainer, "rolled_back")] == [9, 6, 9]
    left_out = trainer.rollbacks.left_out
    assert all(start < end for start, end in left_out)
    assert all(before[1] <= after[1] for before, after in itertools.pairwise(left_out))


def test_no_rollbacks_allowed_is_a_plain_end(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *SETTINGS, "train.max_rollbacks=0")
    poison(trainer, lambda where: trainer.step >= 10)
    with pytest.raises(UserError, match=r"after 0 rollbacks \(train.max_rollbacks=0\)"):
        trainer.fit()
    assert events(trainer, "rolled_back") == []


def test_the_last_two_good_checkpoints_outlive_newer_bad_ones(store, tmp_path):
    trainer = make_trainer(
        tmp_path, store, "train.steps=24", "train.checkpoint_every=2", "train.keep_checkpoints=1", "train.log_every=24",
        "train.skip_budget=1000",
    )  # fmt: skip
    poison(trainer, lambda where: trainer.step >= 6)
    trainer.fit()
    kept = [path.name for path in published(trainer.run.checkpoints)]
    assert kept == ["step_00000004", "step_00000006", "step_00000024"]
    with open(trainer.run.checkpoints / "step_00000006" / "model.safetensors", "r+b") as file:
        file.write(b"damaged")
    found = trainer.rollbacks.choose(trainer.run.checkpoints, lambda message: None)
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize("stop_at", [8, 10])
def test_bad_documents_are_named_although_the_run_stopped_before_the_line_of_the_log(
    store, tmp_path, stop_at
):
    words = ("train.steps=12", "train.log_every=12", "train.checkpoint_every=5", "train.skip_budget=100")
    whole, first, second = (make_trainer(tmp_path / name, store, *words) for name in ("whole", "run", "run"))
    for trainer in (whole, first, second):
        poison(trainer, lambda where, trainer=trainer: trainer.step in (4, 6, 10))
    whole.fit()
    crash_at(first, stop_at)
    with pytest.raises(RuntimeError, match="the machine died"):
        first.fit()
    second.fit()
    (told,), (wanted,) = events(second, "skipped"), events(whole, "skipped")
    assert wanted["steps"] == [5, 7, 11]
    assert {key: told[key] for key in ("steps", "positions", "documents", "count")} == {
        key: wanted[key] for key in ("steps", "positions", "documents", "count")
    }
    assert same(weights(second), weights(whole))


def crash_at(trainer, at):
    """At the start of this step, 0 is the first."""
    run = trainer.train_step

    def one_step(batch, waited):
        if trainer.step == at:
            raise RuntimeError("the machine died")
        run(batch, waited)

    trainer.train_step = one_step


def test_best_and_regular_checkpoints_are_kept_on_top(store, tmp_path):
    trainer = make_trainer(
        tmp_path, store, "train.steps=24", "train.checkpoint_every=2", "train.valid_every=2",
        "train.keep_checkpoints=2", "train.keep_best=2", "train.keep_every=10",
    )  # fmt: skip
    losses = {6: 0.5, 14: 0.7}
    trainer.hooks.validate = lambda denoiser: {"valid_loss": losses.get(trainer.step, 2.0 + trainer.step)}
    trainer.fit()
    kept = [load_checkpoint(path).step for path in published(trainer.run.checkpoints)]
    assert kept == [6, 10, 14, 20, 22, 24]
    again = make_trainer(tmp_path, store, "train.steps=24", "train.checkpoint_every=2", "train.valid_every=2")
    again.fit()
    assert again.step == 24


def test_best_without_a_validation_at_each_checkpoint_is_refused(store, tmp_path):
    with pytest.raises(UserError, match=r"train.keep_best=1: train.valid_every=6 must be a multiple of .*=4"):
        make_trainer(tmp_path, store, "train.keep_best=1")


def test_weights_that_went_bad_are_exchanged_for_good_ones(store, tmp_path):
    """What no amount of other data would heal."""
    trainer = make_trainer(tmp_path, store, *SETTINGS)
    run = trainer.train_step

    def one_step(batch, waited):
        run(batch, waited)
        if trainer.step == 8 and not trainer.rollbacks.count:
            with torch.no_grad():
                trainer.setup.denoiser.token_embed.weight.fill_(float("inf"))

    trainer.train_step = one_step
    trainer.fit()
    (rollback,) = events(trainer, "rolled_back")
    assert (rollback["from_step"], rollback["step"]) == (12, 6)
    assert all(torch.isfinite(tensor).all() for tensor in trainer.setup.denoiser.state_dict().values())
    assert all(torch.isfinite(tensor).all() for tensor in trainer.stepper.ema.average.values())


def test_skips_before_a_checkpoint_do_not_count_again_after_a_rollback(store, tmp_path):
    """A checkpoint inside an interval holds its counters; they must not trigger the next rollback."""
    words = ["train.steps=30", "train.log_every=10", "train.checkpoint_every=3", "train.skip_budget=4"]
    trainer = make_trainer(tmp_path, store, *words)
    run = trainer.train_step

    def one_step(batch, waited):
        if 2 <= trainer.step <= 5 and not trainer.rollbacks.count:
            batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        run(batch, waited)

    trainer.train_step = one_step
    trainer.fit()
    assert trainer.step == 30
    assert trainer.rollbacks.count == 1
