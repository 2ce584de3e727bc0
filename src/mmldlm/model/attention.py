"""Attention among the places of one document, by several equal kernels, and the choice of the fastest.

The choice is measured once per layout on the device at hand, then remembered in a file.
Shapes: T tokens, M slots, L = T + M places of the stream, R rows of W cells, H heads, K head width.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmldlm.layout import Layout
from mmldlm.model.ops import permute_rows, regroup_rows
from mmldlm.runtime import TILE_WIDTHS, recall, remember

log = logging.getLogger(__name__)
_WARM_UPS, _REPEATS = 3, 9
_SLEEP = 60_000_000
"""Cycles of the device, some 30 ms: the host launches the passes in less."""
_MOST_SLOTS, _MOST_DOCUMENTS = 16, 65535
"""That `split` takes: it looks at slots one by one, and a GPU counts documents only so far."""


class Projections(NamedTuple):
    """What both streams bring to attention, where our kernels lead into it."""

    text: Tensor
    """(T, 3*H*K)"""
    latent: Tensor
    """(M, 3*H*K)"""
    text_weight: Tensor
    """(2, K) of the norms of q and k"""
    latent_weight: Tensor
    cosine: Tensor
    """(T, K/2)"""
    sine: Tensor


LONGEST_IN_TILES = 256
"""Places of a document up to which `tiles` are ahead of flash attention where there is no backward pass."""


def serving(backend: str, layout: Layout, *, trained: bool) -> str:
    """The backend itself, but for two: `split` is for training on documents of equal length, and `by_length`, which
    measures nothing, is `tiles` or flash attention."""
    if backend == "by_length":
        return "tiles" if layout.max_segment - layout.num_slots <= LONGEST_IN_TILES else "varlen"
    if backend != "split" or (trained and _splits(layout)):
        return backend
    return "sdpa" if layout.full or layout.rows is not None else "varlen"


def _splits(layout: Layout) -> bool:
    return layout.full and 1 <= layout.num_slots <= _MOST_SLOTS and layout.num_documents <= _MOST_DOCUMENTS


def attend_streams(
    given: Projections, layout: Layout, backend: str, num_heads: int, *, norm: bool, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """From the projections of both streams to what attention returns to each, (T, H*K) and (M, H*K), by our kernels.

    `keep`: `split` keeps q, k and v for the backward pass, which else computes them again.
    """
    if backend == "split":
        from mmldlm.model.kernels.split import attend_split

        of_text, of_latent = attend_split(*given, num_heads, layout.num_slots, norm, keep)[:2]
        return of_text, of_latent
    from mmldlm.model.kernels.gather_qkv import gather_qkv

    three = apart(layout, backend)
    parts = gather_qkv(*given, layout.to_stream, layout.from_stream, num_heads, norm, three)
    return to_streams(attend(parts if three else parts[0], layout, backend), layout)


def to_streams(attended: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(L, H, K) in stream order -> (T, H*K) and (M, H*K)."""
    rows = permute_rows(attended.flatten(1), layout.from_stream, layout.to_stream)
    return rows[: layout.num_tokens], rows[layout.num_tokens :]


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


def candidates(layout: Layout, head_width: int, *, kernels: bool, fused: bool) -> list[str]:
    """The backends to measure on a GPU with flash attention; `kernels`: ours run, `fused`: all are used."""
    names = ["varlen"]
    if kernels and head_width in TILE_WIDTHS:
        names.append("tiles")
    if layout.full:
        names.append("sdpa")
        if fused and head_width in TILE_WIDTHS and _splits(layout):
            names.append("split")
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
    # split begins and ends with rows of the streams: beside it, the way there and back counts for all
    given = _projections(qkv, layout) if "split" in names else qkv
    for name in names:
        with contextlib.suppress(Exception):  # seen again below
            _pass(given, layout, name)
    ready()
    times = {name: _measure(given, layout, name) for name in names}
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


def _projections(qkv: Tensor, layout: Layout) -> Projections:
    """The same numbers as projections of the streams, with angles and weights of norms."""
    text, latent = (rows.requires_grad_() for rows in to_streams(qkv.detach().flatten(1), layout))
    width, kind = qkv.shape[3], torch.float32
    weights = (qkv.new_ones((2, width), dtype=kind).requires_grad_() for _ in range(2))
    angles = (qkv.new_full((layout.num_tokens, width // 2), 0.5**0.5, dtype=kind) for _ in range(2))
    return Projections(text, latent, *weights, *angles)


def _pass(given: Tensor | Projections, layout: Layout, name: str) -> None:
    if isinstance(given, Projections):
        num_heads = given.text.shape[1] // (3 * given.text_weight.shape[1])
        outs = attend_streams(given, layout, name, num_heads, norm=True)
        torch.autograd.backward(outs, [out.detach() for out in outs])
        return
    out = attend(given, layout, name)
    out.backward(out.detach())


def _measure(given: Tensor | Projections, layout: Layout, name: str) -> float:
    """Median milliseconds of a forward and backward pass; infinite where the backend fails."""
    try:
        return statistics.median(_times(given, layout, name))
    except Exception as error:
        log.warning("attention %s cannot be used here: %s", name, str(error).split("\n")[0])
        return float("inf")


def _times(given: Tensor | Projections, layout: Layout, name: str) -> list[float]:
    """Of the device alone: it sleeps until all passes are launched, so that none waits for the host."""
    for _ in range(_WARM_UPS):
        _pass(given, layout, name)
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    for mark in marks[:-1]:
        mark.record()
        _pass(given, layout, name)
    marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def _key(layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype) -> str:
    """What the times depend on; mean length in steps of a quarter, so that every batch of a run agrees."""
    lengths = layout.lengths[layout.lengths > 0].float()
    mean = 2.0 ** (torch.log2(lengths.mean()).mul(4).round().div(4).item())
    kind = "equal" if layout.full else "packed"
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kind}, {len(layout.segment)} places, "
        f"mean {mean:.0f}, longest {layout.max_segment}, slots {layout.num_slots}, {num_heads} x {head_width}, "
        f"{str(dtype).split('.')[-1]}"
    )
