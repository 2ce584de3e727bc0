"""Two or more evaluations compared: paired bootstrap over the documents that they share.

Each result is compared with the first one. A difference is (other - first); its interval and p-value come from
resamples of documents in which both results keep the same documents, so what is hard for both cancels.

Figures of generated pairs count only beside their diversity: a model that has collapsed is not better at anything, and
one whose texts repeat more gets no verdict on the rest. Nor does one whose latents are the same for all texts win by
their mean cosine, or one that ignores its condition by what a wrong condition costs it, or one that costs more nats by
what the right condition saves or by its calibration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.evaluation.results import GENERATED, HELD_OUT, DocumentSet, Evaluation
from mmldlm.json_lines import from_plain
from mmldlm.statistics import (
    MORE,
    RESOLUTION,
    SAME,
    Estimate,
    Quantity,
    bootstrap,
    bootstrap_p_value,
    summarize,
)

COMPARISON_FORMAT = "mmldlm-comparison-2"
NUM_RESAMPLES = 4000
FEW_DOCUMENTS = 20
LONGEST_NAME = 50
"""Characters in the name of a comparison's folder that come from names of models or runs."""
_ANY_TOKENIZER = ("bits_per_", "spearman/")
"""Quantities that mean the same with any tokenizer."""
_OTHER_TOKENIZER = "only bits per byte and per character are compared, tokenizer or encoder differ"
_MUST_AGREE = (
    ("latent_", "bounds on latents, normalised in other ways, are left out", "bounds.latent.log_scale"),
    ("latent_gain/", "what the text saves is left out", "bounds.latent.snr"),
    ("checked/", "ways to decode are left out", "decoding.judge"),
    ("checked/", "ways to decode are left out", "decoding.candidate_temperature"),
    ("t2l/retrieval", "retrieval is left out", "retrieval.num_candidates"),
    ("generated/self_bleu", "self-BLEU is left out", "generation.num_documents"),
    ("generated/reference_nats", "the reference model is left out", "generation.reference_lm.name"),
)
"""Quantities by the beginning of their names, and what both results must have in common for them."""
UNDER_ANOTHERS = re.compile(
    r"(text_bound|bits_per_\w+|latent_bound|calibration)/shuffled(/.*)?|t2l/stranger_cosine"
)
"""Costs and calibration under the latent, or the text, of another document, and the cosine to its latent."""
DIVERSITY = ("generated/repeated_", "generated/self_bleu")
FIGURES_OF_GENERATED = f"{GENERATED}/"
MEMORISED = "generated/memorised_"
"""Figures of generated pairs that texts of random words would win."""
_OWN_COSINES = ("t2l/cosine", "round_trip/latent/own")
"""What the mean latent, given for every text, would be good at."""


@dataclass(frozen=True)
class Evaluated:
    """A result with a name; read from disk, or just measured."""

    label: str
    result: Evaluation
    folder: Path | None = None

    def documents(self, about: str) -> DocumentSet:
        """Values of one set of documents."""
        return self.result.documents.get(about, DocumentSet([], {}))

    @property
    def held_out(self) -> list[int]:
        return self.documents(HELD_OUT).ids


@dataclass(frozen=True)
class ComparedResult:
    """One of the results."""

    label: str
    name: str
    step: int | None
    num_parameters: int
    split: str
    num_documents: int
    folder: str | None


@dataclass(frozen=True)
class ComparedQuantity:
    """One quantity of two results on the documents that both have."""

    about: str
    name: str
    title: str
    better: str
    num_documents: int
    first: float
    other: float
    difference: Estimate
    p_value: float
    verdict: str


