"""What each time counts in the loss, and losses by time.

With p(t) the mask probability, a masked token at text time t weighs

    uniform   1 / (mean of p over times): the same for all, and on average one for every token
    bound     p'(t) / p(t): the continuous-time bound on the negative log-likelihood

Latent times all weigh 1; how often each is drawn is `corruption.latent_time_power`. Late times are hard and early ones
easy, so the log also has the loss by time.
Shapes: R scored rows or slots, B buckets of equal width over [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.corruption.schedule import TextSchedule

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
