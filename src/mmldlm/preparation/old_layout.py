"""Import of the layout that the MM-LDLM research code trained on.

    tokens/<split>/NAME.npz     input_ids and attention_mask, padded; one document, or one per row
    latents/<split>/NAME.npy    (C,), (S, C), or with several documents (N, C), (N, S, C)
    *.json                      optional: a list of entries with the names of files, and perhaps their text

Padding goes, by attention_mask; so do the special tokens that the tokenizer knows, unless they are to be
kept. A file that cannot be read or does not fit is named: the import stops there, or goes on without it and
lists it.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import StoreWriter
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.cutting import choose_split, text_id
from mmldlm.preparation.readers import MOST_UNPACKED, whole_characters
from mmldlm.untrusted import map_array

SPLIT_NAMES = {"val": "validation", "valid": "validation", "dev": "validation"}
UNREADABLE = (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


class BadFileError(Exception):
    """A file that cannot be used; the text names it and says why."""


@dataclass
class OldDocument:
    """One document of the old layout, without padding."""

    tokens: np.ndarray
    latents: np.ndarray
    text: str | None


@dataclass
class ImportReport:
    """What the import did besides the store itself."""

    num_special: int = 0
    """Special tokens that were removed."""
    bad_files: list[str] = field(default_factory=list)


def import_old_layout(
    old: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    encoder: dict[str, Any] | None = None,
    skip_bad: bool = False,
    keep_special: bool = False,
    latent_dtype: str = "float16",
    validation: float = 0.0,
    shard_documents: int = 8192,
) -> tuple[PairStore, ImportReport]:
    """Make a pair store of an old one; `validation` is the share of documents held out where there is no such split."""
    layout = OldLayout(old, tokenizer, keep_special=keep_special, skip_bad=skip_bad)
    layout.check_share(validation)
    shape = layout.latent_shape()
    settings = {
        "import": str(old),
        "tokenizer": tokenizer.name,
        "skip_bad": skip_bad,
        "keep_special": keep_special,
        "latent_dtype": latent_dtype,
    } | ({"validation": validation} if validation else {})
    forced = ["train", "validation"]
    with StoreWriter(
        out,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        num_slots=shape[0],
        num_channels=shape[1],
        latent_dtype=latent_dtype,
        encoder=encoder and {**encoder, "dimension": shape[1]},
        shard_documents=shard_documents,
        settings=settings,
    ) as writer:
        for split, document in layout.documents():
            text = document.text or tokenizer.decode_batch([document.tokens.tolist()])[0]
            if split == "train" and validation:  # a document at least for each
                split = forced.pop(0) if forced else choose_split(text, validation, 0.0, seed=0)
            writer.add(split, [document.tokens], document.latents[None], [text], [text_id(text)])
        counts = {
            "bad_files": len(layout.report.bad_files),
            "special_tokens_removed": layout.report.num_special,
        }
        return writer.finish(counts), layout.report


class OldLayout:
    """Reads an old folder document by document."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, keep_special: bool, skip_bad: bool) -> None:
        self.folder, self.skip_bad, self.report = folder, skip_bad, ImportReport()
        self.vocab_size = tokenizer.vocab_size
        self.special = np.array([] if keep_special else sorted(tokenizer.special_ids()), np.int64)
        if not (folder / "tokens").is_dir() or not (folder / "latents").is_dir():
            raise UserError(
                f"{folder}: not the old layout; it needs the folders 'tokens' and 'latents' inside"
            )
        self.texts, self.listed = _read_lists(folder)
        self._shape: tuple[int, ...] | None = None

    def check_share(self, validation: float) -> None:
        """A share is held out of a training split alone."""
        if not 0 <= validation < 1:
            raise UserError(f"validation={validation}: a share from 0 to below 1 is needed")
        splits = {SPLIT_NAMES.get(path.name, path.name) for path in (self.folder / "tokens").iterdir()}
        if validation and "validation" in splits:
            raise UserError(
                f"validation={validation}: {self.folder} has a validation split already; leave it out"
            )

    def latent_shape(self) -> tuple[int, ...]:
        """(slots, channels) of the first document that can be read."""
        listing = list(self._files())
        for _, tokens_path, latents_path in listing:
            try:
                return next(iter(self._read(tokens_path, latents_path))).latents.shape
            except BadFileError as error:
                self._reject(error)
            finally:
                self.report = ImportReport()  # this was only a look; everything will be met again
        raise UserError(f"{self.folder}: no document in it can be read ({len(listing)} were looked at)")

    def documents(self) -> Iterator[tuple[str, OldDocument]]:
        """All documents with their splits, in the order of their names."""
        for path in sorted(self.listed):
            if not path.is_file():
                self._reject(BadFileError(f"{path}: named in a manifest but missing"))
        for split, tokens_path, latents_path in self._files():
            try:
                for document in self._read(tokens_path, latents_path):
                    yield split, document
            except BadFileError as error:
                self._reject(error)

    def _reject(self, error: BadFileError) -> None:
        if not self.skip_bad:
            raise UserError(f"{error}; correct it, or leave bad files out with --skip-bad") from error
        self.report.bad_files.append(str(error))

    def _files(self) -> Iterator[tuple[str, Path, Path]]:
        """(split, tokens, latents) for every name that either side has."""
        names = {
            path.name
            for side in ("tokens", "latents")
            for path in (self.folder / side).iterdir()
            if path.is_dir()
        }
        for name in sorted(names):
            sides = (self.folder / "tokens" / name, self.folder / "latents" / name)
            stems = {
                path.stem
                for side, ending in zip(sides, ("npz", "npy"), strict=True)
                for path in side.glob(f"*.{ending}")
            }
            for stem in sorted(stems):
                yield SPLIT_NAMES.get(name, name), sides[0] / f"{stem}.npz", sides[1] / f"{stem}.npy"

    def _read(self, tokens_path: Path, latents_path: Path) -> list[OldDocument]:
        ids, mask = _load_tokens(tokens_path)
        latents = _arrange(_load_latents(latents_path), len(ids), latents_path)
        self._shape = self._shape or latents.shape[1:]
        if latents.shape[1:] != self._shape:
            raise BadFileError(
                f"{latents_path}: latent of shape {latents.shape[1:]}, the others have {self._shape}"
            )
        text = self.texts.get((tokens_path.parent.name, tokens_path.stem)) if len(ids) == 1 else None
        documents = []
        for row, row_mask, latent in zip(ids, mask, latents, strict=True):
            tokens = row[row_mask.astype(bool)]
            kept = tokens[~np.isin(tokens, self.special)]
            self._check(kept, tokens_path)
            self.report.num_special += len(tokens) - len(kept)
            documents.append(OldDocument(kept, latent, text))
        return documents

    def _check(self, tokens: np.ndarray, path: Path) -> None:
        if not len(tokens):
            raise BadFileError(f"{path}: no tokens are left without padding and special tokens")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise BadFileError(
                f"{path}: token id {tokens.max()}, the tokenizer has {self.vocab_size}; is it another one?"
            )


