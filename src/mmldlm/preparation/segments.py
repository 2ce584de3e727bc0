"""Source documents to segments: cut, tokenized, without duplicates, each with its split and its id.

A document whose latent was given is one segment or none: it is never cut, because its latent belongs to all of it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import numpy as np

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.cutting import CUTS, collapse, cutter, split_chunks
from mmldlm.preparation.sources import SourceDocument

BATCH = 2048
"""Segments that are tokenized together."""
SHORTEST_MAX = 8
"""Below this many tokens not even one unusual character is sure to fit."""
MOST_DERIVED = 16
KEEPS_LINES = ("none", "chunks")
"""Cuts that leave the line breaks inside a segment."""


@dataclass(frozen=True)
class SegmentOptions:
    """What becomes of a source document."""

    cut: str = "none"
    max_tokens: int = 128
    min_tokens: int = 1
    limit: int | None = None
    validation: float = 0.05
    test: float = 0.0
    seed: int = 0
    derive: int = 0
    """So many spans and so many splices of each training document are added, see `derive`."""

    def __post_init__(self) -> None:
        problems = [
            (self.cut not in CUTS, f"cut={self.cut}: allowed are {', '.join(CUTS)}"),
            (
                self.max_tokens < SHORTEST_MAX,
                f"max_tokens={self.max_tokens}: at least {SHORTEST_MAX} is needed",
            ),
            (
                not 1 <= self.min_tokens <= self.max_tokens,
                f"min_tokens={self.min_tokens}: allowed is 1 to max_tokens ({self.max_tokens})",
            ),
            (self.limit is not None and self.limit < 1, f"limit={self.limit}: at least 1 is needed"),
            (
                not 0 <= self.validation < 1,
                f"validation={self.validation}: a share from 0 to below 1 is needed",
            ),
            (not 0 <= self.test < 1, f"test={self.test}: a share from 0 to below 1 is needed"),
            (self.validation + self.test >= 1, "validation and test together: less than 1 is needed"),
            (
                not 0 <= self.derive <= MOST_DERIVED,
                f"derive={self.derive}: allowed is 0 (nothing) to {MOST_DERIVED}",
            ),
        ]
        wrong = [text for is_wrong, text in problems if is_wrong]
        if wrong:
            raise UserError("; ".join(wrong))


class Piece(NamedTuple):
    """A cut text on its way to a segment."""

    split: str
    text: str
    latent: np.ndarray | None
    has_lines: bool
    """Its line breaks come from a plain text file."""


class Segment(NamedTuple):
    """One document of the store, before it has its latent."""

    text: str
    tokens: np.ndarray
    id: int
    split: str
    made_of: str | None = None
    """For a derived document, what it is made of."""
    latent: np.ndarray | None = None
    """(S, C) if it was given."""


class Segmenter:
    """Streams segments and counts what it leaves out. Make a new one for each pass."""

    def __init__(self, tokenizer: Tokenizer, options: SegmentOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("source_documents", "empty", "too_short", "too_long_cut", "duplicates"), 0)
        )
        self.read_bytes = 0
        self.seen = SeenIds()
        # so that the smallest corpus has something to train on and something held out
        self._forced = ["train", "validation"] if options.validation > 0 else ["train"]
        self._cut = cutter(options.cut)

    def segments(
        self, documents: Iterable[SourceDocument], split: str | None = None
    ) -> Iterator[list[Segment]]:
        """All segments in order, some at a time, or the sample that `limit` asks for.

        With `split` all of them go there, whole: shares and limit are for sources without a split of their own.
        """
        stream, limit = self._stream(documents, split), self.options.limit
        if limit is None or split is not None:
            return stream
        return iter([self._sample(chain.from_iterable(stream), limit)])

    def _stream(self, documents: Iterable[SourceDocument], split: str | None) -> Iterator[list[Segment]]:
        batch: list[Piece] = []
        before = self.read_bytes
        for document in documents:
            batch += self._cut_document(document, split)
            self.read_bytes = before + document.read_bytes
            if len(batch) >= BATCH:
                yield self._finish(batch)
                batch = []
        yield self._finish(batch)

    def _cut_document(self, document: SourceDocument, split: str | None) -> list[Piece]:
        """What is cut from a document; the split is given, or follows from the whole document."""
        self.counts["source_documents"] += 1
        text = document.text or ""
        pieces = self._cut(text)
        if document.has_lines:
            self._count_lines(text, pieces)
        if not pieces:
            self.counts["empty"] += 1
            return []
        split = split or self._choose_split(text)
        return [Piece(split, piece, document.latent, document.has_lines) for piece in pieces]

    def _count_lines(self, text: str, pieces: list[str]) -> None:
        """Lines of plain text, and how many of them do not begin a piece; where pieces keep their lines, see `_fit`."""
        self.counts["lines"] += num_lines(text)
        if self.options.cut not in KEEPS_LINES:
            self.counts["lines_joined"] += joined_lines(text, pieces)

    def _choose_split(self, text: str) -> str:
        if self._forced:
            return self._forced.pop(0)
        return choose_split(text, self.options.validation, self.options.test, self.options.seed)

    def _finish(self, batch: list[Piece]) -> list[Segment]:
        """Tokenize, cut what is too long, leave out what is too short or known."""
        arrays = self.tokenizer.encode_arrays([piece.text for piece in batch])
        fitting = [
            part for piece, tokens in zip(batch, arrays, strict=True) for part in self._fit(piece, tokens)
        ]
        kept = [(piece, tokens) for piece, tokens in fitting if self._long_enough(tokens)]
        ids = text_ids([piece.text for piece, _ in kept])
        fresh = self.seen.add(ids)
        self.counts["duplicates"] += int((~fresh).sum())
        return [
            Segment(piece.text, tokens, id, piece.split, latent=piece.latent)
            for (piece, tokens), id, is_fresh in zip(kept, ids.tolist(), fresh.tolist(), strict=True)
            if is_fresh
        ]

    def _fit(self, piece: Piece, tokens: np.ndarray) -> list[tuple[Piece, np.ndarray]]:
        """The piece, or the chunks that it is cut into where it is too long."""
        parts = [(piece, tokens)]
        if len(tokens) > self.options.max_tokens:
            if piece.latent is not None:
                self.counts["too_long_left_out"] += 1
                return []
            if self.options.cut != "chunks":
                self.counts["too_long_cut"] += 1
            chunks = split_chunks(piece.text, self.tokenizer, self.options.max_tokens)
            arrays = self.tokenizer.encode_arrays(chunks)
            parts = [(piece._replace(text=chunk), array) for chunk, array in zip(chunks, arrays, strict=True)]
        if piece.has_lines and self.options.cut in KEEPS_LINES:
            self.counts["lines_joined"] += sum(num_lines(part.text) - 1 for part, _ in parts)
        return parts

    def _long_enough(self, tokens: np.ndarray) -> bool:
        if len(tokens) >= self.options.min_tokens:
            return True
        self.counts["too_short" if len(tokens) else "empty"] += 1
        return False

    def _sample(self, stream: Iterator[Segment], limit: int) -> list[Segment]:
        """The `limit` segments whose hashes are smallest: a fair sample of all, in their order."""
        heap: list[tuple[int, int, Segment]] = []
        self.counts["left_by_limit"] = 0
        for position, segment in enumerate(stream):
            key = hash63(f"{self.options.seed} {segment.id}")
            entry = (-key, position, segment)
            if len(heap) < limit:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
                self.counts["left_by_limit"] += 1
        return [segment for _, _, segment in sorted(heap, key=lambda entry: entry[1])]


def num_lines(text: str) -> int:
    """Lines that are not blank."""
    return sum(1 for line in text.splitlines() if line.strip())


def joined_lines(text: str, pieces: list[str]) -> int:
    """Lines that do not begin a piece; of the pieces only the whitespace may differ from the text."""
    starts, position = set(), 0
    for piece in pieces:
        starts.add(position)
        position += sum(map(len, piece.split()))
    joined, position = 0, 0
    for line in text.splitlines():
        if line.strip():
            joined += position not in starts
            position += sum(map(len, line.split()))
    return joined


def hash63(text: str) -> int:
    """A hash that fits a signed 64-bit integer, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def text_id(text: str) -> int:
    """The id of a document: a hash of its text, whitespace collapsed."""
    return hash63(collapse(text))


def text_ids(texts: Iterable[str]) -> np.ndarray:
    """The same for many documents."""
    digests = [
        blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for text in texts
    ]
    return (np.frombuffer(b"".join(digests), ">u8") >> 1).astype(np.int64)


def choose_split(text: str, validation: float, test: float, seed: int) -> str:
    """The split of a source document, from a hash of its text, so that all its segments stay together."""
    position = hash63(f"split {seed} {collapse(text)}") / 2**63
    if position < validation:
        return "validation"
    return "test" if position < validation + test else "train"


class SeenIds:
    """The ids met so far, eight bytes each: sorted runs whose sizes at least halve, merged as they grow."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> np.ndarray:
        """True for each id that is new, for the first of its kind in `ids` only."""
        fresh = np.zeros(len(ids), bool)
        fresh[np.unique(ids, return_index=True)[1]] = True
        for run in self._runs:
            position = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            fresh &= run[position] != ids
        self._insert(np.sort(ids[fresh]))
        return fresh

    def _insert(self, run: np.ndarray) -> None:
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)
