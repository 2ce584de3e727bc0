"""The order of the documents, and whole documents into micro-batches of constant size."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from mmldlm import randomness
from mmldlm.config import BatchConfig, BatchStage
from mmldlm.errors import UserError
from mmldlm.layout import Caps


@dataclass(frozen=True)
class Order:
    """Which document stands at which position."""

    num_documents: int
    seed: int

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Epoch of each position."""
        return positions // self.num_documents

    def epoch_of(self, position: int) -> float:
        """Passes over all documents that are done at a position."""
        return position / self.num_documents

    def documents(self, positions: np.ndarray) -> np.ndarray:
        """Index in the split of the document at each position."""
        epochs, ranks = np.divmod(positions, self.num_documents)
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = randomness.make_key(self.seed, randomness.ORDER, int(epoch))
            indices[here] = randomness.permute(ranks[here], self.num_documents, key)
        return indices


def document_keys(seed: int, epochs: np.ndarray, ids: np.ndarray, draw: int = 0) -> np.ndarray:
    """Each document's own source of randomness: a function of (seed, epoch, document, draw)."""
    return randomness.make_key(seed, epochs.astype(np.uint64), ids.astype(np.uint64), draw)


_ROUND = 16
_SIZES = (-0.5, 0.5)
"""Sizes of micro-batches besides the largest, in deviations from the expected sum of lengths. Each one is compiled and
recorded once, so there are few."""


@dataclass(frozen=True)
class Lengths:
    """What is to be known about the documents of a split."""

    mean: float
    longest: int
    deviation: float
    """Of the lengths."""
    equal: bool
    """All documents are as long as the longest."""

    @classmethod
    def of(cls, lengths: np.ndarray, longest: int) -> Lengths:
        """From the lengths of a split; `longest` may be that of another split."""
        return cls(
            float(lengths.mean()),
            longest,
            float(lengths.std()),
            bool(lengths.min() == lengths.max() == longest),
        )


@dataclass(frozen=True)
class StepShape:
    """How a step is cut into micro-batches. The documents of a step depend on the first two numbers alone."""

    tokens_per_step: int
    documents_per_step: int
    num_micro: int
    """Micro-batches of a step over all ranks."""
    caps: Caps
    """Shape of each micro-batch; the largest, where there are several."""
    layout: str = "packed"
    """packed or padded. Where all documents have the same length the two coincide, and padded has no mask."""
    smallest: bool = False
    """No smaller micro-batch is possible."""
    sizes: tuple[int, ...] = ()
    """Smaller numbers of tokens for a micro-batch, ascending: where documents are counted, their sums differ."""

    def at(self, step: int) -> StepShape:
        """The shape of a step: a plan of one stage."""
        return self

    def caps_for(self, num_tokens: int) -> Caps:
        """The smallest shape that holds so many tokens."""
        return next(
            (replace(self.caps, num_tokens=size) for size in self.sizes if size >= num_tokens), self.caps
        )


@dataclass(frozen=True)
class BatchPlan:
    """The shapes of a run, stage by stage."""

    stages: tuple[tuple[int, StepShape], ...]
    """(first step that it does not cover, shape)"""
    last: StepShape

    def at(self, step: int) -> StepShape:
        """The shape of a step, counted from 0."""
        return next((shape for until, shape in self.stages if step < until), self.last)


def plan_batches(
    batch: BatchConfig, lengths: Lengths, *, world_size: int = 1, layout: str = "packed", halvings: int = 0
) -> BatchPlan:
    """All stages of `batch.schedule`; each micro-batch halved so many times, because memory ran out."""

    def shape(sizes: BatchConfig, name: str) -> StepShape:
        return plan_shape(sizes, lengths, world_size=world_size, layout=layout, halvings=halvings, name=name)

    stages = tuple(
        (stage.until, shape(_sizes_of(batch, stage), f"batch.schedule[{number}]"))
        for number, stage in enumerate(batch.schedule)
    )
    return BatchPlan(stages, shape(batch, "batch"))


