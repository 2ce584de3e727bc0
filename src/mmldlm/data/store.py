"""The pair store, reading side: memory-mapped Arrow shards behind one manifest.

Opening reads `manifest.json` and nothing else. A split maps its lengths and, when first touched, its shards.
Small files are compared with their checksums when they are opened, shards as they are read.
Shapes: N documents, S latent slots, C latent channels. Layout on disk: docs/data-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.files import SUFFIX, damage_of, num_blocks, shared_flags
from mmldlm.data.format import DERIVED, REMEDY, Manifest, SplitEntry
from mmldlm.data.shard import Shard, ranges
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.latents import Normalizer
from mmldlm.types import DataShape, PackedBatch
from mmldlm.untrusted import map_array

MOST_UNKNOWN = 0.01
"""Share of unknown tokens without a warning: one in five sentences of 20 tokens. English prose has next to none."""


@dataclass
class Documents:
    """Some documents, in the order asked for."""

    tokens: np.ndarray
    """int64 (sum of lengths,): all documents one after the other."""
    lengths: np.ndarray
    """int64 (N,)"""
    latents: np.ndarray
    """float32 (N, S, C), as the encoder made them (not normalised)."""
    ids: np.ndarray
    """int64 (N,): a hash of the text, the same wherever the text came from."""

    def split_tokens(self) -> list[np.ndarray]:
        """The tokens of each document."""
        return np.split(self.tokens, np.cumsum(self.lengths))[:-1]

    def first(self, count: int) -> Documents:
        """The first `count` documents (0: all)."""
        lengths = self.lengths[: count or None]
        tokens = self.tokens[: int(lengths.sum())]
        return Documents(tokens, lengths, self.latents[: len(lengths)], self.ids[: len(lengths)])


class PairStore:
    """A finished pair store: documents, each with tokens, text and latents, in splits.

    >>> import tempfile
    >>> import mmldlm
    >>> path = tempfile.mkdtemp()
    >>> _ = mmldlm.prepare(
    ...     ["a coil of rope", "the open sea"], path, encoder=lambda texts: [[len(text), 1.0] for text in texts]
    ... )
    >>> store = mmldlm.PairStore.open(path)
    >>> len(store), list(store.splits)
    (2, ['train', 'validation'])
    >>> store.splits["train"].texts, store.splits["train"].latents.tolist()
    (['a coil of rope'], [[[14.0, 1.0]]])
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.fingerprint, self.content = manifest.fingerprint(), manifest.content()
        self.normalizer = Normalizer.from_json(manifest.normalizer)

    @classmethod
    def open(cls, path: str | Path) -> PairStore:
        """Read the manifest; `UserError` if there is none or it is damaged."""
        folder = Path(path)
        return cls(folder, Manifest.load(folder))

    def __len__(self) -> int:
        return sum(split["num_documents"] for split in self.manifest.splits.values())

    def __repr__(self) -> str:
        manifest = self.manifest
        sizes = ", ".join(f"{name} {split['num_documents']:,}" for name, split in manifest.splits.items())
        encoder = manifest.encoder["name"] if manifest.encoder else "no known encoder"
        return (
            f"PairStore({str(self.path)!r}: {sizes} pairs; latents {manifest.num_slots} x {manifest.num_channels} "
            f"{manifest.latent_dtype} by {encoder}; vocabulary {manifest.vocab_size:,})"
        )

    @property
    def shape(self) -> DataShape:
        """Sizes of the inputs and outputs of a network for this data, as `Denoiser` takes them."""
        manifest = self.manifest
        longest = max(split["max_length"] for split in manifest.splits.values())
        return DataShape(manifest.vocab_size, manifest.num_slots, manifest.num_channels, longest)

    @property
    def splits(self) -> dict[str, Split]:
        """All splits by name."""
        return {name: self.split(name) for name in self.manifest.splits}

    @property
    def texts(self) -> list[str | None]:
        """The texts of all splits, one split after the other; None where the store holds no text."""
        return [text for split in self.splits.values() for text in split.texts]

    @property
    def latents(self) -> np.ndarray:
        """The latents of all splits in the encoder's own space: float32 (N, S, C), in the order of `texts`."""
        return np.concatenate([split.latents for split in self.splits.values()])

    @classmethod
    def open_of_run(cls, path: str | Path, moved_to: Path | None = None) -> PairStore:
        """The store that a run was trained on, or the one that the user names in its place."""
        if moved_to is None and not Path(path).exists():
            raise UserError(
                f"{path}: the pair store that this run was trained on is not here; name it, or one prepared in the "
                "same way, with data=STORE"
            )
        return cls.open(path if moved_to is None else moved_to)

    def split(self, name: str) -> Split:
        """One split by name."""
        if name not in self.manifest.splits:
            share = "test" if name == "test" else "validation"
            raise UserError(
                f"{self.path}: no split {name!r}; this store has {', '.join(sorted(self.manifest.splits))}; "
                f"choose one of them, or prepare more text with a larger share for {share}"
            )
        return Split(self, name, self.manifest.splits[name])

    def token_counts(self, split: str = "train") -> np.ndarray:
        """How often each token occurs in a split: int64 (vocab_size,)."""
        self.split(split)
        return self._map_array(f"{split}/token_counts.npy", np.int64, self.manifest.vocab_size)

    @cached_property
    def num_unknown(self) -> dict[str, int]:
        """Of each split, the tokens that stand for text outside the vocabulary of the tokenizer: such text is lost."""
        folder = self.tokenizer_path()
        unknown = None if folder is None else Tokenizer.load(folder).unknown_id
        return {
            name: 0 if unknown is None else int(self.token_counts(name)[unknown])
            for name in self.manifest.splits
        }

    def unknown_warning(self) -> str | None:
        """A line for the user if more than `MOST_UNKNOWN` of the tokens of a split are unknown."""
        shares = {
            name: self.num_unknown[name] / max(1, entry["num_tokens"])
            for name, entry in self.manifest.splits.items()
        }
        if max(shares.values()) <= MOST_UNKNOWN:
            return None
        assert self.manifest.tokenizer is not None
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        return (
            f"{self.path}: many tokens are unknown to the tokenizer {self.manifest.tokenizer.get('name')} ({listed}), "
            "and their words are lost; prepare the text with tokenizer=builtin:qwen, which knows all text, or with a "
            "tokenizer of its language, and with an encoder that knows the language too"
        )

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each document of a split: int32 (num_documents,), memory-mapped."""
        name, entry = f"{split}/lengths.npy", self.manifest.splits[split]
        lengths = self._map_array(name, np.int32, entry["num_documents"])
        if len(lengths) and not (
            1 <= lengths.min() <= lengths.max() <= entry["max_length"]
            and lengths.sum(dtype=np.int64) == entry["num_tokens"]
        ):
            raise UserError(f"{self.path / name}: differs from what the manifest says; {REMEDY}")
        return lengths

    def tokenizer_path(self) -> Path | None:
        """The folder of the tokenizer inside the store; None if the store was made without one."""
        if self.manifest.tokenizer is None:
            return None
        for name in self.manifest.files:
            if name.startswith("tokenizer/"):
                self._require_whole(name)
        return self.path / "tokenizer"

    def _map_array(self, name: str, dtype: Any, size: int) -> np.ndarray:
        self._require_whole(name)
        path = self.path / name
        try:
            array = map_array(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {REMEDY}") from error
        if array.shape != (size,) or array.dtype != dtype:
            raise UserError(
                f"{path}: {array.dtype} values of shape {array.shape} instead of ({size},); {REMEDY}"
            )
        return array

    def _require_whole(self, name: str) -> None:
        """Compare a small file with its checksum."""
        entry = self.manifest.files.get(name)
        problem = "not listed in the manifest" if entry is None else damage_of(self.path / name, entry)
        if problem:
            raise UserError(f"{self.path / name}: damaged file ({problem}); {REMEDY}")

    @cached_property
    def longest_latent(self) -> float:
        """No slot of a training latent is longer than this, whatever the encoder gave.

        Unit length where latents were brought to it, with room for rounding. Else the normaliser bounds it: of n values
        none is further from their mean than sqrt(n) standard deviations.
        """
        if (self.manifest.encoder or {}).get("normalize") is True:
            return 1.1
        num = max(1000, self.manifest.splits.get("train", {"num_documents": 0})["num_documents"])
        mean, scale = (np.atleast_2d(part) for part in (self.normalizer.mean, self.normalizer.scale))
        reach = np.linalg.norm(mean, axis=-1) + np.sqrt(num * self.manifest.num_slots) * np.linalg.norm(
            scale, axis=-1
        )
        return 1.1 * float(reach.max())

    def summary(self, split: str = "train", num_examples: int = 5) -> dict[str, Any]:
        """What the store holds, for people and for JSON: sizes, lengths and texts of one split, what made it."""
        manifest, chosen = self.manifest, self.split(split)
        indices = np.linspace(0, len(chosen) - 1, min(num_examples, len(chosen))).astype(np.int64)
        return {
            "store": str(self.path),
            "fingerprint": self.fingerprint,
            "splits": {
                name: {
                    "num_documents": entry["num_documents"],
                    "num_tokens": entry["num_tokens"],
                    "num_unknown": self.num_unknown[name],
                    "max_length": entry["max_length"],
                    "num_shards": len(entry["shards"]),
                }
                for name, entry in manifest.splits.items()
            },
            "vocab_size": manifest.vocab_size,
            "tokenizer": manifest.tokenizer,
            "latents": {
                "slots": manifest.num_slots,
                "channels": manifest.num_channels,
                "dtype": manifest.latent_dtype,
            },
            "encoder": manifest.encoder,
            "normalizer": {
                "mean_abs": float(np.abs(self.normalizer.mean).mean()),
                "scale_mean": float(self.normalizer.scale.mean()),
            },
            "counts": manifest.counts,
            "settings": manifest.settings,
            "lengths": {"split": split} | _length_summary(np.asarray(chosen.lengths)),
            "examples": chosen.read_texts(indices),
        }

    def find_damage(self) -> list[str]:
        """Compare every file with its checksum; one line for each that differs."""
        shards = [shard for split in self.manifest.splits.values() for shard in split["shards"]]
        expected: dict[str, Any] = {shard["file"]: shard for shard in shards} | dict(self.manifest.files)
        problems = {name: damage_of(self.path / name, entry) for name, entry in sorted(expected.items())}
        return [f"{self.path / name}: {problem}" for name, problem in problems.items() if problem]


class Split:
    """Random access to the documents of one split, `store.splits[name]`. It may go to another process, which opens the
    files again."""

    def __init__(self, store: PairStore, name: str, entry: SplitEntry) -> None:
        self.store, self.name, self.entry = store, name, entry
        sizes = [shard["num_documents"] for shard in entry["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._shards: dict[int, Shard] = {}
        self._lengths: np.ndarray | None = None
        names = [str(Path(shard["file"]).with_suffix(SUFFIX)) for shard in entry["shards"]]
        self._sums = [store.manifest.files.get(name) for name in names]
        sized = zip(entry["shards"], self._sums, strict=True)
        counts = [num_blocks(shard["bytes"]) if sums else 1 for shard, sums in sized]
        self._first_flags = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._flags = shared_flags(int(self._first_flags[-1]))

    def __len__(self) -> int:
        return self.entry["num_documents"]

    def __repr__(self) -> str:
        return f"Split({self.name!r} of {str(self.store.path)!r}: {len(self):,} pairs)"

    @property
    def texts(self) -> list[str | None]:
        """All texts; None where the store holds none."""
        return self.read_texts(np.arange(len(self)))

    @property
    def latents(self) -> np.ndarray:
        """All latents in the encoder's own space: float32 (N, S, C)."""
        return self.read(np.arange(len(self))).latents

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}, "_lengths": None, "_flags": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_flags": shared_flags(int(state["_first_flags"][-1]))}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: int32 (num_documents,), memory-mapped."""
        if self._lengths is None:
            self._lengths = self.store.lengths(self.name)
        return self._lengths

    def read(self, indices: np.ndarray) -> Documents:
        """The documents at these positions, in any order, repeats allowed: their tokens one after the other, which
        `split_tokens()` cuts, and their latents in the encoder's own space."""
        indices = self._checked(indices)
        manifest = self.store.manifest
        lengths = self.lengths[indices].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        out = Documents(
            tokens=np.empty(int(lengths.sum()), np.int64),
            lengths=lengths,
            latents=np.empty((len(indices), manifest.num_slots, manifest.num_channels), np.float32),
            ids=np.empty(len(indices), np.int64),
        )
        for shard, where, rows in self._by_shard(indices):
            tokens, latents, out.ids[where] = shard.read(rows, lengths[where])
            out.tokens[ranges(starts[where], lengths[where])] = tokens
            out.latents[where] = latents.reshape(-1, *out.latents.shape[1:])
        self._check_values(out, indices)
        return out

    def batch(self, indices: Sequence[int] | np.ndarray, *, seed: int = 0, first: int = 0) -> PackedBatch:
        """The documents at these positions for a training loop of one's own: tokens, and latents normalised.

        `first` is the number of documents that were trained on before: times and noise are a function of the seed and
        of each document's number. For a store made with `derive`, give `Corruption` the split's `derived_share`.

        >>> split = model.open_store().splits["train"]
        >>> batch = split.batch([3, 1])
        >>> batch.layout.lengths.tolist() == split.lengths[[3, 1]].tolist(), tuple(batch.latents.shape)
        (True, (2, 1, 4))
        """
        indices = self._checked(np.asarray(indices))
        documents = self.read(indices)
        latents = self.store.normalizer.normalize(documents.latents)
        batch = PackedBatch.of(documents.split_tokens(), latents, seed=seed, first=first)
        return replace(batch, derived=self.derived(indices))

    def derived(self, indices: np.ndarray) -> np.ndarray | None:
        """(n,) bool: which of the documents at these positions are made of others; None where none of the split is."""
        if not self.derived_share:
            return None
        indices = self._checked(indices)
        derived = np.zeros(len(indices), np.bool_)
        for shard, where, rows in self._by_shard(indices):
            derived[where] = shard.derived(rows)
        return derived

    @property
    def derived_share(self) -> float:
        """Of the documents, those that are made of others."""
        counts = self.store.manifest.counts if self.name == "train" else {}
        number = sum(counts.get(kind, 0) for kind in DERIVED)
        return min(1.0, number / max(1, len(self)))

    def read_texts(self, indices: np.ndarray) -> list[str | None]:
        """The texts at these positions; None where the store holds none."""
        indices = self._checked(indices)
        texts: list[str | None] = [None] * len(indices)
        for shard, where, rows in self._by_shard(indices):
            for position, text in zip(where, shard.texts(rows), strict=True):
                texts[position] = text
        return texts

    def _checked(self, indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices).reshape(-1)
        if len(indices) and indices.dtype.kind not in "iu":
            raise UserError(
                f"indices: values of type {indices.dtype}; whole numbers are needed (for a mask, np.flatnonzero(mask))"
            )
        indices = indices.astype(np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"split {self.name!r} has {len(self)} documents, asked for {indices.min()}..{indices.max()}"
            )
        return indices

    def _by_shard(self, indices: np.ndarray) -> list[tuple[Shard, np.ndarray, np.ndarray]]:
        """(shard, positions in `indices`, rows of the shard) for each shard that is touched."""
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        order = np.argsort(owner, kind="stable")
        edges = np.flatnonzero(np.diff(owner[order])) + 1
        groups = np.split(order, edges) if len(order) else []
        return [
            (self._shard(int(owner[where[0]])), where, indices[where] - self._starts[owner[where[0]]])
            for where in groups
        ]

    def _shard(self, shard_idx: int) -> Shard:
        if shard_idx in self._shards:
            self._shards[shard_idx].check()
            return self._shards[shard_idx]
        manifest, flags = self.store.manifest, self._first_flags[shard_idx : shard_idx + 2]
        self._shards[shard_idx] = Shard(
            self.store.path, self.entry["shards"][shard_idx], (manifest.num_slots, manifest.num_channels),
            self._sums[shard_idx], self._flags[slice(*flags)],
        )  # fmt: skip
        return self._shards[shard_idx]

    def _check_values(self, documents: Documents, indices: np.ndarray) -> None:
        """Values that cannot be, although the files are whole: ids beyond the vocabulary, latents of absurd length."""
        limit = self.store.longest_latent * (1.0 if self.name == "train" else 10.0)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("nsc,nsc->ns", documents.latents, documents.latents)
        if (
            int(documents.tokens.max(initial=0)) < self.store.manifest.vocab_size
            and (squares <= limit**2).all()
        ):
            return  # a NaN is not
        bad = ~(squares <= limit**2).all(axis=1)
        ids = np.maximum.reduceat(documents.tokens, np.cumsum(documents.lengths) - documents.lengths)
        first = int(np.argmax(bad | (ids >= self.store.manifest.vocab_size)))
        problem = (
            f"a latent of length {np.sqrt(squares[first].max()):.3g}, and the encoder gives at most {limit:.3g}"
            if bad[first]
            else f"the token id {ids[first]}, and the vocabulary has {self.store.manifest.vocab_size} entries"
        )
        shard = int(np.searchsorted(self._starts, indices[first], side="right")) - 1
        raise UserError(
            f"{self.store.path / self.entry['shards'][shard]['file']}: document {indices[first]} of the split "
            f"{self.name!r} (id {documents.ids[first]}) has {problem}; {REMEDY}"
        )


def _length_summary(lengths: np.ndarray) -> dict[str, Any]:
    """Mean, median and histogram of the lengths of documents."""
    width = -(-(int(np.ptp(lengths)) + 1) // 16)  # whole, so that no two bars begin at the same length
    edges = np.arange(lengths.min(), lengths.max() + width + 1, width)
    counts, _ = np.histogram(lengths, edges)
    return {
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
