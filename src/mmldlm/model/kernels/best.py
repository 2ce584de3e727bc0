"""The most probable value of each row of logits, its probability, and its lead over the second: one read of the logits.

Each lane keeps the two largest values that it has seen and the sum of exponentials relative to the largest; at the end
the lanes are merged. Of equal values the first wins.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_LOWEST = -1e30


@triton.jit
def _best_kernel(
    logits, token, probability, margin, row_stride, num_values, LOWEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], LOWEST, tl.float32)
    second = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, num_values, BLOCK):
        column = start + lane
        inside = column < num_values
        x = tl.load(logits + row * row_stride + column, inside, other=LOWEST).to(tl.float32)
        higher = x > first
        peak = tl.where(higher, x, first)
        second = tl.maximum(second, tl.where(higher, first, x))
        total = total * tl.exp(first - peak) + tl.where(inside, tl.exp(x - peak), 0.0)
        place = tl.where(higher, column, place)
        first = peak
    best = tl.max(first, 0)
    winner = tl.min(tl.where(first == best, place, num_values), 0)
    other = tl.max(tl.where((first == best) & (place == winner), second, first), 0)
    whole = tl.sum(total * tl.exp(first - best), 0)
    tl.store(token + row, winner.to(tl.int64))
    tl.store(probability + row, 1.0 / whole)
    tl.store(margin + row, (1.0 - tl.exp(other - best)) / whole)


def best_values(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R, V) -> (R,) int64 values, and float32 probabilities and margins; NaN where a logit is no number."""
    rows, num_values = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    probability, margin = (torch.empty(rows, device=logits.device) for _ in range(2))
    if rows:
        _best_kernel[(rows,)](
            logits, token, probability, margin, logits.stride(0), num_values,
            LOWEST=_LOWEST, BLOCK=min(_BLOCK, triton.next_power_of_2(num_values)), num_warps=8,
        )  # fmt: skip
    return token.clamp_(max=num_values - 1), probability, margin
