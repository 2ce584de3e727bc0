"""One Arrow file of a pair store, mapped. What is read of it is verified first.

With checksums of blocks (`blocks`) only the blocks that are touched are verified, each of them once for all processes.
A shard from before they existed is compared with the checksum of the whole file when it is opened. Checksums do not
protect from a stranger who computes them too, so offsets and shapes are checked before memory is touched.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.files import BLOCK, SUFFIX, Blocks, FileEntry, damage_of
from mmldlm.data.format import REMEDY, ShardEntry
from mmldlm.errors import UserError

CHECK_SECONDS = 1.0
"""Between two looks at whether a mapped file is still whole."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)


class Shard:
    """The documents of one file; the columns are views of it."""

    def __init__(
        self,
        folder: Path,
        entry: ShardEntry,
        shape: tuple[int, int],
        sums: FileEntry | None,
        seen: np.ndarray,
    ) -> None:
        """`shape` (slots, channels); `sums` is the file of checksums, if there is one, `seen` a flag per block."""
        self.path, self._bytes = folder / entry["file"], entry["bytes"]
        self._numbers_verified = False
        try:
            self._check_size()
            self._content = map_file(self.path)
            self._blocks = self._first_blocks(entry, sums, seen)
            self._bind(read_batch(self._content), entry["num_documents"], shape)
        except _DAMAGE as error:
            raise self._unusable(error) from error

    def check(self) -> None:
        """Notice a file that was cut off or deleted since it was opened: its missing pages would end the process."""
        if time.monotonic() - self._checked_at < CHECK_SECONDS:
            return
        try:
            self._check_size()
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error

    def read(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens one document after the other, latents (n, slots * channels), ids (n,)."""
        try:
            self._require_rows(rows)
            starts, ends = self.offsets[rows].astype(np.int64), self.offsets[rows + 1].astype(np.int64)
            if (ends - starts != lengths).any():
                raise ValueError("its lengths differ from lengths.npy")
            _check_bounds(starts, ends, len(self.tokens))
            if not self._numbers_verified:
                self._require(self._place(self.tokens), starts, ends, self.tokens.itemsize)
        except ValueError as error:
            raise self._unusable(error) from error
        return self.tokens[ranges(starts, lengths)], self.latents[rows], self.ids[rows]

    def texts(self, rows: np.ndarray) -> list[str | None]:
        """The texts; None where the store holds none."""
        try:
            self._require(self._place(self._text_offsets), rows, rows + 2, 8)
            starts, ends = self._text_offsets[rows], self._text_offsets[rows + 1]
            _check_bounds(starts, ends, len(self._characters))
            present = np.ones(len(rows), np.bool_)
            if self._valid is not None:
                self._require(self._place(self._valid), rows // 8, rows // 8 + 1, 1)
                present = (self._valid[rows // 8] >> (rows % 8)) & 1
            self._require(self._place(self._characters), starts, ends, 1)
            return [
                self._characters[start:end].tobytes().decode() if there else None
                for start, end, there in zip(starts, ends, present, strict=True)
            ]
        except ValueError as error:
            raise self._unusable(error) from error

    def derived(self, rows: np.ndarray) -> np.ndarray:
        """(n,) bool: which documents are made of others."""
        if self._made_of is None:
            return np.full(len(rows), self._all_derived)
        try:
            self._require(self._place(self._made_of), rows // 8, rows // 8 + 1, 1)
        except ValueError as error:
            raise self._unusable(error) from error
        return ((self._made_of[rows // 8] >> (rows % 8)) & 1).astype(np.bool_)

    def _unusable(self, error: Exception) -> UserError:
        missing = isinstance(error, FileNotFoundError)
        what = "this file of the pair store is missing" if missing else f"damaged shard ({error})"
        where = getattr(error, "filename", None) or self.path
        return UserError(f"{where}: {what}; {REMEDY}")

    def _check_size(self) -> None:
        size = self.path.stat().st_size
        if size != self._bytes:
            raise ValueError(f"{size} bytes instead of {self._bytes}")
        self._checked_at = time.monotonic()

    def _first_blocks(self, entry: ShardEntry, sums: FileEntry | None, seen: np.ndarray) -> Blocks | None:
        """Verify where Arrow looks first; a file without checksums of blocks is verified as a whole."""
        if sums is None:
            if not seen.all() and (problem := damage_of(self.path, entry)):
                raise ValueError(problem)
            seen[:] = True
            return None
        path = self.path.with_suffix(SUFFIX)
        if problem := damage_of(path, sums):
            raise ValueError(f"{path.name}: {problem}")
        blocks, size = Blocks(self._content, path, seen), len(self._content)
        blocks.require(np.array([0, max(0, size - BLOCK)]), np.array([min(BLOCK, size), size]))
        return blocks

    def _bind(self, batch: Any, num_documents: int, shape: tuple[int, int]) -> None:
        if batch.num_rows != num_documents:
            raise ValueError(f"{batch.num_rows} documents instead of {num_documents}")
        tokens, latents, texts = (batch.column(name) for name in ("tokens", "latents", "text"))
        self.offsets = _numbers(tokens.offsets)
        self.tokens = _numbers(tokens.values)
        self.latents = _numbers(latents.values).reshape(num_documents, math.prod(shape))
        self.ids = _numbers(batch.column("id"))
        if str(texts.type) != "large_string" or texts.offset:
            raise ValueError(f"texts of type {texts.type}")
        valid, offsets, characters = texts.buffers()
        self._valid = None if valid is None else np.frombuffer(valid, np.uint8)
        made_of = batch.column("made_of") if "made_of" in batch.schema.names else None
        there = None if made_of is None else made_of.buffers()[0]
        self._all_derived = made_of is not None and there is None
        self._made_of = None if there is None else np.frombuffer(there, np.uint8)
        self._text_offsets = np.frombuffer(offsets, np.int64)
        self._characters = np.frombuffer(characters or b"", np.uint8)
        kinds = [array.dtype.str for array in (self.tokens, self.latents, self.ids)]
        if kinds[0] not in ("<u2", "<u4") or kinds[1] not in ("<f2", "<f4") or kinds[2] != "<i8":
            raise ValueError(f"columns of types {', '.join(kinds)}")
        self._require_frame()

    def _require_frame(self) -> None:
        """Verify all that lies before and after the columns: Arrow has read it by now."""
        columns = [self.ids, self.offsets, self.tokens, self.latents]
        ends = [self._place(array) + array.nbytes for array in columns]
        texts = [array for array in (self._text_offsets, self._characters) if array.nbytes]
        last = max([*ends, *(self._place(array) + array.nbytes for array in texts)])
        self._numbers_end = -(-max(ends) // BLOCK)
        if self._blocks is not None:
            first, size = min(self._place(array) for array in columns), len(self._content)
            self._blocks.require(np.array([0, last]), np.array([first, size]))

    def _place(self, array: np.ndarray) -> int:
        """Where an array begins in the file, in bytes."""
        if not array.nbytes:
            return 0
        place = array.ctypes.data - self._content.ctypes.data
        if not 0 <= place <= len(self._content) - array.nbytes:
            raise ValueError("it is compressed; a store maps its shards")
        return place

    def _require(self, place: int, starts: np.ndarray, ends: np.ndarray, size: int) -> None:
        """Verify values of an array, which has so many bytes per value."""
        if self._blocks is not None:
            self._blocks.require(place + starts * size, place + ends * size)

    def _require_rows(self, rows: np.ndarray) -> None:
        """Verify ids, offsets and latents of some documents."""
        if self._blocks is None or self._numbers_verified:
            return
        sizes = ((self.ids, 8, 1), (self.offsets, 4, 2), (self.latents, self.latents.strides[0], 1))
        starts = [self._place(array) + rows * size for array, size, _ in sizes]
        ends = [start + size * num for start, (_, size, num) in zip(starts, sizes, strict=True)]
        known = self._blocks.require(np.concatenate(starts), np.concatenate(ends))
        self._numbers_verified = known and bool(self._blocks.seen[: self._numbers_end].all())


def _numbers(column: Any) -> np.ndarray:
    """The numbers of an Arrow array, not copied. Its own `to_numpy` imports pandas, which takes 0.3 s."""
    content, kind = column.buffers()[-1] or b"", np.dtype(column.type.to_pandas_dtype())
    values = np.frombuffer(content, kind)[column.offset : column.offset + len(column)]
    if column.null_count or len(values) != len(column):
        raise ValueError("numbers are missing")
    return values


def _check_bounds(starts: np.ndarray, ends: np.ndarray, size: int) -> None:
    if len(starts) and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= size):
        raise ValueError("its offsets are impossible")


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped: uint8 (size,)."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:  # closing frees the file handle; views keep the mapping alive
        return np.frombuffer(mapped.read_buffer(), np.uint8)


def read_batch(content: np.ndarray) -> Any:
    """The record batch of a shard; ValueError for what is none."""
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0)
        batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return batch


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, ... (lengths[0] of them), then starts[1] ..., without a loop."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
