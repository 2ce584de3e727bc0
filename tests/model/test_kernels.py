"""Our Triton kernels against plain PyTorch. Without a GPU they run in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the checks run in this process")
def test_kernels_in_the_interpreter():
    """The interpreter must be chosen before Triton is imported, and would slow other tests down."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "29 passed" in done.stdout


here = pytest.mark.skipif(not INTERPRETED, reason="run by the test above; on a GPU see test_gpu")


def packed(lengths=(3, 40, 1, 7, 0, 21), slots=2, room=90, most=8):
    from mmldlm.layout import Caps, packed_layout

    return packed_layout(np.array(lengths), slots, Caps(room, most, 40), with_rows=False)


@here
@pytest.mark.parametrize(("width", "blocks"), [(48, 1024), (64, 8), (64, 2)])
def test_add_norm_and_its_gradient(width, blocks, monkeypatch):
    """With one row, eight and 32 rows for a program, which sums them by document."""
    from mmldlm.model.kernels import add_norm as module
    from mmldlm.model.kernels.add_norm import add_norm

    monkeypatch.setattr(module, "_BLOCKS", blocks)

    layout = packed()
    torch.manual_seed(0)
    x, branch = (torch.randn(90, width, requires_grad=True) for _ in range(2))
    modulation = torch.randn(8, 6 * width, requires_grad=True)
    gate, shift, scale = (modulation[:, i * width : (i + 1) * width] for i in (2, 0, 4))
    weight = torch.randn(2, 90, width)

    def answer(out, y):
        loss = (out * weight[0]).sum() + (y * weight[1]).sum()
        return [out, y, *torch.autograd.grad(loss, (x, branch, modulation))]

    d = layout.document
    out = x + gate[d] * branch
    expected = answer(out, F.layer_norm(out, (width,)) * (1 + scale[d]) + shift[d])
    found = answer(*add_norm(x, branch, gate, shift, scale, d, layout.starts, False)[:2])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@here
def test_tiles_and_their_gradient():
    from mmldlm.model.kernels.tiles import attend_tiles

    layout = packed()
    torch.manual_seed(0)
    qkv = torch.randn(len(layout.segment), 3, 2, 16, requires_grad=True)
    weight = torch.randn(len(layout.segment), 2, 16)
    q, k, v = (part.transpose(0, 1)[None] for part in qkv.unbind(1))
    mask = layout.segment[:, None] == layout.segment[None]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
    found = attend_tiles(qkv, layout.segment, layout.bounds)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    grads = [torch.autograd.grad((out * weight).sum(), qkv)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, atol=2e-5, rtol=2e-5)


@here
@pytest.mark.parametrize(
    ("heads", "width", "norm", "apart"), [(3, 12, True, False), (2, 8, False, False), (9, 64, True, True)]
)
def test_gather_qkv_and_its_gradient(heads, width, norm, apart):
    from mmldlm.model.kernels.gather_qkv import gather_qkv
    from mmldlm.model.ops import rotary_angles, rotate

    layout = packed((3, 14, 1, 7, 0, 9), room=40)
    torch.manual_seed(0)
    text, latent = (torch.randn(n, 3 * heads * width, requires_grad=True) for n in (40, 16))
    norms = [torch.randn(2, width, requires_grad=True) for _ in range(2)]
    cosine, sine = rotary_angles(layout.position, width, 1e4)

    def heads_of(x, weight):
        q, k, v = x.view(-1, 3, heads, width).unbind(1)
        if norm:
            q, k = F.rms_norm(q, (width,), weight[0], 1e-6), F.rms_norm(k, (width,), weight[1], 1e-6)
        return q, k, v

    q, k, v = heads_of(text, norms[0])
    turned = torch.stack([rotate(q, cosine, sine), rotate(k, cosine, sine), v], 1)
    expected = torch.cat([turned, torch.stack(heads_of(latent, norms[1]), 1)])[layout.to_stream]
    parts = gather_qkv(
        text,
        latent,
        *norms,
        cosine[:, 0],
        sine[:, 0],
        layout.to_stream,
        layout.from_stream,
        heads,
        norm,
        apart,
    )
    found = torch.stack(parts, 1) if apart else parts[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    weight, leaves = torch.randn_like(expected), [text, latent, *(norms if norm else [])]
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@here
def test_a_denoiser_of_kernels_is_the_plain_denoiser():
    from mmldlm.layout import Caps
    from mmldlm.model.layers import Kernels
    from tests.batches import batch_of, small_corruption, small_denoiser, small_documents

    noisy = small_corruption().corrupt(batch_of(small_documents(), caps=Caps(48, 8, 12)))
    denoiser, answers = small_denoiser(head_width=16, depth=1), []
    for kernels in (Kernels("reference"), Kernels("tiles", fused=True)):
        denoiser.kernels = kernels
        out = denoiser(
            noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout
        )
        text, latent = out.token_hidden[noisy.layout.real], out.latent_prediction[noisy.layout.lengths > 0]
        loss = text.square().sum() + text[:, :5].sum() + latent.square().sum()
        grads = torch.autograd.grad(loss, list(denoiser.parameters()), allow_unused=True)
        answers.append([text, latent, *[grad for grad in grads if grad is not None]])
    for ours, theirs in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=3e-4)


