"""Attention among the places of one document, for many short documents in one stream.

The stream is cut into tiles of TILE places, whatever document they belong to. A tile attends to the range of places
that its documents cover, with a mask where documents differ. So a tile of the matrix unit holds several short
documents, where flash attention by bounds would give each document a tile of its own.
Shapes: L places, H heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmldlm.model.operators import operator


class Tiling(NamedTuple):
    """How a kernel cuts the stream."""

    tile: int
    """Places of a program."""
    step: int
    """Places that it looks at in one go."""
    warps: int
    stages: int


FORWARD = Tiling(64, 32, 4, 1)
BACKWARD = Tiling(64, 32, 4, 1)


@triton.jit
def _range_of(tile, segment, bounds, num_places, TILE: tl.constexpr):
    """First and last place that a tile's documents cover."""
    first = tl.load(segment + tile * TILE)
    last = tl.load(segment + tl.minimum(tile * TILE + TILE, num_places) - 1)
    return tl.load(bounds + first), tl.load(bounds + last + 1)


@triton.jit
def _tiles_kernel(
    qkv, segment, bounds, out, logsum, num_places, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    low, high = _range_of(tile, segment, bounds, num_places, TILE)
    mine = tile * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, WIDTH)
    exists = mine < num_places
    my_segment = tl.load(segment + mine, exists, other=-1)
    row = 3 * HEADS * WIDTH
    base = qkv + head * WIDTH + channel[None, :]
    q = tl.load(base + mine[:, None].to(tl.int64) * row, exists[:, None], other=0.0)
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(low, high, STEP):
        other = start + tl.arange(0, STEP)
        inside = other < high
        at = base + other[:, None].to(tl.int64) * row
        k = tl.load(at + HEADS * WIDTH, inside[:, None], other=0.0)
        v = tl.load(at + 2 * HEADS * WIDTH, inside[:, None], other=0.0)
        their_segment = tl.load(segment + other, inside, other=-2)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(my_segment[:, None] == their_segment[None, :], score, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        power = tl.exp2(score - level[:, None])
        fade = tl.exp2(best - level)
        total = total * fade + tl.sum(power, 1)
        mixed = mixed * fade[:, None] + tl.dot(power.to(v.dtype), v)
        best = highest
    total = tl.where(exists, total, 1.0)
    place = out + mine[:, None].to(tl.int64) * (HEADS * WIDTH) + head * WIDTH + channel[None, :]
    tl.store(place, mixed / total[:, None], exists[:, None])
    tl.store(logsum + head * num_places + mine, best + tl.log2(total), exists)


@triton.jit
def _tiles_back_kernel(
    grad, qkv, out, logsum, segment, bounds, grad_qkv, num_places, scale, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of the q, k and v of one tile: as the one that looks, and as the one that is looked at."""
    tile, head = tl.program_id(0), tl.program_id(1)
    low, high = _range_of(tile, segment, bounds, num_places, TILE)
    mine = tile * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, WIDTH)
    exists = mine < num_places
    my_segment = tl.load(segment + mine, exists, other=-1)
    row, column = 3 * HEADS * WIDTH, head * WIDTH + channel[None, :]
    at = qkv + mine[:, None].to(tl.int64) * row + column
    q = tl.load(at, exists[:, None], other=0.0)
    k = tl.load(at + HEADS * WIDTH, exists[:, None], other=0.0)
    v = tl.load(at + 2 * HEADS * WIDTH, exists[:, None], other=0.0)
    where = mine[:, None].to(tl.int64) * (HEADS * WIDTH) + column
    g = tl.load(grad + where, exists[:, None], other=0.0)
    o = tl.load(out + where, exists[:, None], other=0.0)
    my_logsum = tl.load(logsum + head * num_places + mine, exists, other=0.0)
    my_overlap = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    grad_q = tl.zeros([TILE, WIDTH], tl.float32)
    grad_k = tl.zeros([TILE, WIDTH], tl.float32)
    grad_v = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(low, high, STEP):
        other = start + tl.arange(0, STEP)
        inside = other < high
        their_segment = tl.load(segment + other, inside, other=-2)
        together = my_segment[:, None] == their_segment[None, :]
        there = qkv + other[:, None].to(tl.int64) * row + column
        their_k = tl.load(there + HEADS * WIDTH, inside[:, None], other=0.0)
        their_v = tl.load(there + 2 * HEADS * WIDTH, inside[:, None], other=0.0)
        # my queries look at their keys
        score = tl.dot(q, tl.trans(their_k)) * scale
        share = tl.where(together, tl.exp2(score - my_logsum[:, None]), 0.0)
        pull = share * (tl.dot(g, tl.trans(their_v)) - my_overlap[:, None])
        grad_q += tl.dot(pull.to(q.dtype), their_k)
        # their queries look at my keys
        their_q = tl.load(there, inside[:, None], other=0.0)
        over = other[:, None].to(tl.int64) * (HEADS * WIDTH) + column
        their_g = tl.load(grad + over, inside[:, None], other=0.0)
        their_o = tl.load(out + over, inside[:, None], other=0.0)
        their_logsum = tl.load(logsum + head * num_places + other, inside, other=0.0)
        their_overlap = tl.sum(their_g.to(tl.float32) * their_o.to(tl.float32), 1)
        score = tl.dot(k, tl.trans(their_q)) * scale
        share = tl.where(together, tl.exp2(score - their_logsum[None, :]), 0.0)
        grad_v += tl.dot(share.to(v.dtype), their_g)
        pull = share * (tl.dot(v, tl.trans(their_g)) - their_overlap[None, :])
        grad_k += tl.dot(pull.to(k.dtype), their_q)
    place = grad_qkv + mine[:, None].to(tl.int64) * row + column
    tl.store(place, grad_q * factor, exists[:, None])
    tl.store(place + HEADS * WIDTH, grad_k * factor, exists[:, None])
    tl.store(place + 2 * HEADS * WIDTH, grad_v, exists[:, None])


_LOG2_E = 1.4426950408889634


def _launch(qkv: Tensor, tiling: Tiling) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of a kernel."""
    num_places, _, num_heads, width = qkv.shape
    constants = {"HEADS": num_heads, "WIDTH": width, "TILE": tiling.tile, "STEP": tiling.step}
    constants |= {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return (triton.cdiv(num_places, tiling.tile), num_heads), constants


@operator
def attend_tiles(qkv: Tensor, segment: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """qkv (L, 3, H, K); segment (L,) in rising order; bounds: first place of each segment, one more at the end.

    Returns (L, H, K) and the log of the sum of powers (H, L), base 2.
    """
    qkv = qkv.contiguous()
    num_places, _, num_heads, width = qkv.shape
    out = torch.empty((num_places, num_heads, width), device=qkv.device, dtype=qkv.dtype)
    logsum = torch.empty((num_heads, num_places), device=qkv.device, dtype=torch.float32)
    grid, constants = _launch(qkv, FORWARD)
    _tiles_kernel[grid](qkv, segment, bounds, out, logsum, num_places, width**-0.5 * _LOG2_E, **constants)
    return out, logsum


@torch.library.register_fake(attend_tiles)
def _(qkv: Tensor, segment: Tensor, bounds: Tensor) -> Any:
    num_places, _, num_heads, width = qkv.shape
    logsum = qkv.new_empty((num_heads, num_places), dtype=torch.float32)
    return qkv.new_empty((num_places, num_heads, width)), logsum


@operator
def attend_tiles_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, logsum: Tensor, segment: Tensor, bounds: Tensor
) -> Tensor:
    """Gradient of qkv (L, 3, H, K)."""
    qkv = qkv.contiguous()
    num_places, width = qkv.shape[0], qkv.shape[3]
    result = torch.empty_like(qkv)
    grid, constants = _launch(qkv, BACKWARD)
    _tiles_back_kernel[grid](
        grad.contiguous(), qkv, out, logsum, segment, bounds, result, num_places,
        width**-0.5 * _LOG2_E, width**-0.5, **constants,
    )  # fmt: skip
    return result


@torch.library.register_fake(attend_tiles_backward)
def _(grad: Tensor, qkv: Tensor, out: Tensor, logsum: Tensor, segment: Tensor, bounds: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, *upstream: Any) -> Any:
    qkv, segment, bounds, out, logsum = ctx.saved_tensors
    return attend_tiles_backward(upstream[0], qkv, out, logsum, segment, bounds), None, None


torch.library.register_autograd(attend_tiles, _gradients, setup_context=_keep)
