"""Files that are either whole or not there: temporary name, flush to disk, rename; and their checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from mmldlm.data.blocks import BlockSums
from mmldlm.durable import flush_folder, is_full, read_digest
from mmldlm.errors import UserError

TEMPORARY = ".tmp"
MOST_BYTES = 2**28
"""Of a JSON file; the manifest of a store of a terabyte is smaller."""


class FileEntry(TypedDict):
    """Size and checksum of a finished file."""

    bytes: int
    sha256: str


class _HashingFile:
    """A binary file for writing that hashes on the way, so that the checksum is of what was meant."""

    def __init__(self, file: BinaryIO, blocks: BlockSums | None) -> None:
        self.file, self.hash, self.size, self.closed = file, hashlib.sha256(), 0, False
        self.blocks = blocks

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.hash.update(view)
        if self.blocks is not None:
            self.blocks.update(view)
        self.size += view.nbytes
        return self.file.write(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:  # Arrow closes its sink; the real file must stay open for fsync
        self.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def write_durably(path: Path, fill: Callable[[Any], None], blocks: BlockSums | None = None) -> FileEntry:
    """Let `fill` write the file; after this returns it survives a crash, before that it does not exist.

    `blocks` gets all that is written.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            sink = _HashingFile(file, blocks)
            fill(sink)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        if is_full(error):
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"{path}: no space left on the disk; what was finished stays: "
                "free some space and run the same command again"
            ) from error
        raise
    return {"bytes": sink.size, "sha256": sink.hash.hexdigest()}


def write_json(path: Path, value: Any) -> FileEntry:
    """Write strict JSON durably, the same bytes for the same value."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return write_durably(path, lambda file: file.write(text.encode()))


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
