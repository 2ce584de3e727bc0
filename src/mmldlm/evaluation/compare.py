"""Two or more evaluations side by side: paired bootstrap over the documents that they share.

Each result is compared with the first one. A difference is (other - first); its interval and p-value come from
resamples of documents in which both results keep the same documents, so what is hard for both cancels.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.evaluation.context import HELD_OUT
from mmldlm.evaluation.quantities import MORE, Quantity
from mmldlm.evaluation.report import DOCUMENTS, RESULT
from mmldlm.evaluation.run import RESULT_FORMAT
from mmldlm.evaluation.statistics import bootstrap, summarize

COMPARISON_FORMAT = "mmldlm-comparison-1"
NUM_RESAMPLES = 4000
FEW_DOCUMENTS = 20
LONGEST_NAME = 50
"""Characters in the name of a comparison's folder that come from names of models or runs."""
NO_DIFFERENCE = "no measurable difference"
_ANY_TOKENIZER = ("bits_per_", "spearman/")
"""Quantities that mean the same whatever the tokenizer."""


@dataclass(frozen=True)
class Evaluated:
    """A result on disk with the values of its documents."""

    label: str
    folder: Path
    result: dict[str, Any]
    documents: dict[str, Any]

    def quantities(self, about: str) -> dict[str, Quantity]:
        """Quantities of one set of documents, by name."""
        found = self.documents.get(about, {}).get("quantities", {})
        return {name: Quantity.from_json(saved) for name, saved in found.items()}

    def ids(self, about: str) -> list[int]:
        """Documents of one set."""
        return self.documents.get(about, {}).get("id", [])


def load_evaluated(path: Path, split: str | None = None) -> Evaluated:
    """From a run, from the folder of a report, or from its result.json."""
    folder = _report_folder(path, split)
    _, result = _read_json(folder / RESULT)
    found = result.get("format") if isinstance(result, dict) else None
    if found != RESULT_FORMAT:
        raise UserError(
            f"{folder / RESULT}: has the format {found}, needed is {RESULT_FORMAT}; run 'mmldlm eval' again"
        )
    content, documents = _read_json(folder / DOCUMENTS)
    if result.get("documents_sha256") != hashlib.sha256(content).hexdigest():
        raise UserError(f"{folder}: {DOCUMENTS} does not belong to {RESULT}; run 'mmldlm eval' again")
    return Evaluated(str(path), folder, result, documents)


