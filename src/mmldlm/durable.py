"""Files and folders that survive a crash: written, hashed, flushed to the disk, then renamed into place.

Nothing here knows what a checkpoint is. A *volatile* name starts with a dot and a purpose (`.staging-`,
`.trash-`); whoever finds one after a crash may delete it. `.aside-` holds the former version of a folder that
is being replaced; it is put back after a crash.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

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
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_ASIDE = re.compile(r"\.aside-(.+)-[0-9a-f]{12}")
_LEFTOVER = re.compile(r"\.(staging|trash|new)-.+-[0-9a-f]{12}")

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
            size += len(piece)
            while len(piece):
                piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterable[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def read_digest(path: Path) -> Written:
    """Size and checksum of a file, read in pieces."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Written(file.tell(), digest)


class Prefix:
    """Size and checksum of a file that only grows."""

    def __init__(self) -> None:
        self._size, self._digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: Path, size: int | None = None) -> Prefix:
        """Of the first bytes of a file, of all by default; a file that is too short or not there gives less."""
        prefix = cls()
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            while piece := file.read(CHUNK if size is None else min(CHUNK, size - prefix._size)):
                prefix.add(piece)
        return prefix

    def add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._size += len(piece)

    def so_far(self) -> Written:
        return Written(self._size, self._digest.hexdigest())


def in_parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run the tasks in a thread each and wait for all; the first error is raised then.

    Plain threads: a pool takes no work once the interpreter has begun to end, and a save must still finish. From
    Python 3.12 on no thread starts then, and the tasks run one after another.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def work(idx: int, task: Callable[[], T]) -> None:
        try:
            results[idx] = task()
        except Exception as error:
            errors.append(error)

    threads = []
    for item in enumerate(tasks):
        thread = threading.Thread(target=work, args=item)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:
            work(*item)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[idx] for idx in range(len(tasks))]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an error of a write, which has no file name of its own."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` a new content; a crash leaves the old one or the new one, never a mixture."""
    with staged_file(path) as staged:
        write_file(staged, [content])


@contextlib.contextmanager
def staged_file(path: Path, *, staged: Path | None = None, flushed: bool = True) -> Iterator[Path]:
    """A name to write a file under, which becomes `path` at the end of the `with`; an error leaves `path` as it was.

    `staged` is that name, if a fresh one does not do. Without `flushed` the file is whole, but may not survive a crash.
    """
    staged = staged or volatile(path.parent, "new", path.name)
    try:
        with naming(path):
            yield staged
            publish(staged, path, flushed=flushed)
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


def publish(staged: Path, path: Path, *, flushed: bool = True) -> None:
    """Rename a file that is written and flushed to its final name, atomically."""
    os.replace(staged, path)
    if flushed:
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


def swap_in(staging: Path, final: Path) -> None:
    """Rename a staged folder into place. What had the name before exists until the new one is durable."""
    aside = volatile(final.parent, "aside", final.name) if os.path.lexists(final) else None
    if aside:
        os.rename(final, aside)
    try:
        os.rename(staging, final)
    except BaseException:
        if aside:
            os.rename(aside, final)
        raise
    flush_folder(final.parent)
    if aside:
        discard(aside)


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, renamed to `final` at the end of the `with`; an error leaves `final` as it was."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = volatile(final.parent, "staging", final.name)
    try:
        with naming(final):
            staging.mkdir()
            yield staging
            flush_folder(staging)
        swap_in(staging, final)
    except BaseException:
        if staging.exists():
            discard(staging)
        raise


def clean_leftovers(folder: Path, is_whole: Callable[[Path], bool] = Path.exists) -> None:
    """Delete what a crash left under a volatile name; a folder put aside comes back unless its successor is whole."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            logger.info("%s was left by a process that was killed; deleting it", path)
            discard(path)
        elif _ASIDE.fullmatch(path.name):
            _settle(path, folder / final_name(path.name), is_whole)


def final_name(name: str) -> str:
    """The name that a folder put aside had before; other names are returned unchanged."""
    match = _ASIDE.fullmatch(name)
    return match[1] if match else name


def _settle(aside: Path, final: Path, is_whole: Callable[[Path], bool]) -> None:
    """A crash came while a folder was replaced: keep the new one if it is whole, else the old one."""
    if is_whole(final):
        discard(aside)
    elif not final.exists():
        os.rename(aside, final)
    elif is_whole(aside):
        discard(final)
        os.rename(aside, final)


@contextlib.contextmanager
def file_lock(path: Path, *, timeout: float, what: str) -> Iterator[None]:
    """Hold a lock file; `UserError` that names the holder when another process has it for longer than `timeout`.

    The kernel releases the lock when its holder dies, however it dies, and forked children do not inherit it.
    `what` begins the message: who is writing where.
    """
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout, poll_interval=0.05)
        _write_holder(path)
    except Timeout:
        raise UserError(f"{what} ({_read_holder(path)})") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks; a second writer would not be noticed", path.parent)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def folder_lock(folder: Path, *, timeout: float, what: str) -> Iterator[None]:
    """Hold a folder itself, which nobody deletes as a lock file; nothing where a folder cannot be locked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _folder_locks.add(fd)
    deadline = time.monotonic() + timeout
    try:
        while not _locked(fd):
            if time.monotonic() >= deadline:
                raise UserError(what)
            time.sleep(0.05)
        yield
    finally:
        if fd in _folder_locks:  # a forked child has closed it
            _folder_locks.discard(fd)
            os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (*_NO_LOCKS, errno.EBADF, errno.EINVAL):
            raise
    return True


_folder_locks: set[int] = set()


def _drop_folder_locks() -> None:
    """In a forked child, which would keep the lock when its parent has died."""
    for fd in _folder_locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _folder_locks.clear()


os.register_at_fork(after_in_child=_drop_folder_locks)


def _write_holder(path: Path) -> None:
    """Who holds the lock, for the message of the next process; the lock itself does not depend on it."""
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(holder) + "\n")


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes()[:4096])
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, TypeError, KeyError, OSError):
        return "the lock names no process"


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
