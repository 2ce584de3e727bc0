"""Pure maths of the denoiser: moving rows, rotary positions, modulation, attention inside documents.

Shapes: N documents, T tokens, S slots, L = T + N*S places of the stream, H heads, K head width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.layout import Layout


class _MoveRows(torch.autograd.Function):
    """x[there] forward, grad[back] backward: both directions are reads, none adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _MoveRowsOrZero(torch.autograd.Function):
    """Like `_MoveRows`, but an index one past the end reads zeros, so that empty cells give and get nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (back,) = ctx.saved_tensors
        return F.pad(grads[0], (0, 0, 0, 1)).index_select(0, back), None, None


def permute_rows(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Rows of (n, d) in another order; `back` is the inverse of `there`."""
    return _MoveRows.apply(x, there, back)


def regroup_rows(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Rows of (n, d) into cells (m, d), some of which may be empty (index n) and some rows unused (index m)."""
    return _MoveRowsOrZero.apply(x, there, back)


def rotary_angles(position: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, 1, K/2) of the angle of each pair of channels at each position."""
    half = head_width // 2
    rate = base ** (-torch.arange(half, device=position.device, dtype=torch.float32) / half)
    angle = position[:, None].float() * rate[None, :]
    return angle.cos()[:, None, :], angle.sin()[:, None, :]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + K/2) of (T, H, K) by their angles; in fp32, back in the type of x."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise rows, then scale and shift them as their document's times say."""
    return F.layer_norm(x, (x.shape[-1],)) * (1.0 + scale) + shift


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, backend: str) -> Tensor:
    """Attention among the places of one document. q, k, v and the result are (L, H, K) in stream order."""
    if backend == "varlen":
        return _attend_varlen(q, k, v, layout)
    if backend == "rows":
        return _attend_rows(q, k, v, layout)
    return _attend_reference(q, k, v, layout)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = layout.max_segment
    result = varlen_attn(q, k, v, layout.bounds, layout.bounds, longest, longest)
    assert isinstance(result, Tensor)
    return result


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Documents side by side in padded rows, inside attention only; each attends to itself."""
    (num_rows, width), (num_heads, head_width) = layout.rows.shape, q.shape[1:]
    cells = layout.rows.flatten()
    stacked = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    grid = regroup_rows(stacked, cells, layout.row_cell).view(num_rows, width, 3, num_heads, head_width)
    query, key, value = grid.permute(2, 0, 3, 1, 4)
    result = F.scaled_dot_product_attention(
        query, key, value, attn_mask=_allowed(layout.row_segment)[:, None]
    )
    flat = result.transpose(1, 2).reshape(num_rows * width, num_heads * head_width)
    return regroup_rows(flat, layout.row_cell, cells).view(-1, num_heads, head_width)


def _attend_reference(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """One dense mask over the whole stream: slow, and obviously right."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=_allowed(layout.segment))[0].transpose(
        0, 1
    )


def _allowed(segment: Tensor) -> Tensor:
    """(..., n) segments -> (..., n, n): who attends to whom. A place of no segment sees itself: no row is empty."""
    same = (segment[..., :, None] == segment[..., None, :]) & (segment >= 0)[..., None, :]
    return same | torch.eye(segment.shape[-1], dtype=torch.bool, device=segment.device)
