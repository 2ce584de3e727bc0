"""How close a decoded text is to the true one: by position, as a bag of tokens, exactly, and by BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def token_accuracy(true: np.ndarray, found: np.ndarray) -> float:
    """Share of positions with the right token; both missing and surplus positions count as wrong."""
    common = min(len(true), len(found))
    return float((true[:common] == found[:common]).sum() / max(len(true), len(found)))


def token_f1(true: np.ndarray, found: np.ndarray) -> float:
    """Harmonic mean of precision and recall of the tokens, wherever they stand."""
    shared = sum((Counter(true.tolist()) & Counter(found.tolist())).values())
    return 2.0 * shared / (len(true) + len(found))


def exact_match(true: np.ndarray, found: np.ndarray) -> float:
    """1 if every token is right, else 0."""
    return float(np.array_equal(true, found))


def corpus_bleu(true: Sequence[str], found: Sequence[str]) -> float:
    """BLEU of all documents together, 0 to 100, with the defaults of sacrebleu."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU().corpus_score(list(found), [list(true)]).score)


def bleu_signature() -> str:
    """What to cite beside the number."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU()
    bleu.corpus_score(["a"], [["a"]])
    return str(bleu.get_signature())
