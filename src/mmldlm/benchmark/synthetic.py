"""Pair stores of random documents, for measuring without data: made once per description and kept in the cache.

Times and memory depend on the lengths alone; the tokens and latents are noise. The writer recognises a finished or
a half-made store, so a benchmark that was stopped while making one goes on with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.format import checksum
from mmldlm.data.writer import StoreWriter, store_state
from mmldlm.errors import UserError

_SHARD = 65536
_VALIDATION = 64
_DEFAULT_TOKENS = 2**22


@dataclass(frozen=True)
class Synthetic:
    """A description of random documents; the same description gives the same store."""

    min_length: int
    max_length: int
    vocabulary: int
    channels: int
    documents: int
    seed: int

    def folder(self) -> Path:
        """Where it is kept."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        lengths = f"{self.min_length}-{self.max_length}"
        return Path(home) / "mmldlm" / "synthetic" / f"{lengths}-{checksum(asdict(self))[:12]}"

    def lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Log-normal around the geometric middle, two deviations to either end; equal ends give one length."""
        middle = 0.5 * (np.log(self.min_length) + np.log(self.max_length))
        deviation = 0.25 * (np.log(self.max_length) - np.log(self.min_length))
        drawn = np.exp(rng.normal(middle, deviation, count))
        return np.clip(np.rint(drawn), self.min_length, self.max_length).astype(np.int64)


def describe(
    length: int | None, lengths: str | None, vocabulary: int, channels: int, documents: int | None, seed: int
) -> Synthetic:
    """The description that the options of the command give; sentences of 4 to 64 tokens if they say nothing."""
    if length is not None and lengths is not None:
        raise UserError(f"--length {length} and --lengths {lengths}: give one of the two")
    low, high = (length, length) if length is not None else parse_lengths(lengths or "4:64")
    if documents is None:
        documents = int(np.clip(_DEFAULT_TOKENS // int(np.sqrt(low * high)), 512, _SHARD))
    return Synthetic(low, high, vocabulary, channels, documents, seed)


def parse_lengths(text: str) -> tuple[int, int]:
    """`4:64` as numbers."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise UserError(f"--lengths {text}: write the shortest and the longest document, such as 4:64")
    return int(low), int(high)


def make_store(described: Synthetic) -> Path:
    """The folder of the store; written if it is not there yet."""
    path, settings = described.folder(), {"synthetic": asdict(described)}
    if store_state(path, settings) == "finished":
        return path
    writer = StoreWriter(
        path, vocab_size=described.vocabulary, num_slots=1, num_channels=described.channels,
        encoder={"name": "synthetic", "prompt": "", "normalize": False, "dimension": described.channels},
        shard_documents=_SHARD, settings=settings,
    )  # fmt: skip
    try:
        for split, documents in _parts(described):
            writer.add(split, **documents)
        writer.finish()
    finally:
        writer.close()
    return path


def _parts(described: Synthetic) -> Iterator[tuple[str, dict[str, Any]]]:
    """A shard at a time, each from its own seed. The first document is as long as any may be."""
    for start in range(0, described.documents, _SHARD):
        count = min(_SHARD, described.documents - start)
        yield "train", _documents(described, count, start)
    yield "validation", _documents(described, _VALIDATION, 2**40)


def _documents(described: Synthetic, count: int, start: int) -> dict[str, Any]:
    rng = np.random.default_rng([described.seed, start])
    lengths = described.lengths(count, rng)
    lengths[0] = described.max_length
    flat = rng.integers(0, described.vocabulary, int(lengths.sum()))
    return {
        "token_lists": np.split(flat, np.cumsum(lengths)[:-1]),
        "latents": rng.standard_normal((count, 1, described.channels), dtype=np.float32),
        "ids": np.arange(start, start + count),
    }
