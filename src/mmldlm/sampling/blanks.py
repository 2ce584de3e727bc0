"""Texts with blanks, as people write them: "the ____ of the ____{3}".

A run of four or more underscores, or the tokenizer's own mask word such as [MASK], stands for one token; with a
number in braces behind it, for so many.
"""

from __future__ import annotations

import re

import numpy as np

from mmldlm import randomness
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError

MAX_BLANK = 10_000
"""Tokens of one blank; more are a slip of the finger."""


def parse_blanks(tokenizer: Tokenizer, text: str, mask_id: int) -> np.ndarray:
    """Token ids of a text, with the mask's id in its blanks.

    A space before a blank belongs to what is filled in, as tokenizers of the GPT kind see it.
    """
    tokens: list[int] = []
    end = 0
    for blank in _pattern(tokenizer).finditer(text):
        digits = blank["count"] or "1"
        count = int(digits[:9])  # more digits than that are too many tokens, and slow to read
        if not 1 <= count <= MAX_BLANK:
            raise UserError(f"{text!r}: a blank of {digits} tokens; allowed are 1 to {MAX_BLANK}")
        tokens += _ids(tokenizer, text[end : blank.start()].rstrip()) + [mask_id] * count
        end = blank.end()
    if end == 0:
        raise UserError(f"{text!r}: holds no blank; write ____ for a token, ____{{3}} for three")
    return np.array(tokens + _ids(tokenizer, text[end:]), dtype=np.int64)


def some_blanks(tokens: list[np.ndarray], keys: np.ndarray, share: float, mask_id: int) -> list[np.ndarray]:
    """Texts with about this share of their tokens masked, at least one."""
    result = []
    for text, key in zip(tokens, keys, strict=True):
        chance = randomness.uniform(key, randomness.TEXT_MASK, np.arange(len(text)))
        result.append(np.where((chance < share) | (chance == chance.min()), mask_id, text))
    return result


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    words = [re.escape(token.content) for token in added if token.special and "mask" in token.content.lower()]
    marks = "|".join(["_{4,}", *words])
    return re.compile(rf"(?:{marks})(?:\{{(?P<count>\d+)\}})?")


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    return tokenizer.encode_batch([piece])[0] if piece.strip() else []