def _read_json(path: Path) -> tuple[bytes, Any]:
    """The bytes of a file, and what they say."""
    try:
        content = path.read_bytes()
        return content, json.loads(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no JSON"
        raise UserError(f"{path}: cannot be read ({reason}); run 'mmldlm eval' again") from error


def _report_folder(path: Path, split: str | None) -> Path:
    if path.is_file() and path.name == RESULT:
        return path.parent
    if (path / RESULT).is_file():
        return path
    reports = sorted(found.parent.name for found in path.glob(f"reports/*/{RESULT}"))
    if split is not None and split in reports:
        return path / "reports" / split
    if split is None and len(reports) == 1:
        return path / "reports" / reports[0]
    if not reports or split is not None:
        what = f"no report on the split {split!r}" if split is not None and reports else "no report"
        raise UserError(f"{path}: there is {what}; make it with 'mmldlm eval {path}' first")
    raise UserError(f"{path}: has reports on {', '.join(reports)}; choose one with --split")


def compare(results: list[Evaluated], seed: int = 0) -> dict[str, Any]:
    """Every quantity that the results share, each result against the first."""
    first, labels = results[0], _labels(results)
    notes: list[str] = []
    pairs = [
        _compare_two(first, other, labels[0], label, seed, notes)
        for other, label in zip(results[1:], labels[1:], strict=True)
    ]
    return {
        "format": COMPARISON_FORMAT,
        "results": [
            {"label": label, "folder": str(one.folder)}
            | {key: one.result["model"][key] for key in ("name", "step", "num_parameters")}
            | {"split": one.result["data"]["split"], "num_documents": len(one.ids(HELD_OUT))}
            for label, one in zip(labels, results, strict=True)
        ],
        "num_resamples": NUM_RESAMPLES,
        "seed": seed,
        "comparisons": pairs,
        "notes": list(dict.fromkeys(notes)),
    }


def _labels(results: list[Evaluated]) -> list[str]:
    """Names that tell the results apart: that of the model, or the path as it was given."""
    names = [one.result["model"]["name"] for one in results]
    return [name if names.count(name) == 1 else one.label for name, one in zip(names, results, strict=True)]


def folder_name(results: list[Evaluated]) -> str:
    """Name of the folder for a comparison: of the models, or of the runs' folders; another one for other results.

    Runs of one recipe have one name, and a second comparison must not take the place of the first: where names do not
    tell the results apart, or are too long for a folder, a hash of where the results lie does.
    """
    models = [one.result["model"]["name"] for one in results]
    folders = [one.folder.resolve() for one in results]
    runs = [path.parents[1].name if path.parent.name == "reports" else path.name for path in folders]
    names = models if len(set(models)) == len(models) else runs
    name = "compare-" + "-".join(names)
    if len(set(names)) == len(names) and len(name) <= LONGEST_NAME:
        return name
    where = hashlib.sha256("\n".join(str(path) for path in folders).encode()).hexdigest()
    return f"{name[:LONGEST_NAME]}-{where[:8]}"


def _compare_two(
    first: Evaluated, other: Evaluated, first_label: str, label: str, seed: int, notes: list[str]
) -> dict[str, Any]:
    shared = set(first.ids(HELD_OUT)) & set(other.ids(HELD_OUT))
    if not shared:
        raise UserError(
            f"{other.label}: was evaluated on other documents than {first.label}, none is shared; evaluate both on the "
            "same split of the same data (--data, --split) with the same --seed"
        )
    for one in (first, other):
        if len(shared) < len(one.ids(HELD_OUT)):
            notes.append(
                f"{one.label} has {len(one.ids(HELD_OUT)):,} documents; compared are the {len(shared):,} shared ones"
            )
    if len(shared) < FEW_DOCUMENTS:
        notes.append(
            f"{len(shared)} documents are few: below {FEW_DOCUMENTS} bootstrap intervals are too narrow and p-values "
            "too small; evaluate more documents before a difference is believed"
        )
    rows = []
    for about in first.documents:
        mine, others = first.quantities(about), other.quantities(about)
        for name in mine:
            if name in others and _comparable(name, first, other, notes):
                row = _compare_quantity(first, other, about, mine[name], others[name], seed)
                if row is not None:
                    rows.append({"about": about, "name": name} | row)
    for row in rows:
        row["verdict"] = _verdict(row, first_label, label)
    return {"first": first_label, "other": label, "num_shared": len(shared), "rows": rows}


def _comparable(name: str, first: Evaluated, other: Evaluated, notes: list[str]) -> bool:
    """Whether a quantity means the same in both results; otherwise a note says why it is left out."""

    def same(why: str, *keys: str) -> bool:
        values = []
        for one in (first, other):
            value: Any = one.result
            for key in keys:
                value = (value or {}).get(key)
            values.append(value)
        if values[0] != values[1]:
            shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
            notes.append(
                f"{why}: {'.'.join(keys)} is {shown[0]} in {first.label}, {shown[1]} in {other.label}"
            )
        return values[0] == values[1]

    if not name.startswith(_ANY_TOKENIZER) and not same(
        "only bits per byte and per character are compared, tokenizer or encoder differ",
        "data",
        "fingerprint",
    ):
        return False
    if name.startswith("latent_gain/"):
        return same("what the text buys is left out", "latent_bound", "snr")
    if name.startswith("checked/"):
        why = "what the self-check buys is left out"
        return same(why, "self_check", "judge") and same(why, "self_check", "candidate_temperature")
    if name.startswith("t2l/retrieval"):
        return same("retrieval is left out", "retrieval", "num_candidates")
    if name == "generated/self_bleu":
        return same("self-BLEU is left out", "generation", "num_documents")
    if name == "generated/reference_nats":
        return same("the reference model is left out", "generation", "reference_lm", "name")
    return True


def _compare_quantity(
    first: Evaluated, other: Evaluated, about: str, mine: Quantity, others: Quantity, seed: int
) -> dict[str, Any] | None:
    """Both numbers on the shared documents, their difference, its interval and p-value."""
    where = {document: row for row, document in enumerate(other.ids(about)[: len(others)])}
    matched = {
        document: (row, where[document])
        for row, document in enumerate(first.ids(about)[: len(mine)])
        if document in where
    }
    if len(matched) < 2 or mine.kind != others.kind:
        return None
    rows = np.array(list(matched.values()))
    left, right = mine.take(rows[:, 0]), others.take(rows[:, 1])

    def difference(chosen: np.ndarray) -> np.ndarray:
        return right.statistic(chosen) - left.statistic(chosen)

    whole = np.arange(len(rows))[None]
    a, b = float(left.statistic(whole)[0]), float(right.statistic(whole)[0])
    values = bootstrap(difference, len(rows), seed, NUM_RESAMPLES)
    return {
        "title": mine.title,
        "better": mine.better,
        "num_documents": len(rows),
        "first": a,
        "other": b,
        "difference": summarize(b - a, values).to_json(),
        "p_value": p_value(values),
    }


def p_value(differences: np.ndarray) -> float:
    """Two-sided, from resampled differences: how seldom they lie on the other side of 0; never below 2 / (r + 1)."""
    differences = differences[np.isfinite(differences)]
    sides = ((differences <= 0).sum() + 1, (differences >= 0).sum() + 1)
    return float(min(2.0 * min(sides) / (len(differences) + 1), 1.0))


def _verdict(row: dict[str, Any], first: str, other: str) -> str:
    low, high = row["difference"]["low"], row["difference"]["high"]
    if not (low > 0.0 or high < 0.0):
        return NO_DIFFERENCE
    return f"{other if (low > 0.0) == (row['better'] == MORE) else first} is better"
