"""Cross-entropy of masked tokens, on the scored rows only, a chunk of logits at a time.

Shapes: R scored rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TextLoss:
    """Sums over the scored rows; the caller divides."""

    weighted: Tensor
    """Sum of weight * negative log-likelihood, in nats."""
    correct: Tensor
    """Number of rows whose most probable token is the right one."""
    rows: Tensor
    """Number of rows with a weight."""


def text_loss(head: Head, hidden: Tensor, targets: Tensor, weights: Tensor, chunk_rows: int) -> TextLoss:
    """hidden (R, D), targets (R,), weights (R,). Logits of a chunk are recomputed in the backward pass, never kept."""
    weighted, correct = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    for rows, target, weight in zip(
        hidden.split(chunk_rows), targets.split(chunk_rows), weights.split(chunk_rows), strict=True
    ):
        if torch.is_grad_enabled() and hidden.shape[0] > chunk_rows:
            loss, hits = checkpoint(_chunk_loss, head, rows, target, weight, use_reentrant=False)
        else:
            loss, hits = _chunk_loss(head, rows, target, weight)
        weighted, correct = weighted + loss, correct + hits
    return TextLoss(weighted, correct, (weights > 0).sum().float())


def _chunk_loss(head: Head, hidden: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    nats = F.cross_entropy(logits, target, reduction="none")
    hits = ((logits.detach().argmax(-1) == target) & (weight > 0)).sum().float()
    return (nats * weight).sum(), hits
