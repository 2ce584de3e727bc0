"""The pair store, writing side: durable shards, then the manifest.

Each shard is published with a sidecar (checksum, counts, sums for the normaliser), so a writer that was
killed can be started again with the same settings and the same documents: finished shards are recognised and
kept, and the result is byte for byte what an undisturbed run writes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mmldlm.data.files import (
    SUFFIX,
    TEMPORARY,
    block_sums,
    damage_of,
    file_entry,
    read_json,
    write_durably,
    write_json,
)
from mmldlm.data.format import (
    LATENT_DTYPES,
    MANIFEST,
    SETTINGS,
    Manifest,
    ShardEntry,
    SplitEntry,
    checksum,
    flatten,
    record_batch,
)
from mmldlm.data.shard import map_file, read_batch
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.durable import folder_lock
from mmldlm.errors import UserError
from mmldlm.latents import Moments, fit_normalizer


@dataclass(frozen=True)
class Place:
    """Where a shard will be that is not written yet."""

    path: Path
    entry: dict[str, Any]
    """Empty until then."""


@dataclass(frozen=True)
class ShardFormat:
    """What all shards of a store have in common; any process can write one of them."""

    vocab_size: int
    num_slots: int
    num_channels: int
    latent_dtype: str

    def write(
        self,
        path: Path,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        latents: np.ndarray,
        texts: Sequence[str | None],
        ids: np.ndarray,
        counts: dict[str, int],
        made_of: Sequence[str | None] | None = None,
    ) -> dict[str, Any]:
        """Write a shard and return its sidecar, which is written too: latents (N, S, C).

        `counts` are added to those of the manifest. `made_of` says of each derived document what it is made of;
        without it there is no such column.
        """
        import pyarrow as pa

        lengths = np.array([len(tokens) for tokens in token_lists], np.int64)
        flat = flatten(token_lists, lengths, self.vocab_size)
        stored = self._stored_latents(latents, texts, path)
        batch = record_batch(flat, lengths, stored, texts, ids, self.vocab_size, made_of)
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as out:
            out.write_batch(batch)
        content = memoryview(sink.getvalue())
        with ThreadPoolExecutor(1) as beside:  # both leave Python free
            moments = beside.submit(Moments.of, stored.reshape(-1, self.num_channels))
            sidecar = {
                "file": f"{path.parent.name}/{path.name}",
                "num_documents": len(lengths),
                "num_tokens": int(lengths.sum()),
                "max_length": int(lengths.max()),
                **write_durably(path, content),
                "blocks": write_durably(path.with_suffix(SUFFIX), block_sums(content)),
                "content": _content(ids),
                "counts": counts,
                "moments": moments.result().to_json(),
            }
        write_json(path.with_suffix(".json"), sidecar)
        return sidecar

    def _stored_latents(self, latents: np.ndarray, texts: Sequence[str | None], path: Path) -> np.ndarray:
        """Check shape and values, then the number format of the store."""
        expected = (len(texts), self.num_slots, self.num_channels)
        if latents.shape != expected:
            raise UserError(f"{path}: latents of shape {latents.shape}, this store holds {expected}")
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(latents, dtype=self.latent_dtype)
        half = stored.dtype == np.float16  # whose exponent numpy takes ten times as long to look at
        bad = ~((stored.view(np.uint16) & 0x7C00 != 0x7C00) if half else np.isfinite(stored)).all(axis=(1, 2))
        if bad.any():
            worst = int(np.argmax(bad))
            what = "a NaN or infinite latent"
            if np.isfinite(latents[worst]).all():
                what = f"a latent too large for latent_dtype={self.latent_dtype}; use latent_dtype=float32"
            raise UserError(
                f"{int(bad.sum())} of {len(texts)} documents have {what}; "
                f"the first is {str(texts[worst])[:60]!r}"
            )
        return stored


def store_state(path: Path, settings: dict[str, Any]) -> str:
    """`new`, `partial` or `finished`; rejects a folder with other settings or other contents."""
    if not path.exists():
        return "new"
    if not path.is_dir():
        raise UserError(f"{path}: is a file; give the folder of the pair store")
    if not (path / SETTINGS).is_file():
        if any(entry.name != SETTINGS + TEMPORARY for entry in path.iterdir()):
            raise UserError(f"{path}: is not empty and holds no pair store; choose another folder")
        return "new"
    finished = (path / MANIFEST).is_file()
    if not finished and not any(path.glob("*/shard-*.json")):
        return "new"  # nothing that could be lost
    recorded = read_json(path / SETTINGS, "remove the folder and start again")["settings"]
    if recorded != settings:
        raise UserError(
            f"{path}: was made with other settings: {_difference(recorded, settings)}; "
            "choose another folder, or use the same settings to go on"
        )
    return "finished" if finished else "partial"


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {old.get(key)!r} there, {new.get(key)!r} here" for key in keys)


class StoreWriter:
    """Writes one pair store. `add` documents in a fixed order, then `finish`."""

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        num_slots: int,
        num_channels: int,
        tokenizer: Tokenizer | None = None,
        latent_dtype: str = "float16",
        encoder: dict[str, Any] | None = None,
        shard_documents: int = 65536,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._lock = ExitStack()
        if latent_dtype not in LATENT_DTYPES:
            raise UserError(f"latent_dtype={latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}")
        self.path, self.settings = Path(path), settings or {}
        self.format = ShardFormat(vocab_size, num_slots, num_channels, latent_dtype)
        self.tokenizer, self.encoder = tokenizer, encoder
        self.shard_documents = shard_documents
        self._pending: dict[str, list[tuple[Any, np.ndarray, str | None, int]]] = {}
        self._done: dict[str, list[dict[str, Any]]] = {}
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _begin(self) -> None:
        state = store_state(self.path, self.settings)
        if state == "finished":
            raise UserError(f"{self.path}: this pair store is finished already; choose another folder")
        made_by = self._made_by()
        if state == "partial":
            recorded = read_json(self.path / SETTINGS, "remove the folder and start again")["made_by"]
            if recorded != made_by:
                raise UserError(
                    f"{self.path}: was begun with other parts: {_difference(recorded, made_by)}; "
                    "choose another folder"
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be made ({error.strerror}); choose another folder"
            ) from error
        what = (
            f"{self.path}: another process is writing this pair store; wait for it or choose another folder"
        )
        self._lock.enter_context(folder_lock(self.path, timeout=0.0, what=what))
        write_json(self.path / SETTINGS, {"settings": self.settings, "made_by": made_by})

    def _made_by(self) -> dict[str, Any]:
        """What the bytes of a shard depend on besides the documents."""
        encoder = self.encoder and {key: value for key, value in self.encoder.items() if key != "probe"}
        return {
            "tokenizer": self.tokenizer.spec() if self.tokenizer else None,
            "encoder": encoder,
            "shape": [*astuple(self.format), self.shard_documents],
        }

    def add(
        self,
        split: str,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        latents: np.ndarray,
        texts: Sequence[str | None] | None = None,
        ids: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Append documents; a shard is written whenever enough are together."""
        if len(latents) != len(token_lists):
            raise UserError(f"{len(token_lists)} documents but {len(latents)} latents")
        texts = [None] * len(token_lists) if texts is None else texts
        numbers = map(_id_of_tokens, token_lists) if ids is None else map(int, ids)
        pending = self._pending.setdefault(split, [])
        pending += zip(token_lists, np.asarray(latents), texts, numbers, strict=True)
        while len(pending) >= self.shard_documents:
            self._flush(split, pending)

    def _flush(self, split: str, pending: list[tuple[Any, np.ndarray, str | None, int]]) -> None:
        """Write the first documents that wait as a shard."""
        tokens, latents, texts, ids = zip(*pending[: self.shard_documents], strict=True)
        del pending[: self.shard_documents]
        if not self.keeps_shard(split, np.array(ids, np.int64)):
            self.write_shard(self.reserve(split), tokens, np.stack(latents), texts, np.array(ids, np.int64))

    def keeps_shard(self, split: str, ids: np.ndarray) -> bool:
        """True if the next shard of this split is already on the disk; then it is not to be written again."""
        shards = self._done.setdefault(split, [])
        path = self._shard_path(split, len(shards))
        sidecar = path.with_suffix(".json")
        if not sidecar.is_file():
            return False
        entry = read_json(sidecar, f"remove {sidecar} and run the same command again")
        if entry["content"] != _content(ids):
            raise UserError(
                f"{path}: holds other documents than the text gives now, so the text has changed since; "
                "choose another folder, or remove this one and start again"
            )
        if (
            "blocks" not in entry
            or damage_of(path.with_suffix(SUFFIX), entry["blocks"])
            or damage_of(path, entry)
        ):
            return False
        shards.append(entry)
        return True

    def reserve(self, split: str) -> Place:
        """The next place of this split, for `write_shard`; those after it can be looked at before it is filled."""
        shards = self._done.setdefault(split, [])
        place = Place(self._shard_path(split, len(shards)), {})
        shards.append(place.entry)
        return place

    def write_shard(
        self,
        place: Place,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        latents: np.ndarray,
        texts: Sequence[str | None],
        ids: np.ndarray,
        counts: dict[str, int] | None = None,
        made_of: Sequence[str | None] | None = None,
    ) -> None:
        """Write the shard of a reserved place, as `ShardFormat.write` does."""
        sidecar = self.format.write(place.path, token_lists, latents, texts, ids, counts or {}, made_of)
        place.entry.update(sidecar)

    def finish(self, counts: dict[str, int] | None = None) -> PairStore:
        """Write what is pending, the sidecars of each split, the tokenizer, and last the manifest."""
        for split, pending in self._pending.items():
            if pending:
                self._flush(split, pending)
        self._done = {split: shards for split, shards in self._done.items() if shards}
        if "train" not in self._done:
            raise UserError(
                f"{self.path}: no document fell into the training split; give more text, "
                "or smaller shares for validation and test"
            )
        total = dict(counts or {})
        for shard in self._all_shards():
            for key, value in shard["counts"].items():
                total[key] = total.get(key, 0) + value
        moments = [Moments.from_json(shard["moments"]) for shard in self._done["train"]]
        self._remove_strays()
        manifest = Manifest(
            **asdict(self.format),
            tokenizer=self.tokenizer.spec() if self.tokenizer else None,
            encoder=self.encoder,
            splits={split: _split_entry(shards) for split, shards in sorted(self._done.items())},
            normalizer=fit_normalizer(moments),
            counts=total,
            settings=self.settings,
            files=self._write_side_files(),
        )
        manifest.save(self.path)
        self.close()
        return PairStore.open(self.path)

    def close(self) -> None:
        """Release the folder for other processes; what is on the disk stays."""
        self._lock.close()

    def _all_shards(self) -> Iterable[dict[str, Any]]:
        return (shard for shards in self._done.values() for shard in shards)

    def _shard_path(self, split: str, shard_idx: int) -> Path:
        return self.path / split / f"shard-{shard_idx:05d}.arrow"

    def _write_side_files(self) -> dict[str, Any]:
        files: dict[str, Any] = {
            str(Path(shard["file"]).with_suffix(SUFFIX)): shard["blocks"] for shard in self._all_shards()
        }
        for split, shards in self._done.items():
            lengths, token_counts = summarise(self.path, shards, self.format.vocab_size)
            for name, array in (("lengths", lengths), ("token_counts", token_counts)):
                path = self.path / split / f"{name}.npy"
                files[f"{split}/{name}.npy"] = write_durably(path, _npy(array))
        if self.tokenizer is not None:
            folder = self.path / "tokenizer"
            self.tokenizer.save(folder)
            files |= {f"tokenizer/{path.name}": file_entry(path) for path in sorted(folder.iterdir())}
        return files

    def _remove_strays(self) -> None:
        """Leftovers of a killed run: temporary files, and shards that are no part of the result."""
        listed = {self.path / shard["file"] for shard in self._all_shards()}
        for path in self.path.rglob("*"):
            stray_shard = path.match("shard-*") and path.with_suffix(".arrow") not in listed
            if path.name.endswith(TEMPORARY) or stray_shard:
                path.unlink()


