"""The balance of the loss in a run: exact resume, the log, and steps that are done again."""

import pytest
import torch

from mmldlm.errors import Interrupted
from tests.runs import make_trainer
from tests.stores import write_store
from tests.training.test_loop import StopAt, curve, same, weights

BALANCED = ("objective.balance=gradient_norm", "objective.balance_every=3")
TURNS = "corruption.mode_schedule=[{until: 3, mode_weights: {l2t: 1}}, {until: 6, mode_weights: {t2l: 1}}]"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), store, *BALANCED)
    trainer.fit()
    return trainer


def state(trainer):
    return {**weights(trainer), **trainer.snapshot().tensors["balance"]}


def test_a_stopped_and_resumed_run_is_bit_identical(store, whole, tmp_path):
    first = make_trainer(tmp_path, store, *BALANCED)
    first.hooks.reporter = StopAt(first, 5)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path, store, *BALANCED)
    second.fit()
    assert same(state(second), state(whole))
    assert curve(second) == curve(whole)


@pytest.mark.parametrize("change", ["batch.micro_tokens=64", "speed.activation_checkpointing=block"])
def test_switches_leave_the_curve_where_it_is(store, whole, tmp_path, change):
    trainer = make_trainer(tmp_path, store, *BALANCED, change)
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(whole), strict=True):
        for key in ("loss", "text_loss", "latent_loss", "grad_norm", "text_factor", "latent_factor"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)


def test_norms_are_measured_when_due_and_change_the_factors_from_the_next_step_on(whole):
    lines = {line["step"]: line for line in curve(whole) if "loss" in line}
    assert lines[3]["text_factor"] == lines[3]["latent_factor"] == 1.0
    assert whole.stepper.balance.measured == 3  # in steps 4, 7 and 10
    assert lines[6]["text_factor"] != 1.0
    assert (lines[6]["text_factor"] - 1) * (lines[6]["latent_factor"] - 1) < 0


def test_a_step_done_again_after_memory_ran_out_is_measured_once(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, *BALANCED)
    run = trainer.stepper.pass_over

    def pass_over(micro_batch):
        if trainer.step == 3 and len(micro_batch.noisy.tokens) > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over
    trainer.fit()
    balance, expected = trainer.stepper.balance, whole.stepper.balance
    assert balance.measured == 3
    torch.testing.assert_close(balance.log_ratio, expected.log_ratio, rtol=1e-3, atol=1e-4)


def test_measuring_leaves_no_gradient_behind(store, tmp_path):
    plain = make_trainer(tmp_path / "plain", store, "objective.balance=fixed")
    measured = make_trainer(tmp_path / "measured", store, *BALANCED)
    found = []
    for trainer in (plain, measured):
        batches = trainer.batches
        for _ in range(3):
            trainer.train_step(next(batches), 0.0)
        trainer.stepper.gradients(next(batches))
        found.append([p.grad.clone() for p in trainer.setup.denoiser.parameters() if p.grad is not None])
    assert measured.stepper._norms is not None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("words", "measured"), [
    # turns of the same length as the measurements: each would fall into l2t alone
    (["corruption.mode_schedule=[{until: 3, mode_weights: {l2t: 1}}, {until: 4, mode_weights: {joint: 1}}]",
      "corruption.mode_repeat=true", "objective.balance_every=4"], [7, 11]),
    # a stage in which nothing is trained that both losses reach
    (["corruption.mode_schedule=[{until: 5, mode_weights: {joint: 1}, frozen: [text, latent, shared]}]"], [5, 6, 9]),
])  # fmt: skip
def test_norms_are_measured_at_the_next_step_that_has_both_losses(store, tmp_path, words, measured):
    trainer = make_trainer(tmp_path, store, *BALANCED, *words)
    settle, found = trainer.stepper.balance.settle, []

    def settled(norms, step):
        found.append(step)
        settle(norms, step)

    trainer.stepper.balance.settle = settled
    trainer.fit()
    assert found == measured
    assert trainer.stepper.balance.measured == len(measured)


@pytest.mark.parametrize("words", [
    ["objective.latent_weight=0"],
    ["corruption.mode_weights={l2t: 1}"],
    ["corruption.mode_choice=batch", "corruption.mode_weights={l2t: 1, t2l: 1}"],
    [TURNS, "corruption.mode_repeat=true"],
])  # fmt: skip
def test_where_no_step_has_both_losses_the_factors_stay_one(store, tmp_path, words):
    trainer = make_trainer(tmp_path, store, *BALANCED, *words, "train.steps=7")
    trainer.fit()
    balance = trainer.stepper.balance
    assert balance is None or (balance.measured == 0 and (balance.factors() == 1).all())
