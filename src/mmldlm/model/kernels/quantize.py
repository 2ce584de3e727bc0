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

_ROWS, _ROWS_SUMMED = 4, 32
"""Rows that a program walks over, and where it also sums columns; these are loaded while others are computed."""
_STAGES_SUMMED, _SHARED = 3, 65536
"""Rows under way, and the most bytes that those to come may take: Ada has 99 KiB for a program."""
_TILE = (128, 128)
"""Of a transpose. All of these were timed on an H200."""


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
    STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros([WIDTH], tl.float32)
    for row in tl.range(block * ROWS, tl.minimum(block * ROWS + ROWS, num_rows), num_stages=STAGES):
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
    rows = _ROWS_SUMMED if sums else _ROWS
    num_blocks = triton.cdiv(num_rows, rows)
    q = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty((num_rows, 1), device=x.device, dtype=torch.float32)
    partial = torch.empty((num_blocks if sums else 1, width), device=x.device, dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    bytes_of_a_row = padded * (x.element_size() + (0 if inner is None else inner.element_size()))
    stages = min(_STAGES_SUMMED, 1 + _SHARED // bytes_of_a_row) if sums else 1
    _quantize_kernel[(num_blocks,)](
        x, x if inner is None else inner, q, scale, partial, num_rows, width,
        GELU=gelu, SLOPE=inner is not None, SUMS=sums, ROWS=rows, WIDTH=padded,
        STAGES=stages, num_warps=min(8, max(1, padded // 512)),
    )  # fmt: skip
    return q, scale, partial.sum(0) if sums else None


@triton.jit
def _one_byte(words, byte: tl.constexpr, share, FACTOR: tl.constexpr):
    """A byte of each word, as its lowest; a value in e4m3 times its share."""
    value = (words >> (8 * byte)) & 255
    if FACTOR:
        scaled = value.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * share
        value = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    return value


@triton.jit(do_not_specialize=["num_rows"])
def _transpose_kernel(
    q, factor, out, num_rows, num_padded, width,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """In words of four values: those of four rows become words of four columns, and only these change places."""
    four = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    word = tl.program_id(1).to(tl.int64) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    first = tl.zeros([ROWS // 4, COLUMNS // 4], tl.int32)
    second = tl.zeros([ROWS // 4, COLUMNS // 4], tl.int32)
    third = tl.zeros([ROWS // 4, COLUMNS // 4], tl.int32)
    fourth = tl.zeros([ROWS // 4, COLUMNS // 4], tl.int32)
    for i in tl.static_range(4):
        row = 4 * four + i
        inside = (row[:, None] < num_rows) & (word[None, :] < width // 4)
        words = tl.load(q + row[:, None] * (width // 4) + word[None, :], inside, other=0)
        share = tl.load(factor + row, row < num_rows, other=0.0)[:, None] if FACTOR else 0.0
        first |= _one_byte(words, 0, share, FACTOR) << (8 * i)
        second |= _one_byte(words, 1, share, FACTOR) << (8 * i)
        third |= _one_byte(words, 2, share, FACTOR) << (8 * i)
        fourth |= _one_byte(words, 3, share, FACTOR) << (8 * i)
    inside = (word[:, None] < width // 4) & (four[None, :] < num_padded // 4)
    goal = out + 4 * word[:, None] * (num_padded // 4) + four[None, :]
    tl.store(goal, tl.trans(first), inside)
    tl.store(goal + num_padded // 4, tl.trans(second), inside)
    tl.store(goal + 2 * (num_padded // 4), tl.trans(third), inside)
    tl.store(goal + 3 * (num_padded // 4), tl.trans(fourth), inside)


def transpose(q: Tensor, factor: Tensor | None) -> Tensor:
    """(M, D) in e4m3 -> (D, M), each row times its factor (M, 1) first; zeros fill M to a multiple of 16, as D is."""
    num_rows, width = q.shape
    num_padded = -(-num_rows // 16) * 16
    out = torch.empty((width, num_padded), device=q.device, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(num_padded, _TILE[0]), triton.cdiv(width, _TILE[1]))
    _transpose_kernel[grid](
        q.view(torch.int32), q if factor is None else factor, out.view(torch.int32), num_rows, num_padded, width,
        FACTOR=factor is not None, ROWS=_TILE[0], COLUMNS=_TILE[1], num_warps=8,
    )  # fmt: skip
    return out