@here
@pytest.mark.parametrize(("keep", "kind", "tolerance"), [
    (True, torch.float32, 2e-5), (False, torch.float32, 2e-5), (False, torch.bfloat16, 2e-2),
])  # fmt: skip
def test_the_feed_forward_half_and_its_gradient(keep, kind, tolerance):
    """More rows than a program takes, a width that is no multiple of its columns; a weight that is not trained."""
    from mmldlm.model.products import linear, mlp

    torch.manual_seed(0)
    first, second, last = (
        torch.nn.Linear(24, 300),
        torch.nn.Linear(300, 24),
        torch.nn.Linear(24, 8, bias=False),
    )
    x, weight = torch.randn(150, 24), torch.randn(150, 8)
    rows = x.to(kind).requires_grad_()
    leaves = [first.weight, first.bias, second.weight, second.bias, last.weight]

    def answer(out, x):
        return [out, *torch.autograd.grad((out * weight).sum(), [x, *leaves])]

    found = answer(linear(last, mlp(first, second, rows, keep=keep)), rows)
    exact = x.requires_grad_()
    expected = answer(last(second(F.gelu(first(exact), approximate="tanh"))), exact)
    assert [part.dtype for part in found] == [kind, kind, *[torch.float32] * 5]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance
    for part in (first.weight, first.bias, second.weight, second.bias):
        part.requires_grad_(False)
    part = torch.autograd.grad((linear(last, mlp(first, second, rows, keep=keep)) * weight).sum(), rows)[0]
    assert torch.equal(part, found[1])


@here
def test_one_product_makes_all_modulations():
    from mmldlm.model.ops import all_modulations

    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, size) for size in (12, 4, 12)]
    condition, weights = torch.randn(3, 6, requires_grad=True), [torch.randn(3, size) for size in (12, 4)]
    leaves = [condition, *(part for layer in layers[:2] for part in layer.parameters())]
    found, expected = all_modulations(condition, layers), [layer(condition) for layer in layers]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    grads = [
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(parts[:2], weights, strict=True)), leaves)
        for parts in (found, expected)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@here
@pytest.mark.parametrize(("rows", "values"), [(5, 37), (3, 5000), (2, 2048), (0, 9)])
def test_best_values(rows: int, values: int) -> None:
    """Against sorting; with a tie, with a row stride, and NaN where a logit is NaN."""
    from mmldlm.model.kernels.best import best_values

    logits = 3.0 * torch.randn(rows, values + 3, generator=torch.Generator().manual_seed(0))[:, :values]
    if rows > 2:
        logits[0, 4] = logits[0, 30] = 20.0
    token, probability, margin = best_values(logits)
    ordered = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(token, ordered.indices[:, 0])
    assert torch.allclose(probability, ordered.values[:, 0])
    assert torch.allclose(margin, ordered.values[:, 0] - ordered.values[:, 1], atol=1e-6)
    if rows > 2:
        logits[1, 7] = torch.nan
        assert best_values(logits)[1].isnan().tolist() == [False, True] + [False] * (rows - 2)


