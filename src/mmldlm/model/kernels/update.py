"""AdamW and the average of the weights, for all tensors of a table of addresses: each value is read and written once.

    m += (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2        w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)
    a += share (w - a)

m' = m / (1 - beta1^steps) and v' = v / (1 - beta2^steps). Nothing is written where `skipped` is 1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16384
"""Values of a tensor that a program updates."""
COLUMNS = 7
"""Of the table: addresses of weight, gradient, both moments, average and steps; number of values."""
ALIGNED = 16
"""Bytes, of the first five; gradients may be placed otherwise."""
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _address(row, column: tl.constexpr, first, WIDE: tl.constexpr = True):
    """Where the values begin that a program updates; what is aligned is loaded in wide pieces."""
    place = (tl.load(row + column) + 4 * first).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(place, 16) if WIDE else place


@triton.jit
def _update_kernel(
    table, tensors, starts, decays, lr_at, share_at, skipped, shrink, beta2, share1, share2, log_beta1, log_beta2, eps,
    WIDE: tl.constexpr, AVERAGED: tl.constexpr, CLIPPED: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skipped) == 0.0:
        tensor = tl.load(tensors + tl.program_id(0)).to(tl.int64)
        first = tl.load(starts + tl.program_id(0))
        row = table + tensor * WORDS
        weight, gradient = _address(row, 0, first), _address(row, 1, first, WIDE)
        mean, square, average = _address(row, 2, first), _address(row, 3, first), _address(row, 4, first)
        steps = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32))).to(tl.float64)
        size = tl.minimum(tl.load(row + 6) - first, SPAN).to(tl.int32)
        whole = size // 4 * 4
        lr = tl.load(lr_at)
        keep = 1.0 - lr * tl.load(decays + tensor)
        # 1 - beta^steps is small at first: in double precision
        rate = lr / (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
        root = tl.sqrt((1.0 - tl.exp(steps * log_beta2)).to(tl.float32))
        shrinking = tl.load(shrink) if CLIPPED else 1.0
        share = tl.load(share_at)
        for start in range(0, whole, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _update(
                weight, gradient, mean, square, average, place, place < tl.multiple_of(whole, 4),
                beta2, share1, share2, eps, keep, rate, root, shrinking, share, AVERAGED,
            )  # fmt: skip
        if whole < size:  # fewer values than a wide load has
            place = whole + tl.arange(0, 4)
            _update(
                weight, gradient, mean, square, average, place, place < size,
                beta2, share1, share2, eps, keep, rate, root, shrinking, share, AVERAGED,
            )  # fmt: skip


@triton.jit
def _update(
    weight, gradient, mean, square, average, place, inside, beta2, share1, share2, eps, keep, rate, root, shrinking,
    share, AVERAGED: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + place, inside, other=0.0) * shrinking
    w = tl.load(weight + place, inside, other=0.0)
    m = tl.load(mean + place, inside, other=0.0)
    v = tl.load(square + place, inside, other=0.0)
    m += share1 * (g - m)
    v = beta2 * v + share2 * g * g
    w = w * keep - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(mean + place, m, inside)
    tl.store(square + place, v, inside)
    tl.store(weight + place, w, inside)
    if AVERAGED:
        a = tl.load(average + place, inside, other=0.0)
        tl.store(average + place, a + share * (w - a), inside)


@torch.no_grad()
def update_tensors(
    table: Tensor, tensors: Tensor, starts: Tensor, decays: Tensor, lr: Tensor, share: Tensor | None, skipped: Tensor,
    shrink: Tensor | None, *, betas: tuple[float, float], eps: float, wide: bool,
) -> None:  # fmt: skip
    """table (tensors, columns), decays (tensors,); tensors and starts say where the chunk of each program begins.

    Gradients count times `shrink`. Without `share` there is no average. `wide`: all gradients are aligned too.
    """
    logs = [math.log(beta) if beta else -1e4 for beta in betas]  # a power of e that is 0 after one step
    _update_kernel[(len(tensors),)](
        table, tensors, starts, decays, lr, lr if share is None else share, skipped,
        skipped if shrink is None else shrink, betas[1], *(1.0 - beta for beta in betas), *logs, eps, WIDE=wide,
        AVERAGED=share is not None, CLIPPED=shrink is not None, SPAN=CHUNK, WORDS=COLUMNS, BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
