"""A pair store on disk: `manifest.json`, written last, so that its presence means "finished"; and its shards.

A shard is an Arrow file with the columns id, tokens, latents and text in one record batch; a store with derived
documents has one column more, `made_of`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from mmldlm.data.files import FileEntry, read_json, write_json
from mmldlm.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SETTINGS = "settings.json"
REMEDY = "make the store again with 'mmldlm prepare', or copy it again from where it came"


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
        encoder = None
        if self.encoder is not None:
            encoder = {key: self.encoder.get(key) for key in ("prompt", "normalize", "dimension")}
            encoder["identity"] = self.encoder.get("sha256") or self.encoder.get("name")
        return checksum(
            {
                "tokenizer": None if self.tokenizer is None else self.tokenizer["sha256"],
                "vocab_size": self.vocab_size,
                "encoder": encoder,
                "shape": [self.num_slots, self.num_channels],
            }
        )

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
                f"{path}: format_version={version}, this version of mmldlm reads {FORMAT_VERSION}; "
                "make the store again with 'mmldlm prepare'"
            )
        stated = body.pop("checksum", None)
        if stated != checksum(body) or set(body) != {item.name for item in fields(cls)}:
            raise UserError(f"{path}: the manifest is damaged or was edited (its checksum differs); {REMEDY}")
        return cls(**body)


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


CHECK_SECONDS = 1.0
"""Between two looks at whether a mapped file is still whole."""


class Shard:
    """One Arrow file, mapped; the columns are views of the file."""

    def __init__(self, folder: Path, entry: ShardEntry) -> None:
        self.path, self._bytes = folder / entry["file"], entry["bytes"]
        try:
            self._check_size()
            batch = map_batch(self.path)
            if batch.num_rows != entry["num_documents"]:
                raise ValueError(f"{batch.num_rows} documents instead of {entry['num_documents']}")
            self._bind(batch)
        except (OSError, ValueError, KeyError) as error:
            raise self._unusable(error) from error

    def check(self) -> None:
        """Notice a file that was cut off or deleted since it was opened: its missing pages would end the process."""
        if time.monotonic() - self._checked_at < CHECK_SECONDS:
            return
        try:
            self._check_size()
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UserError:
        missing = isinstance(error, FileNotFoundError)
        what = "this file of the pair store is missing" if missing else f"damaged shard ({error})"
        return UserError(f"{self.path}: {what}; {REMEDY}")

    def _check_size(self) -> None:
        size = self.path.stat().st_size
        if size != self._bytes:
            raise ValueError(f"{size} bytes instead of {self._bytes}")
        self._checked_at = time.monotonic()

    def _bind(self, batch: Any) -> None:
        tokens, latents = batch.column("tokens"), batch.column("latents")
        self.offsets: np.ndarray = tokens.offsets.to_numpy()
        self.tokens: np.ndarray = tokens.values.to_numpy()
        self.latents: np.ndarray = latents.values.to_numpy().reshape(batch.num_rows, -1)
        self.ids: np.ndarray = batch.column("id").to_numpy()
        self._texts = batch.column("text")

    def token_positions(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        starts = self.offsets[rows].astype(np.int64)
        ends = self.offsets[rows + 1].astype(np.int64)
        if (
            (ends - starts != lengths).any()
            or ends.max(initial=0) > len(self.tokens)
            or starts.min(initial=0) < 0
        ):
            raise UserError(f"{self.path}: damaged shard (its lengths differ from lengths.npy); {REMEDY}")
        return ranges(starts, lengths)

    def texts(self, rows: np.ndarray) -> list[str | None]:
        try:
            return self._texts.take(rows).to_pylist()
        except (ValueError, IndexError) as error:
            raise self._unusable(error) from error


def map_batch(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(
        str(path)
    ) as mapped:  # closing frees the file handle; the views keep the mapping alive
        return pa.ipc.open_file(mapped).get_batch(0)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, ... (lengths[0] of them), then starts[1] ..., without a loop."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


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


def summarise(folder: Path, shards: list[dict[str, Any]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all documents and counts of all tokens of a split."""
    lengths = np.empty(sum(shard["num_documents"] for shard in shards), np.int32)
    token_counts, start = np.zeros(vocab_size, np.int64), 0
    for shard in shards:
        tokens = map_batch(folder / shard["file"]).column("tokens")
        lengths[start : start + len(tokens)] = np.diff(tokens.offsets.to_numpy())
        token_counts += np.bincount(tokens.values.to_numpy(), minlength=vocab_size)
        start += len(tokens)
    return lengths, token_counts
