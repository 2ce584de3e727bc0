"""Loader processes that may die or hang: detected within seconds, and reported in one line.

PyTorch would raise an error in the main thread at the moment a loader process dies, which may be in the middle of an
update. Here it is detected where the main thread waits for data, and nowhere else.
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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from mmldlm.errors import UserError

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
            for worker in self.workers:
                with contextlib.suppress(ValueError, OSError):
                    worker.kill()

    def kill(self) -> None:
        """End the processes, also those that no longer respond."""
        for worker in self.workers:
            with contextlib.suppress(ValueError, OSError):
                worker.kill()
        until = time.monotonic() + _LAST_SECONDS
        for worker in self.workers:
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
        causes = {
            "SIGKILL": ", perhaps out of host memory",
            "SIGBUS": ", perhaps /dev/shm is full or a file was cut off",
        }
        return f"{name}{causes.get(name, '')}"
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
