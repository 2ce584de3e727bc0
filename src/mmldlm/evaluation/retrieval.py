"""t2l: turn held-out text into latents, compare them with those of the encoder, and search for each among all of them.

STS: rank correlation between cosines of latents and the scores of people, on a user's file. It has two texts and a
score in each line: `.tsv` and `.csv` (with or without a header), or `.jsonl`.
Shapes: n documents, S latent slots, C latent channels.
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

from mmldlm.data.store import Split
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context, Tokenize, strangers
from mmldlm.evaluation.results import SIMILARITY, Histogram, Retrieval, Similarity
from mmldlm.latents import cosine, directions
from mmldlm.statistics import LESS, MORE, Quantity, difference

_CANDIDATES_AT_ONCE = 8192
_ROUNDING = 1e-12
"""Cosines of equal latents differ by less, depending on the order of their sums."""
_NUM_BINS = 40
NAMES = (("text1", "text2", "score"), ("sentence1", "sentence2", "score"))
_DELIMITERS = {".tsv": "\t", ".csv": ","}
_FEWEST = 3


def measure_retrieval(context: Context) -> Retrieval | None:
    """Turn the chosen documents into latents, and search for each one's own among all latents of the split."""
    if not context.active.latent:
        context.notes.append("t2l is left out: this run has no loss on latents")
        return None
    selection = context.selection
    documents = selection.documents
    latents = context.own_latents(documents.split_tokens(), documents.ids, context.watch("text to latent"))
    if not np.isfinite(latents).all():
        raise UserError("the model gives latents that are not finite; look at the training log of its run")
    own = cosine(latents, documents.latents)
    other = cosine(latents, documents.latents[strangers(len(latents), context.seed)])
    rank = ranks(latents, documents.latents, selection.split, selection.positions)
    quantities = {
        "cosine": Quantity("text to latent, cosine", MORE, own),
        "stranger_cosine": Quantity("text to latent, cosine to a stranger", LESS, other),
        "retrieval_at_1": Quantity("text to latent, retrieval@1", MORE, rank <= 1),
        "retrieval_at_10": Quantity("text to latent, retrieval@10", MORE, rank <= 10),
    }
    num_candidates = len(selection.split)
    return Retrieval(
        **{name: context.record(f"t2l/{name}", quantity) for name, quantity in quantities.items()},
        chance_at_1=1 / num_candidates,
        chance_at_10=min(10 / num_candidates, 1.0),
        median_rank=float(np.median(rank)),
        num_queries=len(rank),
        num_candidates=num_candidates,
        histogram=_histogram(own, other),
    )


def ranks(queries: np.ndarray, truth: np.ndarray, split: Split, positions: np.ndarray) -> np.ndarray:
    """(n,) 1 + number of other candidates at least as near as the right latent: a tie is a miss."""
    wanted = directions(queries)
    own = np.einsum("nc,nc->n", wanted, directions(truth))[:, None]
    ahead = np.zeros(len(queries), dtype=np.int64)
    for start in range(0, len(split), _CANDIDATES_AT_ONCE):
        where = np.arange(start, min(start + _CANDIDATES_AT_ONCE, len(split)))
        scores = wanted @ directions(split.read(where).latents).T
        mine = np.flatnonzero((positions >= start) & (positions < start + len(where)))
        scores[mine, positions[mine] - start] = -np.inf
        ahead += (scores >= own - _ROUNDING).sum(axis=1)
    return ahead + 1


def _histogram(own: np.ndarray, other: np.ndarray) -> Histogram:
    edges = np.linspace(min(own.min(), other.min()), max(own.max(), other.max()) + 1e-6, _NUM_BINS + 1)
    return Histogram(
        edges.tolist(), np.histogram(own, edges)[0].tolist(), np.histogram(other, edges)[0].tolist()
    )


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
        raise UserError(f"{path}: the name of the file ends in .tsv, .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            read = (
                _json_rows(file) if path.suffix == ".jsonl" else _table_rows(file, _DELIMITERS[path.suffix])
            )
            rows = [_row(path, line, fields) for line, fields in read]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text; convert it") from error
    except csv.Error as error:
        raise UserError(f"{path}: is not a table ({error})") from error
    if len(rows) < _FEWEST:
        raise UserError(f"{path}: has {len(rows)} pairs; a rank correlation needs at least {_FEWEST}")
    scores = np.array([score for _, _, score in rows])
    if len(np.unique(scores)) < 2:
        raise UserError(f"{path}: all scores are {scores[0]:g}; a rank correlation needs different ones")
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
            f"{path}: line {line} does not hold two texts and a score; write three columns, or for .jsonl the keys "
            f"{' or '.join(', '.join(names) for names in NAMES)}"
        )
    return fields[0], fields[1], float(fields[2])


def _is_number(value: Any) -> bool:
    try:
        return bool(np.isfinite(float(value))) and not isinstance(value, bool)
    except (TypeError, ValueError):
        return False


def measure_similarity(context: Context, pairs: ScoredPairs, tokenize: Tokenize) -> Similarity | None:
    """Spearman's correlation between the scores and the cosines, of the model's latents and of the encoder's."""
    if not context.active.latent:
        return None
    tokens = [*_tokens(context, pairs, pairs.left, tokenize), *_tokens(context, pairs, pairs.right, tokenize)]
    ids = np.array(pairs.ids)
    both = context.own_latents(
        tokens, np.concatenate([2 * ids, 2 * ids + 1]), context.watch("similarity of texts")
    )
    context.ids[SIMILARITY] = ids.tolist()
    own = _correlation("the model's latents", pairs.scores, cosine(*np.split(both, 2)))
    own_estimate = context.record("spearman/own", own, SIMILARITY)
    if context.encode is None:
        return Similarity(str(pairs.path), len(ids), own_estimate, None, None)
    cosines = cosine(context.encode(pairs.left), context.encode(pairs.right))
    encoder = _correlation("the encoder's latents", pairs.scores, cosines)
    return Similarity(
        str(pairs.path), len(ids), own_estimate, encoder.estimate(context.seed), difference(own, encoder, context.seed)
    )  # fmt: skip


def _correlation(whose: str, scores: np.ndarray, cosines: np.ndarray) -> Quantity:
    title = f"rank correlation with the scores, {whose}"
    return Quantity(title, MORE, np.column_stack([scores, cosines]), kind="spearman")


def _tokens(context: Context, pairs: ScoredPairs, texts: list[str], tokenize: Tokenize) -> list[np.ndarray]:
    longest = context.model.denoiser.shape.max_length
    tokens = [np.array(ids, dtype=np.int64) for ids in tokenize(texts)]
    for text, ids in zip(texts, tokens, strict=True):
        if not len(ids):
            raise UserError(f"{pairs.path}: the text {text!r} holds no token")
    cut = sum(len(ids) > longest for ids in tokens)
    if cut:
        context.notes.append(
            f"{cut} of {len(tokens)} texts of {pairs.path} are cut to {longest} tokens, the longest of training"
        )
    return [ids[:longest] for ids in tokens]
