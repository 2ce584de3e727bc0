"""Runs with self-conditioning: stopped, cut up, compiled, exported, and learning."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from mmldlm.checkpoint.loaded import build_model
from mmldlm.data.writer import StoreWriter
from mmldlm.errors import Interrupted, UserError
from mmldlm.sampling.decode import decode_latents, document_keys, encode_tokens
from mmldlm.sampling.options import SamplingOptions
from mmldlm.training import setup
from mmldlm.training.export import make_export
from mmldlm.training.plan import describe
from tests.runs import curve, make_trainer, same, weights
from tests.training.test_loop import StopAt

ON = "model.self_conditioning=true"
RECALLS = ("token_recall.weight", "latent_recall.weight")


@pytest.fixture(scope="module")
def told(store, tmp_path_factory):
    """A run that nothing disturbed."""
    trainer = make_trainer(tmp_path_factory.mktemp("told"), store, ON)
    trainer.fit()
    return trainer


def export_of(trainer):
    parts = trainer.setup
    return make_export(
        trainer.stepper.ema.average, trainer.config, parts.store, parts.data_shape, trainer.step
    )


def test_a_stopped_and_resumed_run_is_bit_identical(store, told, tmp_path):
    first = make_trainer(tmp_path, store, ON)
    first.hooks.reporter = StopAt(first, 5)
    with pytest.raises(Interrupted):
        first.fit()
    again = make_trainer(tmp_path, store, ON)
    again.fit()
    assert same(weights(again), weights(told))
    assert curve(again) == curve(told)
    assert all(weights(again)[name].any() for name in RECALLS)
    with pytest.raises(UserError, match=r"model.self_conditioning: True -> False"):
        make_trainer(tmp_path, store, "train.steps=13").fit()


@pytest.mark.parametrize(
    "words", [("batch.micro_tokens=64",), ("speed.activation_checkpointing=block", "speed.layout=padded")]
)
def test_the_curve_does_not_depend_on_how_it_is_computed(store, told, tmp_path, words):
    trainer = make_trainer(tmp_path, store, ON, *words)
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(told), strict=True):
        for key in ("loss", "text_loss", "latent_loss", "length_loss", "grad_norm"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)


def test_the_first_pass_is_one_more_variant_of_a_block(store, tmp_path, monkeypatch):
    compiled = {}
    for name, words in (("off", ()), ("on", (ON,))):
        counter = CompileCounter()

        def compile_blocks(denoiser, counter=counter):
            for block in denoiser.blocks:
                block.compile(fullgraph=True, dynamic=False, backend=counter)

        monkeypatch.setattr(setup, "compile_blocks", compile_blocks)
        how = ("speed.compile=true", "speed.scored_rows=false", "train.steps=4")
        trainer = make_trainer(tmp_path / name, store, *words, *how)
        run, seen = trainer._one_step, compiled.setdefault(name, [])

        def one_step(*args, run=run, seen=seen, counter=counter):
            run(*args)
            seen.append(counter.frame_count)

        trainer._one_step = one_step
        torch._dynamo.reset()
        try:
            trainer.fit()
        finally:
            torch._dynamo.reset()
    assert compiled == {"off": [1] * 4, "on": [2] * 4}


def test_an_export_is_used_with_its_memory_and_does_not_mix(store, told, whole):
    export = export_of(told)
    model = build_model(export, torch.device("cpu"), source="told")
    assert model.config.model.self_conditioning
    keys, texts = document_keys(0, 3), [np.arange(5), np.arange(9), np.arange(3)]
    latents = encode_tokens(model, texts, SamplingOptions(num_encode_steps=2), keys=keys)
    decoded = decode_latents(model, latents, SamplingOptions(), lengths=np.array([5, 9, 3]), keys=keys)
    assert [len(text) for text in decoded] == [5, 9, 3]
    plain = export_of(whole)
    message = r"missing: latent_recall.weight, token_recall.weight; use the settings that the weights"
    with pytest.raises(UserError, match=message):
        build_model(replace(export, weights=plain.weights), torch.device("cpu"), source="told")
    with pytest.raises(UserError, match=r"unexpected: latent_recall.weight, token_recall.weight"):
        build_model(replace(plain, weights=export.weights), torch.device("cpu"), source="whole")


def test_a_dry_run_counts_what_is_added(told, whole):
    ours, theirs = describe(told.setup), describe(whole.setup)
    model, data = told.setup.denoiser.config, told.setup.data_shape
    added = model.width**2 + data.num_channels * model.latent_width
    assert ours["parameters_total"] - theirs["parameters_total"] == added
    assert ours["parameters"]["text"] - theirs["parameters"]["text"] == model.width**2
    assert theirs["memory_bytes"] < ours["memory_bytes"] < 1.5 * theirs["memory_bytes"]


def test_it_learns(tmp_path):
    """Every document repeats one token, and its latent says nothing."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(
        tmp_path / "repeats", vocab_size=20, num_slots=1, num_channels=4, latent_dtype="float32", encoder=None
    )
    for split, count in (("train", 60), ("validation", 20)):
        tokens = [np.full(rng.integers(6, 12), rng.integers(0, 20)) for _ in range(count)]
        latents = rng.normal(size=(count, 1, 4)).astype(np.float32)
        writer.add(
            split, tokens, latents, [f"{split} {i}" for i in range(count)], rng.integers(0, 2**62, count)
        )
    writer.finish()
    words = (ON, "train.steps=80", "train.checkpoint_every=80", "optim.lr=5e-3")
    trainer = make_trainer(tmp_path, tmp_path / "repeats", *words)
    trainer.fit()
    lines = [line for line in curve(trainer) if "text_loss" in line]
    assert lines[-1]["text_loss"] < 0.6 * lines[0]["text_loss"]
    assert lines[-1]["text_accuracy"] > 0.5
