"""Drawing one value per row of logits, from one number per row.

A single logit may be minus infinity, which makes its value impossible; a row that holds NaN is refused.
Shapes: R rows, V values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.errors import UserError

CHUNK_ROWS = 512
"""Rows whose probabilities exist at a time."""
_BELOW_ONE = 1.0 - 2.0**-25


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """(R,) values from softmax(logits / temperature), the least probable ones cut off, by inverting its sum.

    The same number gives the same value whatever else is drawn; temperature 0 gives the most probable value.
    """
    if temperature == 0:
        best = logits.max(dim=-1)
        require_finite(best.values)
        return best.indices
    parts = zip(logits.split(CHUNK_ROWS), uniform.split(CHUNK_ROWS), strict=True)
    values = [_draw_chunk(rows, numbers, temperature, top_p) for rows, numbers in parts]
    return torch.cat(values) if values else logits.new_zeros(0, dtype=torch.int64)


def _draw_chunk(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    probability = keep_top_p(torch.softmax(logits / temperature, dim=-1), top_p)
    reached = probability.double().cumsum(dim=-1)
    require_finite(reached[:, -1])
    wanted = uniform.double().clamp(max=_BELOW_ONE)[:, None] * reached[:, -1:]
    # the first value whose sum is beyond the number; one of probability 0 adds nothing and is never the first
    return torch.searchsorted(reached, wanted, right=True).squeeze(1)


def keep_top_p(probability: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of values that together have probability `top_p`; not normalised."""
    if top_p >= 1.0:
        return probability
    ordered, order = probability.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probability).scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))


def largest_probability(logits: Tensor) -> Tensor:
    """(R,) how sure each row is: the probability of its most probable value."""
    parts = [(rows.amax(-1) - rows.logsumexp(-1)).exp() for rows in logits.split(CHUNK_ROWS)]
    result = torch.cat(parts) if parts else logits.new_zeros(0)
    require_finite(result)
    return result


def probability_margin(logits: Tensor) -> Tensor:
    """(R,) how sure each row is: how far its most probable value is ahead of the second."""
    parts = [_margin(rows.softmax(-1)) for rows in logits.split(CHUNK_ROWS)]
    result = torch.cat(parts) if parts else logits.new_zeros(0)
    require_finite(result)
    return result


def _margin(probability: Tensor) -> Tensor:
    best = probability.topk(min(2, probability.shape[-1]), dim=-1).values
    return best[:, 0] - best[:, 1:].sum(-1)


def require_finite(values: Tensor) -> None:
    """Refuse to go on with a model that has gone astray."""
    if not values.isfinite().all():
        raise UserError(
            "the model predicts NaN or infinity, so nothing can be sampled from it; "
            "take an earlier checkpoint, and look at the losses of the run"
        )
