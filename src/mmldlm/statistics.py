"""Statistics: bootstrap intervals over documents, Student's t over training seeds, Holm's correction.

Everything random is a function of the seed. Shapes: n documents, r resamples.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

NUM_RESAMPLES = 1000
MORE, LESS = "more", "less"
"""Which direction of a quantity is better."""
BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "no measurable difference", "too few seeds"
_STREAM = 103
"""Second word of the seed, so that no other part draws the same numbers."""
_MOST_AT_ONCE = 2**22
"""Document indices of resamples that exist at the same time."""
_ROUNDING = 1e-12
"""A spread below this share of the mean is rounding error."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""Document indices (r, n) -> values (r,)."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over documents; `float` gives the number alone."""

    value: float
    standard_error: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap(statistic: Statistic, count: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """(num_resamples,) values of a statistic of documents drawn with replacement.

    The documents drawn depend on the seed and the count alone, so two statistics of the same documents are paired.
    """
    if count < 2:
        return statistic(np.zeros((num_resamples, count), dtype=np.int64))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", stats.DegenerateDataWarning
        )  # resamples without a value are left out later
        result = stats.bootstrap(
            (np.arange(count),),
            lambda rows, axis: statistic(rows),
            n_resamples=num_resamples,
            batch=max(1, min(num_resamples, _MOST_AT_ONCE // count)),
            vectorized=True,
            method="percentile",
            random_state=np.random.default_rng([seed, _STREAM]),
        )
    return np.asarray(result.bootstrap_distribution)


def summarize(value: float, resampled: np.ndarray) -> Estimate:
    """A number with the spread of its resampled values (r,); values that are not finite are left out."""
    resampled = resampled[np.isfinite(resampled)]
    if len(resampled) < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(value, float(resampled.std(ddof=1)), float(low), float(high))


def jackknife_estimate(value: float, left_out: np.ndarray) -> Estimate:
    """For a count of distinct things, which repeats in a bootstrap would distort.

    `left_out` holds the value without each document in turn.
    """
    count = len(left_out)
    if count < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    error = float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
    margin = float(stats.norm.ppf(0.975)) * error
    return Estimate(value, error, value - margin, value + margin)


def bootstrap_p_value(differences: np.ndarray) -> float:
    """Two-sided, from resampled differences: how rarely they are on the other side of 0; at least 2 / (r + 1)."""
    differences = differences[np.isfinite(differences)]
    sides = ((differences <= 0).sum() + 1, (differences >= 0).sum() + 1)
    return float(min(2.0 * min(sides) / (len(differences) + 1), 1.0))


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    count: int
    standard_error: float | None
    """None with fewer than two seeds."""


@dataclass(frozen=True)
class Difference:
    """A mean of differences paired by seed."""

    value: float
    count: int
    low: float | None
    """Lower end of the 95 % interval; None with fewer than two seeds, or where all seeds have the same difference."""
    high: float | None
    p_value: float | None


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Mean and standard error of at least one value."""
    error = float(stats.sem(values)) if len(values) > 1 else None
    return Mean(math.fsum(values) / len(values), len(values), error)


def paired_difference(ours: Mapping[int, float], first: Mapping[int, float]) -> Difference | None:
    """Ours minus first over the seeds that both have, with its t-interval; None where they share no seed.

    Seeds that all have the same difference say nothing about its spread (scores of few documents are coarse). Then
    there is no interval, unless the difference is 0.
    """
    values = [ours[seed] - first[seed] for seed in sorted(ours.keys() & first.keys())]
    if not values:
        return None
    mean = mean_over_seeds(values)
    if mean.standard_error == 0.0 == mean.value:
        return Difference(0.0, mean.count, 0.0, 0.0, 1.0)
    if mean.standard_error is None or mean.standard_error <= abs(mean.value) * _ROUNDING:
        return Difference(mean.value, mean.count, None, None, None)
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(0.95)
    return Difference(mean.value, mean.count, float(low), float(high), float(test.pvalue))


def verdict(difference: Difference, better: str) -> str:
    """Better or worse only where the interval excludes 0."""
    if difference.low is None or difference.high is None:
        return UNKNOWN
    if difference.low <= 0.0 <= difference.high:
        return SAME
    return BETTER if (difference.value > 0.0) == (better == MORE) else WORSE


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: below 0.05, the chance of one false finding or more is below 5 %."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    stepped = np.minimum(np.maximum.accumulate(factors * np.asarray(p_values, np.float64)[order]), 1.0)
    corrected = np.empty(len(p_values))
    corrected[order] = stepped
    return [float(value) for value in corrected]


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
        return float(self.statistic(np.arange(len(self))[None])[0])

    def estimate(self, seed: int) -> Estimate:
        """The number over all documents with its interval."""
        return summarize(self.value(), bootstrap(self.statistic, len(self), seed))

    def take(self, rows: np.ndarray) -> Quantity:
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, values=self.values[rows], weights=weights)

    def to_json(self) -> dict[str, Any]:
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
    a, b = (stats.rankdata(values, axis=-1) for values in (left, right))
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def token_accuracy(true: np.ndarray, decoded: np.ndarray) -> float:
    """Share of positions with the right token; both missing and surplus positions count as wrong."""
    common = min(len(true), len(decoded))
    return float((true[:common] == decoded[:common]).sum() / max(len(true), len(decoded)))


def aligned_tokens(true: Sequence[np.ndarray], decoded: Sequence[np.ndarray]) -> np.ndarray:
    """(n,) tokens that are right once both texts are aligned with the fewest insertions, deletions and replacements.

    Of several such alignments the one with the most right tokens counts. So a text that leaves out one word keeps what
    follows. All pairs are computed together, one row of their tables of costs at a time.
    """
    rows, columns = (np.array([len(text) for text in texts], np.int64) for texts in (true, decoded))
    if not len(rows):
        return np.empty(0, np.int64)
    ours, theirs = (_padded(texts, sizes) for texts, sizes in ((true, rows), (decoded, columns)))
    unit = np.int64(2**32)  # an edit costs a unit, a right token saves one part of it
    along = unit * np.arange(theirs.shape[1] + 1)
    costs = np.broadcast_to(along, (len(rows), len(along))).copy()
    result = np.empty(len(rows), np.int64)
    for row in range(ours.shape[1] + 1):
        if row:
            replaced = costs[:, :-1] + np.where(theirs == ours[:, row - 1, None], -1, unit)
            costs[:, 0] += unit
            costs[:, 1:] = np.minimum(replaced, costs[:, 1:] + unit)
            costs = np.minimum.accumulate(costs - along, 1) + along
        ended = np.flatnonzero(rows == row)
        result[ended] = -costs[ended, columns[ended]] % unit
    return result


def _padded(texts: Sequence[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    """(n, longest) tokens, with -1 past the end."""
    padded = np.full((len(texts), int(sizes.max())), -1, np.int64)
    padded[np.arange(padded.shape[1]) < sizes[:, None]] = np.concatenate(texts)
    return padded


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