@here
@pytest.mark.parametrize("width", [37, 4096 + 70])
def test_the_score_of_logits_and_its_gradient(width):
    from mmldlm.model.kernels.score import score
    from mmldlm.objective.losses import score_logits

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, width, generator=generator)
    bias = torch.randn(width, generator=generator)
    bias[-5:] = -torch.inf
    target, weight = torch.tensor([0, 11, width - 6, 3, 20]), torch.tensor([1.0, 0.0, 2.5, 0.1, 1.0])
    target[1] = (logits + bias)[1].argmax()
    expected = score_logits(logits.clone(), bias, target, weight, torch.float32)
    ours = score(logits.clone(), bias, target, weight)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    assert bool(ours[1][1])


@pytest.fixture
def exact_casts(monkeypatch):
    """Triton's interpreter (3.7) rounds to eight bits wrongly: half up, and without the carry to the exponent."""
    from triton.runtime import interpreter

    plain, kinds = interpreter._convert_float, {"fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32}

    def convert(values, before, after, rounding):
        if "fp8e4nv" not in (before.name, after.name):
            return plain(values, before, after, rounding)
        width = after.primitive_bitwidth
        tensor = torch.from_numpy(np.ascontiguousarray(values)).view(kinds[before.name]).to(kinds[after.name])
        return tensor.view(torch.uint8 if width == 8 else torch.int32).numpy().view(f"uint{width}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@here
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("way", ["plain", "gelu", "slope"])
def test_rows_in_eight_bits(way):
    from mmldlm.model import fp8
    from mmldlm.model.kernels.quantize import quantize_rows

    generator = torch.Generator().manual_seed(0)
    x, inner = (3.0 * torch.randn(37, 48, generator=generator).bfloat16() for _ in range(2))
    x[5], x[6], x[7, 3] = 0.0, x[6] * 1e6, 1e-6
    x[8, 2], x[9, 1], x[9, 4] = torch.inf, torch.nan, torch.inf
    inner = inner if way == "slope" else None
    q, scale, sums = quantize_rows(x, inner, gelu=way == "gelu", sums=way != "gelu")
    value = x.float() * (fp8._slope(inner.float()) if inner is not None else 1.0)
    value = value * fp8._open_share(value) if way == "gelu" else value
    exponent = torch.floor(torch.log2(value.abs().amax(1, keepdim=True).clamp(min=2.0**-60)))
    expected, finite = (
        (value / torch.exp2(exponent - 7)).to(torch.float8_e4m3fn).float(),
        [*range(8), *range(10, 37)],
    )
    assert torch.equal(scale[finite], torch.exp2(exponent - 7)[finite])
    step = (
        0.0 if way == "plain" else 0.13
    )  # a sigmoid that differs in its last bit may round to the next value
    assert ((q.float() - expected).abs() <= step * expected.abs())[finite].all()
    assert ((q.float() != expected)[finite]).float().mean() < 0.01
    for row, bad in ((8, [2]), (9, [1, 4])):
        assert q[row].float().isnan().nonzero().flatten().tolist() == bad
    if sums is not None:
        assert sums.isfinite().logical_not().nonzero().flatten().tolist() == [1, 2, 4]
        torch.testing.assert_close(sums[5:], value.sum(0)[5:], rtol=1e-4, atol=1e-2)


@here
@pytest.mark.usefixtures("exact_casts")
def test_transposes_of_eight_bits():
    from mmldlm.model.kernels.quantize import transpose

    generator = torch.Generator().manual_seed(0)
    q = (20 * torch.randn(150, 272, generator=generator)).to(torch.float8_e4m3fn)
    factor = torch.exp2(-torch.randint(0, 14, (150, 1), generator=generator).float())
    factor[:3] = 0.0
    for share in (None, factor):
        expected = q if share is None else (q.float() * share).to(torch.float8_e4m3fn)
        ours = transpose(q, share)
        assert ours.shape == (272, 160)
        assert torch.equal(ours[:, :150].float(), expected.float().t())
        assert not ours[:, 150:].float().any()


@here
@pytest.mark.usefixtures("exact_casts")
def test_a_linear_layer_in_fp8_by_kernels_is_that_of_plain_pytorch(monkeypatch):
    from mmldlm.model import fp8

    torch.manual_seed(0)
    first, second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    x, answers = torch.randn(40, 32, requires_grad=True), []
    for runs in (True, False):
        monkeypatch.setattr(fp8, "_kernels_run", lambda x, runs=runs: runs)
        y = fp8.mlp8(first, second, fp8.round_rows(x))
        answers.append(
            [y, *torch.autograd.grad(y.square().sum(), [x, *first.parameters(), *second.parameters()])]
        )
    for ours, theirs in zip(*answers, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 5e-3


@here
@pytest.mark.usefixtures("exact_casts")
def test_the_norm_in_eight_bits():
    """Rounds what it would have returned, and passes gradients as it would have."""
    from mmldlm.model.fp8 import round_rows
    from mmldlm.model.kernels.add_norm import add_norm

    width, layout, generator = 48, packed(), torch.Generator().manual_seed(0)
    x, branch = (torch.randn(90, width, generator=generator, requires_grad=True) for _ in range(2))
    modulation = torch.randn(8, 6 * width, generator=generator, requires_grad=True)
    parts = [modulation[:, i * width : (i + 1) * width] for i in (2, 0, 4)]
    out, y, _, _, nothing, _ = add_norm(x, branch, *parts, layout.document, layout.starts, False)
    other, carrier, _, _, q, scale = add_norm(x, branch, *parts, layout.document, layout.starts, True)
    assert nothing.numel() == 0
    assert torch.equal(out, other)
    expected = round_rows(y)
    assert torch.equal(scale, expected.scale)
    assert torch.equal(q.float(), expected.q.float())
    grad, leaves = torch.randn(90, width, generator=generator), (x, branch, modulation)
    ours, theirs = (
        torch.autograd.grad((out, y), leaves, (grad, grad)) for out, y in ((other, carrier), (out, y))
    )
    for mine, plain in zip(ours, theirs, strict=True):
        assert torch.equal(mine, plain)


@here
def test_operators_compile():
    """Schema, gradient and the shapes that the compiler is told: as those of any operator of PyTorch."""
    from mmldlm.model.kernels.add_norm import add_norm
    from mmldlm.model.kernels.gather_qkv import gather_qkv
    from mmldlm.model.kernels.tiles import attend_tiles
    from mmldlm.model.products import feed_forward, product

    layout = packed((3, 5), 1, 8, 2)
    x, parts = (torch.randn(rows, 16, requires_grad=True) for rows in (8, 2))
    qkv = torch.randn(len(layout.segment), 3, 1, 16, requires_grad=True)
    rows, norms = (
        [torch.randn(n, width, requires_grad=True) for n in sizes]
        for sizes, width in (((8, 2), 48), ((2, 2), 16))
    )
    angles, places = torch.randn(8, 8), (layout.to_stream, layout.from_stream)
    half = torch.randn(8, 12).bfloat16().requires_grad_()
    matrices = [torch.randn(size, requires_grad=True) for size in ((20, 12), (20,), (12, 20), (12,))]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, words in (
        (add_norm, (x, x + 1, parts, parts, parts, layout.document, layout.starts, False)),
        (attend_tiles, (qkv, layout.segment, layout.bounds)),
        *((gather_qkv, (*rows, *norms, angles, angles, *places, 1, True, apart)) for apart in (True, False)),
        *((product, (half, weight)) for weight in matrices[:1]),
        *((feed_forward, (half, *matrices, keep)) for keep in (True, False)),
    ):
        torch.library.opcheck(operator, words, test_utils=checks)

    def block(qkv):
        return attend_tiles(qkv.sin(), layout.segment, layout.bounds)[0].cos()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    results = [(out := f(qkv), torch.autograd.grad(out.sum(), qkv)[0]) for f in (block, compiled)]
    torch.testing.assert_close(*results)


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"matrix": (7, 60), "bias": (4096 + 3,), "idle": (5,)}
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size)))


