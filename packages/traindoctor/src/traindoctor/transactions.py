"""Writing changes so that they can be taken back: journal first, then atomic writes, checksums before and after.

A transaction is a folder `.traindoctor/transactions/<id>/` in the audited root: `manifest.json` and, under `before/`,
every changed file with its full relative path. States: prepared (the journal is complete, files may be half done),
applied, undone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from traindoctor import __version__
from traindoctor.discovery import TRANSACTION_FOLDER
from traindoctor.errors import UserError
from traindoctor.fixing import FileChange
from traindoctor.program import program


@dataclass
class FileRecord:
    """One changed file."""

    path: str
    before: str
    after: str
    """SHA-256 of the bytes."""
    mode: int
    codes: list[str] = field(default_factory=list)


@dataclass
class Transaction:
    """One apply."""

    id: str
    state: str
    created_at: str
    version: str
    files: list[FileRecord]


@dataclass
class Undone:
    """What an undo did, file by file."""

    transaction: Transaction
    restored: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def checksum(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def home_of(path: Path) -> Path:
    """The folder whose transactions belong to an audited path."""
    return path.parent if path.is_file() else path


def history(path: Path) -> list[Transaction]:
    """All transactions of a root, oldest first."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give the file or folder that was fixed")
    folder = home_of(path) / TRANSACTION_FOLDER / "transactions"
    found = []
    for manifest in sorted(folder.glob("*/manifest.json")) if folder.is_dir() else []:
        try:
            raw = json.loads(manifest.read_text("utf-8"))
            raw["files"] = [FileRecord(**record) for record in raw["files"]]
            found.append(Transaction(**raw))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{manifest}: not a readable journal ({error}); move its folder away to go on"
            ) from error
    return found


def apply(path: Path, changes: Sequence[FileChange]) -> Transaction:
    """Write the changes as one transaction; on any error everything is as before."""
    root = home_of(path)
    changes = [change for change in changes if change.after != change.before]
    with _locked(root):
        _recover(root)
        targets = {change.path: _check_target(root, change) for change in changes}
        transaction = _prepare(root, changes, targets)
        try:
            for change in changes:
                write_atomically(targets[change.path], change.after, flush_folder=False)
            _flush_folders(targets.values())
            _write_manifest(root, transaction, "applied")
        except BaseException as error:
            _roll_back(root, transaction, changes, targets)
            if isinstance(error, OSError):
                raise UserError(_explain(error, "nothing was changed")) from error
            raise
    return transaction


def _check_target(root: Path, change: FileChange) -> Path:
    """Where to write; refuses what cannot be written or is no longer what was audited."""
    target = (root / change.path).resolve()
    try:
        status = target.stat()
        current = target.read_bytes()
    except OSError as error:
        raise UserError(_explain(error, "nothing was changed")) from error
    if not status.st_mode & stat.S_IWUSR or not os.access(target, os.W_OK):
        raise UserError(
            f"{change.path}: the file is read-only; make it writable or exclude it; nothing was changed"
        )
    if status.st_nlink > 1:
        raise UserError(
            f"{change.path}: the file has {status.st_nlink} hard links, an edit would split them; exclude it; "
            "nothing was changed"
        )
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{change.path}: its folder is read-only; make it writable; nothing was changed")
    if current != change.before:
        raise UserError(f"{change.path}: the file changed while it was audited; run the same command again")
    return target


def _prepare(root: Path, changes: Sequence[FileChange], targets: dict[str, Path]) -> Transaction:
    """Write the journal: copies of all files, then the manifest; only then may a file change."""
    base = root / TRANSACTION_FOLDER
    transaction = Transaction(
        _new_id(base / "transactions"),
        "prepared",
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        __version__,
        [
            FileRecord(
                change.path,
                checksum(change.before),
                checksum(change.after),
                stat.S_IMODE(targets[change.path].stat().st_mode),
                sorted({finding.code for finding in change.fixed}),
            )
            for change in changes
        ],
    )
    folder = base / "transactions" / transaction.id
    try:
        folder.mkdir(parents=True)
        copies = [folder / "before" / change.path for change in changes]
        for change, copy in zip(changes, copies, strict=True):
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, change.before, flush_folder=False)
        _flush_folders(Path(inside, "any") for inside, _, _ in os.walk(folder))
        _write_manifest(root, transaction, "prepared")
    except OSError as error:
        _remove_tree(folder)
        raise UserError(_explain(error, "nothing was changed")) from error
    return transaction


