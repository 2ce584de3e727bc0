"""Source documents to segments: cut, tokenized, without duplicates, each with its split and its id.

Sentences are found by rules (abbreviations, initials, numbers, quotes, ellipses), chunks by their number of tokens. A
document whose latent was given is one segment or none: it is never cut, because its latent belongs to all of it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.preparation.settings import PrepareSettings
from mmldlm.preparation.sources import SourceDocument

TOKEN_CHARACTERS = 64
"""The most characters that a token is reckoned to have."""

_TITLES = (
    "mr mrs ms messrs mme mlle dr prof rev fr hon gov sen rep pres gen adm col maj capt cmdr lt sgt st mt ft"
)
_REFERENCES = (
    "no nos vol vols art arts sec secs fig figs eq eqs ch chap pp p ed eds vs viz cf approx ca al i.e e.g"
)
_NAMES = "jr sr inc ltd co corp bros dept est etc esq u.s u.k u.n e.u d.c u.s.a u.s.s.r ave blvd rd"
_DATES = "a.m p.m b.c a.d jan feb mar apr jun jul aug sept sep oct nov dec mon tue tues wed thu thurs fri"
_STATES = (
    "ala ariz ark calif colo conn del fla ga ill ind kan ky la md mass mich minn miss mo mont neb nev okla "
    "ore pa tenn tex va vt wash wis wyo"
)
_FIRST_WORDS = (
    "a an the this that these those there here he she it we they i you his her its our their my your in on at "
    "by for from to of with as if when while although though because since after before until but and or so "
    "yet nor not no what who which how why where all any each every both some many most such one two let may"
)
NEVER_END = frozenset(f"{_TITLES} {_REFERENCES}".split())
"""Abbreviations that are followed by what they belong to."""
MAY_END = frozenset(f"{_NAMES} {_DATES} {_STATES}".split())
"""Abbreviations that may be the last word of a sentence: then the next word must look like a beginning."""
BEGINNINGS = frozenset(_FIRST_WORDS.split())
LOOK_AROUND = 64
"""Characters that are looked at before and after a full stop."""

_END = re.compile(
    r"""(?P<mark>\.{2,}|…|[.!?]+|[。！？]+)(?P<close>["'”’)\]»]*)(?P<space>\s+|(?<=[。！？])|(?<=[。！？]["”’）」]))"""
)
_OPENING = "\"'“‘([«—–-"


def cutter(cut: str) -> Callable[[str], list[str]]:
    """The function that cuts a source document into segments; `chunks` are made later, by tokens."""
    if cut == "sentences":
        return split_sentences
    if cut == "paragraphs":
        return split_paragraphs
    return lambda text: [text.strip()] if text.strip() else []


def split_sentences(text: str) -> list[str]:
    """Sentences in order, each with its whitespace collapsed. A blank line always ends a sentence."""
    return [collapse(span) for paragraph in split_paragraphs(text) for span in sentence_spans(paragraph)]


def split_paragraphs(text: str) -> list[str]:
    """Blocks between blank lines, each with its whitespace collapsed."""
    blocks = re.split(r"\n[^\S\n]*\n\s*", text.replace("\r\n", "\n").replace("\r", "\n"))
    return [collapsed for block in blocks if (collapsed := collapse(block))]


def collapse(text: str) -> str:
    """One space for every run of whitespace, none at the ends."""
    return " ".join(text.split())


def sentence_spans(paragraph: str) -> Iterator[str]:
    """Sentences with the whitespace that follows them, so that joining them gives the paragraph back."""
    start = 0
    for match in _END.finditer(paragraph):
        rest = paragraph[match.end() : match.end() + LOOK_AROUND]
        before = paragraph[max(start, match.start() - LOOK_AROUND) : match.start()]
        if rest and _is_end(before, match["mark"], match["close"], rest):
            yield paragraph[start : match.end()]
            start = match.end()
    if paragraph[start:].strip():
        yield paragraph[start:]


def _is_end(before: str, mark: str, close: str, rest: str) -> bool:
    """Does the mark after `before` end a sentence, with `rest` to follow?"""
    if mark[0] in "。！？":
        return True
    following = rest.lstrip(_OPENING)
    if following and (following[0].islower() or following[0] in ".,;:"):  # also ". . ."
        return False
    return mark != "." or bool(close) or _word_may_end(before, following)


def _word_may_end(before: str, following: str) -> bool:
    """A full stop after this word: the end of a sentence, or part of an abbreviation, an initial, a number?"""
    words = before.split()
    word = words[-1].lstrip(_OPENING) if words else ""
    plain = word.lower()
    if plain in NEVER_END:  # "No." before a number is "number"; otherwise it is the answer
        return plain == "no" and not following[:1].isdigit()
    if len(word) == 1 and word.isupper():  # an initial, or the word "I"
        return word == "I" and len(words) > 1 and _begins(following)
    if plain in MAY_END or re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]", word):
        return _begins(following)
    return not (len(words) == 1 and re.fullmatch(r"\d{1,3}|[ivxlc]{1,5}", plain))  # "1. First of all"


def _begins(following: str) -> bool:
    word = re.match(r"[^\W\d_]+", following)
    return word is not None and word[0][0].isupper() and word[0].lower() in BEGINNINGS


def split_chunks(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Chunks of at most `max_tokens` tokens: whole sentences where they fit, else cut between words."""
    blocks = re.split(r"(?<=\n)(?=[^\S\n]*\n)", text)
    sentences = [span for block in blocks for span in sentence_spans(block)]
    sizes = [len(tokens) for tokens in tokenizer.encode_batch(sentences)]
    chunks = [chunk.strip() for chunk in _join(sentences, sizes, max_tokens)]
    lengths = [len(tokens) for tokens in tokenizer.encode_batch(chunks)]
    fitting: list[str] = []
    for chunk, length in zip(chunks, lengths, strict=True):
        fitting += [chunk] if length <= max_tokens else _cut_between_words(chunk, tokenizer, max_tokens)
    return fitting


