"""Whole documents into micro-batches of constant size."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from mmldlm.config import BatchConfig
from mmldlm.errors import UserError
from mmldlm.layout import Caps

_ROUND = 16


@dataclass(frozen=True)
class StepShape:
    """How a step is cut into micro-batches. The documents of a step depend on the first two numbers alone."""

    tokens_per_step: int
    documents_per_step: int
    num_micro: int
    """Micro-batches of a step over all ranks."""
    caps: Caps
    """Shape of each micro-batch."""


def plan_shape(
    batch: BatchConfig,
    *,
    mean_length: float,
    max_length: int,
    num_slots: int,
    world_size: int = 1,
    layout: str = "packed",
) -> StepShape:
    """Constant shapes for a split with documents of these lengths."""
    if batch.tokens_per_step < max_length:
        raise UserError(
            f"batch.tokens_per_step={batch.tokens_per_step}: the longest document has {max_length} tokens; "
            f"allowed is at least that, or prepare the store with a smaller --max-tokens"
        )
    if batch.micro_tokens is not None and batch.micro_tokens < max_length:
        raise UserError(
            f"batch.micro_tokens={batch.micro_tokens}: the longest document has {max_length} tokens; "
            f"allowed is at least that, or prepare the store with a smaller --max-tokens"
        )
    documents = batch.documents_per_step or int(batch.tokens_per_step / mean_length * 1.25) + 16
    wanted = batch.tokens_per_step * (1.0 + batch.slack)
    largest = batch.micro_tokens or int(np.ceil(wanted / _ROUND)) * _ROUND
    num_micro = int(np.ceil(wanted / largest))
    num_micro = -(-num_micro // world_size) * world_size
    if layout == "padded":
        # every document takes a row of the full width, however short it is
        rows = max(1, -(-documents // num_micro))
        caps = Caps(rows * max_length, rows, max_length)
    else:
        room = int(np.ceil(max(wanted / num_micro, max_length) / _ROUND)) * _ROUND
        caps = Caps(min(room, largest), min(documents, int(documents / num_micro * 1.1) + 8), max_length)
    return StepShape(batch.tokens_per_step, documents, num_micro, caps)


def pack(lengths: np.ndarray, shape: StepShape, *, padded: bool = False) -> list[np.ndarray]:
    """Documents of a step -> indices for each micro-batch, at least `num_micro` of them; extra ones if they do not fit.

    Longest first, each into the emptiest micro-batch: equal work for all. Where that overflows, into the fullest
    one with room (best fit), which wastes least.
    """
    if padded:
        rows = shape.caps.num_documents
        count = max(shape.num_micro, -(-len(lengths) // rows))
        return [part.astype(np.int64) for part in np.array_split(np.arange(len(lengths)), count)]
    if shape.num_micro == 1 and _fits(lengths, shape.caps):
        return [np.arange(len(lengths))]
    longest_first = np.argsort(-lengths, kind="stable")
    spread = _spread(lengths, longest_first, shape)
    bins = spread if spread is not None else _best_fit(lengths, longest_first, shape)
    return [np.sort(np.array(members, dtype=np.int64)) for members in bins]


def _fits(lengths: np.ndarray, caps: Caps) -> bool:
    return int(lengths.sum()) <= caps.num_tokens and len(lengths) <= caps.num_documents


def _spread(lengths: np.ndarray, longest_first: np.ndarray, shape: StepShape) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(shape.num_micro)]
    heap = [(0, number) for number in range(shape.num_micro)]
    for document in longest_first.tolist():
        load, number = heapq.heappop(heap)
        load += int(lengths[document])
        if load > shape.caps.num_tokens or len(bins[number]) >= shape.caps.num_documents:
            return None
        bins[number].append(document)
        heapq.heappush(heap, (load, number))
    return bins


def _best_fit(lengths: np.ndarray, longest_first: np.ndarray, shape: StepShape) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(shape.num_micro)]
    room = np.full(shape.num_micro, shape.caps.num_tokens, dtype=np.int64)
    count = np.zeros(shape.num_micro, dtype=np.int64)
    for document in longest_first.tolist():
        length = int(lengths[document])
        left = np.where(
            (room >= length) & (count < shape.caps.num_documents), room - length, np.iinfo(np.int64).max
        )
        number = int(left.argmin())
        if left[number] == np.iinfo(np.int64).max:
            bins.append([])
            room, count, number = np.append(room, shape.caps.num_tokens), np.append(count, 0), len(bins) - 1
        bins[number].append(document)
        room[number] -= length
        count[number] += 1
    return bins