def misaligned(*shape):
    """Random numbers at an address that wide loads do not take, as in the buckets of DDP."""
    return torch.randn(1 + np.prod(shape))[1:].view(shape)


def updated(*, fused, averaged, clipped, betas, random, steps=4):
    """Weights, moments, steps and averages after some updates, the third of them skipped."""
    from mmldlm.training.fused_update import FusedUpdate
    from mmldlm.training.optim import AdamW, Ema, Optimizers

    weights = Weights()
    groups = [
        {"params": [weights.matrix], "weight_decay": 0.3},
        {"params": [weights.bias, weights.idle], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=torch.tensor(1e-2), betas=betas, fused=True)
    ema = Ema(weights, 0.9) if averaged else None
    if ema is not None:
        ema.follow(frozenset(["matrix", "bias"]), {})
    kernel, ways = FusedUpdate(adamw, ema) if fused else None, []
    assert kernel is None or not kernel(torch.tensor(0.0), None)  # without a gradient there is nothing to do
    for step in range(steps):
        torch.manual_seed(step)
        weights.matrix.grad, weights.bias.grad = random(7, 60), random(4096 + 3)
        skipped, shrink = torch.tensor(float(step == 2)), torch.tensor(0.25) if clipped else None
        if ema is not None:
            ema.set_step(step + 1)
            ema._descent.param_groups[0]["lr"] = torch.as_tensor(ema.share)
        ways.append(kernel is not None and kernel(skipped, shrink))
        if not ways[-1]:
            Optimizers([adamw]).step(torch.amp.GradScaler("cpu", enabled=False), skipped, shrink)
            if ema is not None:
                ema.update(skipped)
    state = [value for p in (weights.matrix, weights.bias) for value in adamw.state[p].values()]
    return ways, [*weights.parameters(), *state, *(ema.average.values() if ema else [])]


@here
@pytest.mark.parametrize(("averaged", "clipped", "betas", "random"), [
    (True, True, (0.9, 0.99), torch.randn), (False, False, (0.9, 0.999), misaligned),
    (True, False, (0.0, 0.0), torch.randn),
])  # fmt: skip
def test_the_fused_update_is_adamw_and_the_average(averaged, clipped, betas, random):
    way = {"averaged": averaged, "clipped": clipped, "betas": betas, "random": random}
    plain, expected = updated(fused=False, **way)
    fused, found = updated(fused=True, **way)
    assert plain == [False] * 4
    assert fused == [False, True, True, True]  # the moments are made by the first
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@here
def test_a_product_that_the_library_cannot_do_is_left_to_our_kernels(monkeypatch):
    from mmldlm.model.kernels import epilogue

    monkeypatch.setattr(epilogue, "remember", lambda *_: pytest.fail("a failure is not remembered"))
    plan = object.__new__(epilogue.Plan)
    plan.candidates, plan._best, plan._key = [epilogue.Candidate(), epilogue.Candidate()], None, ""
    plan._start = lambda *_: epilogue._call("cublasLtMatmul")
    monkeypatch.setattr(epilogue, "library", lambda: type("Failing", (), {"cublasLtMatmul": lambda *_: 15})())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = torch.zeros(1, 1)
    assert not plan.run(x, x, None, x, x)
    assert plan.candidates == []
    assert (
        epilogue.product_with_slope(torch.zeros(2048, 16), torch.zeros(16, 32), torch.zeros(2048, 32)) is None
    )
