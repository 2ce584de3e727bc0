"""Where text comes from: files, folders, addresses, Hugging Face datasets, texts in memory, or the built-in speeches.

A source is resolved first, so that a typing mistake is reported at once, and then streamed: one `SourceDocument` at a
time, in an order that depends only on the names of the files. Latents that exist already come along: as a field of each
row, or as an array with one row per document.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.format import checksum
from mmldlm.data.tokenizer import quiet_hub
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.locations import find_files
from mmldlm.preparation.readers import (
    LATENT_FIELD,
    Fields,
    Row,
    bounded,
    extension_of,
    parse_row,
    read_file,
)
from mmldlm.preparation.settings import HELD_OUT, PrepareSettings
from mmldlm.untrusted import map_array

FEW_FILES = 20
"""With fewer plain text files than this, a file is divided into parts, each a source document of its own."""
SMALLEST_PART, LARGEST_PART = 256, 8192
"""Characters of a part: a hundredth of all files, within these limits."""
_NEW = {"latents": None, "latent_field": LATENT_FIELD}
"""Settings that older stores do not have, with the value that changes nothing."""
SAMPLED_ROWS = 64
"""Rows of an array that identify it."""
LOOKED_AT_CHARACTERS, FEWEST_LINES = 2**16, 20
"""How much of a text file decides whether it holds one text per line."""
SMALLEST_MARGIN = 50
"""Characters of a line below which nobody wraps prose."""


@dataclass(frozen=True)
class Vectors:
    """Latents that were given, one row per document: (N, C) or (N, S, C)."""

    array: np.ndarray
    name: str

    @classmethod
    def of(cls, latents: Any) -> Vectors:
        """From a .npy file, which is memory-mapped, or from an array."""
        if isinstance(latents, str | Path):
            name, array = str(latents), _map_vectors(Path(latents).expanduser())
        else:
            name, array = (
                "an array",
                np.asarray(latents.detach().cpu() if hasattr(latents, "detach") else latents),
            )
        if array.dtype.kind not in "fiu" or array.ndim not in (2, 3) or not array.size:
            raise UserError(
                f"latents={name}: {array.dtype} values of shape {array.shape}; numbers of shape (documents, channels) "
                "or (documents, slots, channels) are needed"
            )
        return cls(array, name)

    def row(self, idx: int) -> np.ndarray:
        """The latent (S, C) of a document."""
        latent: np.ndarray = np.atleast_2d(self.array[idx])
        if not np.isfinite(latent).all():
            raise UserError(
                f"latents={self.name}: row {idx} holds NaN or infinite values; correct or remove it"
            )
        return latent

    def digest(self) -> str:
        """Changes when the array does, as far as some of its rows show."""
        rows = np.linspace(0, len(self.array) - 1, min(SAMPLED_ROWS, len(self.array))).astype(np.int64)
        values = hashlib.sha256(np.ascontiguousarray(self.array[rows]).tobytes()).hexdigest()
        return f"{self.array.dtype} {list(self.array.shape)}, {values[:16]}"


def _map_vectors(path: Path) -> np.ndarray:
    try:
        return map_array(path)
    except FileNotFoundError as error:
        raise UserError(f"latents={path}: no such file; check the spelling") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"latents={path}: not a .npy file of numbers ({first_line(error)}); save it with numpy.save"
        ) from error


@dataclass(frozen=True)
class SourceDocument:
    """A text as it came; everything that is cut from it goes into the same split."""

    text: str | None
    read_bytes: int
    """How much of its file had been read by then, for the progress bar."""
    latent: np.ndarray | None = None
    """(S, C) if it was given."""
    where: str = ""
    """File and line, for messages."""
    has_lines: bool = False
    """It comes from a plain text file, so its lines may have been meant as texts."""


@dataclass(frozen=True)
class Sources:
    """Resolved sources, ready to be streamed any number of times."""

    files: tuple[Path, ...]
    datasets: tuple[str, ...]
    settings: PrepareSettings
    split: str | None = None
    """The split that all of it goes to; None: by shares."""
    rows: Iterable[Any] | None = None
    """Texts or rows in memory, instead of files and datasets."""
    vectors: Vectors | None = None
    """The latents of all documents, in their order."""

    @property
    def name(self) -> str:
        """The argument that names these sources, for messages."""
        return "source" if self.split is None else f"{self.split}_source"

    @property
    def dataset_split(self) -> str:
        """What is read of a dataset."""
        return self.settings.dataset_splits[self.split] or str(self.split)

    @property
    def fields(self) -> Fields:
        """Which fields of a row are used."""
        return Fields(self.settings.text_field, self.settings.latent_field or None)

    @cached_property
    def num_bytes(self) -> int:
        """Size of all files; datasets do not count."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def text_unit(self) -> str:
        """What a plain text file is divided into."""
        if self.settings.text_unit != "auto":
            return self.settings.text_unit
        if self.vectors is not None:
            return "line"
        few = len(self.files) < FEW_FILES and not self.datasets
        return "part" if few and all(_is_plain(path) for path in self.files) else "file"

    @cached_property
    def latent_shape(self) -> tuple[int, ...] | None:
        """(slots, channels) of the latents that were given, by the first document with text; None: there are none."""
        for document in self._documents():
            if document.text and document.text.strip():
                return None if document.latent is None else document.latent.shape
        raise UserError(f"{self.label()}: there is no text in it; check the files")

    def label(self) -> str:
        """The argument and a few names, for messages."""
        if self.rows is not None:
            return self.name
        shown = [*map(str, self.files[:3]), *self.datasets[:3]]
        return f"{self.name}={' '.join([*shown, '...'] if len(self.files) > 3 else shown)}"

    def digest(self) -> str:
        """Changes when a file is added, removed or changes its size, or a text in memory changes."""
        if self.rows is not None:
            texts = hashlib.sha256()
            for document in self._documents():
                texts.update(f"{document.text!r}\n".encode("utf-8", "surrogatepass"))
            return texts.hexdigest()[:16]
        return checksum([[path.name, path.stat().st_size] for path in self.files] + list(self.datasets))[:16]

    def one_per_line(self) -> list[Path]:
        """Plain text files that look like one text per line, but whose lines will be joined."""
        if self.text_unit == "line" or self.settings.text_unit != "auto":
            return []
        return [path for path in self.files[:FEW_FILES] if _is_plain(path) and looks_like_lines(_head(path))]

    def __iter__(self) -> Iterator[SourceDocument]:
        shape = self.latent_shape
        for document in self._documents():
            empty = not (document.text and document.text.strip())
            if not empty and (None if document.latent is None else document.latent.shape) != shape:
                raise UserError(f"{document.where}: {_mismatch(document.latent, shape)}")
            yield document

    def check_count(self) -> None:
        """`UserError` unless there are as many vectors as documents."""
        if self.vectors is None:
            return
        count, rows = sum(1 for _ in self._plain_documents()), len(self.vectors.array)
        if count != rows:
            raise UserError(
                f"latents={self.vectors.name}: {rows:,} rows, but {self.label()} has {count:,} documents; one row per "
                f"document is needed (a row of a table or a {self.text_unit} of a text file, empty ones included)"
            )

    def _documents(self) -> Iterator[SourceDocument]:
        if self.vectors is None:
            yield from self._plain_documents()
            return
        for idx, document in enumerate(self._plain_documents()):
            if document.latent is not None:
                raise UserError(
                    f"{document.where}: has a latent of its own, and latents={self.vectors.name} is given too; "
                    "leave one out (latent_field='' ignores the field)"
                )
            yield replace(document, latent=self.vectors.row(idx))

    def _plain_documents(self) -> Iterator[SourceDocument]:
        done = 0
        unit, part_characters = self.text_unit, min(max(self.num_bytes // 100, SMALLEST_PART), LARGEST_PART)
        for path in self.files:
            plain = _is_plain(path)
            for row, position in read_file(path, self.fields):
                if plain:
                    every_line = self.vectors is not None and unit == "line"
                    parts = _lines(row.text) if every_line else _divide(row.text, unit, part_characters)
                    for part in parts:
                        text = bounded(part, row.where)
                        yield SourceDocument(text, done + position, where=row.where, has_lines=True)
                else:
                    yield _document(row, done + position)
            done += path.stat().st_size
        for name in self.datasets:
            for row in self._dataset_rows(name):
                yield _document(row, 0)
        for number, value in enumerate(self.rows if self.rows is not None else (), start=1):
            yield _document(parse_row(value, self.fields, f"{self.name}, row {number}"), 0)

    def _dataset_rows(self, name: str) -> Iterator[Row]:
        """Rows of a Hugging Face dataset; with a limit a shuffled part, so that the whole need not be fetched."""
        rows, limit = self._open_dataset(name), self.settings.limit if self.split is None else None
        if limit is not None and self.vectors is None:
            rows = rows.shuffle(seed=self.settings.seed, buffer_size=10_000).take(2 * limit)
        for row_idx, row in enumerate(rows):
            yield parse_row(row, self.fields, f"{name}, row {row_idx + 1}")

    def _open_dataset(self, name: str) -> Any:
        import datasets

        quiet_hub()
        try:
            if Path(name).is_dir():
                loaded = datasets.load_from_disk(name)
                chosen = loaded[self.dataset_split] if isinstance(loaded, datasets.DatasetDict) else loaded
                return chosen.to_iterable_dataset()
            return datasets.load_dataset(
                name, self.settings.dataset_config, split=self.dataset_split, streaming=True
            )
        except Exception as error:  # network, Hub, parsing: every library under it has its own
            argument = "dataset_split" if self.split is None else f"{self.split}_dataset_split"
            raise UserError(
                f"{self.name}={name}: no such file or folder, and no Hugging Face dataset that opens "
                f"({first_line(error)}); check the spelling, dataset_config and {argument}"
            ) from error


def _document(row: Row, read_bytes: int) -> SourceDocument:
    latent = None if row.latent is None else np.atleast_2d(row.latent)
    return SourceDocument(bounded(row.text, row.where), read_bytes, latent, row.where)


def _mismatch(latent: np.ndarray | None, shape: tuple[int, ...] | None) -> str:
    if latent is None:
        return "has no latent, the first document has one; give all documents a latent, or none"
    if shape is None:
        return "has a latent, the first document has none; give all documents a latent, or none"
    return f"its latent has shape {latent.shape} (slots, channels), that of the first document {shape}"


def find_sources(
    settings: PrepareSettings, rows: Iterable[Any] | None = None, vectors: Vectors | None = None
) -> tuple[Sources, ...]:
    """All sources, those that are held out as a whole before the others; `rows`: in memory, instead of the input."""
    if vectors is not None and (settings.validation_input or settings.test_input):
        raise UserError(
            f"latents={vectors.name}: belongs to one source; for held-out sources too, give every row a field "
            f"{LATENT_FIELD!r} instead"
        )
    held_out = [resolve(settings, split) for split in HELD_OUT if settings.inputs[split]]
    main = (
        resolve(settings, vectors=vectors) if rows is None else Sources((), (), settings, None, rows, vectors)
    )
    reject_overlap([*held_out, main])
    return *held_out, main


def resolve(settings: PrepareSettings, split: str | None = None, vectors: Vectors | None = None) -> Sources:
    """Find every file and name every dataset; `UserError` for what does not exist."""
    sources = Sources((), (), settings, split, None, vectors)
    files: list[Path] = []
    datasets: list[str] = []
    for name in settings.inputs[split]:
        if not name.strip():
            raise UserError(f"{sources.name}: one is empty; give a file, a folder, a dataset or builtin:sotu")
        matches = find_files(name, sources.name)
        if matches is None:
            datasets.append(name)
        else:
            files += matches
    return replace(sources, files=tuple(dict.fromkeys(files)), datasets=tuple(dict.fromkeys(datasets)))


def describe(settings: PrepareSettings, sources: Iterable[Sources]) -> dict[str, Any]:
    """What is written down and compared with a later command, without settings that are not used.

    So stores from before there were such settings are still recognised.
    """
    values = asdict(settings) | {"validation": settings.validation_share}
    optional = ("derive", *(f"{split}_{word}" for split in HELD_OUT for word in ("input", "dataset_split")))
    written = {
        key: value
        for key, value in values.items()
        if (value or key not in optional) and not (key in _NEW and value == _NEW[key])
    }
    for part in sources:
        key = part.name.replace("source", "input")
        size = "texts" if part.rows is not None else f"{len(part.files)} files, {part.num_bytes} bytes"
        written |= {key: list(values[key]), f"{key}_files": f"{size}, {part.digest()}"}
        if part.vectors is not None:
            written["latents_content"] = part.vectors.digest()
    return written


def reject_overlap(parts: Sequence[Sources]) -> None:
    """`UserError` if a file, or the same split of a dataset, is named for two splits."""
    owners: dict[tuple[str, str], str] = {}
    for part in parts:
        keys = [(str(path.resolve()), "") for path in part.files]
        keys += [(name, part.dataset_split) for name in part.datasets]
        for key in keys:
            other = owners.setdefault(key, part.name)
            if other != part.name:
                raise UserError(
                    f"{part.name}: {' '.join(key).strip()} is given by {other} too; "
                    "a source goes into one split: leave it out of one of them"
                )


def _is_plain(path: Path) -> bool:
    return extension_of(path) == ".txt"


def _divide(text: str | None, unit: str, part_characters: int) -> list[str | None]:
    if text is None or unit == "file":
        return [text]
    if unit == "line":
        return [line for line in text.splitlines() if line.strip()] or [None]
    pieces = re.split(r"(?<=\n)(?=[ \t]*\n)", text) if "\n\n" in text else text.splitlines(keepends=True)
    parts: list[str | None] = []
    current: list[str] = []
    size = 0
    for piece in pieces:
        current.append(piece)
        size += len(piece)
        if size >= part_characters:
            parts.append("".join(current))
            current, size = [], 0
    return [*parts, "".join(current)] if current or not parts else parts


def _lines(text: str | None) -> list[str | None]:
    """Every line, blank ones too, as a file object counts them: each has its row in an array of latents."""
    lines = re.split(r"\r\n|\r|\n", text or "")
    return list(lines[:-1] if lines[-1] == "" else lines)


def _head(path: Path) -> str:
    """The beginning of a text file; what cannot be read is reported when the file is read for good."""
    for row, _ in read_file(path, Fields()):
        return (row.text or "")[:LOOKED_AT_CHARACTERS]
    return ""


def looks_like_lines(text: str) -> bool:
    """Whether each line seems to be a text of its own: no blank lines between, and not prose wrapped at a margin."""
    lines = text.splitlines()
    sizes = np.array([len(line) for line in lines if line.strip()])
    if len(sizes) < FEWEST_LINES or len(sizes) < 0.95 * len(lines):
        return False
    margin = float(np.quantile(sizes, 0.95))
    return margin < SMALLEST_MARGIN or float((sizes >= 0.8 * margin).mean()) < 0.5
