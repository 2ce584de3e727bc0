"""What only a GPU can show: flash attention agrees, a compiled step neither waits for the host nor compiles again."""

import itertools
import warnings

import numpy as np
import pytest
import torch

from mmldlm.data.loader import plan_steps
from mmldlm.layout import Caps
from mmldlm.types import to_device
from tests.batches import batch_of, small_corruption, small_denoiser, small_documents
from tests.runs import make_trainer
from tests.stores import write_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SHAPE = {"width": 256, "latent_width": 128, "num_heads": 4, "head_width": 64, "time_width": 64}
WIDE = [f"model.{name}={value}" for name, value in SHAPE.items()]


def outputs(denoiser, noisy, backend, *, bf16):
    """Outputs and gradient of one pass."""
    denoiser.attention = backend
    denoiser.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        out = denoiser(
            noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout
        )
    text, latent = (
        out.token_hidden[noisy.layout.real].float(),
        out.latent_prediction[noisy.layout.lengths > 0],
    )
    (text.square().mean() + text[:, :7].mean() + latent.square().mean()).backward()
    grads = torch.cat([p.grad.flatten() for p in denoiser.parameters() if p.grad is not None])
    return torch.cat([text.flatten(), latent.flatten()]).detach(), grads


@pytest.mark.parametrize("backend", ["varlen", "rows", "reference"])
def test_every_attention_in_bf16_is_near_the_fp32_reference(backend):
    lengths = tuple(int(length) for length in np.random.default_rng(0).integers(1, 13, 40))
    batch = batch_of(small_documents(lengths=lengths), caps=Caps(320, 48, 12))
    noisy = to_device(small_corruption().corrupt(batch), "cuda")
    denoiser = small_denoiser(**SHAPE).cuda()
    expected = outputs(denoiser, noisy, "reference", bf16=False)
    for ours, theirs in zip(outputs(denoiser, noisy, backend, bf16=True), expected, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).norm() / theirs.norm() < 0.02


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=400).path


def run_steps(trainer, count):
    setup = trainer.setup
    steps = plan_steps(setup.order, setup.train_split.lengths, setup.shape, trainer.position)
    batches = [setup.reader()[where].pin_memory() for where in itertools.islice(steps, count)]
    torch.cuda.synchronize()
    return batches


def test_a_step_does_not_wait_for_the_device_and_is_compiled_once(store, tmp_path):
    trainer = make_trainer(tmp_path, store, "train.device=cuda", "speed.chunk_rows=64", *WIDE)
    for batch in run_steps(trainer, 5):
        trainer._one_step(batch, 0.0)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    batches = run_steps(trainer, 8)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                trainer._one_step(batch, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message).lower()]
    assert [wait for wait in waits if "prototype" not in wait] == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_the_fast_path_has_the_loss_of_the_plain_one(store, tmp_path):
    curves = []
    plain = ["speed.precision=fp32", "speed.compile=false", "speed.attention=rows", "speed.scored_rows=false"]
    for name, words in (("fast", []), ("plain", plain)):
        trainer = make_trainer(tmp_path / name, store, "train.device=cuda", *WIDE, *words)
        losses = []
        for batch in run_steps(trainer, 10):
            trainer._one_step(batch, 0.0)
            losses.append(trainer.interval.fields()["loss"])
        curves.append(losses)
    np.testing.assert_allclose(curves[0], curves[1], rtol=0.01)
