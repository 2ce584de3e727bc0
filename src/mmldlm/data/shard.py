"""One shard: an Arrow file with the columns id, tokens, latents and text, all in one record batch.

A store with derived documents has one column more, `made_of`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import REMEDY, ShardEntry
from mmldlm.errors import UserError

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
