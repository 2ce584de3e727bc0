"""A quantity of an evaluation: its values per document, how they become one number, and its interval.

Every number that two runs may be compared by is one of these; `documents.json` holds them. Shapes: n documents,
r resamples, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.evaluation.statistics import Estimate, estimate
from mmldlm.evaluation.text_scores import bleu_of_sums

KINDS = ("ratio", "bleu", "spearman", "gap")
MORE, LESS = "more", "less"
_DIGITS = 6


@dataclass(frozen=True)
class Quantity:
    """One number with the documents behind it."""

    title: str
    better: str
    """more or less."""
    values: np.ndarray
    """ratio: (n,) what is summed. bleu: (n, 10) counts, see `text_scores`. spearman: (n, 2) two scores.
    gap: (n, B + 1) confidence minus right answers in each bucket, then the number of answers."""
    weights: np.ndarray | None = None
    """ratio: (n,) what the sum is divided by; None: every document counts as 1."""
    kind: str = "ratio"

    def __len__(self) -> int:
        return len(self.values)

    def statistic(self, rows: np.ndarray) -> np.ndarray:
        """(r, n) rows of documents -> (r,) the number for each."""
        if self.kind == "spearman":
            return np.array([spearman(*self.values[row].T) for row in rows])
        if self.kind == "ratio":
            total = rows.shape[1] if self.weights is None else self.weights[rows].sum(1)
            with np.errstate(invalid="ignore", divide="ignore"):
                return self.values[rows].sum(1) / total
        sums = np.column_stack([column[rows].sum(1) for column in self.values.T])
        if self.kind == "bleu":
            return bleu_of_sums(sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.abs(sums[:, :-1]).sum(1) / sums[:, -1]

    def estimate(self, seed: int) -> Estimate:
        """The number over all documents with its interval."""
        return estimate(self.statistic, len(self), seed)

    def take(self, rows: np.ndarray) -> Quantity:
        """The same of some documents."""
        weights = None if self.weights is None else self.weights[rows]
        return Quantity(self.title, self.better, self.values[rows], weights, self.kind)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        weights = None if self.weights is None else _plain(self.weights)
        head = {"title": self.title, "better": self.better, "kind": self.kind}
        return head | {"values": _plain(self.values), "weights": weights}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Quantity:
        """What `to_json` gave; a ValueError or KeyError where it is something else."""
        values = np.array(saved["values"], dtype=np.float64)
        weights = None if saved["weights"] is None else np.array(saved["weights"], dtype=np.float64)
        if saved["kind"] not in KINDS or saved["better"] not in (MORE, LESS):
            raise ValueError(f"kind {saved['kind']!r}, better {saved['better']!r}")
        return cls(str(saved["title"]), saved["better"], values, weights, saved["kind"])


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind in "iub":
        return values.astype(np.int64).tolist()
    return np.round(values.astype(np.float64), _DIGITS).tolist()


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """Rank correlation: that of Pearson between ranks, equal values sharing their mean rank; nan without spread."""
    a, b = _ranks(left), _ranks(right)
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / size) if size > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - 0.5 * (counts - 1))[place]
