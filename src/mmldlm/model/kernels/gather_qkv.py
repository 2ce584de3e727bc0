"""From the projections of both streams to the queries, keys and values of the packed stream, in one pass.

Each place of the stream reads its row of the text or of the latent stream, normalises the heads of q and k, turns those
of tokens by their rotary angles, and writes all three: side by side, or each into a tensor of its own. The latter suits
attention that returns three gradients, which would else be copied into one. Backward, each row reads the gradients at
its place. The gradients of the norms' weights are summed over blocks of ROWS rows first; nothing is added atomically.
`split` uses the same kernels without an order of places: tokens come first, then slots.
Shapes: T tokens, M slots, L = T + M places, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmldlm.model.operators import operator

ROWS = 16
_CELLS = 2048
"""Values of one half of the channels that a program processes at a time."""
EPS = 1e-6


@triton.jit
def normalise(low, high, eps, WIDTH: tl.constexpr):
    """Both halves of heads over their root mean square, and what they were multiplied with, (rows, 1)."""
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    inverse = tl.rsqrt(square / WIDTH + eps)[:, None]
    return low * inverse, high * inverse, inverse


@triton.jit
def normalise_back(low, high, x_low, x_high, inverse, WIDTH: tl.constexpr):
    """The gradient of what `normalise` was given, from that of its result x."""
    along = (tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1))[:, None] / WIDTH
    return (low - x_low * along) * inverse, (high - x_high * along) * inverse


@triton.jit
def turn(low, high, cosines, sines):
    """Pairs of channels by their angles; with the negative of the sines, back."""
    return low * cosines - high * sines, high * cosines + low * sines


@triton.jit
def _gather_kernel(
    text, latent, to_stream, cosine, sine, text_weight, latent_weight, q, k, v, to_slots, of_slots,
    stride, first_place, num_tokens, length, eps, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS_UP: tl.constexpr, HALF_UP: tl.constexpr, NORM: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One place. With SLOTS also the scores (T, S, H) of a token and the slots of its document, which are there."""
    place = first_place + tl.program_id(0).to(tl.int64)
    row = place if to_stream is None else tl.load(to_stream + place).to(tl.int64)
    head, channel = tl.arange(0, HEADS_UP), tl.arange(0, HALF_UP)
    HALF: tl.constexpr = WIDTH // 2
    of_text = channel < tl.where(row < num_tokens, HALF, 0)
    of_latent = channel < tl.where(row < num_tokens, 0, HALF)
    real_head = head[:, None] < HEADS
    inside = real_head & (channel[None, :] < HALF)
    cell = head[:, None] * WIDTH + channel[None, :]
    size = 3 * HEADS * WIDTH
    cosines = tl.load(cosine + row * HALF + channel, of_text, other=1.0)[None, :]
    sines = tl.load(sine + row * HALF + channel, of_text, other=0.0)[None, :]
    for part in tl.static_range(3):
        at = part * HEADS * WIDTH + cell
        from_text = text + row * size + at
        from_latent = latent + (row - num_tokens) * size + at
        mine, theirs = real_head & of_text[None, :], real_head & of_latent[None, :]
        first = tl.load(from_text, mine, other=0.0) + tl.load(from_latent, theirs, other=0.0)
        second = tl.load(from_text + HALF, mine, other=0.0) + tl.load(from_latent + HALF, theirs, other=0.0)
        goal = (q if part == 0 else k if part == 1 else v) + place * stride + cell
        if part < 2:
            first, second = first.to(tl.float32), second.to(tl.float32)
            if NORM:
                first, second, _ = normalise(first, second, eps, WIDTH)
                weight = part * WIDTH + channel
                low = tl.load(text_weight + weight, of_text, other=0.0)
                low += tl.load(latent_weight + weight, of_latent, other=0.0)
                high = tl.load(text_weight + weight + HALF, of_text, other=0.0)
                high += tl.load(latent_weight + weight + HALF, of_latent, other=0.0)
                first, second = first * low[None, :], second * high[None, :]
            first, second = turn(first, second, cosines, sines)
        first, second = first.to(goal.dtype.element_ty), second.to(goal.dtype.element_ty)
        tl.store(goal, first, inside)
        tl.store(goal + HALF, second, inside)
        if part < 2:
            for slot in tl.static_range(SLOTS):
                other = num_tokens + row // length * SLOTS + slot
                there = (k if part == 0 else q) + other * stride + cell
                low = tl.load(there, inside, other=0.0).to(tl.float32)
                high = tl.load(there + HALF, inside, other=0.0).to(tl.float32)
                score = tl.sum(first.to(tl.float32) * low + second.to(tl.float32) * high, 1) * scale
                goal = (to_slots if part == 0 else of_slots) + (row * SLOTS + slot) * HEADS + head
                tl.store(goal, score, head < HEADS)


