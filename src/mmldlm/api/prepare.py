"""`mmldlm.prepare`: texts to a pair store.

    store = mmldlm.prepare(["one.txt", "s3://bucket/folder"], out="data/mine")      # files, folders, addresses
    store = mmldlm.prepare(texts, out="data/own", encoder=MyEncoder())              # any object with encode(texts)
    store = mmldlm.prepare((texts, vectors), out="data/given")                      # latents that exist already

An encoder returns an array (texts, channels), or (texts, slots, channels) for several vectors per text. A row is a
mapping such as `{"text": ..., "latent": ...}`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import AnyEncoder, encoder_name
from mmldlm.preparation.locations import is_address
from mmldlm.preparation.pipeline import Note, Progress, run
from mmldlm.preparation.ray_engine import RayOptions
from mmldlm.preparation.readers import EXTENSIONS, LATENT_FIELD, extension_of
from mmldlm.preparation.settings import PrepareSettings
from mmldlm.preparation.vectors import Vectors

Source = str | Path | Iterable[Any]
_DATASET_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LONGEST_NAME = 1024
ENGINES = ("plain", "ray")


class SourceName(str):
    """The name of a file, pattern, folder or dataset; in a list of sources it is never taken for a text."""


def prepare(
    source: Source, out: str | Path, *, encoder: AnyEncoder | None = None, tokenizer: str = "builtin:minilm",
    latents: Any = None, cut: str = "none", max_tokens: int = 128, min_tokens: int = 1, limit: int | None = None,
    validation: float | None = None, test: float = 0.0, validation_source: Source = (), test_source: Source = (),
    derive: int = 0, text_field: str | None = None, latent_field: str | None = LATENT_FIELD, text_unit: str = "auto",
    dataset_config: str | None = None, dataset_split: str = "train", validation_dataset_split: str | None = None,
    test_dataset_split: str | None = None, prompt: str = "", normalize: bool | None = None,
    dimension: int | None = None, latent_dtype: str = "float16", shard_documents: int = 8192, seed: int = 0,
    device: str = "auto", batch_size: int | None = None, engine: str = "plain", workers: int | None = None,
    ray_address: str | None = None, progress: Progress | None = None, note: Note | None = None,
) -> PairStore:  # fmt: skip
    """Turn text into a pair store: tokens and latents to train on. Called again, it continues where it was stopped.

    Args:
        source: Text: files, folders, datasets and addresses by name, or texts, rows, a dataset, a data frame of pandas,
            `(texts, array)`.
        out: Folder of the pair store.
        encoder: `builtin:minilm` (the default), a sentence-transformers model, `encode(texts)`, or `module:name`.
        tokenizer: `builtin:minilm`, `builtin:gpt2`, `builtin:qwen`, a folder, or a name on the Hugging Face Hub.
        latents: Latents that you have already, one row per document: an array or a .npy file. Nothing is encoded.
        cut: What becomes one pair: `none` (a whole document), `sentences`, `paragraphs` or `chunks`.
        min_tokens, max_tokens: Shorter documents are left out, longer ones cut, or left out with `latents`.
        limit: At most so many pairs of the source: a fair sample.
        validation, test: Shares of the documents held out; validation 0.05, but 0 with `validation_source`.
        validation_source, test_source: Files or datasets that are held out as a whole.
        derive: Add up to so many spans, splices and word swaps of each training document.
        text_field, latent_field: Fields of a row that hold text and latent, also nested ones such as `content.body`;
            `latent_field=None` ignores latents.
        text_unit: What a document of a .txt file is: `file`, `part` or `line`.
        dataset_config, dataset_split: Configuration and split of a Hugging Face dataset.
        validation_dataset_split, test_dataset_split: The split that a held-out dataset is read from.
        prompt, normalize, dimension: Before each text for the encoder; latents to unit length; the first channels.
        latent_dtype, shard_documents: `float16` or `float32`; documents per file.
        seed: For splits, `limit` and `derive`.
        device, batch_size: Where the encoder runs, and the most texts that it gets at once.
        engine, workers, ray_address: `plain`, or `ray` with so many workers of a local or running cluster.
        progress, note: Called with the numbers of documents done and expected; with lines for a person, of which the
            warnings are logged without it.

    >>> import numpy as np, tempfile
    >>> texts, folder = ["a coil of rope", "the open sea", "a small harbour"], tempfile.mkdtemp()
    >>> store = prepare((texts, np.eye(3)), f"{folder}/own", validation=0.0)
    >>> store.texts[1], store.latents[1, 0].tolist()
    ('the open sea', [0.0, 1.0, 0.0])
    """
    words = locals()
    if engine not in ENGINES:
        raise UserError(f"engine={engine}: allowed are {', '.join(ENGINES)}")
    for name in ("workers", "ray_address"):
        if engine == "plain" and words[name]:
            raise UserError(f"{name}={words[name]}: belongs to engine=ray; add it, or leave this out")
    inputs, rows, latents = _read_source(source, latents, "source")
    vectors = None if latents is None else Vectors.of(latents)
    return run(
        _settings(words, inputs, vectors), out, rows=rows, vectors=vectors, encoder=encoder, device=device,
        batch_size=batch_size, progress=progress, note=note,
        ray=RayOptions(ray_address, workers) if engine == "ray" else None,
    )  # fmt: skip


def _settings(words: dict[str, Any], inputs: tuple[str, ...], vectors: Vectors | None) -> PrepareSettings:
    """The settings of a store, from the arguments of `prepare`."""
    encoder = words["encoder"]
    by_name = encoder is None or isinstance(encoder, str)
    named = {item.name: words[item.name] for item in fields(PrepareSettings) if item.name in words}
    named |= {
        "input": inputs,
        "encoder": None if encoder is None else encoder_name(encoder),
        "normalize": words["normalize"] if by_name else bool(words["normalize"]),
        "validation_input": _names(words["validation_source"], "validation_source"),
        "test_input": _names(words["test_source"], "test_source"),
        "latents": None if vectors is None else vectors.name,
        "latent_field": words["latent_field"] or None,
    }
    return PrepareSettings(**named)


def _read_source(
    source: Source, latents: Any, argument: str
) -> tuple[tuple[str, ...], Iterable[Any] | None, Any]:
    """(names of files and datasets, rows in memory, latents); one of the first two stands for the text."""
    if isinstance(source, str | Path):
        return (str(source),), None, latents
    if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], str | Path):
        if latents is not None:
            raise UserError(f"latents: {argument} is (texts, array) and has latents already; leave one out")
        inputs, rows, _ = _read_source(source[0], None, argument)
        return inputs, rows, source[1]
    if hasattr(source, "column_names"):  # a Hugging Face dataset
        if isinstance(source, dict):
            raise UserError(f"{argument}: is a dictionary of splits; choose one, such as dataset['train']")
        return ("dataset",), source, latents
    _require_several(source, argument)
    if all(hasattr(source, name) for name in ("columns", "notna", "to_dict")):  # a data frame of pandas
        return _read_source(_rows_of_frame(source), latents, argument)
    if isinstance(source, Mapping) or hasattr(source, "columns"):  # whose columns would be taken for texts
        raise UserError(
            f"{argument}: is a {type(source).__name__}; give a list of texts, or of rows such as {{'text': ...}} "
            "(those of a data frame of polars: frame.to_dicts())"
        )
    rows = list(source)
    if rows and _is_name(rows[0]):
        for row in rows:
            if not _is_name(row):
                raise UserError(
                    f"{argument}: {str(rows[0])[:60]!r} names a file, {str(row)[:60]!r} does not exist; "
                    "give files only, or rows such as {'text': ...} for texts that look like names of files"
                )
        return tuple(map(str, rows)), None, latents
    if not rows:
        raise UserError(f"{argument}: is empty; give texts, files, a dataset or builtin:sotu")
    return ("texts",), rows, latents


def _require_several(source: Any, argument: str) -> None:
    """Reject what is neither a name nor a collection."""
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise UserError(f"{argument}={source!r}: give texts, files, a dataset or builtin:sotu")


def _rows_of_frame(frame: Any) -> list[dict[str, Any]]:
    """The rows of a data frame of pandas, which is not imported here; what is missing becomes None."""
    named = frame.set_axis([str(name) for name in frame.columns], axis=1).astype(object)
    rows: list[dict[str, Any]] = named.where(named.notna(), None).to_dict("records")
    return rows


def _names(source: Source, argument: str) -> tuple[str, ...]:
    """The names of files and datasets that are held out as a whole."""
    if isinstance(source, str | Path):
        return (str(source),)
    _require_several(source, argument)
    names = tuple(source)  # of a data frame those of its columns
    if hasattr(source, "columns") or not all(isinstance(name, str | Path) for name in names):
        raise UserError(f"{argument}: only files and names of datasets are allowed here")
    return tuple(map(str, names))


def _is_name(value: Any) -> bool:
    """Whether an entry of a list names a file, a pattern or a dataset, rather than being a text."""
    if isinstance(value, Path | SourceName):
        return True
    if not isinstance(value, str) or "\n" in value or not 0 < len(value) <= _LONGEST_NAME:
        return False
    if value.startswith("builtin:") or is_address(value) or extension_of(Path(value)) in EXTENSIONS:
        return True
    if _DATASET_NAME.fullmatch(value) or (glob.has_magic(value) and "/" in value and " " not in value):
        return True
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False
