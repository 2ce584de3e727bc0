"""Bytes that survive a crash: written, hashed, flushed to the disk, then given their name.

Nothing here knows what a checkpoint is. A *volatile* name starts with a dot and a purpose (`.staging-`,
`.trash-`); whoever finds one after a crash may delete it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mmldlm.errors import UserError

T = TypeVar("T")

CHUNK = 16 * 2**20
"""Bytes per system call. Write and hash release the interpreter lock; few calls disturb training least."""

_SPACE = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than a limit allows",
}
_RIGHTS = {errno.EROFS: "the file system is read-only"} | dict.fromkeys(
    (errno.EACCES, errno.EPERM), "you may not write there"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What a file must look like to be whole."""

    size: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file, hash it on the way and flush it to the disk."""
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in _pieces(chunks):
            digest.update(piece)
            _write_all(fd, piece)
            size += len(piece)
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterable[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _write_all(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]


def read_digest(path: Path) -> Written:
    """Size and checksum of a file, read in pieces."""
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return Written(size, digest.hexdigest())


def in_parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run the tasks in a thread each and wait for all; the first error is raised then.

    Plain threads: a pool takes no work once the interpreter has begun to end, and a save must still finish.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def work(idx: int, task: Callable[[], T]) -> None:
        try:
            results[idx] = task()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[idx] for idx in range(len(tasks))]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of a write says nothing about the file: say what was being made."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` a new content; a crash leaves the old one or the new one, never a mixture."""
    staged = volatile(path.parent, "new", path.name)
    try:
        with naming(path):
            write_file(staged, [content])
            os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make new names and renames inside a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot flush a folder and do it by themselves
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def volatile(folder: Path, purpose: str, name: str) -> Path:
    """A fresh name that may be deleted after a crash."""
    return folder / f".{purpose}-{name}-{uuid.uuid4().hex[:12]}"


def discard(path: Path) -> None:
    """Delete a folder or file: first it loses its name, so that no half of it is taken for the whole."""
    trash = path if path.name.startswith(".trash-") else volatile(path.parent, "trash", path.name.lstrip("."))
    try:
        if trash != path:
            os.rename(path, trash)
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash)
        else:
            trash.unlink()
    except OSError as error:
        logger.warning("%s could not be deleted: %s; it is tried again at the next start", trash, error)


def is_full(error: Exception) -> bool:
    """Whether the disk or the quota has no room left."""
    return isinstance(error, OSError) and error.errno in _SPACE


def explain(error: OSError, path: Path) -> str:
    """One clause for a person: which file, what is wrong, what to do."""
    where = f"{error.filename or path}"
    if error.errno in _SPACE:
        return f"{where}: {_SPACE[error.errno]}; free some space"
    if error.errno in _RIGHTS:
        return f"{where}: {_RIGHTS[error.errno]}; choose a folder you may write to"
    return f"{where}: {error.strerror or error}"


def require_writable(path: Path) -> None:
    """Raise `UserError` unless a file or folder of this name can be written; nothing remains.

    A command calls this before it computes anything. Folders that do not exist yet are not created.
    """
    folder = path if path.is_dir() else path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{path}: {folder} is a file; choose another place")
    probe = volatile(folder, "probe", "x")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as error:
        raise UserError(explain(error, path).replace(str(probe), str(path))) from error
