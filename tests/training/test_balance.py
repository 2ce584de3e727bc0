"""Balances of the loss in a run: exact resume, groups of the optimizer, the log, and steps that are done again."""

import pytest
import torch

from mmldlm.errors import Interrupted, UserError
from tests.runs import make_trainer
from tests.stores import write_store
from tests.training.test_loop import StopAt, curve, same, weights

KINDS = {
    "uncertainty": ("objective.balance=uncertainty",),
    "gradient_norm": ("objective.balance=gradient_norm", "objective.balance_every=3"),
}

TURNS = "corruption.mode_schedule=[{until: 3, mode_weights: {l2t: 1}}, {until: 6, mode_weights: {t2l: 1}}]"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


@pytest.fixture(scope="module")
def wholes(store, tmp_path_factory):
    found = {}
    for kind, words in KINDS.items():
        found[kind] = make_trainer(tmp_path_factory.mktemp(kind), store, *words)
        found[kind].fit()
    return found


def state(trainer):
    return {**weights(trainer), **trainer.snapshot().tensors["balance"]}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stopped_and_resumed_run_is_bit_identical(store, wholes, tmp_path, kind):
    first = make_trainer(tmp_path, store, *KINDS[kind])
    first.hooks.reporter = StopAt(first, 5)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path, store, *KINDS[kind])
    second.fit()
    assert same(state(second), state(wholes[kind]))
    assert curve(second) == curve(wholes[kind])


@pytest.mark.parametrize(("kind", "change"), [
    ("uncertainty", "batch.micro_tokens=64"), ("gradient_norm", "batch.micro_tokens=64"),
    ("gradient_norm", "speed.activation_checkpointing=block"),
])  # fmt: skip
def test_switches_leave_the_curve_where_it_is(store, wholes, tmp_path, kind, change):
    trainer = make_trainer(tmp_path, store, *KINDS[kind], change)
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(wholes[kind]), strict=True):
        for key in ("loss", "text_loss", "latent_loss", "grad_norm", "text_factor", "latent_factor"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)


def test_log_variances_are_a_group_without_decay_and_not_part_of_the_average(wholes):
    trainer = wholes["uncertainty"]
    (group,) = [group for group in trainer.stepper.optimizers.param_groups if group["part"] == "balance"]
    (learned,) = group["params"]
    assert learned is trainer.stepper.balance.log_variances
    assert group["weight_decay"] == 0.0
    assert group["lr"] == pytest.approx(10 * trainer.stepper.optimizers.param_groups[0]["lr"])
    assert trainer.stepper.ema.average.keys() == dict(trainer.setup.denoiser.named_parameters()).keys()
    assert (learned != 0).all()
    line = next(line for line in reversed(curve(trainer)) if "loss" in line)
    assert line["text_factor_by_time"] == pytest.approx(torch.exp(-learned[0]).tolist())
    assert line["text_factor"] == pytest.approx(torch.exp(-learned[0]).mean().item())
    assert "exp_avg.balance.log_variances" in trainer.snapshot().tensors["optimizer"]


def test_norms_are_measured_when_due_and_change_the_factors_from_the_next_step_on(wholes):
    lines = {line["step"]: line for line in curve(wholes["gradient_norm"]) if "loss" in line}
    assert lines[3]["text_factor"] == lines[3]["latent_factor"] == 1.0
    assert wholes["gradient_norm"].stepper.balance.measured == 3  # in steps 4, 7 and 10
    assert lines[6]["text_factor"] != 1.0
    assert (lines[6]["text_factor"] - 1) * (lines[6]["latent_factor"] - 1) < 0


def test_a_step_done_again_after_memory_ran_out_is_measured_once(store, wholes, tmp_path):
    trainer = make_trainer(tmp_path, store, *KINDS["gradient_norm"])
    run = trainer.stepper.pass_over

    def pass_over(micro_batch):
        if trainer.step == 3 and len(micro_batch.noisy.tokens) > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over
    trainer.fit()
    balance, expected = trainer.stepper.balance, wholes["gradient_norm"].stepper.balance
    assert balance.measured == 3
    torch.testing.assert_close(balance.log_ratio, expected.log_ratio, rtol=1e-3, atol=1e-4)


