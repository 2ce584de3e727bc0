"""Steps from a pair store: which documents, read, packed, corrupted and ready for the device.

A step is planned in the main process from the lengths alone and made in a worker. Both are pure functions of the
position, so the number of workers, ranks or micro-batches never changes what a step trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.data.packing import BatchPlan, Order, StepShape, document_keys, pack
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.data.workers import loader_context
from mmldlm.errors import UserError
from mmldlm.layout import Caps, packed_layout, padded_layout
from mmldlm.types import Counts, MicroBatch, NoisyBatch, PackedBatch, Parcel, When

Corrupt = Callable[[PackedBatch], NoisyBatch]
Count = Callable[[np.ndarray, np.ndarray, When], Counts]


@dataclass(frozen=True)
class StepRange:
    """The documents at positions start..end of the order, which are those of a step."""

    start: int
    end: int
    step: int = 0


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of one step for one rank."""

    where: StepRange
    micro_batches: list[Parcel[MicroBatch]]
    counts: Counts
    """Over the whole step, all ranks."""
    num_documents: int
    num_tokens: int
    num_places: int
    """Tokens that the micro-batches have room for."""
    num_squares: int
    """Sum over documents of (tokens + slots)^2, what attention costs."""
    num_scored: int
    """Scored tokens of this rank."""
    num_extra: int
    """Micro-batches beyond the plan, because documents did not fit."""

    def pin_memory(self) -> StepBatch:
        """In page-locked memory; called by the loader."""
        return self._moved(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> StepBatch:
        """On the device; from page-locked memory the copy does not wait."""
        return self._moved(lambda buffer: buffer.to(device, non_blocking=True))

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> StepBatch:
        return replace(
            self, micro_batches=[part.with_buffer(move(part.buffer)) for part in self.micro_batches]
        )


def plan_steps(
    order: Order, lengths: np.ndarray, plan: BatchPlan | StepShape, position: int, step: int = 0
) -> Iterator[StepRange]:
    """Endless plan from a position: documents in order until tokens or documents would exceed the step's."""
    while True:
        shape = plan.at(step)
        window = np.arange(position, position + shape.documents_per_step)
        total = np.cumsum(lengths[order.documents(window)], dtype=np.int64)
        taken = max(1, int(np.searchsorted(total, shape.tokens_per_step, side="right")))
        yield StepRange(position, position + taken, step)
        position, step = position + taken, step + 1


@dataclass
class StepReader(Dataset[StepBatch]):
    """Makes the step at a range of positions."""

    store: PairStore
    split: Split
    order: Order
    plan: BatchPlan | StepShape
    corrupt: Corrupt
    count: Count
    """Positions and lengths of all documents of the step, and which step -> what the loss is divided by."""
    with_rows: bool = True
    """Layouts hold padded rows too, for attention that wants them."""
    rank: int = 0
    world_size: int = 1

    def __getitem__(self, where: Any) -> Any:
        """The step, or the `UserError` that its data gave: a worker cannot raise one without a long traceback."""
        try:
            return self.make(where)
        except UserError as error:
            return error

    def make(self, where: StepRange) -> StepBatch:
        """The step at a range of positions."""
        positions = np.arange(where.start, where.end)
        indices = self.order.documents(positions)
        lengths = np.asarray(self.split.lengths[indices], dtype=np.int64)
        shape = self.plan.at(where.step)
        bins = pack(lengths, shape)
        extra = len(bins) - shape.num_micro
        bins += [np.zeros(0, dtype=np.int64)] * (-len(bins) % self.world_size)
        caps, when = shape.caps, When(where.step, self.order.epoch_of(where.start))
        mine = [
            self._micro_batch(positions[part], indices[part], caps, shape.layout, when)
            for part in bins[self.rank :: self.world_size]
        ]
        counts = self.count(positions, lengths, when)
        return StepBatch(
            where=where,
            micro_batches=[Parcel.of(MicroBatch(part, counts.as_tensors())) for part in mine],
            counts=counts,
            num_documents=len(indices),
            num_tokens=int(lengths.sum()),
            num_places=caps.num_tokens * len(bins),
            num_squares=int(np.square(lengths + self.store.manifest.num_slots).sum()),
            num_scored=sum(int(part.scored_real.sum()) for part in mine),
            num_extra=extra,
        )

    def _micro_batch(
        self, positions: np.ndarray, indices: np.ndarray, caps: Caps, layout: str, when: When
    ) -> NoisyBatch:
        documents = self.split.read(indices)
        keys = document_keys(self.order.seed, self.order.epochs(positions), documents.ids)
        latents = self.store.normalizer.normalize(documents.latents)
        batch = make_batch(documents, latents, positions, keys, caps, layout, with_rows=self.with_rows)
        return self.corrupt(replace(batch, when=when))


def make_batch(
    documents: Documents,
    latents: np.ndarray,
    positions: np.ndarray,
    keys: np.ndarray,
    caps: Caps | None = None,
    layout: str = "packed",
    *,
    with_rows: bool = True,
) -> PackedBatch:
    """Documents as one micro-batch; `latents` normalised. With caps, constant shapes."""
    num_slots = latents.shape[1]
    if layout == "padded":
        assert caps is not None
        lengths = np.pad(documents.lengths, (0, caps.num_documents - len(documents.lengths)))
        where = padded_layout(lengths, num_slots, caps.max_length, with_rows=with_rows)
    else:
        where = packed_layout(documents.lengths, num_slots, caps, with_rows=with_rows)
    tokens = np.zeros(where.num_tokens, dtype=np.int64)
    tokens[where.real.numpy()] = documents.tokens
    missing = where.num_documents - len(documents.lengths)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        latents=torch.from_numpy(np.pad(latents, ((0, missing), (0, 0), (0, 0)))),
        layout=where,
        positions=np.pad(positions, (0, missing), constant_values=-1),
        keys=np.pad(keys, (0, missing)),
    )


def make_loader(
    reader: StepReader,
    steps: Iterator[StepRange],
    *,
    num_workers: int,
    prefetch: int,
    pin_memory: bool,
    poll_seconds: float = 0.0,
) -> DataLoader[StepBatch]:
    """The planned steps in order; workers prepare them ahead. With `poll_seconds`, for `WatchedSteps` only."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=steps,  # type: ignore[arg-type]
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        timeout=poll_seconds if num_workers else 0,
        multiprocessing_context=loader_context() if num_workers and poll_seconds else None,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


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
