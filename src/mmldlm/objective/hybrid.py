"""The loss of texts whose noise is masks and random tokens (GIDD), a chunk of logits at a time.

The network predicts x: the distribution of the clean token given all the *other* tokens and the latent. What the
token's own noisy value z says is added by the rule of the noise, which is known. `stray` is written e (see
`corruption/text.py`).

bound    p'/p * (A * KL + B * IS) per token, whose mean over times and noise bounds the negative log-likelihood, with
             KL = sum over y of ([y = clean] + e) log(([y = clean] + e) / (x(y) + e))
             IS = r - log r - 1,   r = ([z = clean] + e) / (x(z) + e)
         KL compares q(.|clean token) with q(.|prediction) in units of the share of clean tokens, IS does so at z alone;
         A and B are those of `TextProcess.bound_parts`, for a mask B = 0. As e -> 0 the loss is p'/p * -log x(clean) at
         masks and nothing elsewhere, the bound of masked diffusion.
uniform  cross-entropy of the clean token given *all* tokens, by the posterior x(y) ([y = z] + e) / sum; at masks x.

Both are smallest for one and the same x, the exact one; so one sampler serves both.
Shapes: R rows, V vocabulary (the head may have more rows; they are no tokens).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.corruption.text import TextProcess
from mmldlm.objective.text import TextLoss, head_loss, score_logits


class HybridRows(NamedTuple):
    """What is known about the scored rows, (R,) each."""

    target: Tensor
    """Clean token."""
    seen: Tensor
    """Noisy token; 0 in place of a mask, with a gain and a surprise of 0."""
    gain: Tensor
    """What the noisy token adds to its own logit in the posterior."""
    divergence: Tensor
    """A"""
    surprise: Tensor
    """B"""
    stray: Tensor
    """e"""

    @classmethod
    def of(cls, process: TextProcess, tokens: Tensor, noisy_tokens: Tensor, time: Tensor) -> HybridRows:
        """From clean and noisy tokens and the text time of each."""
        return cls(
            tokens,
            noisy_tokens.masked_fill(noisy_tokens == process.mask_id, 0),
            process.posterior_gain(noisy_tokens, time),
            *process.bound_parts(tokens, noisy_tokens, time),
            process.stray(time),
        )


def hybrid_loss(
    head: nn.Linear,
    hidden: Tensor,
    rows: HybridRows,
    weights: Tensor,
    counted: Tensor,
    *,
    weighting: str,
    vocab_size: int,
    chunk_rows: int,
    compiled: bool = False,
) -> TextLoss:
    """hidden (R, D), weights (R,), counted (R,): rows that accuracy is told of."""
    sizes = (vocab_size, chunk_rows)
    if weighting == "uniform":
        asked = (rows.target, weights, rows.seen, rows.gain)
        return head_loss(head, hidden, score_posterior, asked, counted, *sizes, compiled=compiled)
    values = (
        rows.target, rows.seen, rows.gain, weights * rows.divergence, weights * rows.surprise, rows.stray
    )  # fmt: skip
    return head_loss(head, hidden, score_bound, values, counted, *sizes, compiled=compiled)


def hybrid_loss_of_all(
    logits: Tensor, rows: HybridRows, weights: Tensor, counted: Tensor, weighting: str
) -> TextLoss:
    """The plain way over a whole matrix of logits (R, V): the baseline."""
    posterior = posterior_logits(logits, rows)
    nats = F.cross_entropy(posterior, rows.target, reduction="none")
    costs = weights * (nats if weighting == "uniform" else row_costs(logits, rows))
    hits = ((posterior.detach().argmax(-1) == rows.target) & counted).sum().float()
    return TextLoss(costs.sum(), hits, counted.sum().float(), nats.detach(), costs.detach())


def posterior_logits(logits: Tensor, rows: HybridRows) -> Tensor:
    """(R, V) logits of the clean token given also its own noisy value."""
    return logits.scatter_add(1, rows.seen[:, None], rows.gain.to(logits.dtype)[:, None])


def row_costs(logits: Tensor, rows: HybridRows) -> Tensor:
    """(R,) A * KL + B * IS of each row."""
    predicted = logits.softmax(-1)
    at_target = predicted.gather(1, rows.target[:, None]).squeeze(1)
    at_seen = predicted.gather(1, rows.seen[:, None]).squeeze(1)
    spread = torch.log1p(predicted / rows.stray[:, None]).sum(-1)
    ratio = _seen_ratio(at_seen, rows.seen == rows.target, rows.stray)
    divergence = _divergence(at_target, spread, rows.stray)
    return rows.divergence * divergence + rows.surprise * (ratio - ratio.log() - 1.0)


def _divergence(at_target: Tensor, spread: Tensor, stray: Tensor) -> Tensor:
    """KL from x(clean) and the sum over y of log(1 + x(y) / e)."""
    return torch.log((1.0 + stray) / (at_target + stray)) + stray * (torch.log1p(1.0 / stray) - spread)


def _seen_ratio(at_seen: Tensor, is_clean: Tensor, stray: Tensor) -> Tensor:
    """r = ([z = clean] + e) / (x(z) + e)"""
    return (is_clean.to(stray.dtype) + stray) / (at_seen + stray)


def score_posterior(
    logits: Tensor,
    bias: Tensor,
    target: Tensor,
    weight: Tensor,
    seen: Tensor,
    gain: Tensor,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`score_logits` of the posterior; its logits differ by a constant, so the gradient is the same."""
    logits = logits.float().scatter_add_(1, seen[:, None], gain[:, None])
    return score_logits(logits, bias, target, weight, kind)