def _id_of_tokens(tokens: Any) -> int:
    return int(checksum([int(token) for token in tokens])[:16], 16) >> 1


def _content(ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()


def _npy(array: np.ndarray) -> memoryview:
    """An array as a .npy file has it."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getbuffer()


def _split_entry(shards: list[dict[str, Any]]) -> SplitEntry:
    keys = ShardEntry.__annotations__
    return {
        "num_documents": sum(shard["num_documents"] for shard in shards),
        "num_tokens": sum(shard["num_tokens"] for shard in shards),
        "max_length": max(shard["max_length"] for shard in shards),
        "shards": [{key: shard[key] for key in keys} for shard in shards],  # type: ignore[misc]
    }


def summarise(folder: Path, shards: list[dict[str, Any]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all documents and counts of all tokens of a split."""
    lengths = np.empty(sum(shard["num_documents"] for shard in shards), np.int32)
    token_counts, start = np.zeros(vocab_size, np.int64), 0
    for shard in shards:
        tokens = read_batch(map_file(folder / shard["file"])).column("tokens")
        lengths[start : start + len(tokens)] = np.diff(tokens.offsets.to_numpy())
        token_counts += np.bincount(tokens.values.to_numpy(), minlength=vocab_size)
        start += len(tokens)
    return lengths, token_counts
