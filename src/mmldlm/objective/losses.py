"""Losses of tokens and of latents, what each time counts in them, and losses by time.

Text: the scored rows only, a chunk of logits at a time, each chunk once. The gradient of such a loss is known as soon
as its logits are, so it is computed with them: nothing of the size of the logits is kept for the backward pass. With
p(t) the mask probability, a masked token at text time t weighs

    uniform   1 / (mean of p over times): the same for all, and on average one for every token
    bound     p'(t) / p(t): the continuous-time bound on the negative log-likelihood

Latent: how far a prediction is from its target, per slot. Latent times all weigh 1; how often each is drawn is
`corruption.latent_time_power`.

    mse             mean over the channels of (prediction - target)^2
    cosine          1 - cos(prediction, target), and the length
    normalized_mse  mean over the channels of (prediction / |prediction| - target / |target|)^2, and the length, where
                    |x| is the root mean square over the channels; away from zero this is 2 - 2 cos

The last two leave the length of a prediction free, but samplers mix it with noise, so it must be right. Beside them
the length is fitted by least squares along the predicted direction, (|prediction| - <direction, target>)^2: its
gradient only stretches, that of the direction only turns. The best prediction of targets of equal length is then their
mean, which is what samplers assume, just as for mse.
Shapes: R scored rows or slots, D width, V vocabulary (the head may have more rows; they are no tokens), N documents,
S slots, C channels, B buckets of equal width over [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.config import ObjectiveConfig
from mmldlm.corruption.joint import TextSchedule

NUM_BUCKETS = 8


def text_weights(weighting: str, schedule: TextSchedule, time: Tensor, real: Tensor) -> Tensor:
    """(R,) float32: weight of masked tokens at these text times (R,), 0 where `real` (R,) is false."""
    if weighting == "bound":
        return torch.where(real, schedule.bound_weight(time), 0.0)
    return real * (1.0 / schedule.mean_probability)


def bucket_of(time: Tensor) -> Tensor:
    """The bucket of each time."""
    return (time * NUM_BUCKETS).long().clamp(0, NUM_BUCKETS - 1)


@torch.no_grad()
def sums_by_time(losses: Tensor, scored: Tensor, time: Tensor) -> Tensor:
    """(2, B): sum of the losses in each bucket, and how many. losses (R,), scored (R,) bool, time (R,).

    A plain sum per bucket and no scattering: the same bits every time, on a GPU too.
    """
    bucket = bucket_of(time)
    inside = (bucket == torch.arange(NUM_BUCKETS, device=bucket.device)[:, None]) & scored
    sums = torch.where(inside, losses.detach().float(), 0.0).sum(1)
    return torch.stack([sums, inside.sum(1).float()])


@torch.no_grad()
def sum_by_bucket(rows: Tensor, time: Tensor) -> Tensor:
    """(B,): sum of the rows of each bucket; the same bits every time. (R,), (R,)"""
    inside = bucket_of(time) == torch.arange(NUM_BUCKETS, device=time.device)[:, None]
    return torch.where(inside, rows.float(), 0.0).sum(1)


def means(sums: Tensor) -> list[float | None]:
    """Mean loss of each bucket of `sums_by_time`; None where nothing fell into it. Waits for the device."""
    return [total / count if count else None for total, count in zip(*sums.tolist(), strict=True)]


SHORTEST = 0.1
"""Root mean square below which a vector counts as of this length where its direction is needed: a zero vector has none,
and the gradient by a short one is large. Latents are normalised, so 1 is usual."""


def slot_errors(prediction: Tensor, target: Tensor, config: ObjectiveConfig) -> Tensor:
    """(N, S): loss of each slot. (N, S, C), (N, S, C)."""
    prediction = prediction.float()
    if config.latent_loss in ("cosine", "normalized_mse"):
        return _direction_errors(prediction, target, config.latent_loss)
    return (prediction - target).square().mean(-1)


def _direction_errors(prediction: Tensor, target: Tensor, kind: str) -> Tensor:
    length = _length(prediction)
    turned, wanted = prediction / length[..., None], target / _length(target)[..., None]
    if kind == "cosine":
        direction = 1.0 - (turned * wanted).mean(-1)
    else:
        direction = (turned - wanted).square().mean(-1)
    best_length = (turned * target).mean(-1).detach()
    return direction + (length - best_length).square()


def _length(vectors: Tensor) -> Tensor:
    """Root mean square over the channels, at least SHORTEST; its gradient is finite at zero."""
    return vectors.square().mean(-1).clamp(min=SHORTEST**2).sqrt()


def latent_loss(per_slot: Tensor, weight: Tensor) -> Tensor:
    """Sum over the scored slots. (N, S), (N,) weight of each document, 0 where its latent is not scored."""
    return (per_slot * weight[:, None]).sum()


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
    fused: bool = False,
) -> TextLoss:
    """Output head and weighted cross-entropy. hidden (R, D), targets (R,), weights (R,); weight 0: not scored.

    `fused`: by our Triton kernel, where the products are in bf16.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    weighted, hits, nats, costs = _HeadLoss.apply(
        hidden, head.weight, head.bias, targets, weights, vocab_size, chunk_rows, wanted, fused
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


class _HeadLoss(torch.autograd.Function):
    """Output head and loss in one; the gradients are ready when the loss is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, row_weights: Tensor,
        vocab_size: int, chunk_rows: int, wanted: bool, fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # the weight of a token in the loss can exceed what fp16 holds
        gradient_kind = torch.float32 if kind == torch.float16 else kind
        score = (
            _fused_score() if fused and kind == torch.bfloat16 else partial(score_logits, kind=gradient_kind)
        )
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
                costs, hits, gradient, nats = score(part @ matrix.T, shift, target, row_weight)
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


def _fused_score() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    from mmldlm.model.kernels.score import score

    return score


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """total += gradient^T rows, added up in fp32."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.T, rows)
    elif gradient.is_cuda:
        torch.addmm(total, gradient.T, rows, out_dtype=torch.float32, out=total)
    else:
        total += gradient.T @ rows
