"""Losses by the time at which a document was corrupted: late times are hard, early ones easy, the mean says little.

Shapes: R scored rows or slots, B buckets of equal width over [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BUCKETS = 8


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
