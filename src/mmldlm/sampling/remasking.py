"""Rounds that mask what hurts and decode it anew.

Each token is left out in turn, all of them in packed batches, which shows how the cosine would change without it. The
tokens whose absence helps most (or costs least) are masked, decoded anew, and kept if the cosine has risen, and not
because of special tokens, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmldlm import randomness
from mmldlm.sampling.decode import infill_tokens
from mmldlm.sampling.judge import MAX_PROBED, ROUND, Checked, Judge, probed_places
from mmldlm.sampling.ragged import CHUNK_TOKENS, Ragged, slices

ROUND_SHARE = 0.15
"""Share of the tokens that a round masks, at least one."""


def remask_rounds(judge: Judge, best: Checked, num_rounds: int, report: Callable[[], None]) -> Checked:
    """So many rounds; each is reported."""
    for number in range(num_rounds):
        best = _improve(judge, best, randomness.make_key(judge.keys, ROUND, number))
        report()
    return best


def _improve(judge: Judge, best: Checked, keys: np.ndarray) -> Checked:
    """One round: what hurts most is decoded anew, and kept where it is better."""
    passes, encoded = best.passes.copy(), best.num_encoded.copy()
    harm = _harm(judge, best.tokens, keys, passes, encoded)
    blank = judge.model.corruption.text.mask_id
    asked = [with_blanks(text, each, blank) for text, each in zip(best.tokens, harm, strict=True)]
    tokens = infill_tokens(
        judge.model, asked, judge.drawn, latents=judge.latents, keys=keys, against=judge.against, passes=passes
    )  # fmt: skip
    found = judge.cosine(tokens, np.arange(len(tokens)), passes, encoded)
    risen = (found > best.cosine) & (judge.num_unwritten(tokens) <= judge.num_unwritten(best.tokens))
    return Checked(
        [new if is_better else old for new, old, is_better in zip(tokens, best.tokens, risen, strict=True)],
        np.where(risen, found, best.cosine),
        best.first_cosine,
        passes,
        encoded,
        best.num_accepted + risen,
    )


def _harm(
    judge: Judge, tokens: list[np.ndarray], keys: np.ndarray, passes: np.ndarray, encoded: np.ndarray
) -> list[np.ndarray]:
    """For each token, the cosine of its text without it; minus infinity where that was not tried."""
    lengths = np.array([len(text) for text in tokens], np.int64)
    harm: list[np.ndarray] = []
    for part in slices(np.minimum(lengths, MAX_PROBED) * lengths, CHUNK_TOKENS):
        texts = Ragged.of(tokens[part])
        owner, place = probed_places(tokens[part], keys[part])  # a text of one token has none to spare
        shorter = texts.take(owner).drop(place)
        found = Ragged(np.full(len(texts.tokens), -np.inf), texts.lengths)
        harm += found.put(
            owner, place, judge.cosine(shorter.split(), part.start + owner, passes, encoded)
        ).split()
    return harm


def with_blanks(text: np.ndarray, harm: np.ndarray, blank: int) -> np.ndarray:
    """The text with blanks where its tokens do most harm."""
    num_blanks = max(1, int(np.ceil(ROUND_SHARE * len(text))))
    result = text.copy()
    result[np.argsort(-harm, kind="stable")[:num_blanks]] = blank
    return result
