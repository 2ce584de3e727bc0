"""Steps from a pair store: which documents, read, packed, corrupted and ready for the device.

A step is planned in the main process from the lengths alone and made in a worker. Both are pure functions of the
position, so the number of workers, ranks or micro-batches never changes what a step trains on.

Loader processes may die or hang. PyTorch would raise an error in the main thread at the moment a process dies, which
may be in the middle of an update. Here it is detected where the main thread waits for data, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.data.packing import BatchPlan, Order, StepShape, document_keys, pack
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.errors import UserError
from mmldlm.layout import Caps, packed_layout, padded_layout
from mmldlm.types import Counts, MicroBatch, NoisyBatch, PackedBatch, Parcel, When

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How long a loader waits before it looks whether its processes live."""
_GOOD_STEPS = 100
"""After so many, earlier failures no longer count."""
_SET_SECONDS = 1.0
"""How long it may take to set the event that ends loader processes."""
_LAST_SECONDS = 5.0
"""How long killed processes, all together, are waited for."""


class LoaderError(RuntimeError):
    """Loader processes died or hang; the steps can be had again from a new loader."""


class WatchedSteps:
    """Iterates over a loader made with `poll_seconds`, and gives up after `patience` seconds (0: never).

    `waiting` surrounds each time that the main thread waits for data; what it raises there ends the waiting.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        patience: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD)
        self._steps: Any = iter(loader)
        if in_main and before is not None:
            # another loader of this process may have left PyTorch's handler there
            theirs = getattr(before, "__module__", "").startswith("torch.")
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if theirs else before)
        self.context: Any = loader.multiprocessing_context
        self.workers: list[Any] = self.context.workers if self.context else []
        self.patience, self._waiting = patience, waiting
        self._waiting_since: float | None = None
        self._hung = ""
        if self.workers and patience:
            threading.Thread(target=_guard, args=(weakref.ref(self), patience / 4), daemon=True).start()

    def __iter__(self) -> WatchedSteps:
        return self

    def __next__(self) -> Any:
        self._waiting_since = time.monotonic()
        try:
            while True:
                try:
                    with self._waiting():
                        return next(self._steps)
                except (RuntimeError, OSError, EOFError) as error:
                    if trouble := self._hung or self._death(patient=isinstance(error, OSError | EOFError)):
                        self.kill()
                        raise LoaderError(trouble) from error
                    if not self.workers or "timed out" not in str(error):
                        raise
        finally:
            self._waiting_since = None

    def _death(self, patient: bool) -> str:
        """Which process died, if one did; a broken connection may be seen a moment before its end."""
        for worker in self.workers if patient else []:
            worker.join(1.0 / len(self.workers))
        dead = [worker for worker in self.workers if not worker.is_alive()]
        return f"loader process {dead[0].pid} died ({_how(dead[0].exitcode)})" if dead else ""

    def check_patience(self) -> None:
        """Called by a thread of its own: the main thread may itself be stuck in a process that hangs."""
        since = self._waiting_since
        if since is not None and (waited := time.monotonic() - since) >= self.patience:
            self._hung = f"the loader gave nothing for {waited:.0f} s (data.worker_timeout={self.patience:g})"
            self.kill(wait=False)

    def kill(self, *, wait: bool = True) -> None:
        """End the processes, also those that no longer respond."""
        for worker in self.workers:
            with contextlib.suppress(ValueError, OSError):
                worker.kill()
        until = time.monotonic() + _LAST_SECONDS
        for worker in self.workers if wait else []:
            worker.join(max(0.0, until - time.monotonic()))


class _EndEvent:
    """The event that ends loader processes. Setting it cannot hang.

    An event has a lock that all processes share. A process that is killed while it reads the event keeps that lock for
    ever. Only the process that created the event ever sets it, so it need not read it, and it does not wait for it.
    """

    def __init__(self, event: Any) -> None:
        self.event, self._owner, self._is_set = event, os.getpid(), False

    def is_set(self) -> bool:
        """Whether the processes have to end."""
        return self._is_set if os.getpid() == self._owner else self.event.is_set()

    def set(self) -> None:
        """End the processes, if the lock is free; those that are gone need no event."""
        self._is_set = True
        setting = threading.Thread(target=self.event.set, daemon=True)
        setting.start()
        setting.join(_SET_SECONDS)


def loader_context() -> Any:
    """How a watched loader starts its processes: as usual, but they are known, and ending them cannot hang."""
    usual: Any = type(multiprocessing.get_context(multiprocessing.get_start_method()))

    class LoaderContext(usual):  # type: ignore[misc]
        def __init__(self) -> None:
            self.workers: list[Any] = []
            self.end_event: _EndEvent | None = None

        def Process(self, *args: Any, **options: Any) -> Any:  # noqa: N802
            self.workers.append(usual.Process(*args, **options))
            return self.workers[-1]

        def Event(self) -> _EndEvent:  # noqa: N802
            self.end_event = _EndEvent(super().Event())
            return self.end_event

    return LoaderContext()


def _guard(steps: weakref.ref[WatchedSteps], pause: float) -> None:
    while (watched := steps()) is not None and not watched._hung:
        watched.check_patience()
        del watched
        time.sleep(min(1.0, pause))


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        causes = {"SIGKILL": "out of host memory", "SIGBUS": "/dev/shm is full or a file was cut off"}
        return f"{name}, perhaps {causes[name]}" if name in causes else name
    return f"signal {-code}"


class Restarts:
    """How often a loader may be restarted."""

    def __init__(self, most: int) -> None:
        self.most, self.count, self._good = most, 0, 0

    def step_done(self) -> None:
        """A step came out of the loader."""
        self._good += 1
        if self._good >= _GOOD_STEPS:
            self.count = 0

    def failed(self, error: LoaderError, position: int) -> UserError | None:
        """None if a restart is allowed, else what the run ends with."""
        self.count, self._good = self.count + 1, 0
        if self.count > self.most:
            return UserError(
                f"{error}, after {self.most} restarts (data.worker_restarts={self.most}); 'mmldlm data verify' "
                f"checks the store, data.num_workers=0 reads it in the main process"
            )
        log.warning("%s; restarting it at document %d, nothing is lost", error, position)
        return None


Corrupt = Callable[[PackedBatch], NoisyBatch]
Count = Callable[[np.ndarray, np.ndarray, When, np.ndarray | None], Counts]


@dataclass(frozen=True)
class StepRange:
    """The documents at positions start..end of the order, which are those of a step."""

    start: int
    end: int
    step: int = 0


@dataclass(frozen=True)
class StepBatch:
    """All micro-batches of one step for one rank."""

    where: StepRange
    micro_batches: list[Parcel[MicroBatch]]
    counts: Counts
    """Over the whole step, all ranks."""
    num_documents: int
    num_tokens: int
    num_places: int
    """Tokens that the micro-batches have room for."""
    num_squares: int
    """Sum over documents of (tokens + slots)^2, what attention costs."""
    num_scored: int
    """Scored tokens of this rank."""
    num_extra: int
    """Micro-batches beyond the plan, because documents did not fit."""

    def pin_memory(self) -> StepBatch:
        """In page-locked memory; called by the loader."""
        return self._moved(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> StepBatch:
        """On the device; from page-locked memory the copy does not wait."""
        return self._moved(lambda buffer: buffer.to(device, non_blocking=True))

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> StepBatch:
        return replace(
            self, micro_batches=[part.with_buffer(move(part.buffer)) for part in self.micro_batches]
        )


def plan_steps(
    order: Order, lengths: np.ndarray, plan: BatchPlan | StepShape, position: int, step: int = 0
) -> Iterator[StepRange]:
    """Endless plan from a position: documents in order until tokens or documents would exceed the step's."""
    while True:
        shape = plan.at(step)
        window = np.arange(position, position + shape.documents_per_step)
        total = np.cumsum(lengths[order.documents(window)], dtype=np.int64)
        taken = max(1, int(np.searchsorted(total, shape.tokens_per_step, side="right")))
        yield StepRange(position, position + taken, step)
        position, step = position + taken, step + 1


