import itertools

import pytest
import torch

from mmldlm.errors import Interrupted, UserError
from mmldlm.metrics import read_log
from mmldlm.training import recovery
from tests.runs import curve, make_trainer, same, weights
from tests.stores import write_store


class StopAt:
    """Raises the flag during a step, as a signal would."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def start(self, step, num_steps):
        import signal

        run, flag = self.trainer.train_step, self.trainer.stop

        def one_step(*args, **kwargs):
            run(*args, **kwargs)
            if self.trainer.step == self.step:
                flag._handle(signal.SIGINT, None)

        self.trainer.train_step = one_step

    def update(self, step, fields):
        pass


@pytest.mark.parametrize("at", [1, 4, 5, 11])
def test_a_stopped_and_resumed_run_is_bit_identical_to_an_uninterrupted_one(store, whole, tmp_path, at):
    first = make_trainer(tmp_path, store)
    first.hooks.reporter = StopAt(first, at)
    with pytest.raises(Interrupted, match=f"stopped after step {at}, checkpoint saved"):
        first.fit()
    second = make_trainer(tmp_path, store)
    second.fit()
    assert same(weights(second), weights(whole))
    assert curve(second) == curve(whole)
    assert second.progress.position == whole.progress.position


def test_losing_everything_after_a_checkpoint_changes_nothing(store, whole, tmp_path):
    first = make_trainer(tmp_path, store)
    run, crash = first.train_step, itertools.count(1)

    def one_step(*args, **kwargs):
        if next(crash) == 11:
            raise RuntimeError("the machine died")
        run(*args, **kwargs)

    first.train_step = one_step
    with pytest.raises(RuntimeError, match="the machine died"):
        first.fit()
    assert max(line["step"] for line in read_log(first.run.training_log)) == 9
    second = make_trainer(tmp_path, store)
    second.fit()
    assert same(weights(second), weights(whole))
    assert curve(second) == curve(whole)


def test_a_finished_run_is_left_as_it_is(store, whole, tmp_path, caplog):
    again = make_trainer(tmp_path, store)
    again.fit()
    before = weights(again)
    once_more = make_trainer(tmp_path, store)
    caplog.set_level("INFO")
    once_more.fit()
    assert "nothing to do: all 12 steps are done" in caplog.text
    assert same(weights(once_more), before)
    assert curve(once_more) == curve(again)


@pytest.mark.parametrize(
    "change",
    ["batch.micro_tokens=64", "speed.layout=padded", "speed.attention=reference", "speed.scored_rows=false"],
)
def test_switches_leave_the_curve_where_it_is(store, whole, tmp_path, change):
    trainer = make_trainer(tmp_path, store, change)
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(whole), strict=True):
        for key in ("loss", "text_loss", "latent_loss", "length_loss", "grad_norm"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)


def test_bf16_stays_near(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, "speed.precision=bf16")
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(whole), strict=True):
        if "loss" in theirs:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)


def test_micro_batches_may_change_on_resume(store, whole, tmp_path):
    first = make_trainer(tmp_path, store)
    first.hooks.reporter = StopAt(first, 5)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path, store, "batch.micro_tokens=100")
    second.fit()
    assert second.progress.tokens == whole.progress.tokens
    found = weights(second)
    for key, value in weights(whole).items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("change", "told"), [
    ("optim.lr=0.5", r"optim.lr: 0.003 -> 0.5"),
    ("batch.tokens_per_step=300", r"batch.tokens_per_step: 256 -> 300"),
    ("train.steps=6", r"train.steps: 12 -> 6"),
])  # fmt: skip
def test_settings_that_would_make_it_another_run_are_refused(store, tmp_path, change, told):
    make_trainer(tmp_path, store).fit()
    with pytest.raises(UserError, match=told):
        make_trainer(tmp_path, store, change).fit()


def test_another_store_is_refused(store, tmp_path):
    make_trainer(tmp_path, store).fit()
    other = write_store(tmp_path / "other", num_train=100, seed=5)
    with pytest.raises(UserError, match="was trained on another pair store"):
        make_trainer(tmp_path, other.path).fit()


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_averages_nor_moments(store, tmp_path):
    for fused in ("true", "false"):
        trainer = make_trainer(tmp_path / fused, store, f"speed.fused_optimizer={fused}")
        batches = trainer.batches
        trainer.train_step(next(batches), 0.0)
        before = {key: value.clone() for key, value in weights(trainer).items()}
        assert not same(
            before, weights(trainer) | trainer.stepper.ema.average
        )  # a lead that could be taken up
        batch = next(batches)
        batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        trainer.train_step(batch, 0.0)
        assert same(before, weights(trainer))
        trainer.train_step(next(batches), 0.0)
        moved = {key for key, value in weights(trainer).items() if not torch.equal(value, before[key])}
        assert {"token_embed.weight", "ema token_embed.weight"} <= moved
        fields = trainer.window.fields()
        assert fields["skipped_steps"] == 1
        assert fields["loss"] == fields["loss"]


def test_a_run_that_never_has_a_finite_gradient_stops_and_says_what_to_try(store, tmp_path, monkeypatch):
    """And searches no document for the reason, which the weights are."""
    monkeypatch.setattr(recovery, "_finite", lambda *args: pytest.fail("a document was tried"))
    trainer = make_trainer(tmp_path, store, "train.steps=200")
    with torch.no_grad():
        trainer.setup.denoiser.token_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"up to step 51 .*no good checkpoint.*optim.lr=0.001"):
        trainer.fit()


@pytest.mark.parametrize(("modes", "frozen"), [("l2t", "latent_head"), ("t2l", "token_head")])
def test_a_head_without_a_loss_keeps_its_weights_to_the_bit(store, tmp_path, modes, frozen):
    off = [f"corruption.mode_weights.{mode}={float(mode == modes)}" for mode in ("l2t", "t2l", "joint")]
    trainer = make_trainer(tmp_path, store, *off)
    before = {name: tensor.clone() for name, tensor in trainer.setup.denoiser.state_dict().items()}
    trainer.fit()
    for name, tensor in trainer.setup.denoiser.state_dict().items():
        if name.startswith(frozen):
            assert torch.equal(tensor, before[name]), name


def test_now_and_then_a_bad_step_does_not_end_a_run(store, tmp_path):
    trainer = make_trainer(
        tmp_path,
        store,
        "train.steps=24",
        "train.log_every=4",
        "train.checkpoint_every=1000",
        "train.skip_budget=8",
    )
    run = trainer.train_step

    def one_step(batch, waited):
        if trainer.step % 2:
            batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        run(batch, waited)

    trainer.train_step = one_step
    trainer.fit()
    assert sum(line.get("skipped_steps", 0) for line in read_log(trainer.run.training_log)) == 12


def test_settings_of_the_optimizer_reach_it(store, tmp_path):
    words = [
        "optim.beta1=0.8",
        "optim.beta2=0.9",
        "optim.eps=1e-6",
        "optim.weight_decay=0.3",
        "optim.clip_norm=0.01",
    ]
    trainer = make_trainer(tmp_path, store, *words)
    names = {parameter: name for name, parameter in trainer.setup.denoiser.named_parameters()}
    for group in trainer.stepper.optimizers.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
        for parameter in group["params"]:
            decays = parameter.ndim == 2 and names[parameter] not in ("token_embed.weight", "slot_embed")
            assert group["weight_decay"] == (0.3 if decays else 0.0), names[parameter]
    trainer.train_step(next(trainer.batches), 0.0)
    norm = trainer.window.fields()["grad_norm"]
    averages = [
        tensor for name, tensor in trainer.snapshot().tensors["optimizer"].items() if "exp_avg." in name
    ]
    assert norm > 0.1
    # the first average of gradients is a share of the clipped gradient
    assert torch.nn.utils.get_total_norm(averages).item() == pytest.approx((1 - 0.8) * 0.01, rel=1e-3)


def test_validation_sees_the_averaged_weights_and_the_schedule_the_optimizer(store, tmp_path):
    trainer = make_trainer(tmp_path, store)
    seen = []

    def validate(denoiser):
        weight = denoiser.token_embed.weight.detach().clone()
        seen.append((weight, trainer.stepper.optimizers.param_groups[0]["lr"]))
        return {"valid_loss": 0.0}

    trainer.hooks.validate = validate
    trainer.fit()
    assert torch.equal(seen[-1][0], trainer.stepper.ema.average["token_embed.weight"])
    assert not torch.equal(seen[-1][0], trainer.setup.denoiser.token_embed.weight)
    logged = [line["lr"] for line in curve(trainer) if "lr" in line]
    assert seen[-1][1] == pytest.approx(logged[-1])
    assert len(set(logged)) == len(logged)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_data_is_one_clear_line_from_a_worker_too(store, tmp_path, num_workers):
    trainer = make_trainer(tmp_path, store, f"data.num_workers={num_workers}")

    def broken(indices):
        raise UserError("shard-00000.arrow: is damaged")

    trainer.setup.train_split.read = broken
    with pytest.raises(UserError, match=r"^shard-00000.arrow: is damaged$"):
        trainer.fit()


def test_a_setting_younger_than_the_run_must_keep_its_default(store, tmp_path):
    from mmldlm.config.recipe import config_to_dict
    from mmldlm.training.checkpoints import check_resume

    trainer = make_trainer(tmp_path, store)
    meta = trainer.snapshot().meta
    del meta["settings"]["corruption"]["latent_time_power"]
    check_resume(trainer.config, trainer.setup.store, meta, "run")
    trainer.config.corruption.latent_time_power = 0.5
    with pytest.raises(UserError, match=r"latent_time_power: 1.0 -> 0.5"):
        check_resume(trainer.config, trainer.setup.store, meta, "run")
    assert config_to_dict(trainer.config)["corruption"]["latent_time_power"] == 0.5


def test_training_learns_text_and_latent(store, tmp_path):
    trainer = make_trainer(tmp_path, store, "train.steps=120", "train.checkpoint_every=120")
    trainer.fit()
    lines = [line for line in curve(trainer) if "latent_loss" in line]
    assert lines[-1]["latent_loss"] < 0.75 * lines[0]["latent_loss"]
    assert lines[-1]["length_loss"] < lines[0]["length_loss"]


def test_training_learns_text_that_can_be_learned(tmp_path):
    """Every document repeats one token, so the visible ones tell the masked ones."""
    import numpy as np

    from mmldlm.data.writer import StoreWriter

    rng = np.random.default_rng(0)
    writer = StoreWriter(
        tmp_path / "repeats", vocab_size=20, num_slots=1, num_channels=4, latent_dtype="float32", encoder=None
    )
    for split, count in (("train", 200), ("validation", 20)):
        tokens = [np.full(rng.integers(6, 12), rng.integers(0, 20)) for _ in range(count)]
        latents = rng.normal(size=(count, 1, 4)).astype(np.float32)
        writer.add(
            split, tokens, latents, [f"{split} {i}" for i in range(count)], rng.integers(0, 2**62, count)
        )
    writer.finish()
    trainer = make_trainer(tmp_path, tmp_path / "repeats", "train.steps=150", "train.checkpoint_every=150")
    trainer.fit()
    lines = [line for line in curve(trainer) if "text_loss" in line]
    assert lines[-1]["text_loss"] < 0.6 * lines[0]["text_loss"]
    assert lines[-1]["text_accuracy"] > 0.5
