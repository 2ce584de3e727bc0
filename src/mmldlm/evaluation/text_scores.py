"""How close a decoded text is to the true one: by position, as a bag of tokens, exactly, and by BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_ORDERS = 4


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


def bleu_counts(true: Sequence[str], found: Sequence[str]) -> np.ndarray:
    """(n, 10) what BLEU adds up over documents: matches and totals of 1- to 4-grams, then both lengths."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True)  # only keeps sacrebleu from warning about single sentences
    scores = [bleu.sentence_score(one, [other]) for one, other in zip(found, true, strict=True)]
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    return np.array(rows, dtype=np.int64).reshape(-1, 2 * _ORDERS + 2)


def bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """(r, 10) summed counts -> (r,) BLEU as sacrebleu's defaults have it, many at once for the bootstrap.

    An n-gram order without a match counts as half a match, the next such order as a quarter, and so on.
    """
    matches, totals = sums[:, :_ORDERS].astype(np.float64), sums[:, _ORDERS : 2 * _ORDERS].astype(np.float64)
    found, true = sums[:, -2].astype(np.float64), sums[:, -1].astype(np.float64)
    missing = matches == 0
    smoothed = np.where(missing, 0.5 ** np.cumsum(missing, axis=1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(smoothed / totals).mean(1))
        brevity = np.where(found < true, np.exp(1.0 - true / found), 1.0)
        whole = 100.0 * precision * brevity
    return np.where((matches.sum(1) == 0) | (totals == 0).any(1), 0.0, whole)


def bleu_signature() -> str:
    """What to cite beside the number."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU()
    bleu.corpus_score(["a"], [["a"]])
    return str(bleu.get_signature())