@dataclass(frozen=True)
class ComparedPair:
    """One result against the first."""

    first: str
    other: str
    num_shared: int
    rows: list[ComparedQuantity]

    def __getitem__(self, name: str) -> ComparedQuantity:
        """A quantity by name, such as `text_bound/right`."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name}: compared are {', '.join(row.name for row in self.rows)}")


@dataclass(frozen=True)
class Comparison:
    """Every quantity that the results share, each result against the first."""

    results: list[ComparedResult]
    pairs: list[ComparedPair]
    num_resamples: int
    seed: int
    notes: list[str]
    command: str | None = None
    report: str | None = None
    """The page, where one was written."""

    def __getitem__(self, name: str) -> ComparedQuantity:
        """A quantity of the second result against the first."""
        return self.pairs[0][name]

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite are nan."""
        return {"format": COMPARISON_FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Comparison:
        if values.get("format") != COMPARISON_FORMAT:
            raise UserError(
                f"the format is {values.get('format')}; {COMPARISON_FORMAT} is needed: compare again"
            )
        comparison: Comparison = from_plain(cls, values)
        return comparison


def compare_results(results: Sequence[Evaluated], seed: int = 0) -> Comparison:
    """Every quantity that the results share, each result against the first."""
    models = [one.result.model.name for one in results]  # its own label where two have the same name
    named = [
        replace(one, label=name) if models.count(name) == 1 else one
        for name, one in zip(models, results, strict=True)
    ]
    notes: list[str] = []
    pairs = [_compare_two(named[0], other, seed, notes) for other in named[1:]]
    described = [
        ComparedResult(
            label=one.label,
            name=one.result.model.name,
            step=one.result.model.step,
            num_parameters=one.result.model.num_parameters,
            split=one.result.data.split,
            num_documents=len(one.held_out),
            folder=None if one.folder is None else str(one.folder),
        )
        for one in named
    ]
    return Comparison(described, pairs, NUM_RESAMPLES, seed, list(dict.fromkeys(notes)))


def folder_name(results: Sequence[Evaluated]) -> str:
    """Name of the folder for a comparison: of the models, or of the runs' folders; different for other results.

    Runs of one recipe have one name, and a second comparison must not replace the first. Where names do not distinguish
    the results, or are too long for a folder, a hash of the results' paths does.
    """
    models = [one.result.model.name for one in results]
    folders = [(one.folder or Path(one.label)).resolve() for one in results]
    runs = [path.parents[1].name if path.parent.name == "reports" else path.name for path in folders]
    names = models if len(set(models)) == len(models) else runs
    name = "compare-" + "-".join(names)
    if len(set(names)) == len(names) and len(name) <= LONGEST_NAME:
        return name
    where = hashlib.sha256("\n".join(str(path) for path in folders).encode()).hexdigest()
    return f"{name[:LONGEST_NAME]}-{where[:8]}"


def _compare_two(first: Evaluated, other: Evaluated, seed: int, notes: list[str]) -> ComparedPair:
    shared = set(first.held_out) & set(other.held_out)
    if not shared:
        raise UserError(
            f"{other.label}: was evaluated on other documents than {first.label}, they share none; evaluate both on "
            "the same split of the same data with the same seed"
        )
    _note_documents(first, other, len(shared), notes)
    rows = []
    for about in first.result.documents:
        mine, others = first.documents(about).quantities, other.documents(about).quantities
        for name in mine:
            if name in others and _is_comparable(name, first, other, notes):
                row = _compare_quantity(first, other, about, name, seed)
                rows += [] if row is None else [row]
    rows = _beside_diversity(rows, first, other, notes)
    return ComparedPair(first.label, other.label, len(shared), rows)


def _beside_diversity(
    rows: list[ComparedQuantity], first: Evaluated, other: Evaluated, notes: list[str]
) -> list[ComparedQuantity]:
    """The rows, with verdicts that neither a lack of diversity nor one latent for all texts can win."""
    reasons = {one.label: one.result.generation and one.result.generation.collapsed for one in (first, other)}
    collapsed = [label for label, reason in reasons.items() if reason]
    notes += [f"{label} has collapsed: {reasons[label]}" for label in collapsed]
    blind = {(one.label, name) for one in (first, other) for name in blind_cosines(one.result)}
    dull = {
        one.label
        for one, rival in ((first, other), (other, first))
        for row in rows
        if row.verdict == f"{rival.label} is better" and _repeats_more_than_real(one, row.name)
    }

    def verdict(row: ComparedQuantity) -> str:
        winner = next((label for label in reasons if row.verdict == f"{label} is better"), None)
        if winner is None:
            return row.verdict
        loser = other if winner == first.label else first
        cost = cost_behind(row.name)
        dearer = any(one.name == cost and one.verdict == f"{loser.label} is better" for one in rows)
        natural = not _repeats_more_than_real(loser, row.name)
        withheld = reason_to_withhold(
            row.name, winner, loser.label, blind=(winner, row.name) in blind, dearer=dearer,
            collapsed=winner in collapsed, natural=natural, dull=winner in dull,
        )  # fmt: skip
        return withheld or row.verdict

    return [replace(row, verdict=verdict(row)) for row in rows]


def cost_behind(figure: str) -> str | None:
    """The cost that a winner of this figure must not exceed; None for figures that stand alone.

    An overconfident model gains most by the right condition. One that knows little is unsure everywhere, and so has
    the smallest calibration error.
    """
    side, _, gain = figure.partition("_gain/")
    if gain:
        return f"{side}_bound/right"
    kind = re.fullmatch(r"calibration/(\w+)/\w+", figure)
    return f"text_bound/{kind[1]}" if kind else None


def reason_to_withhold(
    figure: str,
    winner: str,
    loser: str,
    *,
    blind: bool,
    dearer: bool,
    collapsed: bool,
    natural: bool,
    dull: bool,
) -> str | None:
    """Why a better figure is no win; None where it is one.

    `blind`: the figure is a cosine of latents of the winner that do not depend on the text. `dearer`: the winner costs
    more than the loser in the cost behind the figure. The rest is about figures of generated pairs alone. `collapsed`:
    the winner's texts have collapsed. `natural`: the loser's texts repeat no more than held-out ones. `dull`: the
    winner's texts repeat more than the loser's and held-out ones.
    """
    if UNDER_ANOTHERS.fullmatch(figure):
        return "none: won by ignoring the condition"
    if blind:
        return f"none: latents of {winner} do not depend on the text"
    if dearer:
        return f"none: {winner} costs more nats"
    if not figure.startswith(FIGURES_OF_GENERATED):
        return None
    if collapsed:
        return f"none: {winner} has collapsed"
    if figure.startswith(MEMORISED):
        return "none: random words are in no training text either"
    if figure.startswith(DIVERSITY):
        return f"none: {loser} repeats no more than held-out texts" if natural else None
    return f"none: {winner} is less diverse" if dull else None


def blind_cosines(result: Evaluation) -> set[str]:
    """Cosines of latents that are no nearer to their own texts than to others."""
    blind = set(_OWN_COSINES) if result.retrieval and result.retrieval.blind else set()
    if result.generation is not None:
        both = result.generation.agreement
        pairs = {"own": (both.own, both.own_strangers), "encoder": (both.encoder, both.encoder_strangers)}
        for who, (own, strangers) in pairs.items():
            if own is not None and strangers is not None and own.low <= strangers:
                blind.add(f"generated/agreement/{who}")
    return blind


def _repeats_more_than_real(one: Evaluated, name: str) -> bool:
    generation = one.result.generation
    if not name.startswith(DIVERSITY) or generation is None:
        return False
    return generation.diversity.exceeds_real(name.removeprefix("generated/"))


def _note_documents(first: Evaluated, other: Evaluated, num_shared: int, notes: list[str]) -> None:
    for one in (first, other):
        if num_shared < len(one.held_out):
            notes.append(
                f"{one.label} has {len(one.held_out):,} documents; compared are the {num_shared:,} shared ones"
            )
    if first.result.data.fingerprint != other.result.data.fingerprint:
        notes += [
            f"the tokenizer of {one.label} does not reproduce {text.num_changed:,} of {text.num_documents:,} texts, "
            "and its bits per byte and per character leave out what it loses"
            for one in (first, other)
            if (text := one.result.bounds.text) is not None and text.num_changed
        ]
    if num_shared < FEW_DOCUMENTS:
        notes.append(
            f"{num_shared} documents are few: below {FEW_DOCUMENTS} bootstrap intervals are too narrow and p-values "
            "too small; evaluate more documents before relying on a difference"
        )


def _is_comparable(name: str, first: Evaluated, other: Evaluated, notes: list[str]) -> bool:
    """Whether a quantity means the same in both results; otherwise a note says why it is left out."""
    needed = [(why, path) for prefix, why, path in _MUST_AGREE if name.startswith(prefix)]
    if not name.startswith(_ANY_TOKENIZER):
        needed.insert(0, (_OTHER_TOKENIZER, "data.fingerprint"))
    for why, path in needed:
        values = [_field(one.result, path) for one in (first, other)]
        if values[0] != values[1]:
            shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
            notes.append(f"{why}: {path} is {shown[0]} in {first.label}, {shown[1]} in {other.label}")
            return False
    return True


def _field(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _compare_quantity(
    first: Evaluated, other: Evaluated, about: str, name: str, seed: int
) -> ComparedQuantity | None:
    """Both numbers on the shared documents, their difference, its interval and p-value."""
    mine, others = first.documents(about).quantities[name], other.documents(about).quantities[name]
    where = {document: row for row, document in enumerate(other.documents(about).ids[: len(others)])}
    matched = {
        document: (row, where[document])
        for row, document in enumerate(first.documents(about).ids[: len(mine)])
        if document in where
    }
    if len(matched) < 2 or mine.kind != others.kind:
        return None
    rows = np.array(list(matched.values()))
    left, right = mine.take(rows[:, 0]), others.take(rows[:, 1])

    def difference(chosen: np.ndarray) -> np.ndarray:
        return right.statistic(chosen) - left.statistic(chosen)

    resampled = bootstrap(difference, len(rows), seed, NUM_RESAMPLES)
    apart = summarize(right.value() - left.value(), resampled)
    return ComparedQuantity(
        about=about, name=name, title=mine.title, better=mine.better, num_documents=len(rows), first=left.value(),
        other=right.value(), difference=apart, p_value=bootstrap_p_value(resampled),
        verdict=_verdict(apart, mine, first.label, other.label),
    )  # fmt: skip


def _verdict(difference: Estimate, quantity: Quantity, first: str, other: str) -> str:
    if not (difference.low > 0.0 or difference.high < 0.0) or abs(difference.value) < RESOLUTION:
        return SAME
    return f"{other if (difference.low > 0.0) == (quantity.better == MORE) else first} is better"
