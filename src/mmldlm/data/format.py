"""What a pair store is on disk: `manifest.json`, written last, so that its presence means "finished"; and shards.

A manifest may come from a stranger: types, sizes and names are checked before anything relies on them. A shard is an
Arrow file with the columns id, tokens, latents and text in one record batch; a store with derived documents has one
column more, `made_of`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from mmldlm.data.files import FileEntry, read_json, write_json
from mmldlm.errors import UserError
from mmldlm.untrusted import misfit

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SETTINGS = "settings.json"
REMEDY = "prepare the store again, or copy it again from where it came"
LATENT_DTYPES = ("float16", "float32")
LIMITS = {"vocab_size": 2**24, "num_slots": 2**16, "num_channels": 2**20, "max_length": 2**24}
"""Larger sizes are mistakes, or meant to exhaust the memory."""
DERIVED = ("derived_spans", "derived_splices", "derived_swaps")
"""The counts of the manifest that say how many training documents are made of others."""


class ShardEntry(TypedDict):
    """One Arrow file."""

    file: str
    num_documents: int
    num_tokens: int
    bytes: int
    sha256: str


class SplitEntry(TypedDict):
    """One split: its shards in order and its totals."""

    num_documents: int
    num_tokens: int
    max_length: int
    shards: list[ShardEntry]


@dataclass
class Manifest:
    """Contents of `manifest.json`."""

    num_slots: int
    num_channels: int
    latent_dtype: str
    vocab_size: int
    tokenizer: dict[str, Any] | None
    """name and sha256 of the vocabulary and its rules; the tokenizer itself is in the folder `tokenizer`."""
    encoder: dict[str, Any] | None
    """What made the latents: name, sha256 of the weights, prompt, normalize, dimension. None: unknown."""
    splits: dict[str, SplitEntry]
    normalizer: dict[str, list[float]]
    """mean and scale per channel, fitted on the training split."""
    counts: dict[str, int] = field(default_factory=dict)
    """What happened on the way: duplicates, empty, cut, too short ..."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the store was made with."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    """Every other file of the store (lengths, token counts, tokenizer), for `verify`."""
    format_version: int = FORMAT_VERSION

    def fingerprint(self) -> str:
        """A stable hash of what a pair means: tokenizer, encoder, shapes. A model fits every store that shares it."""
        return fingerprint(vars(self))

    def content(self) -> str:
        """A hash of the pairs themselves and their order. A run goes on only with the same content."""
        shards = {name: [shard["sha256"] for shard in split["shards"]] for name, split in self.splits.items()}
        return checksum({"fingerprint": self.fingerprint(), "shards": shards, "normalizer": self.normalizer})

    def save(self, folder: Path) -> None:
        """Publish the store."""
        body = asdict(self)
        write_json(folder / MANIFEST, {**body, "checksum": checksum(body)})

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check `manifest.json`; everything that is wrong is a `UserError`."""
        path = folder / MANIFEST
        _check_presence(folder, path)
        body = read_json(path, f"the manifest is damaged: {REMEDY}")
        version = body.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path}: format_version={version!r:.40}, this version of mmldlm reads {FORMAT_VERSION}; "
                "prepare the store again"
            )
        stated = body.pop("checksum", None)
        if stated != checksum(body) or set(body) != {item.name for item in fields(cls)}:
            raise UserError(f"{path}: the manifest is damaged or was edited (its checksum differs); {REMEDY}")
        if problem := misfit(cls, body, "it") or next(_impossible(cls(**body)), None):
            raise UserError(f"{path}: is not the manifest of a pair store ({problem}); {REMEDY}")
        return cls(**body)


def too_large(sizes: dict[str, int]) -> str | None:
    """What is wrong with the sizes that data gives a network, as one clause."""
    for name, size in sizes.items():
        if not 1 <= size <= LIMITS[name]:
            return f"{name} is {size}, allowed is 1 to {LIMITS[name]}"
    return None


def unfit_normalizer(value: Any, num_slots: int, num_channels: int) -> str | None:
    """What is wrong with the mean and scale of the channels, as one clause."""
    for name in ("mean", "scale"):
        try:
            array = np.asarray(value[name], np.float64)
        except (KeyError, TypeError, ValueError):
            return f"normalizer.{name} is not a list of numbers"
        if array.shape not in ((num_channels,), (num_slots, num_channels)):
            return f"normalizer.{name} has shape {array.shape} for {num_channels} channels"
        if not np.isfinite(array).all() or (name == "scale" and array.min() <= 0):
            return f"normalizer.{name} holds an impossible value"
    return None


def _impossible(manifest: Manifest) -> Iterator[str]:
    """Values of the right type that no store has: sizes that disagree, names of files outside the store."""
    sizes = {name: getattr(manifest, name) for name in ("vocab_size", "num_slots", "num_channels")}
    if problem := too_large(sizes) or unfit_normalizer(manifest.normalizer, *list(sizes.values())[1:]):
        yield problem
    if manifest.latent_dtype not in LATENT_DTYPES:
        yield f"latent_dtype is {manifest.latent_dtype!r:.40}"
    if manifest.tokenizer is not None and not isinstance(manifest.tokenizer.get("sha256"), str):
        yield "tokenizer has no sha256"
    for name, split in manifest.splits.items():
        if problem := _impossible_split(manifest, split):
            yield f"splits.{name:.40} {problem}"
    shards = [shard["file"] for split in manifest.splits.values() for shard in split["shards"]]
    for path in map(Path, (*shards, *manifest.files, *(f"{name}/x" for name in manifest.splits))):
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            yield f"{str(path)[:60]!r} lies outside the store"


def _impossible_split(manifest: Manifest, split: SplitEntry) -> str | None:
    row = manifest.num_slots * manifest.num_channels * np.dtype(manifest.latent_dtype).itemsize
    for name in ("num_documents", "num_tokens"):
        counts = [shard[name] for shard in split["shards"]]  # type: ignore[literal-required]
        if min(counts, default=0) < 0 or sum(counts) != split[name]:  # type: ignore[literal-required]
            return f"has another {name} than its shards"
    for shard in split["shards"]:
        if shard["bytes"] < 2 * shard["num_tokens"] + row * shard["num_documents"]:
            return f"has the file {shard['file']!r:.60}, which is too small for its documents"
    return too_large({"max_length": split["max_length"]}) if split["num_documents"] else None


def fingerprint(described: Mapping[str, Any]) -> str:
    """That of a store or model, from what its manifest or description says about tokenizer, encoder and shapes."""
    tokenizer, encoder = described["tokenizer"], described["encoder"]
    if encoder is not None:
        identity = encoder.get("sha256") or encoder.get("name")
        encoder = {key: encoder.get(key) for key in ("prompt", "normalize", "dimension")} | {
            "identity": identity
        }
    return checksum(
        {
            "tokenizer": None if tokenizer is None else tokenizer.get("sha256"),
            "vocab_size": described["vocab_size"],
            "encoder": encoder,
            "shape": [described["num_slots"], described["num_channels"]],
        }
    )


def checksum(value: Any) -> str:
    """sha256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_presence(folder: Path, path: Path) -> None:
    if path.is_file():
        return
    if not folder.exists():
        raise UserError(
            f"{folder}: no such pair store; make one with 'mmldlm prepare --input TEXT --out {folder}'"
        )
    if (folder / SETTINGS).is_file():
        raise UserError(
            f"{folder}: this pair store is not finished; run the same 'mmldlm prepare' command again"
        )
    raise UserError(
        f"{folder}: not a pair store (it has no {MANIFEST}); make one with 'mmldlm prepare', "
        "or import an old layout with 'mmldlm data import'"
    )


