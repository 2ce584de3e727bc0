"""Weights for use: one folder that is enough to sample, on any machine, without the pair store.

    export/
      model.safetensors   the weights; settings, data description and versions are in its metadata
      config.json         the same description, for people
      tokenizer/          the tokenizer's own files
      manifest.json       sizes and checksums

`model.safetensors` decides; a `config.json` that says something else is refused, because someone edited it
in vain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mmldlm import durable
from mmldlm.checkpoint import strict_json
from mmldlm.checkpoint.manifest import (
    MANIFEST,
    Entry,
    Manifest,
    check_file,
    entry,
    read_manifest,
    write_manifest,
)
from mmldlm.checkpoint.publish import swap_in
from mmldlm.checkpoint.state import versions
from mmldlm.checkpoint.tensor_file import plan, read_tensors, stream
from mmldlm.errors import UserError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer"
KIND = "export"
_MARK, _FORMAT = "mmldlm", "export-1"
_DESCRIBED = ("config", "data", "versions")
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja", ".vocab"})


@dataclass
class Export:
    """A trained denoiser and all that is needed to use it."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    """The settings of the run."""
    data: dict[str, Any]
    """What made the data: fingerprint, sizes, normaliser, tokenizer, encoder. Arrays are kept bit by bit."""
    tokenizer_path: Path | None = None
    """File or folder of the tokenizer; after reading, the folder inside the export."""
    versions: dict[str, str] = field(default_factory=dict)


def write_export(folder: Path, export: Export) -> None:
    """Publish an export under `folder`; an older export of that name is replaced, nothing else is."""
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = durable.volatile(folder.parent, "staging", folder.name)
    try:
        with durable.naming(folder):
            staging.mkdir()
            write_manifest(staging, Manifest(KIND, 0, 0, tuple(_write_files(staging, export))))
            durable.flush_folder(staging)
        swap_in(staging, folder)
    except BaseException:
        if staging.exists():
            durable.discard(staging)
        raise


def _check_target(folder: Path) -> None:
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / WEIGHTS).is_file()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: exists and is not an export; choose a new folder")


def _write_files(staging: Path, export: Export) -> Iterator[Entry]:
    described = {
        _MARK: _FORMAT,
        "config": export.config,
        "data": export.data,
        "versions": export.versions or versions(),
    }
    notes = {key: strict_json.dump(value).decode("utf-8") for key, value in described.items()}
    yield _put(staging, WEIGHTS, stream(plan(export.weights), notes | {"format": "pt"}))
    yield _put(staging, CONFIG, [strict_json.dump(described, indent=2) + b"\n"])
    for source in _tokenizer_files(export.tokenizer_path):
        yield _put(staging, f"{TOKENIZER}/{source.name}", [source.read_bytes()])


def _put(staging: Path, name: str, chunks: Any) -> Entry:
    (staging / name).parent.mkdir(exist_ok=True)
    written = durable.write_file(staging / name, chunks)
    durable.flush_folder((staging / name).parent)
    return entry(name, KIND, written)


def _tokenizer_files(path: Path | None) -> list[Path]:
    """The tokenizer alone, also when it lies in the folder of a whole model."""
    if path is None:
        return []
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    found = [file for file in files if file.is_file() and file.suffix in _TOKENIZER_FILES]
    if not found:
        raise UserError(f"{path}: holds no tokenizer; a file like tokenizer.json is needed")
    return found


def read_export(folder: Path) -> Export:
    """Read an export back. Checksums are compared where the manifest came along with the files."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: is not an export, {WEIGHTS} is missing; make one with 'mmldlm export'")
    if (folder / MANIFEST).exists():
        for file in read_manifest(folder).files:
            if file.name != CONFIG:
                check_file(folder, file)
    try:
        weights, notes = read_tensors(path)
        config, data, made_with = (strict_json.load(notes.get(key, "null")) for key in _DESCRIBED)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: is damaged or not an export ({error}); copy it again") from error
    if notes.get(_MARK) != f'"{_FORMAT}"' or not all(
        isinstance(part, dict) for part in (config, data, made_with)
    ):
        raise UserError(
            f"{path}: is not an export of this version ({_FORMAT}); make one with 'mmldlm export'"
        )
    _check_twin(folder / CONFIG, notes)
    tokenizer = folder / TOKENIZER
    return Export(weights, config, data, tokenizer if tokenizer.is_dir() else None, made_with)


def _check_twin(path: Path, notes: dict[str, str]) -> None:
    if not path.exists():
        return
    try:
        twin = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it, {WEIGHTS} holds the same") from error
    if twin != {key: json.loads(notes[key]) for key in (_MARK, *_DESCRIBED)}:
        raise UserError(
            f"{path}: differs from what {WEIGHTS} says; delete it, or export again with other settings"
        )
