"""Where text comes from: files, folders, addresses, Hugging Face datasets, texts in memory, or the built-in speeches.

A source is resolved first, so that a typing mistake is reported at once, and then streamed: one `SourceDocument` at a
time, in an order that depends only on the names of the files. Latents that exist already come along: as a field of each
row, or as an array with one row per document.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.format import checksum
from mmldlm.data.tokenizer import builtin_folder, first_line, quiet_hub
from mmldlm.errors import UserError
from mmldlm.preparation.readers import (
    EXTENSIONS,
    LATENT_FIELD,
    Fields,
    Row,
    Vectors,
    bounded,
    extension_of,
    parse_row,
    read_file,
)
from mmldlm.preparation.remote import find_remote, is_address

FEW_FILES = 20
"""With fewer plain text files than this, a file is divided into parts, each a source document of its own."""
SMALLEST_PART, LARGEST_PART = 256, 8192
"""Characters of a part: a hundredth of all files, within these limits."""
TEXT_UNITS = ("auto", "file", "part", "line")
LOOKED_AT_CHARACTERS, FEWEST_LINES = 2**16, 20
"""How much of a text file decides whether it holds one text per line."""
SMALLEST_MARGIN = 50
"""Characters of a line below which nobody wraps prose."""


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
class SourceOptions:
    """How rows become text."""

    text_field: str | None = None
    text_unit: str = "auto"
    dataset_config: str | None = None
    dataset_split: str = "train"
    seed: int = 0
    limit: int | None = None
    split: str | None = None
    """The split that all of it goes to; None: by shares."""
    latent_field: str | None = LATENT_FIELD

    @property
    def name(self) -> str:
        """The argument that names these sources, for messages."""
        return "source" if self.split is None else f"{self.split}_source"

    @property
    def dataset_split_name(self) -> str:
        """The argument that says which split of a dataset is read."""
        return "dataset_split" if self.split is None else f"{self.split}_dataset_split"

    @property
    def fields(self) -> Fields:
        """Which fields of a row are used."""
        return Fields(self.text_field, self.latent_field)


@dataclass(frozen=True)
class Sources:
    """Resolved sources, ready to be streamed any number of times."""

    files: tuple[Path, ...]
    datasets: tuple[str, ...]
    options: SourceOptions
    rows: Iterable[Any] | None = None
    """Texts or rows in memory, instead of files and datasets."""
    vectors: Vectors | None = None
    """The latents of all documents, in their order."""

    @cached_property
    def num_bytes(self) -> int:
        """Size of all files; datasets do not count."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def text_unit(self) -> str:
        """What a plain text file is divided into."""
        if self.options.text_unit != "auto":
            return self.options.text_unit
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
            return self.options.name
        shown = [*map(str, self.files[:3]), *self.datasets[:3]]
        return f"{self.options.name}={' '.join([*shown, '...'] if len(self.files) > 3 else shown)}"

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
        if self.text_unit == "line" or self.options.text_unit != "auto":
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
            for row, position in read_file(path, self.options.fields):
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
            for row in _stream_dataset(name, self.options, shuffled=self.vectors is None):
                yield _document(row, 0)
        for number, value in enumerate(self.rows if self.rows is not None else (), start=1):
            yield _document(parse_row(value, self.options.fields, f"{self.options.name}, row {number}"), 0)


def _document(row: Row, read_bytes: int) -> SourceDocument:
    latent = None if row.latent is None else np.atleast_2d(row.latent)
    return SourceDocument(bounded(row.text, row.where), read_bytes, latent, row.where)


def _mismatch(latent: np.ndarray | None, shape: tuple[int, ...] | None) -> str:
    if latent is None:
        return "has no latent, the first document has one; give all documents a latent, or none"
    if shape is None:
        return "has a latent, the first document has none; give all documents a latent, or none"
    return f"its latent has shape {latent.shape} (slots, channels), that of the first document {shape}"


def resolve(inputs: Sequence[str], options: SourceOptions, vectors: Vectors | None = None) -> Sources:
    """Find every file and name every dataset; `UserError` for what does not exist."""
    files: list[Path] = []
    datasets: list[str] = []
    for name in inputs:
        if not name.strip():
            raise UserError(f"{options.name}: one is empty; give a file, a folder, a dataset or builtin:sotu")
        matches = _find_files(name, options.name)
        if matches is None:
            datasets.append(name)
        else:
            files += matches
    return Sources(tuple(dict.fromkeys(files)), tuple(dict.fromkeys(datasets)), options, None, vectors)


