"""Steps on their way to the device: copied beside the computation, which waits only for the copy it needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mmldlm.data.loader import StepBatch
from mmldlm.errors import UserError


class Feed:
    """The steps of a loader on the device. A `UserError` that a worker met comes through as it is."""

    def __init__(
        self, steps: Iterator[StepBatch | UserError], device: torch.device, *, overlap: bool
    ) -> None:
        self.steps, self.device = steps, device
        self.copies = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> StepBatch | UserError:
        step = next(self.steps)
        if isinstance(step, UserError):
            return step
        if self.copies is None:
            return step.to(self.device)
        with torch.cuda.stream(self.copies):
            moved = step.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.copies)
        for part in moved.micro_batches:
            part.buffer.record_stream(current)
        return moved
