"""Text to sentences, paragraphs and chunks.

Sentences are found by rules (abbreviations, initials, numbers, quotes, ellipses), chunks by their number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from mmldlm.data.tokenizer import Tokenizer

CUTS = ("none", "sentences", "paragraphs", "chunks")
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
        if size > room:
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
