"""Where every token and latent slot of a micro-batch sits: the bridge between data, model and samplers.

Shapes: N documents, T tokens, S latent slots a document, L = T + N*S places of the stream, R rows, W row width.

The text stream is flat (T, ...) and the latent stream is flat (N*S, ...). Attention needs the parts of one document
side by side, so the *stream* orders them as: slots and tokens of document 0, of document 1, ..., filler. Filler are
the tokens at the end that belong to no document; they exist only where shapes must be constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Places of the stream in padded rows, several documents in a row."""

    places: Tensor
    """(R, W) stream place in each cell, L in empty cells."""
    cell: Tensor
    """(L,) cell of places.flatten() that holds each stream place, R*W for filler."""
    segment: Tensor
    """(R, W) which cells of a row attend to each other; -1 for cells that no one may attend to."""


@dataclass(frozen=True)
class Layout:
    """Index tensors of one micro-batch. All on one device, all of constant shape when caps were given."""

    document: Tensor
    """(T,) document of each token."""
    position: Tensor
    """(T,) place of each token in its document, from 0."""
    real: Tensor
    """(T,) bool, false for filler."""
    lengths: Tensor
    """(N,) tokens of each document."""
    starts: Tensor
    """(N+1,) first row of each document in the text stream; filler is counted to the document before it."""
    to_stream: Tensor
    """(L,) stream place -> row of cat(text, latents)."""
    from_stream: Tensor
    """(L,) row of cat(text, latents) -> stream place."""
    segment: Tensor
    """(L,) which stream places attend to each other; places that no one may attend to have -1."""
    bounds: Tensor
    """(segments + 1,) int32, where each segment of the stream starts; empty segments at the end."""
    rows: Rows | None
    """The same places as padded rows, where attention wants them."""
    full: bool
    """Every document fills its row: segments of equal length, one after the other."""
    num_slots: int
    max_segment: int
    """No segment is longer than this."""

    @property
    def num_documents(self) -> int:
        """N, documents that hold no token included."""
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, filler included."""
        return self.document.shape[0]


@dataclass(frozen=True)
class Caps:
    """Constant shapes, so that nothing is compiled twice."""

    num_tokens: int
    num_documents: int
    max_length: int


def packed_layout(
    lengths: np.ndarray, num_slots: int, caps: Caps | None = None, *, with_rows: bool = True
) -> Layout:
    """One stream without padding; with caps, filler tokens and empty documents at the end keep shapes constant."""
    lengths = np.asarray(lengths, dtype=np.int64)
    if caps is None:
        caps = Caps(int(lengths.sum()), len(lengths), int(lengths.max(initial=1)))
    used = int(lengths.sum())
    assert used <= caps.num_tokens, "more tokens than the caps allow"
    assert len(lengths) <= caps.num_documents, "more documents than the caps allow"
    assert lengths.max(initial=0) <= caps.max_length, "a document is longer than the cap"
    lengths = np.pad(lengths, (0, caps.num_documents - len(lengths)))
    starts = np.cumsum(lengths) - lengths
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(used) - np.repeat(starts, lengths)
    num_filler = caps.num_tokens - used
    document = np.pad(document, (0, num_filler), constant_values=len(lengths) - 1)
    position = np.concatenate([position, np.arange(num_filler) % caps.max_length])
    starts = np.append(starts, caps.num_tokens)
    return _assemble(lengths, starts, document, position, used, num_slots, caps, with_rows)


def padded_layout(lengths: np.ndarray, num_slots: int, max_length: int, *, with_rows: bool = True) -> Layout:
    """The classic rectangle: every document takes `max_length` tokens, past its length filler inside its row."""
    lengths = np.asarray(lengths, dtype=np.int64)
    num_documents, width = len(lengths), num_slots + max_length
    document = np.repeat(np.arange(num_documents), max_length)
    position = np.tile(np.arange(max_length), num_documents)
    num_tokens, size = len(document), num_documents * width
    cells = np.arange(size).reshape(num_documents, width)
    slots = num_tokens + np.arange(num_documents * num_slots).reshape(num_documents, num_slots)
    tokens = np.arange(num_tokens).reshape(num_documents, max_length)
    to_stream = np.concatenate([slots, tokens], axis=1).reshape(-1)
    # a row without a document may attend to itself: it is never read
    full = bool(np.isin(lengths, (0, max_length)).all())
    real = np.arange(width)[None, :] < num_slots + lengths[:, None]
    segment = np.where(real | full, np.arange(num_documents)[:, None], -1)
    return _to_layout(
        document=document, position=position, real=position < lengths[document], lengths=lengths,
        starts=np.arange(num_documents + 1) * max_length, to_stream=to_stream, segment=segment.reshape(-1),
        bounds=np.arange(num_documents + 1) * width,
        rows=(cells, np.arange(size), segment) if with_rows else None, full=full,
        num_slots=num_slots, max_segment=width,
    )  # fmt: skip


def _assemble(
    lengths: np.ndarray, starts: np.ndarray, document: np.ndarray, position: np.ndarray, used: int,
    num_slots: int, caps: Caps, with_rows: bool,
) -> Layout:  # fmt: skip
    num_documents, num_tokens = len(lengths), len(document)
    spans = lengths + num_slots
    begins = np.cumsum(spans) - spans
    end = int(spans.sum())
    size = num_tokens + num_documents * num_slots
    # place of each token and each slot in the stream
    place = np.empty(size, dtype=np.int64)
    place[:used] = begins[document[:used]] + num_slots + position[:used]
    place[used:num_tokens] = np.arange(end, size)
    place[num_tokens:] = (begins[:, None] + np.arange(num_slots)[None, :]).reshape(-1)
    to_stream = np.empty(size, dtype=np.int64)
    to_stream[place] = np.arange(size)

    width = caps.max_length + num_slots
    # filler is cut into segments of its own, so that every place is computed and none is longer than the cap
    tail = np.arange(end, size, width)
    most = num_documents + -(-num_tokens // width) + 1
    bounds = np.full(most + 1, size, dtype=np.int64)
    bounds[: num_documents + len(tail)] = np.concatenate([begins, tail])
    owner = np.repeat(np.arange(num_documents), spans)
    filler_segment = num_documents + (np.arange(end, size) - end) // width
    return _to_layout(
        document=document, position=position, real=np.arange(num_tokens) < used, lengths=lengths, starts=starts,
        to_stream=to_stream, segment=np.concatenate([owner, filler_segment]), bounds=bounds,
        rows=_rows_of(spans, begins, owner, size, width) if with_rows else None, full=False,
        num_slots=num_slots, max_segment=width,
    )  # fmt: skip


def _rows_of(
    spans: np.ndarray, begins: np.ndarray, owner: np.ndarray, size: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, cell and segment of `Rows` for documents that follow each other in the stream."""
    row, offset = _place_in_rows(spans, width)
    most_rows = min(len(spans), 2 * -(-size // width) + 1)
    place = np.arange(len(owner))
    where = (row[owner], offset[owner] + place - begins[owner])
    places = np.full((most_rows, width), size, dtype=np.int64)
    places[where] = place
    segment = np.full((most_rows, width), -1, dtype=np.int64)
    segment[where] = owner
    cell = np.full(size, places.size, dtype=np.int64)
    cell[: len(owner)] = where[0] * width + where[1]
    return places, cell, segment


def _place_in_rows(spans: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first column of each document, in order, as many in a row as fit: at most twice the rows needed."""
    row, offset = np.zeros(len(spans), dtype=np.int64), np.zeros(len(spans), dtype=np.int64)
    current, used = 0, 0
    for document, span in enumerate(spans.tolist()):
        if used + span > width:
            current, used = current + 1, 0
        row[document], offset[document] = current, used
        used += span
    return row, offset


def _to_layout(
    *,
    to_stream: np.ndarray,
    bounds: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    full: bool,
    num_slots: int,
    max_segment: int,
    **arrays: np.ndarray,
) -> Layout:
    from_stream = np.empty_like(to_stream)
    from_stream[to_stream] = np.arange(len(to_stream))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return Layout(
        to_stream=torch.from_numpy(to_stream),
        from_stream=torch.from_numpy(from_stream),
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        rows=None if rows is None else Rows(*map(torch.from_numpy, rows)),
        full=full,
        num_slots=num_slots,
        max_segment=max_segment,
        **tensors,
    )
