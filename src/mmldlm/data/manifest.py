"""What a pair store says about itself: `manifest.json`, written last, so its presence means "finished"."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

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
