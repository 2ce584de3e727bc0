"""Attention `split`: tokens by a library, slots merged in. Without a GPU in Triton's interpreter, as `test_kernels`."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mmldlm.layout import Caps, packed_layout, padded_layout
from mmldlm.model.attention import serving
from mmldlm.model.layers import Block, Kernels, Places, Stream
from mmldlm.model.ops import RowsOf, rotary_angles

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the checks run in this process")
def test_split_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "10 passed" in done.stdout


here = pytest.mark.skipif(not INTERPRETED, reason="run by the test above; on a GPU see below")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Problem:
    """A block whose attention is asked, projections of both streams and gradients of what it returns."""

    def __init__(self, slots, norm=True, length=6, documents=2, heads=2, width=16, device="cpu"):
        torch.manual_seed(0)
        shape = {"time_width": 4, "num_heads": heads, "head_width": width, "mlp_ratio": 1.0, "qk_norm": norm}
        self.block = Block(Stream(8, **shape), Stream(8, **shape)).to(device).train()
        norms = [part for name, part in self.block.named_parameters() if "_norm" in name]
        for part in norms:
            torch.nn.init.normal_(part, 1.0, 0.3)
        self.layout = padded_layout(np.full(documents, length), slots, length, with_rows=False)
        cosine, sine = (part[:, 0].to(device) for part in rotary_angles(self.layout.position, width, 1e4))
        if device != "cpu":
            from mmldlm.types import to_device

            self.layout = to_device(self.layout, device)
        nothing = RowsOf(self.layout.document, self.layout.starts)
        self.places = Places(self.layout, nothing, nothing, cosine, sine)
        counts, inner = (documents * length, documents * slots), heads * width
        self.rows = [1.5 * torch.randn(count, 3 * inner, device=device) for count in counts]
        self.grads = [torch.randn(count, inner, device=device) for count in counts]
        self.norms = norms

    def answer(self, kernels, kind=torch.float32):
        """Results of both streams; gradients of both projections and of the weights of four norms."""
        rows = [part.to(kind).requires_grad_() for part in self.rows]
        outs = self.block._attend(*rows, self.places, kernels)
        assert [out.dtype for out in outs] == [kind, kind]
        found = torch.autograd.grad(outs, [*rows, *self.norms], [grad.to(kind) for grad in self.grads])
        return [*outs, *found]


@pytest.fixture
def short_blocks(monkeypatch):
    from mmldlm.model.kernels import split

    monkeypatch.setattr(split, "FORWARD", split.Blocks(4, 4))
    monkeypatch.setattr(split, "BACKWARD", split.Blocks(4, 4))
    monkeypatch.setattr(split, "_CHUNK", 1)


@here
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    ("slots", "norm", "keep"),
    [(1, True, "all"), (1, False, "products"), (3, True, "products"), (3, False, "all"), (4, True, "all")],
)
def test_split_is_plain_attention(slots, norm, keep):
    """Blocks that the documents do not fill, and more of them than are put together in one go."""
    problem = Problem(slots, norm)
    found = problem.answer(Kernels("split", fused=True, keep=keep))
    expected = problem.answer(Kernels("reference"))
    assert len(found) == (8 if norm else 4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@here
@pytest.mark.usefixtures("short_blocks")
def test_split_gives_the_same_bits_whatever_it_keeps():
    problem = Problem(2, documents=1)
    first, *others = (
        problem.answer(Kernels("split", True, keep=keep)) for keep in ("all", "all", "products")
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@here
@pytest.mark.usefixtures("short_blocks")
def test_a_great_score_does_not_overflow():
    problem = Problem(1, norm=False, documents=1)
    problem.rows = [30.0 * part for part in problem.rows]
    expected = problem.answer(Kernels("reference"))
    for ours, theirs in zip(problem.answer(Kernels("split", True)), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


@here
@pytest.mark.usefixtures("short_blocks")
def test_a_denoiser_with_split_is_the_plain_one():
    """Through checkpoints that keep products, where one stream's result may be without a gradient."""
    from tests.batches import batch_of, small_corruption, small_denoiser, small_documents

    batch = batch_of(small_documents(lengths=(3, 3)), caps=Caps(6, 2, 3), layout="padded")
    noisy, answers = small_corruption().corrupt(batch), []
    assert noisy.layout.full
    denoiser = small_denoiser(head_width=16, depth=1)
    for kernels in (Kernels("reference"), Kernels("split", fused=True, keep="products")):
        denoiser.kernels = kernels
        out = denoiser(
            noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout
        )
        loss = out.token_hidden.square().sum() + out.token_hidden[:, :5].sum()
        grads = torch.autograd.grad(loss, list(denoiser.parameters()), allow_unused=True)
        answers.append([out.token_hidden, *(grad for grad in grads if grad is not None)])
    for ours, theirs in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=3e-4)


@here
@pytest.mark.usefixtures("short_blocks")
def test_the_operator_compiles():
    from mmldlm.model.kernels.split import attend_split

    rows, norms = (
        [torch.randn(n, width, requires_grad=True) for n in sizes]
        for sizes, width in (((3, 1), 48), ((2, 2), 16))
    )
    angles = torch.randn(3, 8)
    for keep in (True, False):
        torch.library.opcheck(
            attend_split, (*rows, *norms, angles, angles, 1, 1, True, keep),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip


def test_where_split_serves():
    full, packed = padded_layout(np.array([8, 8]), 1, 8), packed_layout(np.array([3, 5]), 1, Caps(16, 4, 8))
    bare = packed_layout(np.array([3, 5]), 1, Caps(16, 4, 8), with_rows=False)
    many = padded_layout(np.array([8, 8]), 17, 8)
    assert serving("split", full, trained=True) == "split"
    assert serving("split", full, trained=False) == "sdpa"
    assert serving("split", many, trained=True) == "sdpa"
    assert serving("split", packed, trained=True) == "sdpa"
    assert serving("split", bare, trained=True) == "varlen"
    assert serving("tiles", packed, trained=True) == "tiles"
    assert serving("by_length", packed, trained=False) == "tiles"
    long = packed_layout(np.array([300, 2]), 1, with_rows=False)
    assert serving("by_length", long, trained=False) == "varlen"


class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("slots", "length", "width"), [(1, 2048, 64), (1, 300, 64), (3, 130, 128), (16, 64, 16), (4, 257, 32)]
    )
    @pytest.mark.parametrize("keep", ["all", "products"])
    def test_split_is_near_fp32(self, slots, length, width, keep):
        problem = Problem(slots, length=length, heads=4, width=width, device="cuda")
        problem.rows = [part.bfloat16().float() for part in problem.rows]
        expected = problem.answer(Kernels("reference"))
        plain = problem.answer(Kernels("sdpa", fused=True), torch.bfloat16)
        found = problem.answer(Kernels("split", fused=True, keep=keep), torch.bfloat16)
        for ours, other, theirs in zip(found, plain, expected, strict=True):
            error, usual = ((part.float() - theirs).norm() / theirs.norm() for part in (ours, other))
            assert torch.isfinite(ours).all()
            assert error < 0.02
            assert error < 2 * usual + 1e-3

    def test_split_in_fp32_is_the_plain_path(self):
        """Where no library kernel takes the numbers, plain maths stands in."""
        problem = Problem(3, length=70, device="cuda")
        found, expected = (problem.answer(Kernels(name, name == "split")) for name in ("split", "reference"))
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() / theirs.norm() < 2e-3
