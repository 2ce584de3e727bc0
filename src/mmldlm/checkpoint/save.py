"""Save checkpoints beside training: the step waits only for the copy of the state, on a GPU not even for that.

The state is copied into host memory that is allocated once and used again for every checkpoint. With a GPU that memory
is page-locked and the copies are queued on the current stream: later updates wait for them on the device, the host
waits for nothing. A thread then writes, flushes and publishes the copy. At most one save is under way; a second one
waits for the first. Whatever goes wrong (a full disk, say) is reported, and the former checkpoints stay as they are.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmldlm import durable
from mmldlm.checkpoint.files import (
    SUFFIX,
    DamagedError,
    Entry,
    FileLayout,
    Spared,
    as_bytes,
    clean,
    dispensable,
    entry,
    plan,
    publish,
    read_latest,
    read_manifest,
    retire,
    stage,
)
from mmldlm.checkpoint.state import META, META_GROUP, Snapshot
from mmldlm.errors import UserError
from mmldlm.json_lines import dump_exact, load_exact

SLAB = 64 * 2**20
"""Bytes; a power of two, because page-locked allocations are rounded up to one."""
SCORE = "valid_loss"
"""Key in a checkpoint's meta, where it was validated at its step; smaller is better."""
GOOD = 2
"""Number of good checkpoints that are kept: the newest of them may turn out to be damaged."""
_PAGE = 4096
_SLOW_SECONDS = 1.0

logger = logging.getLogger(__name__)


class SaveError(UserError):
    """A checkpoint could not be saved. Training can go on; the next save is a new attempt."""

    def __init__(self, step: int, reason: str, kept: Path | None) -> None:
        rest = f"{kept.name} is still the newest checkpoint" if kept else "there is no checkpoint yet"
        super().__init__(f"the checkpoint of step {step} was not saved: {reason}; {rest}")
        self.step = step