@triton.jit
def _return_kernel(
    grad_q, grad_k, grad_v, raw, from_stream, cosine, sine, weight, grad_raw, partial,
    stride, num_rows, first_place, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS_UP: tl.constexpr, HALF_UP: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradient of the projections of one stream, and partial sums for the weights of its norms; STEP rows at a time."""
    block = tl.program_id(0).to(tl.int64)
    index, channel = tl.arange(0, STEP * HEADS_UP), tl.arange(0, HALF_UP)
    head = index % HEADS_UP
    HALF: tl.constexpr = WIDTH // 2
    used = channel < HALF
    cell = head[:, None] * WIDTH + channel[None, :]
    size = 3 * HEADS * WIDTH
    for part in tl.static_range(3):
        low_sum = tl.zeros([STEP * HEADS_UP, HALF_UP], tl.float32)
        high_sum = tl.zeros([STEP * HEADS_UP, HALF_UP], tl.float32)
        grad = grad_q if part == 0 else grad_k if part == 1 else grad_v
        for start in range(0, ROWS, STEP):
            row = block * ROWS + start + index // HEADS_UP
            inside = ((row < num_rows) & (head < HEADS))[:, None] & used[None, :]
            place = row
            if from_stream is not None:
                place = tl.load(from_stream + first_place + row, row < num_rows, other=0).to(tl.int64)
            source = grad + place[:, None] * stride + cell
            here = row[:, None] * size + part * HEADS * WIDTH + cell
            first = tl.load(source, inside, other=0.0)
            second = tl.load(source + HALF, inside, other=0.0)
            if part < 2:
                first, second = first.to(tl.float32), second.to(tl.float32)
                if TURN:
                    angle = row[:, None] * HALF + channel[None, :]
                    cosines = tl.load(cosine + angle, inside, other=1.0)
                    sines = tl.load(sine + angle, inside, other=0.0)
                    first, second = turn(first, second, cosines, -sines)
                if NORM:
                    x_low = tl.load(raw + here, inside, other=0.0).to(tl.float32)
                    x_high = tl.load(raw + here + HALF, inside, other=0.0).to(tl.float32)
                    x_low, x_high, inverse = normalise(x_low, x_high, eps, WIDTH)
                    low_sum += first * x_low
                    high_sum += second * x_high
                    low = tl.load(weight + part * WIDTH + channel, used, other=0.0)[None, :]
                    high = tl.load(weight + part * WIDTH + HALF + channel, used, other=0.0)[None, :]
                    first, second = normalise_back(first * low, second * high, x_low, x_high, inverse, WIDTH)
            tl.store(grad_raw + here, first, inside)
            tl.store(grad_raw + here + HALF, second, inside)
        if NORM and part < 2:
            goal = partial + (block * 2 + part) * WIDTH + channel
            tl.store(goal, tl.sum(low_sum, 0), used)
            tl.store(goal + HALF, tl.sum(high_sum, 0), used)


def sizes_of(num_heads: int, width: int, norm: bool) -> dict[str, Any]:
    up = triton.next_power_of_2
    return {
        "HEADS": num_heads,
        "WIDTH": width,
        "HEADS_UP": up(num_heads),
        "HALF_UP": up(width // 2),
        "NORM": norm,
    }


def gather_rows(
    text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor, cosine: Tensor, sine: Tensor,
    parts: tuple[Tensor, ...], num_heads: int, norm: bool, *, to_stream: Tensor | None = None,
    first_place: int = 0, num_places: int, scores: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill places of q, k and v (`parts`), in an order or as they come; with `scores` (T, S, H) those of slots too."""
    width, num_tokens = text.shape[1] // (3 * num_heads), text.shape[0]
    num_slots = 0 if scores is None else scores[0].shape[1]
    length = num_tokens * num_slots // latent.shape[0] if num_slots else 1
    _gather_kernel[(num_places,)](
        text, latent, to_stream, cosine, sine, text_weight, latent_weight, *parts, *(scores or (None, None)),
        parts[0].stride(0), first_place, num_tokens, length, EPS, width**-0.5,
        **sizes_of(num_heads, width, norm), SLOTS=num_slots, num_warps=2,
    )  # fmt: skip


@operator
def gather_qkv(
    text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor, cosine: Tensor, sine: Tensor,
    to_stream: Tensor, from_stream: Tensor, num_heads: int, norm: bool, apart: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """text (T, 3*H*K), latent (M, 3*H*K); weights (2, K) of the norms of q and k; cosine, sine (T, K/2).

    Returns (L, 3, H, K) and two empty tensors, or with `apart` q, k and v (L, H, K). Without `norm` the weights are
    ignored.
    """
    text, latent = text.contiguous(), latent.contiguous()
    width = text.shape[1] // (3 * num_heads)
    places = len(to_stream)
    results = _empty(text, places, num_heads, width, apart)
    parts = results if apart else results[0].unbind(1)
    gather_rows(
        text, latent, text_weight, latent_weight, cosine, sine, parts, num_heads, norm,
        to_stream=to_stream, num_places=places,
    )  # fmt: skip
    return results


def _empty(
    text: Tensor, places: int, num_heads: int, width: int, apart: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not apart:
        return text.new_empty((places, 3, num_heads, width)), text.new_empty(0), text.new_empty(0)
    q, k, v = (text.new_empty((places, num_heads, width)) for _ in range(3))
    return q, k, v


@torch.library.register_fake(gather_qkv)
def _(
    text: Tensor, latent: Tensor, text_weight: Tensor, latent_weight: Tensor, cosine: Tensor, sine: Tensor,
    to_stream: Tensor, from_stream: Tensor, num_heads: int, norm: bool, apart: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty(text, to_stream.shape[0], num_heads, text.shape[1] // (3 * num_heads), apart)


@operator
def return_qkv(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, raw: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor,
    from_stream: Tensor, first_place: int, turn: bool, norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the projections (rows, 3*H*K) of one stream and of its norms' weights (2, K).

    Those of q, k and v are (L, H, K), with any distance between places.
    """
    return return_rows(
        grad_q, grad_k, grad_v, raw, weight, cosine, sine, from_stream, first_place, turn, norm
    )


def return_rows(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, raw: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor,
    from_stream: Tensor | None, first_place: int, turn: bool, norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`return_qkv`; without an order of places the gradients are in that of the rows."""
    num_heads, width = grad_q.shape[1:]
    strides = (grad_q.stride(0), width, 1)
    if any(part.stride() != strides for part in (grad_q, grad_k, grad_v)):
        grad_q, grad_k, grad_v = (part.contiguous() for part in (grad_q, grad_k, grad_v))
    raw = raw.contiguous()
    sizes = sizes_of(num_heads, width, norm)
    num_blocks = triton.cdiv(raw.shape[0], ROWS)
    grad_raw = torch.empty_like(raw)
    partial = torch.empty((num_blocks, 2, width), device=raw.device, dtype=torch.float32)
    step = min(ROWS, triton.next_power_of_2(max(1, _CELLS // (sizes["HEADS_UP"] * sizes["HALF_UP"]))))
    _return_kernel[(num_blocks,)](
        grad_q, grad_k, grad_v, raw, from_stream, cosine, sine, weight, grad_raw, partial,
        grad_q.stride(0), raw.shape[0], first_place, EPS, **sizes, TURN=turn, ROWS=ROWS, STEP=step, num_warps=4,
    )  # fmt: skip
    return grad_raw, partial.sum(0) if norm else torch.zeros_like(weight, dtype=torch.float32)


@torch.library.register_fake(return_qkv)
def _(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, raw: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor,
    from_stream: Tensor, first_place: int, turn: bool, norm: bool,
) -> Any:  # fmt: skip
    return raw.new_empty(raw.shape), weight.new_empty((2, grad_q.shape[2]), dtype=torch.float32)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    text, latent, text_weight, latent_weight, cosine, sine, _, from_stream, _, ctx.norm, ctx.apart = inputs
    ctx.save_for_backward(text, latent, text_weight, latent_weight, cosine, sine, from_stream)


def _gradients(ctx: Any, *upstream: Any) -> Any:
    text, latent, text_weight, latent_weight, cosine, sine, from_stream = ctx.saved_tensors
    grads = upstream if ctx.apart else upstream[0].contiguous().unbind(1)
    grad_text, grad_text_weight = return_qkv(
        *grads, text, text_weight, cosine, sine, from_stream, 0, True, ctx.norm
    )
    grad_latent, grad_latent_weight = return_qkv(
        *grads, latent, latent_weight, cosine, sine, from_stream, text.shape[0], False, ctx.norm
    )
    return grad_text, grad_latent, grad_text_weight, grad_latent_weight, *[None] * 7


torch.library.register_autograd(gather_qkv, _gradients, setup_context=_keep)