def _join(sentences: list[str], sizes: list[int], max_tokens: int) -> list[str]:
    """Neighbouring sentences together as long as they fit."""
    chunks: list[str] = []
    room = 0
    for sentence, size in zip(sentences, sizes, strict=True):
        if size > room or not chunks:  # the first may hold no token
            chunks.append("")
            room = max_tokens
        chunks[-1] += sentence
        room -= size
    return chunks


def _cut_between_words(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    pieces: list[str] = []
    while text:
        window = text[: TOKEN_CHARACTERS * max_tokens]
        offsets = tokenizer.offsets(window)
        if len(offsets) <= max_tokens and len(window) == len(text):
            return [*pieces, text]
        end = len(window)
        for room in range(min(max_tokens, len(offsets)), 0, -1):  # a cut may change the tokens beside it
            end = _boundary(text, offsets[room - 1][1])
            if len(tokenizer.offsets(text[:end].strip())) <= max_tokens:
                break
        pieces.append(text[:end].strip())
        text = text[end:].strip()
    return pieces


def _boundary(text: str, end: int) -> int:
    """The last gap between words at or before `end`, if it is not too far away."""
    if end >= len(text) or text[end].isspace():
        return max(end, 1)
    gap = max(text.rfind(" ", 0, end), text.rfind("\n", 0, end))
    return gap if gap > end // 2 else max(end, 1)


BATCH = 2048
"""Segments that are tokenized together."""
KEEPS_LINES = ("none", "chunks")
"""Cuts that leave the line breaks inside a segment."""


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

    def __init__(
        self, tokenizer: Tokenizer, options: PrepareSettings, forced: Sequence[str] | None = None
    ) -> None:
        """`forced`: the splits of the first documents with text; None: as for a whole corpus."""
        self.tokenizer, self.options = tokenizer, options
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("source_documents", "empty", "too_short", "too_long_cut", "duplicates"), 0)
        )
        self.read_bytes = 0
        self.seen = SeenIds()
        self._forced = list(forced_splits(options) if forced is None else forced)
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
        for segments in self.cut(documents, split):
            fresh = self.seen.add(np.array([segment.id for segment in segments], np.int64))
            self.counts["duplicates"] += int((~fresh).sum())
            yield list(compress(segments, fresh.tolist()))

    def cut(self, documents: Iterable[SourceDocument], split: str | None) -> Iterator[list[Segment]]:
        """All segments in order, some at a time, duplicates too."""
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
        if document.has_lines:  # where pieces keep their lines, `_fit` counts those that are joined
            self.counts["lines"] += num_lines(text)
            joined = 0 if self.options.cut in KEEPS_LINES else joined_lines(text, pieces)
            self.counts["lines_joined"] += joined
        if not pieces:
            self.counts["empty"] += 1
            return []
        if split is None and self._forced:
            split = self._forced.pop(0)
        options = self.options
        split = split or choose_split(text, options.validation_share, options.test, options.seed)
        return [Piece(split, piece, document.latent, document.has_lines) for piece in pieces]

    def _finish(self, batch: list[Piece]) -> list[Segment]:
        """Tokenize, cut what is too long, leave out what is too short."""
        arrays = self.tokenizer.encode_arrays([piece.text for piece in batch])
        fitting = [
            part for piece, tokens in zip(batch, arrays, strict=True) for part in self._fit(piece, tokens)
        ]
        kept = [(piece, tokens) for piece, tokens in fitting if self._long_enough(tokens)]
        ids = text_ids([piece.text for piece, _ in kept])
        return [
            Segment(piece.text, tokens, id, piece.split, latent=piece.latent)
            for (piece, tokens), id in zip(kept, ids.tolist(), strict=True)
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


def forced_splits(options: PrepareSettings) -> tuple[str, ...]:
    """Of the first documents with text: the smallest corpus needs something to train on and something held out."""
    return ("train", "validation") if options.validation_share > 0 else ("train",)


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