class Saver:
    """Saves into one folder and keeps the newest `keep` checkpoints, and those that are `spared`.

    Where there is no room for a new one, all may go but the newest and those that are `needed`.
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
        needed: Spared | None = None,
        on_error: Callable[[Exception], None],
        on_saved: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        self._folder, self._keep, self._spared, self._needed = folder, keep, spared, needed
        self._on_error, self._on_saved = on_error, on_saved
        self._memory = HostCopy()
        self._thread: threading.Thread | None = None
        self.last_saved: int | None = None
        """Step of the newest checkpoint that this saver made durable."""
        self._prepare()

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        clean(self._folder)

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
        """Take the state as it is now and publish it in the background; `wait` until that is done."""
        meta = dump_exact(snapshot.meta, indent=1)
        began = time.perf_counter()
        self.wait()
        if (waited := time.perf_counter() - began) > _SLOW_SECONDS:
            logger.warning(
                "training waited %.1f s for the last checkpoint; save less often or on a faster disk", waited
            )
        try:
            work = (snapshot.step, self._take(snapshot), meta)
        except MemoryError as error:
            self._fail(snapshot.step, error)
            return
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint-saver")
        self._thread.start()
        if wait:
            self.wait()

    def _take(self, snapshot: Snapshot) -> Any:
        """The copy that is written."""
        return self._memory.take(snapshot.tensors)

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
            path = self._publish_somehow(step, images, meta)
        except Exception as error:
            self._fail(step, error)
            return
        self.last_saved = step
        retire(self._folder, self._keep, self._spared)
        self._report(step, path, time.perf_counter() - began)

    def _report(self, step: int, path: Path, seconds: float) -> None:
        _call(self._on_saved, step, path, seconds)

    def _publish_somehow(self, step: int, images: list[Image], meta: bytes) -> Path:
        """Where there is no room, checkpoints that could be done without make it, the oldest first."""
        while True:
            try:
                return self._publish(step, images, meta)
            except OSError as error:
                surplus = dispensable(self._folder, self._needed) if durable.is_full(error) else []
                if not surplus or not self._make_room(error, surplus[0]):
                    raise

    def _make_room(self, error: OSError, surplus: Path) -> bool:
        logger.warning("%s; %s is deleted to make room", durable.explain(error, self._folder), surplus)
        durable.discard(surplus)
        return not surplus.exists()

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
        failure = SaveError(step, reason, read_latest(self._folder))
        failure.__cause__ = error
        _call(self._on_error, failure)


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


@dataclass
class Image:
    """One file in host memory."""

    group: str
    header: bytes
    views: list[memoryview]

    def chunks(self) -> Iterator[bytes | memoryview]:
        yield self.header
        yield from self.views


class HostCopy:
    """Reusable host memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def take(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        notes: Mapping[str, Mapping[str, str]] | None = None,
    ) -> list[Image]:
        """Copy all groups, each with its notes; call `finish` before the bytes are read. Replaces what was taken."""
        layouts = {group: plan(named) for group, named in tensors.items()}
        devices = {tensor.device for layout in layouts.values() for tensor in layout.stored.values()}
        on_gpu = [device for device in devices if device.type == "cuda"]
        self._reserve(sum(layout.size for layout in layouts.values()), pinned=bool(on_gpu))
        images, position = [], 0
        for group, layout in layouts.items():
            header = layout.header({"group": group, **(notes or {}).get(group, {})})
            images.append(Image(group, header, self._views(position, layout.size)))
            self._fill(position, layout)
            position += layout.size
        self._events = [_mark(device) for device in on_gpu]
        return images

    def finish(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events = []

    def _reserve(self, size: int, *, pinned: bool) -> None:
        while (missing := size - self.nbytes) > 0:
            self._slabs.append(_allocate(min(SLAB, -(-missing // _PAGE) * _PAGE), pinned=pinned))

    def _parts(self, start: int, size: int) -> Iterator[torch.Tensor]:
        """The pieces of slabs that hold bytes [start, start + size)."""
        for slab in self._slabs:
            if size <= 0:
                return
            if start < slab.numel():
                part = slab[start : start + size]
                size -= part.numel()
                yield part
            start = max(0, start - slab.numel())

    def _views(self, start: int, size: int) -> list[memoryview]:
        return [part.numpy().data for part in self._parts(start, size)]

    @torch.no_grad()
    def _fill(self, start: int, layout: FileLayout) -> None:
        for name, tensor in layout.stored.items():
            source, done = as_bytes(tensor), 0
            for part in self._parts(start + layout.offsets[name], tensor.nbytes):
                part.copy_(source[done : done + part.numel()], non_blocking=source.is_cuda)
                done += part.numel()


def _allocate(size: int, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise MemoryError(f"{size} bytes of host memory for a checkpoint: {error}") from error
        logger.warning("no page-locked memory for checkpoints (%s); copies will be slower", error)
        return _allocate(size, pinned=False)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class Retention:
    """Called with all checkpoints that look whole, oldest first; returns those that must stay."""

    best: int = 0
    """So many with the smallest score."""
    every: int = 0
    """All whose step is a multiple of this; 0: none."""
    is_good: Callable[[Path], bool] | None = None
    """The newest checkpoints that this is true of stay, whatever came after them."""
    good: int = GOOD
    """So many of them."""

    def __call__(self, paths: Sequence[Path]) -> set[Path]:
        kept = set(self._best(paths))
        if self.every:
            kept |= {path for path in paths if _step(path) % self.every == 0}
        if self.is_good is not None:
            kept |= set(islice(filter(self.is_good, reversed(paths)), self.good))
        return kept

    def _best(self, paths: Sequence[Path]) -> list[Path]:
        if not self.best:
            return []
        scored = [(score, path) for path in paths if (score := _score(path)) is not None]
        return [path for _, path in sorted(scored, key=lambda pair: pair[0])[: self.best]]


def _score(path: Path) -> float | None:
    try:
        score = load_exact((path / META).read_bytes()).get(SCORE)
    except (OSError, ValueError):
        return None
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except DamagedError:
        return 0