def reject_overlap(parts: Sequence[Sources]) -> None:
    """`UserError` if a file, or the same split of a dataset, is named for two splits."""
    owners: dict[tuple[str, str], str] = {}
    for part in parts:
        keys = [(str(path.resolve()), "") for path in part.files]
        keys += [(name, part.options.dataset_split) for name in part.datasets]
        for key in keys:
            other = owners.setdefault(key, part.options.name)
            if other != part.options.name:
                raise UserError(
                    f"{part.options.name}: {' '.join(key).strip()} is given by {other} too; "
                    "a source goes into one split: leave it out of one of them"
                )


def _find_files(name: str, option: str) -> list[Path] | None:
    """The files that a name stands for; None if it is a dataset."""
    if name.startswith("builtin:"):
        return _builtin_files(name, option)
    if is_address(name):
        return find_remote(name, option)
    path = Path(name).expanduser()
    if path.is_dir():
        return None if _is_saved_dataset(path) else _folder_files(path, option)
    if path.exists():
        return [_known(path, option)]
    if glob.has_magic(name):
        matches = sorted(
            Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()
        )
        if not matches:
            raise UserError(
                f"{option}={name}: no file matches this pattern; the folder searched is {Path.cwd()}"
            )
        return [_known(match, option) for match in matches]
    if _looks_like_path(name):
        raise UserError(
            f"{option}={name}: no such file or folder; check the spelling (you are in {Path.cwd()})"
        )
    return None


def _builtin_files(name: str, option: str) -> list[Path]:
    if name != "builtin:sotu":
        raise UserError(f"{option}={name}: the only built-in text is builtin:sotu")
    folder = builtin_folder("sotu", "'mmldlm[demo]'", name) / "data" / "speeches"
    return sorted(folder.glob("*.txt"))


def _folder_files(folder: Path, option: str) -> list[Path]:
    try:
        next(folder.iterdir(), None)
    except PermissionError as error:
        raise UserError(f"{option}={folder}: you may not read this folder; check its permissions") from error
    files = sorted(path for path in folder.rglob("*") if path.is_file() and extension_of(path) in EXTENSIONS)
    if not files:
        raise UserError(
            f"{option}={folder}: no text in this folder; files may end in {', '.join(EXTENSIONS)} (also .gz)"
        )
    return files


def _known(path: Path, option: str) -> Path:
    if not path.is_file():
        raise UserError(
            f"{option}={path}: is a pipe or a device, and text is read more than once; write it into a file first"
        )
    if extension_of(path) not in EXTENSIONS:
        raise UserError(
            f"{option}={path}: unknown kind of file; allowed are {', '.join(EXTENSIONS)}, also with .gz"
        )
    return path


def _is_plain(path: Path) -> bool:
    return extension_of(path) == ".txt"


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _looks_like_path(name: str) -> bool:
    dataset_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None
    return not dataset_name or re.search(r"\.[A-Za-z]{1,7}$", name) is not None


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


def _stream_dataset(name: str, options: SourceOptions, *, shuffled: bool) -> Iterator[Row]:
    """Rows of a Hugging Face dataset; with a limit a shuffled part, so that the whole need not be fetched."""
    rows = _open_dataset(name, options)
    if options.limit is not None and shuffled:
        rows = rows.shuffle(seed=options.seed, buffer_size=10_000).take(2 * options.limit)
    for row_idx, row in enumerate(rows):
        yield parse_row(row, options.fields, f"{name}, row {row_idx + 1}")


def _open_dataset(name: str, options: SourceOptions) -> Any:
    import datasets

    quiet_hub()
    split = options.dataset_split
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            chosen = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            return chosen.to_iterable_dataset()
        return datasets.load_dataset(name, options.dataset_config, split=split, streaming=True)
    except Exception as error:  # network, Hub, parsing: every library under it has its own
        raise UserError(
            f"{options.name}={name}: no such file or folder, and no Hugging Face dataset that opens "
            f"({first_line(error)}); check the spelling, dataset_config and {options.dataset_split_name}"
        ) from error
