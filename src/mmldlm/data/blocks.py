"""Checksums of blocks: a shard is verified piece by piece, each piece as it is first read.

Beside `NAME.arrow` lies `NAME.crc32`: for each 4,096 bytes of the shard, in order, its CRC-32 as a little-endian
uint32. A block is as long as a page of memory, so verifying it reads nothing from the disk that reading would not.
"""

from __future__ import annotations

import mmap
import zlib
from array import array
from pathlib import Path

import numpy as np

from mmldlm.errors import UserError

BLOCK = 4096
SUFFIX = ".crc32"


def num_blocks(size: int) -> int:
    """Blocks of a file of so many bytes."""
    return -(-size // BLOCK)


class BlockSums:
    """The checksums of a file, collected while it is written."""

    def __init__(self) -> None:
        self._sums, self._crc, self._filled = array("I"), 0, 0

    def update(self, data: memoryview) -> None:
        """The next bytes of the file."""
        view, start = data.cast("B"), 0
        while start < len(view):
            piece = view[start : start + BLOCK - self._filled]
            self._crc, self._filled = zlib.crc32(piece, self._crc), self._filled + len(piece)
            start += len(piece)
            if self._filled == BLOCK:
                self._sums.append(self._crc)
                self._crc = self._filled = 0

    def content(self) -> bytes:
        """What the file of checksums holds."""
        sums = [*self._sums, self._crc] if self._filled else self._sums
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
        for block in np.unique(pending).tolist() if len(pending) else ():
            start = block * BLOCK
            if zlib.crc32(self.content[start : start + BLOCK]) != self.sums[block]:
                raise ValueError(f"bytes {start} to {start + BLOCK - 1} differ from their checksum")
            self.seen[block] = True
        return not len(pending)

    def require_range(self, start: int, end: int) -> bool:
        """The same for one range."""
        return self.require(np.array([start]), np.array([end]))
