"""Documents to segments: sentences, paragraphs, or chunks of at most so many tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.preparation.sentences import sentence_spans, split_paragraphs, split_sentences

CUTS = ("none", "sentences", "paragraphs", "chunks")
TOKEN_CHARACTERS = 64
"""The most characters that a token is reckoned to have."""


def cutter(cut: str) -> Callable[[str], list[str]]:
    """The function that cuts a source document into segments; `chunks` are made later, by tokens."""
    if cut == "sentences":
        return split_sentences
    if cut == "paragraphs":
        return split_paragraphs
    return lambda text: [text.strip()] if text.strip() else []


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