def test_measuring_leaves_no_gradient_behind(store, tmp_path):
    plain = make_trainer(tmp_path / "plain", store)
    measured = make_trainer(tmp_path / "measured", store, *KINDS["gradient_norm"])
    found = []
    for trainer in (plain, measured):
        batches = trainer._batches()
        for _ in range(3):
            trainer._one_step(next(batches), 0.0)
        trainer.stepper.gradients(next(batches))
        found.append([p.grad.clone() for p in trainer.setup.denoiser.parameters() if p.grad is not None])
    assert measured.stepper._norms is not None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_balance_alone(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *KINDS["uncertainty"])
    batches = trainer._batches()
    trainer._one_step(next(batches), 0.0)
    before = trainer.stepper.balance.log_variances.detach().clone()
    batch = next(batches)
    batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
    trainer._one_step(batch, 0.0)
    assert torch.equal(trainer.stepper.balance.log_variances, before)


@pytest.mark.parametrize(("words", "told"), [
    (["objective.balance=gradient_norm", "objective.latent_weight=0"], "a loss on text and one on latents are needed"),
    (["objective.balance=gradient_norm", "corruption.mode_weights.t2l=0", "corruption.mode_weights.joint=0"], "needed"),
    (["objective.balance=uncertainty", "objective.latent_weight=0", "objective.text_weight=0"], "text or on latents"),
    ([*KINDS["gradient_norm"], "corruption.mode_choice=batch", "corruption.mode_weights.joint=0"], "never be compared"),
    ([*KINDS["gradient_norm"], TURNS, "corruption.mode_repeat=true"], "never be compared"),
    ([*KINDS["gradient_norm"], "train.frozen=[text, latent, shared]"], "never be compared"),
])  # fmt: skip
def test_where_there_is_nothing_to_balance_it_is_refused(store, tmp_path, words, told):
    with pytest.raises(UserError, match=told):
        make_trainer(tmp_path, store, *words)


def test_one_modality_alone_is_balanced_over_its_times(store, tmp_path):
    words = ("corruption.mode_weights.t2l=0", "corruption.mode_weights.joint=0", "train.steps=3")
    trainer = make_trainer(tmp_path, store, *KINDS["uncertainty"], *words)
    trainer.fit()
    text, latent = trainer.stepper.balance.log_variances
    assert (text != 0).any()
    assert (latent == 0).all()


@pytest.mark.parametrize(("words", "measured"), [
    # turns of the same length as the measurements: each would fall into l2t alone
    (["corruption.mode_schedule=[{until: 3, mode_weights: {l2t: 1}}, {until: 4, mode_weights: {joint: 1}}]",
      "corruption.mode_repeat=true", "objective.balance_every=4"], [7, 11]),
    # a stage in which nothing is trained that both losses reach
    (["corruption.mode_schedule=[{until: 5, mode_weights: {joint: 1}, frozen: [text, latent, shared]}]"], [5, 6, 9]),
])  # fmt: skip
def test_norms_are_measured_at_the_next_step_that_has_both_losses(store, tmp_path, words, measured):
    trainer = make_trainer(tmp_path, store, *KINDS["gradient_norm"], *words)
    settle, found = trainer.stepper.balance.settle, []

    def settled(norms, step):
        found.append(step)
        settle(norms, step)

    trainer.stepper.balance.settle = settled
    trainer.fit()
    assert found == measured
    assert trainer.stepper.balance.measured == len(measured)


def test_a_modality_without_a_loss_keeps_its_log_variances(store, tmp_path):
    """Momentum from an earlier stage would move them on."""
    stages = (
        "corruption.mode_schedule=[{until: 4, mode_weights: {joint: 1}}, {until: 8, mode_weights: {l2t: 1}}, "
        "{until: 12, mode_weights: {t2l: 1}}]"
    )
    trainer = make_trainer(tmp_path, store, *KINDS["uncertainty"], stages)
    batches, seen = trainer._batches(), []
    for _ in range(10):
        trainer._one_step(next(batches), 0.0)
        seen.append(trainer.stepper.balance.log_variances.detach().clone())
    assert torch.equal(seen[3][1], seen[7][1])
    assert torch.equal(seen[7][0], seen[9][0])
    assert not torch.equal(seen[3][0], seen[7][0])
    assert not torch.equal(seen[7][1], seen[9][1])