def _load_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        _check_unpacked(path)
        with np.load(path, allow_pickle=False) as arrays:
            ids, mask = np.atleast_2d(arrays["input_ids"]), np.atleast_2d(arrays["attention_mask"])
    except UNREADABLE as error:
        raise BadFileError(f"{path}: {_reason(error, path)}") from error
    if ids.shape != mask.shape or not np.issubdtype(ids.dtype, np.integer):
        raise BadFileError(
            f"{path}: input_ids {ids.shape} {ids.dtype} and attention_mask {mask.shape} do not fit"
        )
    return ids.astype(np.int64), mask


def _check_unpacked(path: Path) -> None:
    """A small archive can stand for more numbers than there is memory."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MOST_UNPACKED:
        raise ValueError(f"{size:,} bytes once unpacked, at most {MOST_UNPACKED:,} are allowed")


def _load_latents(path: Path) -> np.ndarray:
    try:
        latents = map_array(path).astype(np.float32)
    except UNREADABLE as error:
        raise BadFileError(f"{path}: {_reason(error, path)}") from error
    if not latents.size or not np.isfinite(latents).all():
        raise BadFileError(
            f"{path}: the latent is {'empty' if not latents.size else 'not finite (NaN or infinite)'}"
        )
    return latents


def _arrange(latents: np.ndarray, num_documents: int, path: Path) -> np.ndarray:
    """To (N, S, C)."""
    if num_documents == 1 and latents.ndim <= 2:
        return np.atleast_2d(latents)[None]
    if latents.ndim == 2:
        latents = latents[:, None, :]
    if latents.ndim != 3 or len(latents) != num_documents:
        raise BadFileError(f"{path}: latents of shape {latents.shape} for {num_documents} documents")
    return latents


def _reason(error: Exception, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing, its partner is there"
    if isinstance(error, KeyError):
        return f"cannot be read ({error.args[0]})"
    return f"cannot be read ({first_line(error)})"


def _read_lists(folder: Path) -> tuple[dict[tuple[str, str], str], set[Path]]:
    """Texts by split and name, and every file that a JSON list in the folder names."""
    texts: dict[tuple[str, str], str] = {}
    listed: set[Path] = set()
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: not JSON ({error}); correct or remove it") from error
        for entry in _entries(content):
            for value in entry.values():
                if isinstance(value, str) and value.endswith((".npy", ".npz")):
                    listed.add(folder / value)
                    if isinstance(entry.get("text"), str):
                        place = Path(value).parent.name, Path(value).stem
                        texts[place] = whole_characters(entry["text"], f"{path}, text of {value}")
    return texts, listed


def _entries(content: Any) -> Iterator[dict[str, Any]]:
    """Every object in lists, however deep in the JSON."""
    if isinstance(content, dict):
        yield content
        for value in content.values():
            yield from _entries(value)
    elif isinstance(content, list):
        for value in content:
            yield from _entries(value)
