"""Save checkpoints beside training: the step waits only for the copy of the state, on a GPU not even for that.

A thread then writes, flushes and publishes the copy. At most one save is under way; a second one waits for
the first. Whatever goes wrong on the way (a full disk, say) is reported, and the former checkpoints stay as
they are.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mmldlm import durable
from mmldlm.checkpoint import strict_json
from mmldlm.checkpoint.host_copy import HostCopy, Image
from mmldlm.checkpoint.manifest import Entry, entry
from mmldlm.checkpoint.publish import Spared, clean, publish, read_latest, retire, stage
from mmldlm.checkpoint.resume import META, META_GROUP
from mmldlm.checkpoint.state import Snapshot
from mmldlm.checkpoint.tensor_file import SUFFIX
from mmldlm.errors import UserError

_SLOW_SECONDS = 1.0
_GROUP = re.compile(r"[A-Za-z0-9_]+")

logger = logging.getLogger(__name__)


class SaveError(UserError):
    """A checkpoint could not be saved. Training can go on; the next save is a new attempt."""

    def __init__(self, step: int, reason: str, kept: Path | None) -> None:
        rest = f"{kept.name} is still the newest checkpoint" if kept else "there is no checkpoint yet"
        super().__init__(f"the checkpoint of step {step} was not saved: {reason}; {rest}")
        self.step = step


class Saver:
    """Saves into one folder and keeps the newest `keep` checkpoints, and those that are `spared`.

    `on_error` gets a `SaveError`, `on_saved` gets step, path and seconds; both are called from the writing
    thread. Meant for one process a folder: the one that holds the lock of the run. `wait()` before reading
    the folder in the same process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        spared: Spared | None = None,
        on_error: Callable[[Exception], None],
        on_saved: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        if keep < 1:
            raise UserError(f"keep={keep}: at least 1 checkpoint has to be kept")
        self._folder, self._keep, self._spared = folder, keep, spared
        self._on_error, self._on_saved = on_error, on_saved
        self._memory = HostCopy()
        self._thread: threading.Thread | None = None
        self.last_saved: int | None = None
        """Step of the newest checkpoint that this saver made durable."""
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
        """Take the state as it is now and publish it in the background; `wait` until that is done."""
        _check_groups(snapshot)
        meta = strict_json.dump(snapshot.meta, indent=1)
        began = time.perf_counter()
        self.wait()
        if (waited := time.perf_counter() - began) > _SLOW_SECONDS:
            logger.warning(
                "training waited %.1f s for the last checkpoint; save less often or on a faster disk", waited
            )
        try:
            images = self._memory.take(snapshot.tensors)
        except MemoryError as error:
            self._fail(snapshot.step, error)
            return
        work = (snapshot.step, images, meta)
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint-saver")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until no save is under way."""
        thread = self._thread
        if thread is None:
            return
        thread.join()
        self._thread = None

    def leave(self) -> None:
        """Forget the save that is under way, because the process ends now; what it leaves is cleaned up later."""
        self._thread = None

    def close(self) -> None:
        """Finish what is under way and give the memory back."""
        self.wait()
        self._memory = HostCopy()

    def _write(self, step: int, images: list[Image], meta: bytes) -> None:
        began = time.perf_counter()
        try:
            path = self._publish(step, images, meta)
        except Exception as error:
            self._fail(step, error)
            return
        self.last_saved = step
        retire(self._folder, self._keep, self._spared)
        _call(self._on_saved, step, path, time.perf_counter() - began)

    def _publish(self, step: int, images: list[Image], meta: bytes) -> Path:
        self._memory.finish()
        staging = stage(self._folder, step)
        try:
            return publish(self._folder, staging, step, _write_files(staging, images, meta))
        except BaseException:
            if staging.exists():
                durable.discard(staging)  # gives its room back
            raise

    def _fail(self, step: int, error: Exception) -> None:
        reason = durable.explain(error, self._folder) if isinstance(error, OSError) else str(error)
        if durable.is_full(error):
            reason += " or lower train.keep_checkpoints"
        told = SaveError(step, reason, read_latest(self._folder))
        told.__cause__ = error
        _call(self._on_error, told)


def _check_groups(snapshot: Snapshot) -> None:
    for group in snapshot.tensors:
        if group == META_GROUP or not _GROUP.fullmatch(group):
            raise ValueError(f"{group!r} cannot be a group of tensors: it becomes the name of a file")


def _write_files(staging: Path, images: list[Image], meta: bytes) -> list[Entry]:
    """All files side by side: hashing takes a core for each, and the optimizer alone is half of the bytes."""
    contents = {f"{image.group}{SUFFIX}": (image.group, image.chunks()) for image in images}
    contents[META] = (META_GROUP, iter([meta]))
    tasks = [partial(_write_entry, staging, name, *content) for name, content in contents.items()]
    return durable.in_parallel(tasks)


def _write_entry(staging: Path, name: str, group: str, chunks: Iterator[bytes | memoryview]) -> Entry:
    return entry(name, group, durable.write_file(staging / name, chunks))


def _call(callback: Callable[..., None] | None, *args: object) -> None:
    """A callback that fails must not look like a save that failed."""
    try:
        if callback is not None:
            callback(*args)
    except Exception:
        logger.exception("the callback of the checkpoint saver failed")
