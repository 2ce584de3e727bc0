"""The list of what a published folder holds: name, size and checksum of each file, and a checksum of itself.

Writing the manifest is the last thing before a folder gets its name, so a folder with a good manifest is
whole unless the disk damaged it later; `check_file` finds that out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmldlm.durable import Written, read_digest, write_file
from mmldlm.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
_MOST_BYTES = 64 * 2**20


class DamagedError(UserError):
    """A published folder is not what its manifest says; `file` and `reason` tell where."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


@dataclass(frozen=True)
class Entry:
    """One file, by its path below the folder. Files of a group are read as one: a rank may write its own."""

    name: str
    group: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was published, and as which in turn."""

    kind: str
    step: int
    sequence: int
    """Counts publications; after a rollback a smaller step can be the newer one."""
    files: tuple[Entry, ...]
    format: int = FORMAT


def entry(name: str, group: str, written: Written) -> Entry:
    return Entry(name, group, written.size, written.sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_file(folder / MANIFEST, [_serialize(asdict(manifest))])


def _serialize(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1)
    check = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": check}, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, or DamagedError."""
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
        body = json.loads(content)["manifest"]
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise DamagedError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedError(path, "is torn or damaged") from None
    return _parse(path, content, body)


def _parse(path: Path, content: bytes, body: Any) -> Manifest:
    if isinstance(body, dict) and isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise DamagedError(
            path, f"has format {body['format']}, this version reads up to {FORMAT}; update mmldlm"
        )
    try:
        if _serialize(body) != content:
            raise DamagedError(path, "differs from its own checksum")
        files = tuple(Entry(**item) for item in body["files"])
        manifest = Manifest(**(body | {"files": files}))
        whole = all(isinstance(number, int) for number in (manifest.step, manifest.sequence))
    except (TypeError, ValueError, KeyError, RecursionError):
        raise DamagedError(path, "is not a manifest") from None
    if not whole or not all(_inside(file.name) for file in files):
        raise DamagedError(path, "is not a manifest")
    return manifest


def _inside(name: object) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """A quick look: every file is there and as long as it should be."""
    for file in manifest.files:
        path = folder / file.name
        try:
            size = path.stat().st_size
        except OSError:
            raise DamagedError(path, "is missing") from None
        if size != file.size:
            raise DamagedError(path, f"has {size} bytes, the manifest says {file.size}")


def check_file(folder: Path, file: Entry) -> Path:
    """Read the whole file and compare it with its checksum; the path when it is good."""
    path = folder / file.name
    try:
        found = read_digest(path)
    except OSError as error:
        raise DamagedError(path, f"cannot be read: {error.strerror}") from error
    if found.sha256 != file.sha256:
        raise DamagedError(path, "differs from its checksum in the manifest")
    return path
