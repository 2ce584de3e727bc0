"""The data that flows between rooms: a batch, its noisy twin, and the predictions of the denoiser.

Shapes: N documents, T tokens, S latent slots, C latent channels, D width, V vocabulary, R scored rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.errors import UserError
from mmldlm.layout import Layout, packed_layout

Moved = TypeVar("Moved")


@dataclass(frozen=True)
class DataShape:
    """Sizes of the network's inputs and outputs, which the data determines."""

    vocab_size: int
    num_slots: int
    num_channels: int
    max_length: int


class When(NamedTuple):
    """How far a run is: what may change from step to step is a function of this."""

    step: int = 0
    """Counted from 0."""
    epoch: float = 0.0
    """Passes over the documents that are done when the step begins."""


@dataclass(frozen=True)
class PackedBatch:
    """Clean documents of one micro-batch: one stream of tokens and their latents.

    >>> import numpy as np
    >>> from mmldlm import PackedBatch
    >>> batch = PackedBatch.of([[3, 1, 4], [1, 5]], np.zeros((2, 7), np.float32))
    >>> batch.tokens.tolist(), tuple(batch.latents.shape), batch.layout.lengths.tolist()
    ([3, 1, 4, 1, 5], (2, 1, 7), [3, 2])
    """

    tokens: Tensor
    """(T,) int64; what filler holds does not matter."""
    latents: Tensor
    """(N, S, C) float32, normalised."""
    layout: Layout
    positions: np.ndarray
    """(N,) place of each document in the endless order of documents; -1 where there is none."""
    keys: np.ndarray
    """(N,) uint64, the document's own source of randomness."""
    when: When = field(default_factory=When)
    """The step that it belongs to."""
    derived: np.ndarray | None = None
    """(N,) bool, true for documents that `prepare --derive` made of others; None: there are none."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int] | np.ndarray],
        latents: np.ndarray | Tensor,
        *,
        seed: int = 0,
        first: int = 0,
    ) -> PackedBatch:
        """Token ids of each text and their normalised latents, (n, channels) or (n, slots, channels).

        `first` is the number of documents that were trained on before: times and noise are a function of the seed and
        of each document's number.
        """
        lengths = np.array([len(text) for text in tokens], np.int64)
        array = np.asarray(latents, np.float32)
        array = array[:, None] if array.ndim == 2 else array
        if array.ndim != 3 or len(array) != len(lengths):
            raise UserError(
                f"latents of shape {tuple(np.shape(latents))}: (n, channels) or (n, slots, channels) is needed for the "
                f"{len(lengths)} texts"
            )
        if not len(lengths) or lengths.min() == 0:
            raise UserError("tokens: at least one text is needed, and each needs at least one token")
        positions = first + np.arange(len(lengths))
        return cls(
            tokens=torch.from_numpy(np.concatenate([np.asarray(text, np.int64) for text in tokens])),
            latents=torch.from_numpy(np.ascontiguousarray(array)),
            layout=packed_layout(lengths, array.shape[1]),
            positions=positions,
            keys=randomness.make_key(seed, positions),
        )


@dataclass(frozen=True)
class Times:
    """What a mode comes down to: two times and what is to be produced, per document."""

    text_time: np.ndarray
    """(N,) float32 in [0, 1]; 0 clean, 1 all masked."""
    latent_time: np.ndarray
    """(N,) float32 in [0, 1]; 0 clean, 1 pure noise."""
    text_is_target: np.ndarray
    """(N,) bool."""
    latent_is_target: np.ndarray
    """(N,) bool."""


@dataclass(frozen=True)
class NoisyBatch:
    """A corrupted micro-batch with everything that the denoiser and the objective need."""

    layout: Layout
    tokens: Tensor
    """(T,) clean."""
    latents: Tensor
    """(N, S, C) clean."""
    noisy_tokens: Tensor
    """(T,)"""
    noisy_latents: Tensor
    """(N, S, C)"""
    latent_noise: Tensor
    """(N, S, C)"""
    text_time: Tensor
    """(N,) float32"""
    latent_time: Tensor
    """(N,) float32"""
    latent_target: Tensor
    """(N,) float32, 1 where the latent is scored."""
    length_target: Tensor
    """(N,) float32, 1 where the document length is scored."""
    scored: Tensor
    """(R,) token rows that are scored: masked tokens of documents whose text is a target, then repeats of the last row
    of the stream."""
    scored_real: Tensor
    """(R,) bool, false for the repeats."""


@dataclass(frozen=True)
class Counts:
    """What the parts of the loss are divided by: counts over the whole step, all ranks and micro-batches."""

    tokens: float | Tensor
    """Tokens of the documents whose text is a target."""
    slots: float | Tensor
    """Latent slots that are a target."""
    documents: float | Tensor
    """Documents whose length is scored."""

    @classmethod
    def of(cls, *batches: NoisyBatch) -> Counts:
        """Those of a step that consists of these micro-batches."""
        return cls(
            tokens=sum(float((batch.length_target * batch.layout.lengths).sum()) for batch in batches),
            slots=sum(float(batch.latent_target.sum()) * batch.layout.num_slots for batch in batches),
            documents=sum(float(batch.length_target.sum()) for batch in batches),
        )

    def as_tensors(self) -> Counts:
        """Numbers that can travel to a device."""
        return Counts(*(torch.tensor(float(count)) for count in (self.tokens, self.slots, self.documents)))


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: what it computes on, and what its losses are divided by."""

    noisy: NoisyBatch
    counts: Counts