@dataclass
class StepReader(Dataset[StepBatch]):
    """Makes the step at a range of positions."""

    store: PairStore
    split: Split
    order: Order
    plan: BatchPlan | StepShape
    corrupt: Corrupt
    count: Count
    """Positions and lengths of all documents of the step, which step, and which are derived -> what the loss is divided
    by."""
    with_rows: bool = True
    """Layouts hold padded rows too, for attention that wants them."""
    rank: int = 0
    world_size: int = 1

    def __getitem__(self, where: Any) -> Any:
        """The step, or the `UserError` that its data gave: a worker cannot raise one without a long traceback."""
        try:
            return self.make(where)
        except UserError as error:
            return error

    def make(self, where: StepRange) -> StepBatch:
        """The step at a range of positions."""
        positions = np.arange(where.start, where.end)
        indices = self.order.documents(positions)
        lengths = np.asarray(self.split.lengths[indices], dtype=np.int64)
        derived = self.split.derived(indices)
        shape = self.plan.at(where.step)
        bins = pack(lengths, shape)
        extra = len(bins) - shape.num_micro
        bins += [np.zeros(0, dtype=np.int64)] * (-len(bins) % self.world_size)
        caps = [shape.caps_for(int(lengths[part].sum())) for part in bins]
        when = When(where.step, self.order.epoch_of(where.start))
        mine = [
            self._micro_batch(positions[bins[idx]], indices[bins[idx]], caps[idx], shape.layout, when,
                              None if derived is None else derived[bins[idx]])
            for idx in range(self.rank, len(bins), self.world_size)
        ]  # fmt: skip
        counts = self.count(positions, lengths, when, derived)
        return StepBatch(
            where=where,
            micro_batches=[Parcel.of(MicroBatch(part, counts.as_tensors())) for part in mine],
            counts=counts,
            num_documents=len(indices),
            num_tokens=int(lengths.sum()),
            num_places=sum(each.num_tokens for each in caps),
            num_squares=int(np.square(lengths + self.store.manifest.num_slots).sum()),
            num_scored=sum(int(part.scored_real.sum()) for part in mine),
            num_extra=extra,
        )

    def _micro_batch(
        self, positions: np.ndarray, indices: np.ndarray, caps: Caps, layout: str, when: When,
        derived: np.ndarray | None,
    ) -> NoisyBatch:  # fmt: skip
        documents = self.split.read(indices)
        keys = document_keys(self.order.seed, self.order.epochs(positions), documents.ids)
        latents = self.store.normalizer.normalize(documents.latents)
        batch = make_batch(documents, latents, positions, keys, caps, layout, with_rows=self.with_rows)
        if derived is not None:  # as many as the batch has places for documents
            derived = np.pad(derived, (0, len(batch.keys) - len(derived)))
        return self.corrupt(replace(batch, when=when, derived=derived))


