"""Attention among the places of one document, by several equal kernels, and the choice of the fastest.

The choice is measured once per layout on the device at hand, then remembered in a file.
Shapes: L places of the stream, R rows of W cells, H heads, K head width.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmldlm.layout import Layout
from mmldlm.model.ops import regroup_rows
from mmldlm.runtime import TILE_WIDTHS, recall, remember

log = logging.getLogger(__name__)
_WARM_UPS, _REPEATS = 3, 9


def apart(layout: Layout, backend: str) -> bool:
    """Whether a backend takes q, k and v from tensors of their own."""
    return backend == "sdpa" and layout.full


def attend(qkv: Tensor | tuple[Tensor, ...], layout: Layout, backend: str) -> Tensor:
    """qkv (L, 3, H, K) in stream order, or each of the three (L, H, K) where they are `apart` -> (L, H, K)."""
    if apart(layout, backend):
        return _attend_full(qkv.unbind(1) if isinstance(qkv, Tensor) else qkv, layout)
    assert isinstance(qkv, Tensor)
    if backend == "tiles":
        return _attend_tiles(qkv, layout)
    if backend == "varlen":
        return _attend_varlen(qkv, layout)
    if backend in ("sdpa", "rows"):
        return _attend_rows(qkv, layout)
    return _attend_reference(qkv, layout)


def _attend_tiles(qkv: Tensor, layout: Layout) -> Tensor:
    """Our kernel for short documents: several of them in one tile."""
    from mmldlm.model.kernels.tiles import attend_tiles

    return attend_tiles(qkv, layout.segment, layout.bounds)[0]


def _attend_varlen(qkv: Tensor, layout: Layout) -> Tensor:
    """Flash attention with the bounds of the documents.

    `torch.nn.attention.varlen` calls the same operator, but imports PyTorch's compiler first, which takes seconds.
    """
    bounds, longest = layout.bounds, layout.max_segment
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *qkv.unbind(1), bounds, bounds, longest, longest, 0.0, False, False
    )[0]
    return out


def _attend_full(qkv: tuple[Tensor, ...], layout: Layout) -> Tensor:
    """Every document fills its row: no mask, so cuDNN and flash attention apply."""
    q, k, v = (part.unflatten(0, (-1, layout.max_segment)).transpose(1, 2) for part in qkv)
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


def candidates(layout: Layout, head_width: int, *, kernels: bool) -> list[str]:
    """The backends to measure on a GPU with flash attention."""
    names = ["varlen"]
    if kernels and head_width in TILE_WIDTHS:
        names.append("tiles")
    if layout.full:
        names.append("sdpa")
    return names


def remembered_attention(
    layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype, names: list[str]
) -> str | None:
    """The fastest of these backends, if that was measured before or there is no choice."""
    if len(names) == 1:
        return names[0]
    known = recall("attention", _key(layout, num_heads, head_width, dtype))
    return _fastest(known) if set(known) == set(names) else None


def measure_attention(
    layout: Layout,
    num_heads: int,
    head_width: int,
    dtype: torch.dtype,
    names: list[str],
    ready: Callable[[], None] = lambda: None,
) -> str:
    """The fastest of these backends for forward and backward; `layout` is on the device.

    `ready` is called when all of them are compiled: it returns when nobody else uses the device.
    """
    qkv = _input(layout, num_heads, head_width, dtype)
    for name in names:
        with contextlib.suppress(Exception):  # seen again below
            _pass(qkv, layout, name)
    ready()
    times = {name: _measure(qkv, layout, name) for name in names}
    if all(math.isfinite(ms) for ms in times.values()):  # what failed may work when memory is free
        remember("attention", _key(layout, num_heads, head_width, dtype), times)
    return _fastest(times)


def _fastest(times: dict[str, float]) -> str:
    ordered = sorted(times, key=lambda name: times[name])
    listed = ", ".join(f"{name} {times[name]:.2f} ms" for name in ordered)
    log.info("attention: %s (forward and backward of one block: %s)", ordered[0], listed)
    return ordered[0]


def _input(layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """Random q, k and v for all places."""
    device = layout.segment.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (len(layout.segment), 3, num_heads, head_width)
    return torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()


def _pass(qkv: Tensor, layout: Layout, name: str) -> None:
    out = attend(qkv, layout, name)
    out.backward(out.detach())


def _measure(qkv: Tensor, layout: Layout, name: str) -> float:
    """Median milliseconds of a forward and backward pass; infinite where the backend fails."""
    try:
        return statistics.median(_times(qkv, layout, name))
    except Exception as error:
        log.warning("attention %s cannot be used here: %s", name, str(error).split("\n")[0])
        return float("inf")


def _times(qkv: Tensor, layout: Layout, name: str) -> list[float]:
    milliseconds = []
    for repeat in range(_WARM_UPS + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _pass(qkv, layout, name)
        end.record()
        torch.cuda.synchronize()
        if repeat >= _WARM_UPS:
            milliseconds.append(begin.elapsed_time(end))
    return milliseconds


def _key(layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype) -> str:
    """What the times depend on; mean length in steps of a quarter, so that every batch of a run agrees."""
    lengths = layout.lengths[layout.lengths > 0].float()
    mean = 2.0 ** (torch.log2(lengths.mean()).mul(4).round().div(4).item())
    kind = "equal" if layout.full else "packed"
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kind}, {len(layout.segment)} places, "
        f"mean {mean:.0f}, longest {layout.max_segment}, {num_heads} x {head_width}, {str(dtype).split('.')[-1]}"
    )