@dataclass(frozen=True)
class DenoiserOutput:
    """Predictions of the denoiser for a noisy micro-batch."""

    token_hidden: Tensor
    """(T, D) last hidden state of the text stream, or (R, D) of the rows that were asked for; `Denoiser.token_logits`
    turns rows of it into logits."""
    latent_prediction: Tensor
    """(N, S, C)"""
    length_logits: Tensor | None
    """(N, longest length), where the length is modelled; index i means length i + 1."""


class Piece(NamedTuple):
    """Rows of a tensor that is divided among ranks."""

    start: int
    """The first one."""
    rows: int
    shape: tuple[int, ...]
    """Of the whole tensor."""


def map_tensors(value: Moved, change: Callable[[Tensor], Tensor]) -> Moved:
    """The same dataclass with every tensor, also in nested dataclasses, changed."""
    return cast(Moved, _map_parts(value, Tensor, change))


def _map_parts(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    assert is_dataclass(value)
    changed: dict[str, Any] = {}
    for item in fields(value):
        part = getattr(value, item.name)
        if isinstance(part, kind):
            part = change(part)
        elif is_dataclass(part):
            part = _map_parts(part, kind, change)
        changed[item.name] = part
    return type(value)(**changed)  # type: ignore[misc]


def to_device(value: Moved, device: torch.device | str) -> Moved:
    """The same dataclass on the device; from page-locked memory the copy does not wait."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


class Slot(NamedTuple):
    """Where a tensor lies in a buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parcel(Generic[Moved]):
    """A dataclass whose tensors lie in one buffer: it goes to another process or device in one piece."""

    buffer: Tensor
    """(bytes,) uint8"""
    template: Any
    """The dataclass with a `Slot` in place of each tensor. Parcels with equal templates differ in their bytes only."""

    @classmethod
    def of(cls, value: Moved) -> Parcel[Moved]:
        """Copy all tensors into a new buffer."""
        placed: list[tuple[Slot, Tensor]] = []
        end = 0

        def place(tensor: Tensor) -> Slot:
            nonlocal end
            slot = Slot(end, tensor.dtype, tuple(tensor.shape))
            placed.append((slot, tensor))
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            return slot

        template = _map_parts(value, Tensor, place)
        parcel = cls(torch.empty(end, dtype=torch.uint8), template)
        for slot, tensor in placed:
            parcel._view(slot).copy_(tensor)
        return parcel

    def open(self) -> Moved:
        """The dataclass; its tensors are views of the buffer."""
        return cast(Moved, _map_parts(self.template, Slot, self._view))

    def with_buffer(self, buffer: Tensor) -> Parcel[Moved]:
        """The same shapes in another buffer."""
        return replace(self, buffer=buffer)

    def _view(self, slot: Slot) -> Tensor:
        size = math.prod(slot.shape) * slot.dtype.itemsize
        return self.buffer[slot.offset : slot.offset + size].view(slot.dtype).view(slot.shape)


_ALIGNED = 256
"""Bytes; what vector loads on a GPU like."""
