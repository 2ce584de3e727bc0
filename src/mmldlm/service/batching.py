"""Requests of many clients through one model: what waits and asks for the same thing is computed together.

One thread owns the model. While it computes, requests queue up; then it takes the oldest and all others that can share
its pass. Nothing waits for a batch to fill, so a single client sees no delay. What is sampled depends on the seed and
on the text or latent itself, never on the batch, so an answer does not depend on who else asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mmldlm.errors import UserError

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Compute = Callable[[list[Any], Progress], Iterable[Any]]
"""Documents in, a result for each of them out, in the same order. The progress must be reported often: it raises
`TimeoutError` when nobody waits for the results any more."""


class BusyError(Exception):
    """More documents are waiting than the service is willing to hold."""


class ClosedError(Exception):
    """The service is stopping."""


@dataclass(eq=False)
class Job:
    """The documents of one request."""

    kind: Hashable
    """Jobs of the same kind may be computed together; None: alone."""
    documents: list[Any]
    compute: Compute
    deadline: float
    """By `time.monotonic`; what is not done by then is given up."""
    result: Future[list[Any]] = field(default_factory=Future)
    wanted: bool = True
    """Whether somebody waits for the result."""


class Batcher:
    """Queue and thread. `observe` gets the number of documents and the seconds of each pass."""

    def __init__(
        self, *, most_documents: int, most_waiting: int, observe: Callable[[int, float], None] | None = None
    ) -> None:
        """`most_documents` of a pass; `most_waiting` documents in the queue."""
        self.most_documents, self.most_waiting = most_documents, most_waiting
        self._observe = observe or (lambda documents, seconds: None)
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(len(job.documents) for job in self._queue)

    def submit(self, job: Job) -> Future[list[Any]]:
        """Queue a job; its future gets the results, or the error that its own documents cause."""
        with self._changed:
            if self._closed:
                raise ClosedError
            waiting = sum(len(other.documents) for other in self._queue)
            if self._queue and waiting + len(job.documents) > self.most_waiting:
                raise BusyError
            self._queue.append(job)
            self._changed.notify()
        return job.result

    def close(self) -> None:
        """Give up what is left, and end the thread after the step it is in."""
        with self._changed:
            self._closed = True
            for job in self._queue:
                job.result.cancel()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while jobs := self._next_jobs():
            began, count = time.monotonic(), sum(len(job.documents) for job in jobs)
            self._run(jobs)
            self._observe(count, time.monotonic() - began)

    def _next_jobs(self) -> list[Job]:
        """The oldest job and those that can share its pass; none when the service has stopped."""
        with self._changed:
            while True:
                while self._queue and not self._queue[0].result.set_running_or_notify_cancel():
                    self._queue.popleft()
                if self._queue:
                    return self._take()
                if self._closed:
                    return []
                self._changed.wait()

    def _take(self) -> list[Job]:
        taken, kept = [self._queue.popleft()], deque[Job]()
        room = self.most_documents - len(taken[0].documents)
        for job in self._queue:
            shares = job.kind is not None and job.kind == taken[0].kind and len(job.documents) <= room
            if shares and job.result.set_running_or_notify_cancel():
                taken.append(job)
                room -= len(job.documents)
            elif not job.result.done():
                kept.append(job)
        self._queue = kept
        return taken

    def _run(self, jobs: list[Job]) -> None:
        """Give every job its results; an error is that of the job whose documents cause it."""
        latest = max(job.deadline for job in jobs)

        def progress(done: int, total: int) -> None:
            if self._closed or time.monotonic() > latest or not any(job.wanted for job in jobs):
                raise TimeoutError

        try:
            progress(0, 1)
            results = list(
                jobs[0].compute([document for job in jobs for document in job.documents], progress)
            )
        except Exception as error:
            if len(jobs) > 1 and isinstance(error, UserError):
                for job in jobs:
                    self._run([job])
                return
            if not isinstance(error, UserError | TimeoutError):
                logger.exception("a request failed")
            for job in jobs:
                job.result.set_exception(error)
            return
        for job in jobs:
            job.result.set_result(results[: len(job.documents)])
            results = results[len(job.documents) :]
