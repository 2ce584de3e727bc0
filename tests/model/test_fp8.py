"""Products in fp8 against the same computed in fp32 from values that were rounded, and against exact ones."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmldlm import runtime
from mmldlm.config.recipe import load_recipe
from mmldlm.layout import Caps
from mmldlm.model import fp8
from mmldlm.model.layers import Kernels
from mmldlm.runtime import settle_runtime
from tests.batches import batch_of, small_corruption, small_denoiser, small_documents
from tests.runs import curve, make_trainer, weights

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
HALF_STEP = 2.0**-4
"""Largest relative error of a value in e4m3."""


def numbers(*shape, device="cpu", seed=0, spread=2.0):
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(shape[0], 1, generator=generator))
    return (size * torch.randn(shape, generator=generator)).to(device)


def rounded(x):
    """Values as e4m3 holds them, with a power of two for each row: fp32 throughout."""
    exponent = torch.floor(torch.log2(x.abs().amax(1, keepdim=True).clamp(min=2.0**-60)))
    scale = torch.exp2(exponent - 7)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def again(x, scale):
    """Values of rows that are rounded once more, to what one scale for all of them can hold."""
    top = scale.max()
    return (x / top).to(torch.float8_e4m3fn).float() * top


def make_linear(inputs=48, outputs=32, bias=True, device="cpu"):
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias=bias).to(device)


def emulated(x, linear, grad):
    """Result and gradients of x, weight and bias by the formulas of the module."""
    x8, w8, g8 = rounded(x), rounded(linear.weight.detach()), rounded(grad)
    both = fp8.quantize_rows(grad)[1] * fp8.quantize_rows(x)[1]
    x_unit, w_scale = x8 / fp8.quantize_rows(x)[1], fp8.quantize_rows(linear.weight.detach())[1]
    weighted = again(g8 / fp8.quantize_rows(grad)[1] * both, both)
    return [x8 @ w8.t() + linear.bias, g8 @ again(w8, w_scale), weighted.t() @ x_unit, grad.sum(0)]


@pytest.mark.parametrize("rows", [40, 33, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_the_three_products_are_those_of_rounded_values(device, rows):
    linear = make_linear(device=device)
    x = numbers(rows, 48, device=device).requires_grad_()
    grad = 1e-6 * numbers(rows, 32, device=device, seed=1)
    grad[7] = 0.0  # as rows that nothing is scored of
    y = fp8.linear8(linear, fp8.round_rows(x))
    assert y.dtype == torch.bfloat16
    y.backward(grad.bfloat16())
    expected = emulated(x.detach(), linear, grad.bfloat16().float())
    found = [y, x.grad, linear.weight.grad, linear.bias.grad]
    for ours, theirs, step in zip(found, expected, (2**-8, 2**-8, 1e-5, 1e-5), strict=True):
        assert ours.dtype in (torch.bfloat16, torch.float32)
        error = (ours.float() - theirs).abs()
        # the units of a GPU add up with fewer digits than fp32 has
        rest = 2e-5 if device == "cpu" else 2e-3
        assert (error <= step * theirs.abs() + rest * theirs.abs().max()).all()


@pytest.mark.parametrize("device", DEVICES)
def test_errors_stay_within_what_rounding_explains(device):
    linear, twin = make_linear(256, 128, device=device), make_linear(256, 128, device=device)
    x = numbers(512, 256, device=device).requires_grad_()
    other = x.detach().clone().requires_grad_()
    grad = numbers(512, 128, device=device, seed=1)
    y, exact = fp8.linear8(linear, fp8.round_rows(x)), twin(other)
    # two factors of a product are wrong by at most half a step each, small ones by what is lost below the largest
    bound = 2.2 * HALF_STEP * (other.abs() @ twin.weight.abs().t()) + 2**-7 * (exact.abs() + twin.bias.abs())
    assert ((y - exact).abs() <= bound + 1e-3).all()
    y.backward(grad.bfloat16())
    exact.backward(grad)
    for ours, theirs in ((x.grad, other.grad), (linear.weight.grad, twin.weight.grad)):
        assert 1e-3 < (ours - theirs).norm() / theirs.norm() < HALF_STEP


@pytest.mark.parametrize("device", DEVICES)
def test_the_feed_forward_half_and_its_gradients(device):
    first, second = make_linear(64, 128, device=device), make_linear(128, 64, device=device)
    x, grad = numbers(96, 64, device=device, spread=0.3), numbers(96, 64, device=device, seed=1)
    answers = []
    for compute in (
        lambda x: fp8.mlp8(first, second, fp8.round_rows(x)),
        lambda x: second(F.gelu(first(x), approximate="tanh")),
    ):
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *first.parameters(), *second.parameters()]
        y = compute(leaf)
        answers.append([y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))])
    for ours, theirs in zip(*answers, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2 * HALF_STEP


def test_gelu_is_that_of_pytorch():
    h = torch.linspace(-30, 30, 4001, requires_grad=True)
    expected = F.gelu(h, approximate="tanh")
    (slope,) = torch.autograd.grad(expected.sum(), h)
    torch.testing.assert_close(h * fp8._open_share(h), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(fp8._slope(h.detach()), slope, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_and_what_is_not_finite(device):
    """A step without a loss has gradients of 0; one that is not finite must not look healthy."""
    linear = make_linear(device=device)
    for value, good in ((0.0, True), (torch.inf, False), (torch.nan, False)):
        x = torch.ones(32, 48, device=device, requires_grad=True)
        grad = torch.zeros(32, 32, device=device)
        grad[3, 4] = value
        linear.zero_grad()
        fp8.linear8(linear, fp8.round_rows(x)).backward(grad.bfloat16())
        for gradient in (x.grad, linear.weight.grad):
            assert bool((gradient == 0).all() if good else not gradient.isfinite().all())
        x = torch.ones(32, 48, device=device)
        x[5, 6] = value
        assert bool(fp8.linear8(linear, fp8.round_rows(x)).isfinite().all()) == good


def test_what_is_frozen_gets_no_gradient():
    linear = make_linear()
    linear.weight.requires_grad_(False)
    x = numbers(32, 48).requires_grad_()
    fp8.linear8(linear, fp8.round_rows(x)).sum().backward()
    assert linear.weight.grad is None
    assert linear.bias.grad is not None
    assert x.grad is not None


SIZES = {"width": 64, "num_heads": 2, "head_width": 32, "mlp_ratio": 2.0}


def outputs(denoiser, noisy, kernels):
    denoiser.kernels = kernels
    denoiser.zero_grad()
    with torch.autocast(noisy.tokens.device.type, torch.bfloat16):
        out = denoiser(
            noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout
        )
    text, latent = out.token_hidden[noisy.layout.real].float(), out.latent_prediction
    (text.square().mean() + text[:, :7].mean() + latent.square().mean()).backward()
    grads = [p.grad.flatten() for p in denoiser.parameters() if p.grad is not None]
    return torch.cat([text.flatten(), latent.flatten()]).detach(), torch.cat(grads)


@pytest.mark.parametrize("keep", ["all", "products"])
def test_a_denoiser_in_fp8_is_near_the_one_in_bf16(keep):
    noisy = small_corruption().corrupt(batch_of(small_documents(), caps=Caps(48, 8, 12)))
    denoiser = small_denoiser(**SIZES)
    expected = outputs(denoiser, noisy, Kernels("rows"))
    found = outputs(denoiser, noisy, Kernels("rows", keep=keep, fp8=True))
    plain = outputs(denoiser, noisy, Kernels("rows", fp8=True))
    for ours, same, theirs in zip(found, plain, expected, strict=True):
        assert torch.equal(ours, same), "what is computed again is the same"
        assert 1e-4 < (ours - theirs).norm() / theirs.norm() < 0.1
    denoiser.eval()
    judged = outputs(denoiser, noisy, Kernels("rows", fp8=True))
    assert torch.equal(judged[0], outputs(denoiser, noisy, Kernels("rows"))[0]), "validation is in bf16"


def test_blocks_compile_whole():
    denoiser = small_denoiser(depth=1, **SIZES)
    noisy = small_corruption().corrupt(batch_of(small_documents(), caps=Caps(48, 8, 12)))
    expected = outputs(denoiser, noisy, Kernels("rows", fp8=True))
    denoiser.blocks[0].compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for keep in ("all", "products"):
        found = outputs(denoiser, noisy, Kernels("rows", fp8=True, keep=keep))
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_a_device_without_it_computes_in_bf16_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        settled = settle_runtime(load_recipe("demo", ["speed.precision=fp8"]), torch.device("cpu"))
    assert settled.precision == "bf16"
    (line,) = caplog.messages
    assert line.startswith("speed.precision=fp8: needs Triton and an NVIDIA GPU")


@pytest.fixture
def fp8_on_cpu(monkeypatch):
    """The real path of a run, with the products that PyTorch has on a CPU."""
    monkeypatch.setattr(runtime, "_or_bf16", lambda wanted, device: wanted)


RUN = ["batch.micro_tokens=128", "train.frozen=[latent]", "train.steps=8"]


@pytest.mark.usefixtures("fp8_on_cpu")
def test_a_run_in_fp8_is_near_bf16_and_resumes_to_the_bit(store, tmp_path):
    """With several micro-batches, frozen parts and averages."""
    trainers = {}
    for name, words in {"bf16": ["speed.precision=bf16"], "fp8": ["speed.precision=fp8"]}.items():
        trainers[name] = make_trainer(tmp_path / name, store, *RUN, *words)
        trainers[name].fit()
    whole = trainers["fp8"]
    assert whole.setup.denoiser.kernels.fp8
    assert whole.setup.runtime.precision == "fp8"
    losses = [[line["loss"] for line in curve(t) if "loss" in line] for t in trainers.values()]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
    part = make_trainer(tmp_path / "part", store, *RUN, "speed.precision=fp8", "train.steps=4")
    part.fit()
    rest = make_trainer(tmp_path / "part", store, *RUN, "speed.precision=fp8")
    rest.fit()
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(rest).items())


@pytest.mark.usefixtures("fp8_on_cpu")
def test_matrices_that_do_not_fit_stay_in_bf16_with_one_line(store, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path / "some", store, "speed.precision=fp8", "model.mlp_ratio=1.25")
        none = make_trainer(tmp_path / "none", store, "speed.precision=fp8", "model.width=24")
    assert trainer.setup.denoiser.kernels.fp8
    assert not none.setup.denoiser.kernels.fp8
    assert none.setup.runtime.precision == "bf16"
    first, second = (line for line in caplog.messages if "fp8" in line)
    assert "bf16 is used for 32 x 40, 40 x 32, whose sides are no multiples of 16" in first
    assert "24 x 48" in second


@pytest.mark.usefixtures("fp8_on_cpu")
def test_a_device_whose_products_fail_computes_in_bf16(store, tmp_path, caplog, monkeypatch):
    def fail(*tensors, **options):
        raise RuntimeError("not here\nbut elsewhere")

    monkeypatch.setattr(fp8, "product8", fail)
    trainer = make_trainer(tmp_path, store, "speed.precision=fp8")
    assert not trainer.setup.denoiser.kernels.fp8
    assert "speed.precision=fp8: does not work on this device, bf16 is used: not here" in caplog.text
