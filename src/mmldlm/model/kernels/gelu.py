"""GELU, its gradient together with the sums over rows that the bias before it needs, and such sums: one pass each.

The form with tanh: h * sigmoid(1.5957691216057308 * (h + 0.044715 * h^3)).
Shapes: M rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_ROWS, _COLUMNS, _TILES, _WARPS = 4, 512, 16, 4
"""Tile of a program, and how many of them, one below the other, it walks over."""
_BLOCKS, _MOST_TILES = 256, 128
"""Sums alone: rows of partial sums that are enough to fill a device, and most tiles of a program."""


@triton.jit(do_not_specialize=["size"])
def _gelu_kernel(h, a, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(h + place, inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(a + place, value * share, inside)


@triton.jit(do_not_specialize=["num_rows"])
def _slope_kernel(
    grad, h, out, a, partial, num_rows, width,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (block * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column[None, :] < width)
        place = row[:, None] * width + column[None, :]
        value = tl.load(h + place, inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        rise = 1.5957691216057308 * (1.0 + 0.134145 * value * value)
        slope = share + value * rise * share * (1.0 - share)
        result = tl.load(grad + place, inside, other=0.0).to(tl.float32) * slope
        tl.store(out + place, result, inside)
        if AGAIN:
            tl.store(a + place, value * share, inside)
        total += result
    tl.store(partial + block * width + column, tl.sum(total, 0), column < width)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _sums_kernel(x, partial, num_rows, tiles, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, tiles, 4):
        for tile in tl.static_range(4):  # several loads under way
            row = (block * tiles + first + tile) * ROWS + tl.arange(0, ROWS)
            inside = (row[:, None] < num_rows) & (column[None, :] < width)
            total += tl.load(x + row[:, None] * width + column[None, :], inside, other=0.0).to(tl.float32)
    tl.store(partial + block * width + column, tl.sum(total, 0), column < width)


def gelu(h: Tensor) -> Tensor:
    """Of each value."""
    h = h.contiguous()
    a = torch.empty_like(h)
    _gelu_kernel[(triton.cdiv(h.numel(), _BLOCK),)](h, a, h.numel(), BLOCK=_BLOCK, num_warps=8)
    return a


def sum_rows(x: Tensor) -> Tensor:
    """Sums over the rows of (M, D) in fp32, (D,)."""
    x = x.contiguous()
    num_rows, width = x.shape
    tiles = min(_MOST_TILES, max(_TILES, triton.next_power_of_2(num_rows // (_ROWS * _BLOCKS))))
    num_blocks = triton.cdiv(num_rows, _ROWS * tiles)
    partial = torch.empty((num_blocks, width), device=x.device, dtype=torch.float32)
    _sums_kernel[(num_blocks, triton.cdiv(width, _COLUMNS))](
        x, partial, num_rows, tiles, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
    return partial.sum(0)


def gelu_backward(grad: Tensor, h: Tensor, *, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of h (M, D) in place of `grad`, its sums over the rows (D,) in fp32, and with `again` GELU of h."""
    grad, h = grad.contiguous(), h.contiguous()
    num_rows, width = h.shape
    num_blocks = triton.cdiv(num_rows, _ROWS * _TILES)
    a = torch.empty_like(h) if again else None
    partial = torch.empty((num_blocks, width), device=h.device, dtype=torch.float32)
    _slope_kernel[(num_blocks, triton.cdiv(width, _COLUMNS))](
        grad, h, grad, h if a is None else a, partial, num_rows, width,
        AGAIN=again, ROWS=_ROWS, COLUMNS=_COLUMNS, TILES=_TILES, num_warps=_WARPS,
    )  # fmt: skip
    return grad, partial.sum(0), a
