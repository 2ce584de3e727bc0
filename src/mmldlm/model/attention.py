"""Attention among the places of one document, by whichever kernel suits the shape. All give the same answer.

Shapes: L places of the stream, R rows of W cells, H heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmldlm.layout import Layout
from mmldlm.model.ops import regroup_rows


def attend(qkv: Tensor, layout: Layout, backend: str) -> Tensor:
    """qkv (L, 3, H, K) in stream order -> (L, H, K)."""
    if backend == "tiles":
        return _attend_tiles(qkv, layout)
    if backend == "varlen":
        return _attend_varlen(qkv, layout)
    if backend == "sdpa" and layout.full:
        return _attend_full(qkv, layout)
    if backend in ("sdpa", "rows"):
        return _attend_rows(qkv, layout)
    return _attend_reference(qkv, layout)


def _attend_tiles(qkv: Tensor, layout: Layout) -> Tensor:
    """Our kernel for short documents: several of them in one tile."""
    from mmldlm.model.kernels.tiles import attend_tiles

    return attend_tiles(qkv, layout.segment, layout.bounds)[0]


def _attend_varlen(qkv: Tensor, layout: Layout) -> Tensor:
    """Flash attention with the bounds of the documents."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.unbind(1)
    longest = layout.max_segment
    result = varlen_attn(q, k, v, layout.bounds, layout.bounds, longest, longest)
    assert isinstance(result, Tensor)
    return result


def _attend_full(qkv: Tensor, layout: Layout) -> Tensor:
    """Every document fills its row: no mask, so cuDNN and flash attention apply."""
    q, k, v = qkv.view(-1, layout.max_segment, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        result = F.scaled_dot_product_attention(q, k, v)
    return result.transpose(1, 2).flatten(0, 1)


def _attend_rows(qkv: Tensor, layout: Layout) -> Tensor:
    """Documents side by side in padded rows, inside attention only; each attends to itself."""
    rows = layout.rows
    assert rows is not None, "the layout was made without rows"
    (num_rows, width), (num_heads, head_width) = rows.places.shape, qkv.shape[2:]
    cells = rows.places.flatten()
    grid = regroup_rows(qkv.flatten(1), cells, rows.cell).view(num_rows, width, 3, num_heads, head_width)
    query, key, value = grid.permute(2, 0, 3, 1, 4)
    mask = _allowed(rows.segment)[:, None]
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    flat = result.transpose(1, 2).reshape(num_rows * width, num_heads * head_width)
    return regroup_rows(flat, rows.cell, cells).view(-1, num_heads, head_width)


def _attend_reference(qkv: Tensor, layout: Layout) -> Tensor:
    """One dense mask over the whole stream: slow, and obviously right."""
    query, key, value = (part.transpose(0, 1)[None] for part in qkv.unbind(1))
    mask = _allowed(layout.segment)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)


def _allowed(segment: Tensor) -> Tensor:
    """(..., n) segments -> (..., n, n): who attends to whom. A place of no segment sees itself: no row is empty."""
    same = (segment[..., :, None] == segment[..., None, :]) & (segment >= 0)[..., None, :]
    return same | torch.eye(segment.shape[-1], dtype=torch.bool, device=segment.device)
