"""Pure maths of the denoiser: moving rows, rotary positions, modulation.

Shapes: N documents, T tokens, M rows of a stream, K head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.model.fp8 import Rounded, round_rows
from mmldlm.model.products import product_in_fp32


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


class _TakeRows(torch.autograd.Function):
    """x[rows] forward; backward each row of x reads its gradient, or zero: nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, rows)

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


class RowsOf(NamedTuple):
    """Which document each row of a stream belongs to; the rows of a document are neighbours."""

    document: Tensor
    """(M,)"""
    starts: Tensor
    """(N+1,) first row of each document."""


class Chosen(NamedTuple):
    """Some rows of a stream, in rising order; the last row of the stream may come several times."""

    rows: Tensor
    """(R,)"""
    back: Tensor
    """(M,) place of each row of the stream in `rows`, the first one if there are several; R if there is none."""
    where: RowsOf

    @classmethod
    def of(cls, rows: Tensor, where: RowsOf) -> Chosen:
        """Without waiting for the device."""
        every = torch.arange(len(where.document), device=rows.device)
        place = torch.searchsorted(rows, every)
        there = rows.index_select(0, place.clamp(max=len(rows) - 1)) == every
        starts = torch.searchsorted(rows, where.starts)
        return cls(
            rows, torch.where(there, place, len(rows)), RowsOf(where.document.index_select(0, rows), starts)
        )

    def take(self, x: Tensor) -> Tensor:
        """(M, D) -> (R, D). A row that comes several times gets the gradient of its first place alone: of the others,
        which fill up, there is none."""
        result: Tensor = _TakeRows.apply(x, self.rows, self.back)
        return result


def add_and_norm(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, where: RowsOf, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """Add a gated branch to the residual stream x, then normalise and modulate it by the row's document.

    x, branch (M, D); gate, shift, scale (N, D). Returns the new residual stream and its modulated norm, (M, D) each.
    """
    if fused:
        from mmldlm.model.kernels.add_norm import add_norm

        return add_norm(x, branch, gate, shift, scale, where.document, where.starts, False)[:2]
    gates, shifts, scales = (part.float().index_select(0, where.document) for part in (gate, shift, scale))
    added = x.float() + gates * branch
    y = F.layer_norm(added, (x.shape[-1],)) * (1.0 + scales) + shifts
    return added.to(x.dtype), y


def add_and_norm_rounded(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, where: RowsOf, *, fused: bool
) -> tuple[Tensor, Rounded]:
    """The same, with the modulated norm in eight bits."""
    if not fused:
        out, y = add_and_norm(x, branch, gate, shift, scale, where, fused=False)
        return out, round_rows(y)
    from mmldlm.model.kernels.add_norm import add_norm

    out, y, _, _, q, q_scale = add_norm(x, branch, gate, shift, scale, where.document, where.starts, True)
    return out, Rounded(y, q, q_scale)


class _AllModulations(torch.autograd.Function):
    """Linear layers with one input, as one product. Gradients of the weights leave it in fp32."""

    @staticmethod
    def forward(ctx: Any, condition: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        device = condition.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else condition.dtype
        ctx.sizes = [len(weight) for weight in weights]
        matrix = condition.new_empty((sum(ctx.sizes), condition.shape[1]), dtype=kind)
        torch._foreach_copy_(list(matrix.split(ctx.sizes)), list(weights))
        rows = condition.to(kind)
        with torch.autocast(device, enabled=False):
            result = torch.addmm(torch.cat(biases).to(kind), rows, matrix.t())
        ctx.save_for_backward(rows, matrix)
        ctx.kind = condition.dtype
        return result.split(ctx.sizes, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, matrix = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            grad = torch.cat(grads, dim=1)
            weights = product_in_fp32(grad.t(), rows).split(ctx.sizes)
            biases = grad.sum(0, dtype=torch.float32).split(ctx.sizes)
            condition = (grad @ matrix).to(ctx.kind)
        both = [part for pair in zip(weights, biases, strict=True) for part in pair]
        needed = ctx.needs_input_grad[1:]
        return condition, *(part if wanted else None for part, wanted in zip(both, needed, strict=True))


def all_modulations(condition: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """What each layer makes of the condition (N, E), in one product: (N, outputs) each."""
    return _AllModulations.apply(
        condition, *(part for layer in layers for part in (layer.weight, layer.bias))
    )
