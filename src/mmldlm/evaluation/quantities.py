"""A quantity: its values per document, and how they become one number with an interval.

Every number that two runs may be compared by is one of these. Beside them, the scores of a text against the true one.
Shapes: n documents, r resamples, B buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmldlm.statistics import LESS, MORE, Estimate, bootstrap, estimate, summarize

KINDS = ("ratio", "bleu", "spearman", "gap")
_DIGITS = 6
RESOLUTION = 10.0**-_DIGITS
"""Values per document are kept to this; smaller differences mean nothing."""
_ORDERS = 4
"""Longest n-grams of BLEU."""


@dataclass(frozen=True, eq=False)
class Quantity:
    """One number with the documents behind it."""

    title: str
    better: str
    """more or less."""
    values: np.ndarray
    """ratio: (n,) what is summed. bleu: (n, 10) counts, see `bleu_counts`. spearman: (n, 2) two scores.
    gap: (n, B + 1) confidence minus right answers in each bucket, then the number of answers."""
    weights: np.ndarray | None = None
    """ratio: (n,) what the sum is divided by; None: every document counts as 1."""
    kind: str = "ratio"

    def __len__(self) -> int:
        return len(self.values)

    def statistic(self, rows: np.ndarray) -> np.ndarray:
        """Indices of documents (r, n) -> (r,) the number for each row."""
        if self.kind == "spearman":
            return spearman(self.values[rows, 0], self.values[rows, 1])
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.kind == "ratio":
                total = rows.shape[-1] if self.weights is None else self.weights[rows].sum(-1)
                return self.values[rows].sum(-1) / total
            sums = np.column_stack([column[rows].sum(-1) for column in self.values.T])
            return bleu_of_sums(sums) if self.kind == "bleu" else np.abs(sums[:, :-1]).sum(1) / sums[:, -1]

    def value(self) -> float:
        """The number over all documents."""
        return float(self.statistic(np.arange(len(self))[None])[0])

    def estimate(self, seed: int) -> Estimate:
        """The number over all documents with its interval."""
        return estimate(self.statistic, len(self), seed)

    def take(self, rows: np.ndarray) -> Quantity:
        """The same of some documents."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, values=self.values[rows], weights=weights)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        weights = None if self.weights is None else _plain(self.weights)
        head = {"title": self.title, "better": self.better, "kind": self.kind}
        return head | {"values": _plain(self.values), "weights": weights}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Quantity:
        """The inverse of `to_json`; a ValueError or KeyError where it is something else."""
        values = np.array(saved["values"], dtype=np.float64)
        weights = None if saved["weights"] is None else np.array(saved["weights"], dtype=np.float64)
        if saved["kind"] not in KINDS or saved["better"] not in (MORE, LESS):
            raise ValueError(f"kind {saved['kind']!r}, better {saved['better']!r}")
        return cls(str(saved["title"]), saved["better"], values, weights, saved["kind"])


def difference(quantity: Quantity, base: Quantity, seed: int) -> Estimate:
    """How much more than the base, with the same documents in every resample."""

    def apart(rows: np.ndarray) -> np.ndarray:
        return quantity.statistic(rows) - base.statistic(rows)

    return summarize(quantity.value() - base.value(), bootstrap(apart, len(quantity), seed))


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind in "iub":
        return values.astype(np.int64).tolist()
    return np.round(values.astype(np.float64), _DIGITS).tolist()


def spearman(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(r, n), (r, n) -> (r,) rank correlation; equal values share their mean rank; nan without spread."""
    from scipy.stats import rankdata

    a, b = (rankdata(values, axis=-1) for values in (left, right))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def token_accuracy(true: np.ndarray, decoded: np.ndarray) -> float:
    """Share of positions with the right token; both missing and surplus positions count as wrong."""
    common = min(len(true), len(decoded))
    return float((true[:common] == decoded[:common]).sum() / max(len(true), len(decoded)))


def token_f1(true: np.ndarray, decoded: np.ndarray) -> float:
    """Harmonic mean of precision and recall of the tokens, at any position."""
    shared = sum((Counter(true.tolist()) & Counter(decoded.tolist())).values())
    return 2.0 * shared / (len(true) + len(decoded))


def exact_match(true: np.ndarray, decoded: np.ndarray) -> float:
    """1 if every token is right, else 0."""
    return float(np.array_equal(true, decoded))


def bleu_counts(true: Sequence[str], decoded: Sequence[str]) -> np.ndarray:
    """(n, 10) what BLEU adds up over documents: matches and totals of 1- to 4-grams, then both lengths."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True)  # only keeps sacrebleu from warning about single sentences
    scores = [bleu.sentence_score(one, [other]) for one, other in zip(decoded, true, strict=True)]
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    return np.array(rows, dtype=np.int64).reshape(-1, 2 * _ORDERS + 2)


def bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """(r, 10) summed counts -> (r,) BLEU, 0 to 100, with the defaults of sacrebleu; many at once for the bootstrap.

    An n-gram order without a match counts as half a match, the next such order as a quarter, and so on.
    """
    matches, totals = sums[:, :_ORDERS].astype(np.float64), sums[:, _ORDERS : 2 * _ORDERS].astype(np.float64)
    decoded, true = sums[:, -2].astype(np.float64), sums[:, -1].astype(np.float64)
    missing = matches == 0
    smoothed = np.where(missing, 0.5 ** np.cumsum(missing, axis=1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(smoothed / totals).mean(1))
        brevity = np.where(decoded < true, np.exp(1.0 - true / decoded), 1.0)
        whole = 100.0 * precision * brevity
    return np.where((matches.sum(1) == 0) | (totals == 0).any(1), 0.0, whole)


def bleu_signature() -> str:
    """What to cite beside the number."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU()
    bleu.corpus_score(["a"], [["a"]])
    return str(bleu.get_signature())
