"""Add a gated branch to a residual stream, normalise the sum and modulate it: one pass forward, one backward.

    out = x + gate[d] * branch          y = norm(out) * (1 + scale[d]) + shift[d]          d = document of the row

Rows of one document are neighbours, so the gradients of gate, shift and scale are sums over runs of rows. A program
walks over some rows and writes a partial sum whenever a document or its block ends. The partial of (block b, document
d) goes to place b + d: along the rows both numbers only grow, so no two share a place, and those of one document are
neighbours again. Nothing is added atomically; the result is the same every time.
How many rows there are, and how many a program has, are no constants of a kernel: the last block has as many as are
scored, and within the recording of a graph nothing may be compiled.
Where y is wanted in eight bits it is rounded in the same pass, and not written otherwise.
Shapes: M rows, N documents, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmldlm.model.kernels.quantize import to_eight_bits
from mmldlm.model.operators import operator

_BLOCKS, _MOST_ROWS = 1024, 64
"""Programs that fill a device, and most rows of one."""
_REGISTERS = 64
"""Of a thread: with more of them fewer programs run at a time, and each waits for its sums (timed on an H200)."""
_STAGES, _SHARED = 4, 24576
"""Rows under way in a program, and the most bytes that those to come may take (timed on an H200 at width 1,024; wider
rows have fewer registers to spare)."""
EPS = 1e-5


@triton.jit
def _forward_kernel(
    x, branch, gate, shift, scale, document, out, y, mean, rstd, y_scale,
    gate_stride, shift_stride, scale_stride, width, eps, WIDTH: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    d = tl.load(document + row).to(tl.int64)
    here = row * width + column
    gates = tl.load(gate + d * gate_stride + column, inside, other=0.0).to(tl.float32)
    value = tl.load(x + here, inside, other=0.0).to(tl.float32)
    value += gates * tl.load(branch + here, inside, other=0.0).to(tl.float32)
    tl.store(out + here, value, inside)
    average = tl.sum(value, 0) / width
    centred = tl.where(inside, value - average, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    scales = tl.load(scale + d * scale_stride + column, inside, other=0.0).to(tl.float32)
    shifts = tl.load(shift + d * shift_stride + column, inside, other=0.0).to(tl.float32)
    normed = centred * inverse * (1.0 + scales) + shifts
    if ROUND:
        eight, factor = to_eight_bits(normed)
        tl.store(y + here, eight, inside)
        tl.store(y_scale + row, factor)
    else:
        tl.store(y + here, normed, inside)
    tl.store(mean + row, average)
    tl.store(rstd + row, inverse)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["num_rows", "rows"])
def _backward_kernel(
    grad_out, grad_y, out, branch, gate, scale, document, mean, rstd, grad_x, grad_branch, partial,
    gate_stride, scale_stride, num_rows, rows, width, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    first = block * rows
    end = tl.minimum(first + rows, num_rows)
    current = tl.load(document + first).to(tl.int64)
    gates = tl.load(gate + current * gate_stride + column, inside, other=0.0).to(tl.float32)
    scales = tl.load(scale + current * scale_stride + column, inside, other=0.0).to(tl.float32)
    gate_sum = tl.zeros([WIDTH], tl.float32)
    shift_sum = tl.zeros([WIDTH], tl.float32)
    scale_sum = tl.zeros([WIDTH], tl.float32)
    for row in tl.range(first, end, num_stages=STAGES):
        d = tl.load(document + row).to(tl.int64)
        if d != current:
            place = partial + (block + current) * 3 * width + column
            tl.store(place, gate_sum, inside)
            tl.store(place + width, shift_sum, inside)
            tl.store(place + 2 * width, scale_sum, inside)
            gate_sum = tl.zeros([WIDTH], tl.float32)
            shift_sum = tl.zeros([WIDTH], tl.float32)
            scale_sum = tl.zeros([WIDTH], tl.float32)
            gates = tl.load(gate + d * gate_stride + column, inside, other=0.0).to(tl.float32)
            scales = tl.load(scale + d * scale_stride + column, inside, other=0.0).to(tl.float32)
            current = d
        here = row * width + column
        # all four loads come before the sum, at which all threads wait
        upstream = tl.load(grad_y + here, inside, other=0.0).to(tl.float32)
        normed = tl.load(out + here, inside, other=0.0).to(tl.float32)
        total = tl.load(grad_out + here, inside, other=0.0).to(tl.float32)
        branches = tl.load(branch + here, inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row)
        normed = tl.where(inside, (normed - tl.load(mean + row)) * inverse, 0.0)
        scaled = upstream * (1.0 + scales)
        along, level = tl.reduce((scaled * normed, scaled), 0, _add_both)
        total += (scaled - level / width - normed * (along / width)) * inverse
        tl.store(grad_x + here, total, inside)
        tl.store(grad_branch + here, total * gates, inside)
        gate_sum += total * branches
        shift_sum += upstream
        scale_sum += upstream * normed
    place = partial + (block + current) * 3 * width + column
    tl.store(place, gate_sum, inside)
    tl.store(place + width, shift_sum, inside)
    tl.store(place + 2 * width, scale_sum, inside)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(partial, starts, result, rows, width, WIDTH: tl.constexpr):
    """Partials of one document and one of (gate, shift, scale) -> their sum; 0 for a document without rows."""
    d = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < width
    first = tl.load(starts + d).to(tl.int64)
    end = tl.load(starts + d + 1).to(tl.int64)
    total = tl.zeros([WIDTH], tl.float32)
    if end > first:
        for place in range(first // rows + d, (end - 1) // rows + d + 1):
            total += tl.load(partial + (place * 3 + part) * width + column, inside, other=0.0)
    tl.store(result + (d * 3 + part) * width + column, total, inside)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _warps(width: int) -> int:
    return min(8, max(1, triton.next_power_of_2(width) // 256))


@operator
def add_norm(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, document: Tensor, starts: Tensor,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, branch (M, D); gate, shift, scale (N, D); document (M,) in rising order; starts (N+1,) first row of each.

    Returns out (M, D) in the type of x, y (M, D) in the type of branch, mean and inverse deviation of each row, and
    with `rounded` y in e4m3 with its scales (M, 1); the values of y are then undefined, it only has a gradient.
    """
    num_rows, width = x.shape
    x, branch, gate, shift, scale = (
        x.contiguous(),
        branch.contiguous(),
        _rows(gate),
        _rows(shift),
        _rows(scale),
    )
    out, y = torch.empty_like(x), torch.empty_like(branch)
    mean, rstd = (torch.empty(num_rows, device=x.device, dtype=torch.float32) for _ in range(2))
    q = torch.empty(x.shape if rounded else (0, 0), device=x.device, dtype=torch.float8_e4m3fn)
    q_scale = torch.empty((len(q), 1), device=x.device, dtype=torch.float32)
    _forward_kernel[(num_rows,)](
        x, branch, gate, shift, scale, document, out, q if rounded else y, mean, rstd, q_scale,
        gate.stride(0), shift.stride(0), scale.stride(0), width, EPS,
        WIDTH=triton.next_power_of_2(width), ROUND=rounded, num_warps=_warps(width // 2 if rounded else width),
    )  # fmt: skip
    return out, y, mean, rstd, q, q_scale


@torch.library.register_fake(add_norm)
def _(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, document: Tensor, starts: Tensor,
    rounded: bool,
) -> Any:  # fmt: skip
    row = x.new_empty(x.shape[0], dtype=torch.float32)
    q = x.new_empty(x.shape if rounded else (0, 0), dtype=torch.float8_e4m3fn)
    q_scale = x.new_empty((q.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape), branch.new_empty(branch.shape), row, torch.empty_like(row), q, q_scale


@operator
def add_norm_backward(
    grad_out: Tensor, grad_y: Tensor, out: Tensor, branch: Tensor, gate: Tensor, scale: Tensor,
    document: Tensor, starts: Tensor, mean: Tensor, rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x (M, D), of branch (M, D), and of gate, shift and scale together (N, 3, D)."""
    num_rows, width = out.shape
    num_documents = gate.shape[0]
    grad_out, grad_y, branch = grad_out.contiguous(), grad_y.contiguous(), branch.contiguous()
    gate, scale = _rows(gate), _rows(scale)
    rows = min(_MOST_ROWS, max(1, triton.next_power_of_2(num_rows // _BLOCKS)))
    num_blocks = triton.cdiv(num_rows, rows)
    grad_x, grad_branch = torch.empty_like(out), torch.empty_like(branch)
    partial = torch.empty((num_blocks + num_documents, 3, width), device=out.device, dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    warps = min(16, max(1, padded // 128))
    bytes_of_a_row = 2 * padded * (out.element_size() + branch.element_size())
    stages = min(_STAGES, 1 + _SHARED // bytes_of_a_row)
    _backward_kernel[(num_blocks,)](
        grad_out, grad_y, out, branch, gate, scale, document, mean, rstd, grad_x, grad_branch, partial,
        gate.stride(0), scale.stride(0), num_rows, rows, width, WIDTH=padded, STAGES=stages,
        num_warps=warps, maxnreg=_REGISTERS,
    )  # fmt: skip
    sums = torch.empty((num_documents, 3, width), device=out.device, dtype=gate.dtype)
    _sum_kernel[(num_documents, 3)](partial, starts, sums, rows, width, WIDTH=padded, num_warps=warps)
    return grad_x, grad_branch, sums


@torch.library.register_fake(add_norm_backward)
def _(
    grad_out: Tensor, grad_y: Tensor, out: Tensor, branch: Tensor, gate: Tensor, scale: Tensor,
    document: Tensor, starts: Tensor, mean: Tensor, rstd: Tensor,
) -> Any:  # fmt: skip
    sums = gate.new_empty((gate.shape[0], 3, gate.shape[1]))
    return out.new_empty(out.shape), branch.new_empty(branch.shape), sums


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, branch, gate, _, scale, document, starts, _ = inputs
    out, _, mean, rstd, _, _ = output
    ctx.save_for_backward(out, branch, gate, scale, document, starts, mean, rstd)


def _gradients(ctx: Any, *upstream: Any) -> Any:
    out, branch, gate, scale, document, starts, mean, rstd = ctx.saved_tensors
    grad_x, grad_branch, sums = add_norm_backward(
        upstream[0], upstream[1], out, branch, gate, scale, document, starts, mean, rstd
    )
    return grad_x, grad_branch, sums[:, 0], sums[:, 1], sums[:, 2], None, None, None


torch.library.register_autograd(add_norm, _gradients, setup_context=_keep)
