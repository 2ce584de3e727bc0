"""Rows in eight bits with a scale for each, and the transposes that the backward products need.

    q = e4m3(v * 2^(7 - e))     scale = 2^(e - 7)     e = exponent of the largest |v| of the row, so |q| < 256

v is a row, or GELU of a row, or a gradient of GELU on its way back; so the activation takes no pass of its own. Scales
are powers of two: they cost no precision, and a transpose can take them over into the values exactly.
Shapes: M rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Rows that a program walks over where it also sums columns."""
_TILE = (128, 64)


@triton.jit
def to_eight_bits(value):
    """A row in e4m3, and its scale."""
    largest = tl.max(tl.abs(value), 0)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 67)  # rows of zeros have a scale too
    value = value * ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    value += value - value  # the cast would turn an infinite value into a large one; so it becomes NaN
    return value.to(tl.float8e4nv), ((exponent - 7) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x, inner, q, scale, sums, num_rows, width,
    GELU: tl.constexpr, SLOPE: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros([WIDTH], tl.float32)
    for row in range(block * ROWS, tl.minimum(block * ROWS + ROWS, num_rows)):
        here = row * width + column
        value = tl.load(x + here, inside, other=0.0).to(tl.float32)
        if GELU:
            value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        if SLOPE:
            h = tl.load(inner + here, inside, other=0.0).to(tl.float32)
            open_share = tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
            rise = 1.5957691216057308 * (1.0 + 0.134145 * h * h)
            value = value * (open_share + h * rise * open_share * (1.0 - open_share))
        if SUMS:
            total += value
        eight, factor = to_eight_bits(value)
        tl.store(q + here, eight, inside)
        tl.store(scale + row, factor)
    if SUMS:
        tl.store(sums + block * width + column, total, inside)


def quantize_rows(
    x: Tensor, inner: Tensor | None, *, gelu: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (M, D) -> (M, D) in e4m3, scales (M, 1), and sums over the rows (D,) before rounding, if asked for.

    `gelu`: of GELU of x. `inner`: of x times the slope of GELU at `inner`.
    """
    x, inner = x.contiguous(), None if inner is None else inner.contiguous()
    num_rows, width = x.shape
    rows = ROWS if sums else 1
    num_blocks = triton.cdiv(num_rows, rows)
    q = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty((num_rows, 1), device=x.device, dtype=torch.float32)
    partial = torch.empty((num_blocks if sums else 1, width), device=x.device, dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    _quantize_kernel[(num_blocks,)](
        x, x if inner is None else inner, q, scale, partial, num_rows, width,
        GELU=gelu, SLOPE=inner is not None, SUMS=sums, ROWS=rows, WIDTH=padded,
        num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip
    return q, scale, partial.sum(0) if sums else None


@triton.jit(do_not_specialize=["num_rows"])
def _transpose_kernel(
    q, factor, out, num_rows, num_padded, width,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < num_rows) & (column[None, :] < width)
    value = tl.load(q + row[:, None] * width + column[None, :], inside, other=0)
    if FACTOR:
        share = tl.load(factor + row, row < num_rows, other=0.0)
        scaled = value.to(tl.float8e4nv, bitcast=True).to(tl.float32) * share[:, None]
        value = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    goal = out + column[:, None] * num_padded + row[None, :]
    tl.store(goal, tl.trans(value), (column[:, None] < width) & (row[None, :] < num_padded))


def transpose(q: Tensor, factor: Tensor | None) -> Tensor:
    """(M, D) in e4m3 -> (D, M), each row times its factor (M, 1) first; zeros fill M up to a multiple of 16."""
    num_rows, width = q.shape
    num_padded = -(-num_rows // 16) * 16
    out = torch.empty((width, num_padded), device=q.device, dtype=torch.uint8)
    grid = (triton.cdiv(num_padded, _TILE[0]), triton.cdiv(width, _TILE[1]))
    _transpose_kernel[grid](
        q.view(torch.uint8), q if factor is None else factor, out, num_rows, num_padded, width,
        FACTOR=factor is not None, ROWS=_TILE[0], COLUMNS=_TILE[1], num_warps=4,
    )  # fmt: skip
    return out.view(torch.float8_e4m3fn)
