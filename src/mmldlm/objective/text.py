"""Losses of tokens by their logits: the scored rows only, a chunk of logits at a time, each chunk once.

The gradient of such a loss is known as soon as its logits are, so it is computed with them: nothing of the size of
the logits is kept for the backward pass or computed again there.
Shapes: R scored rows, D width, V vocabulary (the head may have more rows; they are no tokens).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TextLoss:
    """Sums over the scored rows; the caller divides."""

    weighted: Tensor
    """Sum of weight * loss of the row, in nats."""
    correct: Tensor
    """Number of scored rows whose most probable token is the right one."""
    rows: Tensor
    """Number of scored rows."""
    nats: Tensor
    """(R,) negative log-likelihood of each row's token, without its weight and without a gradient."""
    costs: Tensor
    """(R,) weight * loss of each row, without a gradient."""


def text_loss(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    vocab_size: int,
    chunk_rows: int,
    compiled: bool = False,
) -> TextLoss:
    """Output head and weighted cross-entropy. hidden (R, D), targets (R,), weights (R,); weight 0: not scored."""
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    weighted, hits, nats, costs = _HeadLoss.apply(
        hidden, head.weight, head.bias, targets, weights, vocab_size, chunk_rows, wanted, compiled
    )
    scored = weights > 0
    return TextLoss(weighted, (hits & scored).sum().float(), scored.sum().float(), nats, costs)


def text_loss_of_all(logits: Tensor, targets: Tensor, weights: Tensor) -> TextLoss:
    """The plain way over a whole matrix of logits (R, V), most of them with weight 0: the baseline."""
    nats = F.cross_entropy(logits, targets, reduction="none")
    hits = ((logits.detach().argmax(-1) == targets) & (weights > 0)).sum().float()
    costs = nats * weights
    return TextLoss(costs.sum(), hits, (weights > 0).sum().float(), nats.detach(), costs.detach())


def score_logits(
    logits: Tensor, bias: Tensor, target: Tensor, weight: Tensor, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted nats and hits of each row, the gradient of the sum by the logits in type `kind`, nats of each row.

    Computed in fp32 in the memory of the logits, which are used up.
    """
    logits = logits.float().add_(bias)
    best, choice = logits.max(-1)
    wanted = logits.gather(1, target[:, None]).squeeze(1)
    power = logits.sub_(best[:, None]).exp_()
    total = power.sum(-1)
    nats = best + total.log() - wanted
    gradient = power.mul_((weight / total)[:, None]).scatter_add_(1, target[:, None], -weight[:, None])
    return nats * weight, choice == target, gradient.to(kind), nats


@functools.cache
def _compiled_score() -> Any:
    return torch.compile(score_logits, dynamic=False, fullgraph=True)


class _HeadLoss(torch.autograd.Function):
    """Output head and loss in one; the gradients are ready when the loss is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, row_weights: Tensor,
        vocab_size: int, chunk_rows: int, wanted: bool, compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        score = _compiled_score() if compiled else score_logits
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # the weight of a token in the loss can exceed what fp16 holds
        gradient_kind = torch.float32 if kind == torch.float16 else kind
        loss = hidden.new_zeros((), dtype=torch.float32)
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (weight, bias)] if wanted else []
        hidden_grads, row_hits, row_nats, row_costs = [], [], [], []
        with torch.autocast(device, enabled=False):
            shift = bias.float().masked_fill(
                torch.arange(len(bias), device=bias.device) >= vocab_size, -torch.inf
            )
            rows, matrix = hidden.to(kind), weight.to(kind)
            chunks = (x.split(chunk_rows) for x in (rows, targets, row_weights))
            for part, target, row_weight in zip(*chunks, strict=True):
                costs, hits, gradient, nats = score(part @ matrix.T, shift, target, row_weight, gradient_kind)
                loss = loss + costs.sum()
                row_hits.append(hits)
                row_nats.append(nats)
                row_costs.append(costs)
                if wanted:
                    hidden_grads.append(gradient @ matrix.to(gradient_kind))
                    _add_product(grads[0], gradient, part.to(gradient_kind))
                    grads[1] += gradient.sum(0, dtype=torch.float32)
        if wanted:
            ctx.save_for_backward(torch.cat(hidden_grads).to(hidden.dtype), grads[0], grads[1])
        all_hits, all_nats, all_costs = (torch.cat(parts) for parts in (row_hits, row_nats, row_costs))
        ctx.mark_non_differentiable(all_hits, all_nats, all_costs)
        return loss, all_hits, all_nats, all_costs

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        scale = upstream[0]
        return hidden * scale, weight * scale, bias * scale, None, None, None, None, None, None


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """total += gradient^T rows, added up in fp32."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.T, rows)
    else:
        total += gradient.T @ rows
