"""STS: does the model's own latent put texts as near to each other as people do? Rank correlation on a user's file.

A file has two texts and a score in each line: `.tsv` and `.csv` (with or without a header), or `.jsonl`.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.evaluation.context import SIMILARITY, Context, Tokenize
from mmldlm.evaluation.quantities import MORE, Quantity
from mmldlm.evaluation.statistics import bootstrap, summarize
from mmldlm.latents import cosine

NAMES = (("text1", "text2", "score"), ("sentence1", "sentence2", "score"))
_DELIMITERS = {".tsv": "\t", ".csv": ","}
_FEWEST = 3


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts with how alike people find them."""

    path: Path
    left: list[str]
    right: list[str]
    scores: np.ndarray
    """(n,)"""

    @property
    def ids(self) -> list[int]:
        """A hash of the two texts."""
        joined = [f"{a}\0{b}".encode("utf-8", "replace") for a, b in zip(self.left, self.right, strict=True)]
        digests = [hashlib.blake2b(text, digest_size=8).digest() for text in joined]
        return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def read_scored_pairs(path: Path) -> ScoredPairs:
    """Read a file; a `UserError` names the line that is wrong."""
    if path.suffix not in (*_DELIMITERS, ".jsonl"):
        raise UserError(f"--sts {path}: the name of the file ends in .tsv, .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            read = (
                _json_rows(file) if path.suffix == ".jsonl" else _table_rows(file, _DELIMITERS[path.suffix])
            )
            rows = [_row(path, line, fields) for line, fields in read]
    except OSError as error:
        raise UserError(f"--sts {path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--sts {path}: is not UTF-8 text; convert it") from error
    except csv.Error as error:
        raise UserError(f"--sts {path}: is not a table ({error})") from error
    if len(rows) < _FEWEST:
        raise UserError(f"--sts {path}: has {len(rows)} pairs; a rank correlation needs at least {_FEWEST}")
    scores = np.array([score for _, _, score in rows])
    if len(np.unique(scores)) < 2:
        raise UserError(
            f"--sts {path}: all scores are {scores[0]:g}; a rank correlation needs different ones"
        )
    return ScoredPairs(path, [a for a, _, _ in rows], [b for _, b, _ in rows], scores)


def _table_rows(file: Any, delimiter: str) -> Iterator[tuple[int, list[Any]]]:
    """A header is a first line whose third field is no number; its names, where known, choose the columns."""
    columns = [0, 1, 2]
    reader = csv.reader(
        file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    )
    for number, fields in enumerate(reader, start=1):
        if not any(field.strip() for field in fields):
            continue
        if number == 1 and len(fields) >= 3 and (named := _named_columns(fields)) is not None:
            columns = named
            continue
        if number == 1 and len(fields) >= 3 and not _is_number(fields[2]):
            continue
        yield reader.line_num, [fields[column] for column in columns if column < len(fields)]


def _named_columns(fields: list[str]) -> list[int] | None:
    words = [field.strip().lower() for field in fields]
    return next(([words.index(name) for name in names] for names in NAMES if set(names) <= set(words)), None)


def _json_rows(file: Any) -> Iterator[tuple[int, list[Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            names = next((names for names in NAMES if set(names) <= value.keys()), ())
            value = [value[name] for name in names]
        yield number, value if isinstance(value, list) else []


def _row(path: Path, line: int, fields: list[Any]) -> tuple[str, str, float]:
    good = len(fields) == 3 and all(isinstance(text, str) and text.strip() for text in fields[:2])
    if not good or not _is_number(fields[2]):
        raise UserError(
            f"--sts {path}: line {line} has not two texts and a score; give three columns, or for .jsonl the keys "
            f"{' or '.join(', '.join(names) for names in NAMES)}"
        )
    return fields[0], fields[1], float(fields[2])


def _is_number(value: Any) -> bool:
    try:
        return bool(np.isfinite(float(value))) and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def measure_similarity(context: Context, pairs: ScoredPairs, tokenize: Tokenize) -> dict[str, Any] | None:
    """Spearman's correlation between the scores and the cosines, of the model's latents and of the encoder's."""
    if not context.active.latent:
        return None
    left, right = (
        _tokens(context, pairs, pairs.left, tokenize),
        _tokens(context, pairs, pairs.right, tokenize),
    )
    ids = np.array(pairs.ids)
    both = context.own_latents(
        [*left, *right], np.concatenate([2 * ids, 2 * ids + 1]), context.watch("similarity of texts")
    )
    context.ids[SIMILARITY] = ids.tolist()
    own = _quantity("the model's latents", pairs.scores, cosine(*np.split(both, 2)))
    result: dict[str, Any] = {
        "file": str(pairs.path),
        "num_pairs": len(ids),
        "own": context.record("spearman/own", own, SIMILARITY),
        "encoder": None,
        "difference": None,
    }
    if context.encode is not None:
        encoder = _quantity(
            "the encoder's latents",
            pairs.scores,
            cosine(context.encode(pairs.left), context.encode(pairs.right)),
        )
        result["encoder"] = encoder.estimate(context.seed).to_json()
        values = bootstrap(lambda rows: own.statistic(rows) - encoder.statistic(rows), len(ids), context.seed)
        difference = result["own"]["value"] - result["encoder"]["value"]
        result["difference"] = summarize(difference, values).to_json()
    return result


def _quantity(whose: str, scores: np.ndarray, cosines: np.ndarray) -> Quantity:
    title = f"rank correlation with the scores, {whose}"
    return Quantity(title, MORE, np.column_stack([scores, cosines]), kind="spearman")


def _tokens(context: Context, pairs: ScoredPairs, texts: list[str], tokenize: Tokenize) -> list[np.ndarray]:
    longest = context.model.denoiser.shape.max_length
    tokens = [np.array(ids, dtype=np.int64) for ids in tokenize(texts)]
    for text, ids in zip(texts, tokens, strict=True):
        if not len(ids):
            raise UserError(f"--sts {pairs.path}: the text {text!r} holds no token")
    cut = sum(len(ids) > longest for ids in tokens)
    if cut:
        context.notes.append(
            f"{cut} of {len(tokens)} texts of {pairs.path} are cut to {longest} tokens, the longest of training"
        )
    return [ids[:longest] for ids in tokens]
