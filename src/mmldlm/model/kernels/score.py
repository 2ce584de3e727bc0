"""Cross-entropy of a chunk of logits and its gradient, which takes the place of the logits: each is read twice.

    nats = log sum exp(z) - z[target]      gradient = weight * (softmax(z) - one at the target)      z = logits + bias

One program per row. The first pass keeps the largest value and the sum of exponentials so far, the second writes.
Shapes: R rows, V columns; a column whose bias is -inf is no token, and gets a gradient of 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _score_kernel(logits, bias, targets, weights, nats, hits, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    weight = tl.load(weights + row)
    here = logits + row * stride
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    choice = tl.full([], -1, tl.int32)
    wanted = tl.zeros([], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(here + column, inside, other=-float("inf")).to(tl.float32)
        value += tl.load(bias + column, inside, other=0.0)
        largest, where = tl.max(value, 0, return_indices=True)
        higher = tl.maximum(best, largest)
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(value - higher), 0)
        choice = tl.where(largest > best, start + where, choice)
        wanted += tl.sum(tl.where(column == target, value, 0.0), 0)
        best = higher
    tl.store(nats + row, best + tl.log(total) - wanted)
    tl.store(hits + row, choice == target)
    scale = weight / total
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(here + column, inside, other=-float("inf")).to(tl.float32)
        value += tl.load(bias + column, inside, other=0.0)
        gradient = tl.exp(value - best) * scale
        gradient -= tl.where(column == target, weight, 0.0)
        tl.store(here + column, gradient, inside)


@torch.no_grad()
def score(
    logits: Tensor, bias: Tensor, target: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `objective.text.score_logits`: weighted nats, hits, gradient by the logits (in their memory), nats."""
    num_rows, width = logits.shape
    nats = torch.empty(num_rows, device=logits.device, dtype=torch.float32)
    hits = torch.empty(num_rows, device=logits.device, dtype=torch.bool)
    _score_kernel[(num_rows,)](
        logits, bias, target, weight, nats, hits, width, logits.stride(0), BLOCK=_BLOCK, num_warps=8
    )
    return nats * weight, hits, logits, nats