def _sizes_of(batch: BatchConfig, stage: BatchStage) -> BatchConfig:
    names = ("tokens_per_step", "documents_per_step", "micro_tokens", "micro_documents")
    sizes = {name: value for name in names if (value := getattr(stage, name)) is not None}
    return replace(batch, schedule=[], **sizes)


def plan_shape(
    batch: BatchConfig,
    lengths: Lengths,
    *,
    world_size: int = 1,
    layout: str = "packed",
    halvings: int = 0,
    name: str = "batch",
) -> StepShape:
    """Constant shapes for a split with documents of these lengths; `name` is where the sizes were set."""
    longest = lengths.longest
    tokens = batch.tokens_per_step or (batch.documents_per_step or 1) * longest
    for key, value in (("tokens_per_step", tokens), ("micro_tokens", batch.micro_tokens)):
        if value is not None and value < longest:
            raise UserError(
                f"{name}.{key}={value}: the longest document has {longest} tokens; "
                f"allowed is at least that, or prepare the store with a smaller --max-tokens"
            )
    documents = batch.documents_per_step or _most_documents(tokens, lengths)
    if lengths.equal or layout == "padded":
        if lengths.equal:
            documents = min(documents, tokens // longest)
        return _rectangle(batch, tokens, documents, longest, world_size, halvings)
    wanted = min(tokens, _usual_tokens(documents, lengths)) * (1.0 + batch.slack)
    share = _round_up(wanted / world_size)  # more never comes to a rank at once
    whole = min(batch.micro_tokens or share, share)
    largest = max(longest, whole >> halvings)
    num_micro = int(np.ceil(wanted / largest))
    if batch.micro_documents:
        num_micro = max(num_micro, -(-documents // max(1, batch.micro_documents >> halvings)))
    num_micro = -(-num_micro // world_size) * world_size
    room = min(_round_up(max(wanted / num_micro, longest)), max(largest, longest))
    most = min(documents, int(documents / num_micro * 1.1) + 8) if num_micro > 1 else documents
    counted = tokens > _usual_tokens(documents, lengths)
    sizes = [
        _round_up(_usual_tokens(documents, lengths, s) * (1.0 + batch.slack) / num_micro) for s in _SIZES
    ]
    return StepShape(
        tokens, documents, num_micro, Caps(room, most, longest),
        sizes=tuple(size for size in sizes if counted and size < room), smallest=largest == longest,
    )  # fmt: skip


def _most_documents(tokens: int, lengths: Lengths) -> int:
    """A number that the documents of a step hardly ever exceed: five deviations more than on average."""
    mean = tokens / lengths.mean
    return int(mean + 5.0 * lengths.deviation / lengths.mean * mean**0.5) + 16


def _usual_tokens(documents: int, lengths: Lengths, deviations: float = 2.0) -> int:
    """Tokens of so many documents; two deviations more than on average, which one step in forty exceeds."""
    return int(documents * lengths.mean + deviations * lengths.deviation * documents**0.5) + 1


def _rectangle(
    batch: BatchConfig, tokens: int, documents: int, longest: int, world_size: int, halvings: int
) -> StepShape:
    """Every document takes a row of the full width, however short it is."""
    rows = min(
        -(-documents // world_size),
        (batch.micro_tokens or documents * longest) // longest,
        batch.micro_documents or documents,
    )
    rows = max(1, rows >> halvings)
    num_micro = -(-documents // rows)
    num_micro = -(-num_micro // world_size) * world_size
    rows = max(1, -(-documents // num_micro))
    return StepShape(
        tokens, documents, num_micro, Caps(rows * longest, rows, longest), "padded", smallest=rows == 1
    )


def _round_up(size: float) -> int:
    return int(np.ceil(size / _ROUND)) * _ROUND


def pack(lengths: np.ndarray, shape: StepShape) -> list[np.ndarray]:
    """Documents of a step -> indices for each micro-batch, at least `num_micro` of them; extra ones if they do not fit.

    Longest first, each into the emptiest micro-batch: equal work for all. Where that overflows, into the fullest
    one with room (best fit), which wastes least.
    """
    if shape.layout == "padded":
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
