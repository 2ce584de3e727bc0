"""More training documents out of the ones there are: spans of a document, splices of two, words swapped.

Every draw is a hash of the seed and of the document's id, so it is the same in any order of reading and after a
restart. A splice needs a second document, a swap words of others, and a stream cannot look one up. So the text is read
once before, to choose a fair sample of the training documents (those whose hashes are smallest) that stays in memory;
second halves and new words come from it. Memory is bounded by that sample and eight bytes for the id of each text.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress, islice, repeat
from typing import NamedTuple

import numpy as np

from mmldlm.data.format import DERIVED
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.preparation.cutting import BATCH, SeenIds, Segment, hash63, text_ids
from mmldlm.preparation.settings import PrepareSettings

MOST_PARTNERS = 65_536
PARTNER_TOKENS = 2**23
"""The sample of second halves holds at most so many documents, and so many tokens if all were of the longest kind."""
SHORTEST_SPAN = 2
"""Words."""

FEWEST_WORDS = 3
"""A document of fewer has no words swapped."""

OUTCOMES = (*DERIVED, "derived_too_short", "derived_too_long")
_PLACES = {"span": 0, "splice": 1, "swap": 2}
"""Of the kinds, in `DERIVED`."""
LOT = 128
"""Documents from which is drawn in one go."""
LOTS_AHEAD = 16
"""Lots that are begun before the first is waited for."""

_WORD = re.compile(r"\S+")
_BOUNDARY = re.compile(r"[:;,.!?](?=\s)")
_LETTER = re.compile(r"\w")
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0xAC00)) if unicodedata.category(mark)[0] == "M")
"""Vowel signs and accents that are characters of their own, as in Hindi and Thai; `\\w` leaves them out."""
_LETTERS = re.compile(rf"\w[\w'{_MARKS}-]*")


class Candidate(NamedTuple):
    """A derived text before it is known whether it may enter the store."""

    kind: str
    text: str
    made_of: str
    """`span ID FIRST END`: words FIRST to END (without it, from 0); `splice ID END ID START`: the characters up to
    END of one document, those from START of the other; `swap ID PLACE ID WORD ...`: the word at PLACE became word
    WORD of another document, and so on."""


class Drawn(NamedTuple):
    """All candidates of some documents, whether their texts are new or not."""

    texts: list[str]
    made_of: list[str]
    ids: np.ndarray
    outcomes: np.ndarray
    """What becomes of each if its text is new: places in `OUTCOMES`."""
    tokens: np.ndarray
    """Of all of them, one after the other."""
    lengths: np.ndarray

    def segments(self, kept: np.ndarray) -> list[Segment]:
        """Those for which `kept` is true."""
        ends, rows = self.lengths.cumsum(), kept.tolist()
        starts, stops, ids = (column[kept].tolist() for column in (ends - self.lengths, ends, self.ids))
        tokens = [self.tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
        texts, made_of = compress(self.texts, rows), compress(self.made_of, rows)
        columns = zip(texts, tokens, ids, repeat("train"), made_of, repeat(None), strict=False)
        return list(map(Segment._make, columns))


Parent = tuple[int, str]
"""Id and text of a document that others are derived from."""
Begin = Callable[[list[Parent]], Callable[[], Drawn]]
"""Begins `Deriver.draw` and returns what waits for its result."""


@dataclass(frozen=True)
class Survey:
    """What has to be known of all documents before the first one can be spliced."""

    partners: list[tuple[int, str]]
    """(id, text) of training documents with a boundary: a sample that does not depend on the order of reading."""
    num_documents: int

    @classmethod
    def of(cls, segments: Iterable[Segment], options: PrepareSettings) -> Survey:
        """Read all segments and keep the training documents with the smallest hashes."""
        num_documents = 0

        def ranked() -> Iterator[tuple[int, int, str]]:
            nonlocal num_documents
            for segment in segments:
                num_documents += 1
                if segment.split == "train" and boundaries(segment.text):
                    yield partner_key(options, segment.id), segment.id, segment.text

        chosen = heapq.nsmallest(num_partners(options), ranked())
        return cls([(id, text) for _, id, text in chosen], num_documents)


def num_partners(options: PrepareSettings) -> int:
    """How many documents the sample of second halves may hold."""
    return max(1, min(MOST_PARTNERS, PARTNER_TOKENS // options.max_tokens))


def partner_key(options: PrepareSettings, id: int) -> int:
    """The documents with the smallest of these are in it."""
    return hash63(f"partner {options.seed} {id}")


class Deriver:
    """Passes documents on and adds what can be derived from those of the training split."""

    def __init__(
        self, tokenizer: Tokenizer, options: PrepareSettings, survey: Survey, known: SeenIds
    ) -> None:
        self.tokenizer, self.options, self.survey = tokenizer, options, survey
        self.counts: Counter[str] = Counter(dict.fromkeys((*OUTCOMES, "derived_duplicates"), 0))
        self.share_done = 0.0
        self._known = known
        self._starts_of = lru_cache(len(survey.partners) + 1)(boundaries)
        self._words_of = lru_cache(len(survey.partners) + 1)(words_of)

    def extend(self, segments: Iterable[Segment], begin: Begin | None = None) -> Iterator[list[Segment]]:
        """All segments, some at a time, each time followed by the documents that are derived from them.

        `begin` begins to draw somewhere else; the lots that follow are begun before the first is waited for.
        """
        extended: list[Segment] = []
        for passed, share, drawn in self._begun(
            segments, begin or (lambda parents: partial(self.draw, parents))
        ):
            extended += passed + self._fresh(drawn())
            if share:
                self.share_done += share
                yield extended
                extended = []

    def _begun(
        self, segments: Iterable[Segment], begin: Begin
    ) -> Iterator[tuple[list[Segment], float, Callable[[], Drawn]]]:
        """Lots whose documents are being drawn: what goes before them, the share of all that ends here, the result."""
        begun: deque[tuple[list[Segment], float, Callable[[], Drawn]]] = deque()
        stream = iter(segments)
        while batch := list(islice(stream, BATCH)):
            parents = [(segment.id, segment.text) for segment in batch if segment.split == "train"]
            starts = range(0, len(parents) or 1, LOT)
            for start in starts:
                share = len(batch) / self.survey.num_documents if start == starts[-1] else 0.0
                begun.append(([] if start else batch, share, begin(parents[start : start + LOT])))
                if len(begun) > LOTS_AHEAD:
                    yield begun.popleft()
        yield from begun

    def _fresh(self, drawn: Drawn) -> list[Segment]:
        """The candidates whose text is not in the store, in no split, and whose length is allowed."""
        fresh = self._known.add(drawn.ids)
        self.counts["derived_duplicates"] += int((~fresh).sum())
        numbers = np.bincount(drawn.outcomes[fresh], minlength=len(OUTCOMES)).tolist()
        self.counts.update(dict(zip(OUTCOMES, numbers, strict=True)))
        return drawn.segments(fresh & (drawn.outcomes < len(DERIVED)))

    def draw(self, parents: Iterable[Parent]) -> Drawn:
        """All candidates of some documents, whether their texts are new or not."""
        seed, count, partners = self.options.seed, self.options.derive, self.survey.partners
        candidates = [
            candidate
            for id, text in parents
            for candidate in (
                *draw_spans(id, text, seed, count),
                *draw_splices(id, text, seed, count, partners, self._starts_of),
                *draw_swaps(id, text, seed, count, partners, self._words_of),
            )
        ]
        kinds, texts, made_of = map(list, zip(*candidates, strict=True)) if candidates else ([], [], [])
        tokens, lengths = self.tokenizer.encode_flat(texts)
        outcomes = np.array([_PLACES[kind] for kind in kinds], np.uint8)
        outcomes[lengths < self.options.min_tokens] = OUTCOMES.index("derived_too_short")
        outcomes[lengths > self.options.max_tokens] = OUTCOMES.index("derived_too_long")
        return Drawn(texts, made_of, text_ids(texts), outcomes, tokens, lengths)


def missing_kinds(counts: dict[str, int]) -> str:
    """A line about the kinds of derived documents of which none came out; empty where there is nothing to say."""
    missing = [kind for kind in DERIVED if counts.get(kind) == 0]
    if not missing:
        return ""
    return (
        f"derive: no {' and no '.join(kind.removeprefix('derived_') for kind in missing)} came out; spans need three "
        "words between spaces, splices and swaps also other documents with one of : ; , . ! ? before a space"
    )


def boundaries(text: str) -> list[int]:
    """Where a text may be cut: after `: ; , . ! ?` before white space, with a letter or digit on both sides."""
    ends = [match.end() for match in _BOUNDARY.finditer(text)]
    return [end for end in ends if _LETTER.search(text, 0, end) and _LETTER.search(text, end)]


def draw_spans(id: int, text: str, seed: int, count: int) -> list[Candidate]:
    """`count` runs of words of a text, shorter than the whole: first the length is drawn, then the place."""
    words = [match.span() for match in _WORD.finditer(text)]
    if len(words) <= SHORTEST_SPAN:
        return []
    spans: list[Candidate] = []
    for draw in range(count):
        length = SHORTEST_SPAN + _below(len(words) - SHORTEST_SPAN, f"span length {seed} {id} {draw}")
        first = _below(len(words) - length + 1, f"span start {seed} {id} {draw}")
        made_of = f"span {id} {first} {first + length}"
        spans.append(Candidate("span", text[words[first][0] : words[first + length - 1][1]], made_of))
    return spans


def draw_splices(
    id: int,
    text: str,
    seed: int,
    count: int,
    partners: list[tuple[int, str]],
    starts_of: Callable[[str], list[int]] = boundaries,
) -> list[Candidate]:
    """`count` times the beginning of a text up to a boundary and the rest of a partner after one of its own.

    `starts_of` gives the boundaries of a partner, for a caller who remembers them.
    """
    ends = boundaries(text)
    if not ends or not partners:
        return []
    splices: list[Candidate] = []
    for draw in range(count):
        place = _below(len(partners), f"splice partner {seed} {id} {draw}")
        if partners[place][0] == id:
            place = (place + 1) % len(partners)
        partner_id, partner = partners[place]
        if partner_id == id:  # there is no other
            return []
        starts = starts_of(partner)
        end = ends[_below(len(ends), f"splice end {seed} {id} {draw}")]
        start = starts[_below(len(starts), f"splice start {seed} {id} {draw}")]
        made_of = f"splice {id} {end} {partner_id} {start}"
        splices.append(Candidate("splice", f"{text[:end]} {partner[start:].lstrip()}", made_of))
    return splices


def words_of(text: str) -> np.ndarray:
    """(words, 2) where each word of letters and digits begins and ends."""
    return np.array([match.span() for match in _LETTERS.finditer(text)], np.int32).reshape(-1, 2)


def draw_swaps(
    id: int,
    text: str,
    seed: int,
    count: int,
    partners: list[tuple[int, str]],
    words_of_partner: Callable[[str], np.ndarray] = words_of,
) -> list[Candidate]:
    """`count` times the text with up to a third of its words replaced, each by a word of some partner.

    `words_of_partner` gives the words of a partner, for a caller who remembers them.
    """
    words = words_of(text).tolist()
    if len(words) < FEWEST_WORDS or not partners:
        return []
    swaps: list[Candidate] = []
    for draw in range(count):
        num = 1 + _below(len(words) // 3, f"swap count {seed} {id} {draw}")
        places = {_below(len(words), f"swap place {seed} {id} {draw} {k}") for k in range(num)}
        pieces, last, made_of = [], 0, [f"swap {id}"]
        for place in sorted(places):
            partner_id, partner = partners[_below(len(partners), f"swap partner {seed} {id} {draw} {place}")]
            choices = words_of_partner(partner)
            word = _below(len(choices), f"swap word {seed} {id} {draw} {place}")
            (start, end), (first, after) = words[place], choices[word].tolist()
            pieces += [text[last:start], partner[first:after]]
            last = end
            made_of.append(f"{place} {partner_id} {word}")
        swaps.append(Candidate("swap", "".join(pieces) + text[last:], " ".join(made_of)))
    return swaps


def _below(limit: int, words: str) -> int:
    """A number in 0..limit-1, all alike, that follows from the words."""
    return hash63(words) * limit >> 63
