"""How far a run is, what the loop calls without knowing it, and the documents of its steps on the device."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mmldlm.data.loader import Feed, StepBatch, make_loader, plan_steps
from mmldlm.data.packing import BatchPlan
from mmldlm.data.workers import POLL_SECONDS, LoaderError, Restarts, WatchedSteps
from mmldlm.errors import UserError
from mmldlm.model.denoiser import Denoiser
from mmldlm.training.setup import Setup
from mmldlm.training.signals import AskedToStopError, StopFlag, StopWaiting

Fields = dict[str, Any]


class Reporter(Protocol):
    """Whoever shows the run to people."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins, or resumes, at a step."""
        ...

    def update(self, step: int, fields: Fields) -> None:
        """A line was logged."""
        ...


@dataclass
class Hooks:
    """Validation and decoding of samples, on the averaged weights; and whoever shows the run."""

    validate: Callable[[Denoiser], Fields]
    decode: Callable[[Denoiser, int], list[Fields]]
    reporter: Reporter
    leave: Callable[[int], Any] = os._exit
    """Ends the process at once with an exit code, when a step hangs and `train.step_timeout_action` is exit."""


@dataclass
class Progress:
    """How far a run is. Kept in checkpoints."""

    step: int = 0
    position: int = 0
    """In the order of documents."""
    tokens: int = 0
    documents: int = 0
    validated: list[Any] | None = None
    """Step and loss of the last validation."""

    def advance(self, batch: StepBatch) -> None:
        """A step was done."""
        self.step += 1
        self.position = batch.where.end
        self.tokens += batch.num_tokens
        self.documents += batch.num_documents

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in ({"validated": None} | dict(state)).items():
            setattr(self, name, value)


log = logging.getLogger(__name__)


class Batches(Iterator["StepBatch | UserError"]):
    """Endless. Where data cannot be had, the error comes in its place: ranks have to agree before one of them stops.

    The loader is started at the first step, and again after `restart`, or when its processes died or hung, which
    `record` writes into the ledger.
    """

    def __init__(self, setup: Setup, stop: StopFlag, record: Callable[..., None]) -> None:
        self.setup, self.stop, self.record = setup, stop, record
        self.restarts = Restarts(setup.config.data.worker_restarts)
        self.watched: WatchedSteps | None = None
        """The loader at work."""
        self._feed: Feed | None = None
        self._plan = setup.plan
        self._step = self._position = 0

    def restart(self, step: int, position: int, plan: BatchPlan) -> None:
        """Continue at a step with the document at a position, cut into micro-batches as the plan says."""
        self.close()
        self._step, self._position, self._plan = step, position, plan

    def __next__(self) -> StepBatch | UserError:
        while True:
            try:
                self._feed = self._feed or self._start()
                batch = next(self._feed)
            except UserError as error:
                return error
            except StopWaiting:
                return AskedToStopError("asked to stop while waiting for data")
            except LoaderError as error:
                self.close()
                self.record("loader_failed", step=self._step, reason=str(error))
                if exhausted := self.restarts.failed(error, self._position):
                    return exhausted
                continue
            self.restarts.step_done()
            if isinstance(batch, StepBatch):
                self._step, self._position = batch.where.step + 1, batch.where.end
            return batch

    def close(self) -> None:
        """End the loader's processes; one that is stuck would keep this process from ending."""
        self._feed = None
        if self.watched is not None:
            self.watched.kill()

    def _start(self) -> Feed:
        setup, runtime = self.setup, self.setup.runtime
        steps = plan_steps(setup.order, setup.train_split.lengths, self._plan, self._position, self._step)
        reader = setup.reader(self._plan)
        if runtime.num_workers and (free := shared_memory()) is not None and free < _PLENTY:
            first = next(
                plan_steps(setup.order, setup.train_split.lengths, self._plan, self._position, self._step)
            )
            size = sum(part.buffer.nbytes for part in reader.make(first).micro_batches)
            check_shared_memory(free, size, runtime.num_workers, setup.config.data.prefetch)
        loader = make_loader(
            reader, steps, num_workers=runtime.num_workers, prefetch=setup.config.data.prefetch,
            pin_memory=runtime.pin_memory, poll_seconds=POLL_SECONDS,
        )  # fmt: skip
        self.watched = WatchedSteps(loader, setup.config.data.worker_timeout, self.stop.waiting)
        return Feed(self.watched, runtime.device, overlap=setup.config.speed.overlap_copies)

    def make(self, where: Any, plan: BatchPlan) -> StepBatch:
        """One step again, in this process, cut as another plan says."""
        batch = self.setup.reader(plan).make(where)
        pinned = batch.pin_memory() if self.setup.runtime.pin_memory else batch
        return pinned.to(self.setup.runtime.device)


_PLENTY = 2 * 2**30
"""Bytes of shared memory above which nothing is measured."""


def shared_memory() -> int | None:
    """Free bytes where loader processes leave their batches; None where that is not known."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def check_shared_memory(free: int, step: int, num_workers: int, prefetch: int) -> None:
    """Reject loader processes for which there is no room: they would be killed in the middle of the run."""
    needed = step * (num_workers * prefetch + 2)  # two more are being handed over and used
    if needed > free:
        raise UserError(
            f"/dev/shm: {free / 2**20:.0f} MiB are free, loader processes need about {needed / 2**20:.0f} MiB "
            f"(data.num_workers={num_workers}, data.prefetch={prefetch}); start the container with a larger shared "
            f"memory (docker run --shm-size=8g, or --ipc=host), or set data.num_workers=0"
        )