def score_bound(
    logits: Tensor, bias: Tensor, target: Tensor, seen: Tensor, gain: Tensor, divergence: Tensor,
    surprise: Tensor, stray: Tensor, kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """divergence * KL + surprise * IS and hits of each row, the gradient of the sum by the logits in type `kind`, nats.

    With h(y) = x(y) / (x(y) + e), the derivative by the log of x(y), were the x(y) free, is

        D(y) = -A e h(y) - A h(y) [y = clean] + B (1 - r) h(y) [y = z]

    and that by the logits is D(y) - x(y) * sum of D. Hits and nats are those of the posterior. Computed in at least
    fp32, in the memory of the logits (which are used up) and two more matrices of that size.
    """
    logits = (logits if logits.dtype == torch.float64 else logits.float()).add_(bias)
    to, at = target[:, None], seen[:, None]
    best, choice = logits.max(-1)
    wanted, own = logits.gather(1, to).squeeze(1), logits.gather(1, at).squeeze(1)
    choice = torch.where(own + gain > best, seen, choice)
    power = logits.sub_(best[:, None]).exp_()
    total = power.sum(-1)
    predicted = power.div_(total[:, None])
    odds = predicted / stray[:, None]
    spread = torch.log1p(odds).sum(-1)
    is_clean = seen == target
    own_odds = odds.gather(1, at).squeeze(1)
    nats = best + total.log() - wanted
    nats = nats + torch.where(gain > 0, torch.log1p(own_odds) - gain * is_clean, 0.0)
    ratio = _seen_ratio(predicted.gather(1, at).squeeze(1), is_clean, stray)
    costs = divergence * _divergence(predicted.gather(1, to).squeeze(1), spread, stray)
    costs = costs + surprise * (ratio - ratio.log() - 1.0)
    pull = odds.div_(odds + 1.0)
    of_target = -divergence * pull.gather(1, to).squeeze(1)
    of_seen = surprise * (1.0 - ratio) * pull.gather(1, at).squeeze(1)
    pull = pull.mul_((-divergence * stray)[:, None])
    pull = pull.scatter_add_(1, to, of_target[:, None]).scatter_add_(1, at, of_seen[:, None])
    gradient = pull.sub_(predicted.mul_(pull.sum(-1, keepdim=True)))
    return costs, choice == target, gradient.to(kind), nats