def _new_id(folder: Path) -> str:
    """Sorts by age, also for transactions within one second."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    taken = {entry.name for entry in folder.glob(f"{stamp}-*")} if folder.is_dir() else set()
    return next(name for number in range(10_000) if (name := f"{stamp}-{number:04d}") not in taken)


def _write_manifest(root: Path, transaction: Transaction, state: str) -> None:
    transaction.state = state
    manifest = root / TRANSACTION_FOLDER / "transactions" / transaction.id / "manifest.json"
    write_atomically(manifest, (json.dumps(asdict(transaction), indent=2) + "\n").encode())


def _roll_back(
    root: Path, transaction: Transaction, changes: Sequence[FileChange], targets: dict[str, Path]
) -> None:
    """Put back what was written. The journal goes last: if this fails too, the next `undo` still has it."""
    transaction.state = "prepared"
    for change in changes:
        if targets[change.path].read_bytes() == change.after:
            write_atomically(targets[change.path], change.before)
    _remove_tree(root / TRANSACTION_FOLDER / "transactions" / transaction.id)


def recover(path: Path) -> list[Undone]:
    """Take back transactions that were interrupted between their journal and their end."""
    root = home_of(path)
    if not any(transaction.state == "prepared" for transaction in history(root)):
        return []
    # Under the lock, or the unfinished work of a running doctor would be taken for that of a dead one.
    with _locked(root):
        return _recover(root)


def _recover(root: Path) -> list[Undone]:
    return [_restore(root, transaction) for transaction in history(root) if transaction.state == "prepared"]


def undo(path: Path, wanted: str | None = None) -> Undone:
    """Restore the files of the last applied transaction, or of the one named."""
    root = home_of(path)
    if not history(root):
        raise UserError(f"{root}: there is nothing to undo; no fix was applied here")
    with _locked(root):
        known = history(root)
        if wanted is not None:
            chosen = next((t for t in known if t.id == wanted), None)
            if chosen is None:
                raise UserError(
                    f"no transaction {wanted!r} in {root}; '{program()} history {path}' lists them"
                )
            if chosen.state == "undone":
                raise UserError(f"transaction {wanted} is undone already")
        else:
            chosen = next((t for t in reversed(known) if t.state in ("applied", "prepared")), None)
            if chosen is None:
                raise UserError(f"{root}: there is nothing to undo; no fix was applied here")
        return _restore(root, chosen)


def _restore(root: Path, transaction: Transaction) -> Undone:
    result = Undone(transaction)
    folder = root / TRANSACTION_FOLDER / "transactions" / transaction.id
    for record in transaction.files:
        target = (root / record.path).resolve()
        if transaction.state == "prepared":
            _remove_leftovers(target)
        try:
            current = checksum(target.read_bytes())
        except OSError as error:
            result.refused.append((record.path, f"it cannot be read ({error.strerror})"))
            continue
        if current == record.before:
            result.restored.append(record.path)
            continue
        if current != record.after:
            later = [
                t.id
                for t in history(root)
                if t.id > transaction.id and t.state == "applied" and record.path in {f.path for f in t.files}
            ]
            hint = f"undo {later[-1]} first" if later else "somebody changed it since; it is left alone"
            result.refused.append((record.path, hint))
            continue
        try:
            data = (folder / "before" / record.path).read_bytes()
        except OSError as error:
            result.refused.append((record.path, f"the kept copy cannot be read ({error.strerror})"))
            continue
        if checksum(data) != record.before:
            result.refused.append((record.path, "the kept copy is damaged"))
            continue
        try:
            write_atomically(target, data, flush_folder=False)
        except OSError as error:
            result.refused.append((record.path, _explain(error, "it is left alone")))
            continue
        result.restored.append(record.path)
    _flush_folders((root / path).resolve() for path in result.restored)
    if not result.refused:
        _write_manifest(root, transaction, "undone")
    return result


_TEMPORARY = ".traindoctor"


def _temporary_prefix(target: Path) -> str:
    return f".{target.name[:40]}."


def _remove_leftovers(target: Path) -> None:
    """A process killed while writing leaves its temporary file next to the target."""
    if not target.parent.is_dir():
        return
    for entry in target.parent.iterdir():
        if entry.name.startswith(_temporary_prefix(target)) and entry.name.endswith(_TEMPORARY):
            with contextlib.suppress(OSError):
                entry.unlink()


def write_atomically(target: Path, data: bytes, *, flush_folder: bool = True) -> None:
    """Replace a file's content in one step, keeping its mode: a crash leaves the old content or the new.

    Whoever writes many files flushes their folders once, at the end (`_flush_folders`).
    """
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=_temporary_prefix(target), suffix=_TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    if flush_folder:
        _flush_folders([target])


def _flush_folders(targets: Iterable[Path]) -> None:
    """Make the names of these files durable."""
    for parent in sorted({target.parent for target in targets}):
        with contextlib.suppress(OSError):
            folder = os.open(parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _remove_tree(folder: Path) -> None:
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(Path(parent, name))
        for name in folders:
            with contextlib.suppress(OSError):
                os.rmdir(Path(parent, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One writer per root at a time; the system frees the lock when a process dies."""
    import fcntl

    base = root / TRANSACTION_FOLDER
    try:
        base.mkdir(exist_ok=True)
        # Git shall neither show nor add the journal.
        (base / ".gitignore").write_text("*\n", "utf-8")
        lock = os.open(base / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(_explain(error, "the journal cannot be written; nothing was changed")) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{root}: another doctor is writing here; wait for it and run the same command again"
            ) from error
        yield
    finally:
        os.close(lock)


def _explain(error: OSError, outcome: str) -> str:
    if error.errno == errno.ENOSPC:
        return f"{error.filename or 'the disk'}: no space left; free some space; {outcome}"
    return f"{error.filename}: {error.strerror}; {outcome}"
