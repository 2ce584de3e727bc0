"""Where text comes from: files, globs, folders, Hugging Face datasets, or the built-in speeches.

A source is resolved first (so that a typing mistake shows at once) and then streamed: one `SourceDocument` at
a time, in an order that depends only on the names of the files.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.data.manifest import checksum
from mmldlm.data.tokenizer import builtin_folder, first_line, quiet_hub
from mmldlm.errors import UserError
from mmldlm.preparation.readers import EXTENSIONS, read_file, text_of_row

FEW_FILES = 20
"""With fewer plain text files than this, a file is divided into parts, each a source document of its own."""
SMALLEST_PART, LARGEST_PART = 256, 8192
"""Characters of a part: a hundredth of all files, within these limits."""
TEXT_UNITS = ("auto", "file", "part", "line")


@dataclass(frozen=True)
class SourceDocument:
    """A text as it came; all that is cut from it goes into the same split."""

    text: str | None
    read_bytes: int
    """How much of its file had been read by then, for the progress bar."""


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

    @property
    def name(self) -> str:
        """The option of the command that names these sources, for messages."""
        return "--input" if self.split is None else f"--{self.split}-input"

    @property
    def dataset_split_name(self) -> str:
        """The option that says which split of a dataset is read."""
        return "--dataset-split" if self.split is None else f"--{self.split}-dataset-split"


@dataclass(frozen=True)
class Sources:
    """Resolved sources, ready to be streamed any number of times."""

    files: tuple[Path, ...]
    datasets: tuple[str, ...]
    options: SourceOptions

    @property
    def num_bytes(self) -> int:
        """Size of all files; datasets do not count."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def text_unit(self) -> str:
        """What a plain text file is divided into."""
        if self.options.text_unit != "auto":
            return self.options.text_unit
        few = len(self.files) < FEW_FILES and not self.datasets
        return "part" if few and all(_is_plain(path) for path in self.files) else "file"

    @property
    def _part_characters(self) -> int:
        return min(max(self.num_bytes // 100, SMALLEST_PART), LARGEST_PART)

    def names(self) -> list[str]:
        """A few names, for messages."""
        shown = [*map(str, self.files[:3]), *self.datasets[:3]]
        return [*shown, "..."] if len(self.files) > 3 else shown

    def digest(self) -> str:
        """Changes when a file comes, goes or changes its size."""
        return checksum([[path.name, path.stat().st_size] for path in self.files] + list(self.datasets))[:16]

    def __iter__(self) -> Iterator[SourceDocument]:
        done = 0
        unit, part_characters = self.text_unit, self._part_characters
        for path in self.files:
            plain = _is_plain(path)
            for text, position in read_file(path, self.options.text_field):
                for part in _divide(text, unit, part_characters) if plain else [text]:
                    yield SourceDocument(part, done + position)
            done += path.stat().st_size
        for name in self.datasets:
            yield from _stream_dataset(name, self.options)


def resolve(inputs: Sequence[str], options: SourceOptions) -> Sources:
    """Find every file and name every dataset; `UserError` for what does not exist."""
    files: list[Path] = []
    datasets: list[str] = []
    for name in inputs:
        if not name.strip():
            raise UserError(
                f"{options.name}: a source is empty; give a file, a folder, a dataset or builtin:sotu"
            )
        found = _find_files(name, options.name)
        if found is None:
            datasets.append(name)
        else:
            files += found
    return Sources(tuple(dict.fromkeys(files)), tuple(dict.fromkeys(datasets)), options)


def refuse_overlap(parts: Sequence[Sources]) -> None:
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
                f"{option} {name}: no file matches this pattern; the folder searched is {Path.cwd()}"
            )
        return [_known(match, option) for match in matches]
    if _looks_like_path(name):
        raise UserError(
            f"{option} {name}: no such file or folder; check the spelling (you are in {Path.cwd()})"
        )
    return None


def _builtin_files(name: str, option: str) -> list[Path]:
    if name != "builtin:sotu":
        raise UserError(f"{option} {name}: the only built-in text is builtin:sotu")
    folder = builtin_folder("sotu", "'mmldlm[demo]'", name) / "data" / "speeches"
    return sorted(folder.glob("*.txt"))


def _folder_files(folder: Path, option: str) -> list[Path]:
    try:
        next(folder.iterdir(), None)
    except PermissionError as error:
        raise UserError(f"{option} {folder}: you may not read this folder; check its permissions") from error
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _extension(path) in EXTENSIONS)
    if not files:
        raise UserError(
            f"{option} {folder}: no text in this folder; files may end in {', '.join(EXTENSIONS)} (also .gz)"
        )
    return files


def _known(path: Path, option: str) -> Path:
    if not path.is_file():
        raise UserError(
            f"{option} {path}: is a pipe or a device, and text is read more than once; write it into a file first"
        )
    if _extension(path) not in EXTENSIONS:
        raise UserError(
            f"{option} {path}: unknown kind of file; allowed are {', '.join(EXTENSIONS)}, also with .gz"
        )
    return path


def _extension(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _is_plain(path: Path) -> bool:
    return _extension(path) == ".txt"


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


def _stream_dataset(name: str, options: SourceOptions) -> Iterator[SourceDocument]:
    """Rows of a Hugging Face dataset; with a limit a shuffled part, so that the whole need not be fetched."""
    rows = _open_dataset(name, options)
    if options.limit is not None:
        rows = rows.shuffle(seed=options.seed, buffer_size=10_000).take(2 * options.limit)
    for row_idx, row in enumerate(rows):
        yield SourceDocument(text_of_row(row, options.text_field, f"{name}, row {row_idx + 1}"), 0)


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
            f"{options.name} {name}: no such file or folder, and no Hugging Face dataset that opens "
            f"({first_line(error)}); check the spelling, --dataset-config and {options.dataset_split_name}"
        ) from error
