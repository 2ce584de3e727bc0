"""What works at the same time in one process: a thread that reads ahead, and one that writes behind.

Tokenizers, networks and files leave Python free while they work, so the stages need not wait for each other. An error
in a stage comes out where the caller takes or gives the next item, as if all were done in one go.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

T = TypeVar("T")
TURN_SECONDS = 1e-4
"""How long a thread may keep Python for itself. A network gives it away at each of its operations, and would wait
fifty times as long for each with the usual value."""
GARBAGE_OBJECTS = 100_000
"""New objects after which Python looks for garbage in circles. There is none among documents, and with the usual 700
a third of the reading thread's time goes into the search."""
LEAVE_SECONDS = 10.0
"""A stage that does not end by then, as one that waits for a network, is left behind; it cannot hold up the process."""


class StoppedError(Exception):
    """The work is no longer wanted."""


@dataclass(frozen=True)
class _End:
    """The last thing that comes, with what went wrong."""

    error: BaseException | None


class Ahead(Generic[T]):
    """Takes items from an iterable in a thread of its own, at most `size` of them before they are wanted."""

    def __init__(self, items: Iterable[T], size: int, stop: threading.Event) -> None:
        self._items, self._stop = items, stop
        self._ready: queue.Queue[T | _End] = queue.Queue(size)
        self._thread = threading.Thread(target=self._run, name="prepare-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Have the thread stop; whoever makes the items may look at `stop` to be quicker."""
        self._stop.set()
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                self._ready.get(timeout=0.02)  # the thread may wait for room

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with ExitStack() as opened:
                if isinstance(self._items, Generator):  # and with it what it has opened, such as processes
                    opened.callback(self._items.close)
                for item in self._items:
                    self._ready.put(item)
                    if self._stop.is_set():
                        break
        except BaseException as raised:  # whatever it is, the caller gets it
            error = raised
        self._ready.put(_End(error))


def until(stop: threading.Event, items: Iterable[T]) -> Iterator[T]:
    """The items, for as long as they are wanted."""
    for item in items:
        if stop.is_set():
            raise StoppedError
        yield item


class Behind:
    """Does jobs in a thread of its own, in their order, one at a time; on leaving, the last one is finished."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare-behind")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if error_type is None:
            self.wait()

    def do(self, job: Callable[[], None]) -> None:
        """Begin a job once the one before is done; raises what went wrong with that."""
        self.wait()
        self._last = self._pool.submit(job)

    def wait(self) -> None:
        """Until the last job is done; raises what went wrong with it."""
        if self._last is not None:
            self._last.result()


@contextmanager
def many_documents() -> Iterator[None]:
    """Python set up for threads that make many objects: short turns, and few searches for garbage."""
    turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(min(turn, TURN_SECONDS))
        if thresholds[0]:  # else somebody has switched it off
            gc.set_threshold(max(thresholds[0], GARBAGE_OBJECTS), *thresholds[1:])
        yield
    finally:
        sys.setswitchinterval(turn)
        gc.set_threshold(*thresholds)
