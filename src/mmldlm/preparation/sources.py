"""Where text comes from: files, folders, addresses, Hugging Face datasets, texts in memory, or the built-in speeches.

A source is resolved first, so that a typing mistake is reported at once, and then streamed: one `SourceDocument` at a
time, in an order that depends only on the names of the files. Latents that exist already come along: as a field of each
row, or as an array with one row per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mmldlm.data.format import checksum
from mmldlm.data.tokenizer import quiet_hub
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.locations import find_files
from mmldlm.preparation.parts import (
    LOOKED_AT_CHARACTERS,
    divide,
    every_line_of,
    looks_like_lines,
    part_size,
    spans,
)
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
from mmldlm.preparation.vectors import Vectors
from mmldlm.reports import counted

FEW_FILES = 20
"""With fewer plain text files than this, a file is divided into parts, each a source document of its own."""
_NEW = {"latents": None, "latent_field": LATENT_FIELD}
"""Settings that older stores do not have, with the value that changes nothing."""
SMALLEST_PORTION, LARGEST_PORTION, MOST_PORTIONS, PORTION_ROWS = 2**23, 2**28, 4096, 65_536
"""Bytes of a file that one process reads in one go, how many such portions are too many, and rows in memory."""


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


class Portion(NamedTuple):
    """What is read in one go: a file or a part of one, a dataset, or some rows in memory."""

    path: Path | None = None
    span: tuple[int, int] | None = None
    """The part of the file; None: all of it."""
    dataset: str | None = None
    rows: Iterable[Any] = ()
    first_row: int = 1


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

    def raise_empty(self, counts: Mapping[str, int]) -> NoReturn:
        """`UserError`: nothing came out; `counts` is what was left out."""
        words = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items())
        raise UserError(f"{self.label()}: no text came out ({words or 'the source is empty'})")

    def digest(self) -> str:
        """Changes when a file is added, removed or changes its size, or a text or latent of a row in memory changes."""
        if self.rows is not None:
            texts = hashlib.sha256()
            for document in self._documents():
                texts.update(f"{document.text!r}\n".encode("utf-8", "surrogatepass"))
                if document.latent is not None and self.vectors is None:  # which has a digest of its own
                    texts.update(document.latent.tobytes())
            return texts.hexdigest()[:16]
        return checksum([[path.name, path.stat().st_size] for path in self.files] + list(self.datasets))[:16]

    def one_per_line(self) -> list[Path]:
        """Plain text files that look like one text per line, but whose lines will be joined."""
        if self.text_unit == "line" or self.settings.text_unit != "auto":
            return []
        return [path for path in self.files[:FEW_FILES] if _is_plain(path) and looks_like_lines(_head(path))]

    def __iter__(self) -> Iterator[SourceDocument]:
        return _checked(self._documents(), self.latent_shape)

    def check_count(self) -> None:
        """`UserError` unless there are as many vectors as documents."""
        if self.vectors is None:
            return
        count, rows = sum(1 for _ in self._plain_documents()), len(self.vectors.array)
        if count != rows:
            raise UserError(
                f"latents={self.vectors.name}: {counted(rows, 'row')}, but {self.label()} has "
                f"{counted(count, 'document')}; one row per document is "
                f"needed (a row of a table or a {self.text_unit} of a text file, empty ones included)"
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
        for portion in self._portions():
            yield from self._read(portion, done)
            done += portion.path.stat().st_size if portion.path else 0

    def _portions(self) -> Iterator[Portion]:
        yield from map(Portion, self.files)
        yield from (Portion(dataset=name) for name in self.datasets)
        if self.rows is not None:
            yield Portion(rows=self.rows)

    def divided(self) -> Iterator[Portion]:
        """The same in portions that several processes can read; in this order they give the same documents."""
        size = min(max(SMALLEST_PORTION, self.num_bytes // MOST_PORTIONS), LARGEST_PORTION)
        for portion in self._portions():
            if portion.path is not None and (self.text_unit == "line" or not _is_plain(portion.path)):
                yield from (portion._replace(span=span) for span in spans(portion.path, size))
            elif self.rows is not None:
                rows, first = iter(self.rows), 1
                while some := list(islice(rows, PORTION_ROWS)):
                    yield Portion(rows=some, first_row=first)
                    first += len(some)
            else:
                yield portion

    def documents(self, portion: Portion) -> Iterator[SourceDocument]:
        """Those of one portion, for which an encoder makes the latents; an error names its place in the whole file."""
        try:
            yield from _checked(self._read(portion), None)
        except UserError:
            if portion.span is not None:
                for _ in _checked(self._read(portion._replace(span=None)), None):
                    pass
            raise

    def _read(self, portion: Portion, done: int = 0) -> Iterator[SourceDocument]:
        if portion.path is not None:
            yield from self._file_documents(portion.path, portion.span, done)
        elif portion.dataset is not None:
            yield from (_document(row, 0) for row in self._dataset_rows(portion.dataset))
        for number, value in enumerate(portion.rows, start=portion.first_row):
            yield _document(parse_row(value, self.fields, f"{self.name}, row {number}"), 0)

    def _file_documents(
        self, path: Path, span: tuple[int, int] | None, done: int
    ) -> Iterator[SourceDocument]:
        unit, part_characters = self.text_unit, part_size(self.num_bytes)
        plain, every_line = _is_plain(path), self.vectors is not None and unit == "line"
        for row, position in read_file(path, self.fields, span):
            if not plain:
                yield _document(row, done + position)
                continue
            parts = every_line_of(row.text) if every_line else divide(row.text, unit, part_characters)
            for part in parts:
                if part is not None or span is None:
                    text = bounded(part, row.where)
                    yield SourceDocument(text, done + position, where=row.where, has_lines=True)

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


def _checked(documents: Iterable[SourceDocument], shape: tuple[int, ...] | None) -> Iterator[SourceDocument]:
    """The documents; `UserError` for a latent of another shape."""
    for document in documents:
        empty = not (document.text and document.text.strip())
        if not empty and (None if document.latent is None else document.latent.shape) != shape:
            raise UserError(f"{document.where}: {_mismatch(document.latent, shape)}")
        yield document


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


def _head(path: Path) -> str:
    """The beginning of a text file; what cannot be read is reported when the file is read for good."""
    for row, _ in read_file(path, Fields()):
        return (row.text or "")[:LOOKED_AT_CHARACTERS]
    return ""