def make_batch(
    documents: Documents,
    latents: np.ndarray,
    positions: np.ndarray,
    keys: np.ndarray,
    caps: Caps | None = None,
    layout: str = "packed",
    *,
    with_rows: bool = True,
) -> PackedBatch:
    """Documents as one micro-batch; `latents` normalised. With caps, constant shapes."""
    num_slots = latents.shape[1]
    if layout == "padded":
        assert caps is not None
        lengths = np.pad(documents.lengths, (0, caps.num_documents - len(documents.lengths)))
        where = padded_layout(lengths, num_slots, caps.max_length, with_rows=with_rows)
    else:
        where = packed_layout(documents.lengths, num_slots, caps, with_rows=with_rows)
    tokens = np.zeros(where.num_tokens, dtype=np.int64)
    tokens[where.real.numpy()] = documents.tokens
    missing = where.num_documents - len(documents.lengths)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        latents=torch.from_numpy(np.pad(latents, ((0, missing), (0, 0), (0, 0)))),
        layout=where,
        positions=np.pad(positions, (0, missing), constant_values=-1),
        keys=np.pad(keys, (0, missing)),
    )


def make_loader(
    reader: StepReader,
    steps: Iterator[StepRange],
    *,
    num_workers: int,
    prefetch: int,
    pin_memory: bool,
    poll_seconds: float = 0.0,
) -> DataLoader[StepBatch]:
    """The planned steps in order; workers prepare them ahead. With `poll_seconds`, for `WatchedSteps` only."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=steps,  # type: ignore[arg-type]
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        timeout=poll_seconds if num_workers else 0,
        multiprocessing_context=loader_context() if num_workers and poll_seconds else None,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


class Feed:
    """The steps of a loader on the device. A `UserError` that a worker met comes through as it is."""

    def __init__(
        self, steps: Iterator[StepBatch | UserError], device: torch.device, *, overlap: bool
    ) -> None:
        self.steps, self.device = steps, device
        self.copies = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> StepBatch | UserError:
        step = next(self.steps)
        if isinstance(step, UserError):
            return step
        if self.copies is None:
            return step.to(self.device)
        with torch.cuda.stream(self.copies):
            moved = step.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.copies)
        for part in moved.micro_batches:
            part.buffer.record_stream(current)
        return moved
