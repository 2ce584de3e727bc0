"""Files that are either whole or not there: temporary name, flush to disk, rename; and their checksums.

A shard is verified piece by piece, each piece as it is first read. Beside `NAME.arrow` lies `NAME.crc32`: for each
4,096 bytes of the shard, in order, its CRC-32 as a little-endian uint32. A block is as long as a page of memory, so
verifying it reads nothing from the disk that reading would not.
"""

from __future__ import annotations

import json
import mmap
import zlib
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from mmldlm.durable import is_full, read_digest, staged_file, write_file
from mmldlm.errors import UserError

BLOCK = 4096
SUFFIX = ".crc32"


def num_blocks(size: int) -> int:
    """Blocks of a file of so many bytes."""
    return -(-size // BLOCK)


def block_sums(content: bytes | memoryview) -> bytes:
    """What the file of checksums of a content holds."""
    view = memoryview(content)
    sums = [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK)]
    return np.array(sums, "<u4").tobytes()


def shared_flags(count: int) -> np.ndarray:
    """bool (count,), all false, shared with processes that are forked later: a block is verified once for all."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(1, count)), np.bool_)[:count]
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"a pair store of {count} blocks is too large for this machine ({error})") from error


class Blocks:
    """The blocks of a mapped file, and which of them are known to be whole."""

    def __init__(self, content: np.ndarray, sums: Path, seen: np.ndarray) -> None:
        """`content` (bytes,) uint8; `sums` holds its checksums; ValueError if it has another number of blocks."""
        self.content, self.seen = content.data, seen
        self.sums = np.frombuffer(sums.read_bytes(), "<u4")
        if not len(self.sums) == len(seen) == num_blocks(len(self.content)):
            raise ValueError(f"{sums.name} has {len(self.sums)} checksums for {len(seen)} blocks")

    def require(self, starts: np.ndarray, ends: np.ndarray) -> bool:
        """Verify what is not known yet of these ranges of bytes; ValueError names the first block that differs.

        True if nothing of it had to be verified.
        """
        first = starts // BLOCK
        counts = np.maximum((ends - 1) // BLOCK - first + 1, 0)
        before = np.cumsum(counts) - counts
        blocks = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
        pending = blocks[~self.seen[blocks]]
        if len(pending):
            self._verify(np.unique(pending))
        return not len(pending)

    def _verify(self, blocks: np.ndarray) -> None:
        for block, expected in zip(blocks.tolist(), self.sums[blocks].tolist(), strict=True):
            start = block * BLOCK
            if zlib.crc32(self.content[start : start + BLOCK]) != expected:
                raise ValueError(f"bytes {start} to {start + BLOCK - 1} differ from their checksum")
        self.seen[blocks] = True


TEMPORARY = ".tmp"
MOST_BYTES = 2**28
"""Of a JSON file; the manifest of a store of a terabyte is smaller."""


class FileEntry(TypedDict):
    """Size and checksum of a finished file."""

    bytes: int
    sha256: str


def write_durably(path: Path, content: bytes | memoryview) -> FileEntry:
    """After this returns the file survives a crash, before that it does not exist."""
    staged = path.with_name(path.name + TEMPORARY)
    staged.unlink(missing_ok=True)
    try:
        with staged_file(path, staged=staged):
            written = write_file(staged, [content])
    except OSError as error:
        if is_full(error):
            raise UserError(
                f"{path}: no space left on the disk; what was finished stays: "
                "free some space and run the same command again"
            ) from error
        raise
    return {"bytes": written.size, "sha256": written.sha256}


def write_json(path: Path, value: Any) -> FileEntry:
    """Write strict JSON durably, the same bytes for the same value."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return write_durably(path, text.encode())


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; a damaged file is a `UserError` that ends with the remedy."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; {remedy}")
    return value


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file as it is on the disk now."""
    digest = read_digest(path)
    return {"bytes": digest.size, "sha256": digest.sha256}


def damage_of(path: Path, entry: Any) -> str | None:
    """How a file differs from its size and checksum, as one clause; None if it does not."""
    try:
        actual = file_entry(path)
    except OSError as error:
        return error.strerror or str(error)
    if actual["bytes"] != entry["bytes"]:
        return f"{actual['bytes']} bytes instead of {entry['bytes']}"
    return None if actual["sha256"] == entry["sha256"] else "checksum differs"
