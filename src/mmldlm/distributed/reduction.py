"""Gradients of a bucket summed over ranks, in full or in half the bytes; a communication hook of DDP.

DDP by itself would take the mean. Every part of our loss is a local sum over a global count, so the sum is the gradient
of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def sum_bucket(buffer: Tensor, compression: str) -> tuple[Any, Future[Tensor]]:
    """Begin the sum; the work that was begun, and the future of the buffer with the sum inside."""
    if compression == "none":
        work: Any = dist.all_reduce(buffer, async_op=True)
        return work, work.get_future().then(lambda future: future.value()[0])
    # shares of the mean: the sum of all could exceed what fp16 holds
    share = dist.get_world_size()
    small = buffer.to(KINDS[compression]).div_(share)
    work = dist.all_reduce(small, async_op=True)
    return work, work.get_future().then(lambda future: buffer.copy_(future.value()[0]).mul_(share))


def left_alone(buffer: Tensor) -> Future[Tensor]:
    """The buffer as it is, where the step was given up."""
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future
