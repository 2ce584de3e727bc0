"""More training documents out of the ones there are: spans of a document, and splices of two.

Every draw is a hash of the seed and of the document's id, so it is the same in any order of reading and after a
restart. A splice needs a second document, and a stream cannot look one up. So the text is read once before, to choose
a fair sample of the training documents (those whose hashes are smallest) that stays in memory; the second half of
every splice comes from it. Memory is bounded by that sample and eight bytes for the id of each text.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.prepare.segments import BATCH, SeenIds, Segment, SegmentOptions, hash63, text_id

MOST_PARTNERS = 65_536
PARTNER_TOKENS = 2**23
"""The sample of second halves holds at most so many documents, and so many tokens if all were of the longest kind."""
SHORTEST_SPAN = 2
"""Words."""

_WORD = re.compile(r"\S+")
_BOUNDARY = re.compile(r"[:;,.!?](?=\s)")
_LETTER = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A derived text before it is known whether it may enter the store."""

    kind: str
    text: str
    made_of: str
    """`span ID FIRST END`: words FIRST to END (without it, from 0); `splice ID END ID START`: the characters up to
    END of one document, those from START of the other."""


@dataclass(frozen=True)
class Survey:
    """What has to be known of all documents before the first one can be spliced."""

    partners: list[tuple[int, str]]
    """(id, text) of training documents with a boundary: a sample that does not depend on the order of reading."""
    num_documents: int

    @classmethod
    def of(cls, segments: Iterable[Segment], options: SegmentOptions) -> Survey:
        """Read all segments and keep the training documents with the smallest hashes."""
        num_documents = 0

        def ranked() -> Iterator[tuple[int, int, str]]:
            nonlocal num_documents
            for segment in segments:
                num_documents += 1
                if segment.split == "train" and boundaries(segment.text):
                    yield hash63(f"partner {options.seed} {segment.id}"), segment.id, segment.text

        room = max(1, min(MOST_PARTNERS, PARTNER_TOKENS // options.max_tokens))
        chosen = heapq.nsmallest(room, ranked())
        return cls([(id, text) for _, id, text in chosen], num_documents)


class Deriver:
    """Passes documents on and adds what can be derived from those of the training split."""

    def __init__(self, tokenizer: Tokenizer, options: SegmentOptions, survey: Survey, known: SeenIds) -> None:
        self.tokenizer, self.options, self.survey = tokenizer, options, survey
        self.counts: Counter[str] = Counter(
            dict.fromkeys(
                (
                    "derived_spans",
                    "derived_splices",
                    "derived_duplicates",
                    "derived_too_short",
                    "derived_too_long",
                ),
                0,
            )
        )
        self.share_done = 0.0
        self._known = known

    def extend(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """All segments, some at a time, each lot followed by the documents that are derived from it."""
        passed, stream = 0, iter(segments)
        while batch := list(islice(stream, BATCH)):
            yield from batch
            yield from self._derive([segment for segment in batch if segment.split == "train"])
            passed += len(batch)
            self.share_done = passed / self.survey.num_documents

    def _derive(self, parents: list[Segment]) -> Iterator[Segment]:
        """The candidates whose text is not in the store, in no split, and whose length is allowed."""
        candidates = [candidate for parent in parents for candidate in self._candidates(parent)]
        ids = [text_id(candidate.text) for candidate in candidates]
        fresh = self._known.add(np.array(ids, np.int64))
        self.counts["derived_duplicates"] += int((~fresh).sum())
        chosen = [(candidates[i], ids[i]) for i in np.flatnonzero(fresh)]
        lists = self.tokenizer.encode_batch([candidate.text for candidate, _ in chosen])
        for (candidate, id), tokens in zip(chosen, lists, strict=True):
            if self._fits(len(tokens)):
                self.counts[f"derived_{candidate.kind}s"] += 1
                array = np.array(tokens, np.uint32)
                yield Segment(candidate.text, array, id, "train", candidate.made_of)

    def _candidates(self, parent: Segment) -> list[Candidate]:
        seed, count = self.options.seed, self.options.derive
        return [
            *draw_spans(parent.id, parent.text, seed, count),
            *draw_splices(parent.id, parent.text, seed, count, self.survey.partners),
        ]

    def _fits(self, num_tokens: int) -> bool:
        if num_tokens < self.options.min_tokens:
            self.counts["derived_too_short"] += 1
        elif num_tokens > self.options.max_tokens:
            self.counts["derived_too_long"] += 1
        else:
            return True
        return False


def draw_spans(id: int, text: str, seed: int, count: int) -> list[Candidate]:
    """`count` runs of words of a text, shorter than the whole: first the length is drawn, then the place."""
    words = [match.span() for match in _WORD.finditer(text)]
    if len(words) <= SHORTEST_SPAN:
        return []
    spans: list[Candidate] = []
    for draw in range(count):
        length = SHORTEST_SPAN + _below(len(words) - SHORTEST_SPAN, "span length", seed, id, draw)
        first = _below(len(words) - length + 1, "span start", seed, id, draw)
        made_of = f"span {id} {first} {first + length}"
        spans.append(Candidate("span", text[words[first][0] : words[first + length - 1][1]], made_of))
    return spans


def draw_splices(
    id: int, text: str, seed: int, count: int, partners: list[tuple[int, str]]
) -> list[Candidate]:
    """`count` times the beginning of a text up to a boundary and the rest of a partner after one of its own."""
    ends = boundaries(text)
    if not ends or not partners:
        return []
    splices: list[Candidate] = []
    for draw in range(count):
        place = _below(len(partners), "splice partner", seed, id, draw)
        if partners[place][0] == id:
            place = (place + 1) % len(partners)
        partner_id, partner = partners[place]
        if partner_id == id:  # there is no other
            return []
        starts = boundaries(partner)
        end = ends[_below(len(ends), "splice end", seed, id, draw)]
        start = starts[_below(len(starts), "splice start", seed, id, draw)]
        made_of = f"splice {id} {end} {partner_id} {start}"
        splices.append(Candidate("splice", f"{text[:end]} {partner[start:].lstrip()}", made_of))
    return splices


def boundaries(text: str) -> list[int]:
    """Where a text may be cut: after `: ; , . ! ?` before white space, with a letter or digit on both sides."""
    ends = [match.end() for match in _BOUNDARY.finditer(text)]
    return [end for end in ends if _LETTER.search(text, 0, end) and _LETTER.search(text, end)]


def _below(limit: int, *words: object) -> int:
    """A number in 0..limit-1, all alike, that follows from the words."""
    return hash63(" ".join(map(str, words))) * limit >> 63