def flatten(token_lists: Sequence[Any], lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    if not len(lengths) or lengths.min() < 1:
        raise UserError("a document without tokens cannot be stored; leave it out")
    flat = np.concatenate(token_lists).astype(np.int64)
    if flat.min() < 0 or flat.max() >= vocab_size:
        raise UserError(
            f"token id {int(flat.max())}: the vocabulary has {vocab_size} entries; is it another tokenizer?"
        )
    return flat


def record_batch(
    flat: np.ndarray,
    lengths: np.ndarray,
    latents: np.ndarray,
    texts: Sequence[str | None],
    ids: Any,
    vocab_size: int,
    made_of: Sequence[str | None] | None = None,
) -> Any:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise UserError(
            f"{offsets[-1]} tokens in one shard, at most 2147483647 fit; use fewer documents per shard"
        )
    token_type = np.uint16 if vocab_size <= 65536 else np.uint32
    columns = {
        "id": pa.array(np.asarray(ids, np.int64)),
        "tokens": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat.astype(token_type))),
        "latents": pa.FixedSizeListArray.from_arrays(pa.array(latents.reshape(-1)), latents[0].size),
        "text": pa.array(texts, pa.large_string()),
    }
    if made_of is not None:
        columns["made_of"] = pa.array(made_of, pa.large_string())
    return pa.record_batch(columns)
