"""How varied texts are: different n-grams among all, repeats inside a text, and likeness of the texts to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmldlm.evaluation.statistics import Estimate, jackknife_estimate

MOST_SELF_BLEU = 200
"""Texts that self-BLEU compares with each other; its cost grows with their square."""


def ngrams(tokens: Sequence[int] | np.ndarray, order: int) -> list[tuple[int, ...]]:
    """All runs of `order` tokens."""
    row = [int(token) for token in tokens]
    return list(zip(*(row[start:] for start in range(order)), strict=False))


def distinct(texts: Sequence[np.ndarray], order: int) -> Estimate:
    """Different n-grams over all n-grams of all texts together.

    Its interval is by jackknife: in a bootstrap sample texts occur twice, which alone would make it smaller.
    """
    counts = [Counter(ngrams(text, order)) for text in texts]
    whole: Counter[tuple[int, ...]] = Counter()
    owners: Counter[tuple[int, ...]] = Counter()
    for count in counts:
        whole.update(count)
        owners.update(count.keys())
    totals = np.array([count.total() for count in counts], dtype=np.float64)
    # what leaves with a text are the n-grams that no other text has
    alone = np.array([sum(owners[gram] == 1 for gram in count) for count in counts], dtype=np.float64)
    if totals.sum() == 0:
        return jackknife_estimate(float("nan"), np.empty(0))
    rest = totals.sum() - totals
    left_out = (len(whole) - alone)[rest > 0] / rest[rest > 0]
    found = jackknife_estimate(float(len(whole) / totals.sum()), left_out)
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))  # it is a share; nan stays nan


def repeats(texts: Sequence[np.ndarray], order: int) -> tuple[np.ndarray, np.ndarray]:
    """(n,) n-grams that stood in the same text before, and (n,) all n-grams of the text."""
    found = [ngrams(text, order) for text in texts]
    totals = np.array([len(grams) for grams in found], dtype=np.float64)
    return totals - np.array([len(set(grams)) for grams in found]), totals


def self_bleu(texts: Sequence[str]) -> np.ndarray:
    """(n,) BLEU of each text against all others as references; 100: it is made of pieces of them."""
    from sacrebleu.metrics.bleu import BLEU

    bleu, chosen = BLEU(effective_order=True), list(texts[:MOST_SELF_BLEU])
    return np.array(
        [bleu.sentence_score(text, chosen[:idx] + chosen[idx + 1 :]).score for idx, text in enumerate(chosen)]
    )
