"""Files at an address such as s3://bucket/folder or hf://datasets/owner/name, read through fsspec when needed."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from mmldlm.data.tokenizer import first_line
from mmldlm.errors import UserError
from mmldlm.preparation.readers import EXTENSIONS


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
        """A file object that fetches what is read."""
        import fsspec

        return fsspec.open(self.address, mode).open()

    def __str__(self) -> str:
        return self.address


def is_address(name: str) -> bool:
    """Whether a source is an address of fsspec."""
    return "://" in name


def find_remote(name: str, option: str) -> list[Any]:
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
        if entry.get("type") == "file" and _kind(key) in EXTENSIONS
    ]
    if not files:
        raise UserError(
            f"{option}={name}: no file to read there; files may end in {', '.join(EXTENSIONS)} (also .gz)"
        )
    return files


def _kind(name: str) -> str:
    path = PurePosixPath(name)
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
