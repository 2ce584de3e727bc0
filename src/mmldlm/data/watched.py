"""The steps of a loader whose processes may die or hang: noticed within seconds, and told in one line.

PyTorch would raise an error in the main thread at the moment a loader process dies, which may be in the middle of an
update. Here it is noticed where the main thread waits for data, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
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
"""After so many, earlier trouble is forgotten."""
_TELL_SECONDS = 1.0
"""How long it may take to tell loader processes that they are to end."""
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
        self.workers: list[Any] = list(getattr(self._steps, "_workers", []))
        if self.workers:
            _use_ending(self._steps)
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
        """End the processes, also those that listen to nothing any more."""
        for worker in self.workers:
            with contextlib.suppress(ValueError, OSError):
                worker.kill()
        until = time.monotonic() + _LAST_SECONDS
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))


class _Ending:
    """PyTorch's note to the loader processes that they are to end, which cannot hang the one who writes it.

    The note has a lock that all processes share. One that is killed while it looks at the note keeps that lock for
    ever. Only this process ever writes it, so it need not ask; and it does not wait for the lock.
    """

    def __init__(self, event: Any) -> None:
        self.event, self._written = event, False

    def is_set(self) -> bool:
        """Whether the processes were told to end."""
        return self._written

    def set(self) -> None:
        """Tell them, if the lock can be had; those that are gone need not be told."""
        self._written = True
        telling = threading.Thread(target=self.event.set, daemon=True)
        telling.start()
        telling.join(_TELL_SECONDS)


def _use_ending(steps: Any) -> None:
    steps._workers_done_event = _Ending(steps._workers_done_event)


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
        return f"{name}, perhaps out of host memory" if name == "SIGKILL" else name
    return f"signal {-code}"


class Restarts:
    """How often a loader may be started anew."""

    def __init__(self, most: int) -> None:
        self.most, self.count, self._good = most, 0, 0

    def step_done(self) -> None:
        """A step came out of the loader."""
        self._good += 1
        if self._good >= _GOOD_STEPS:
            self.count = 0

    def failed(self, error: LoaderError, position: int) -> UserError | None:
        """None if a new start is allowed, else what the run ends with."""
        self.count, self._good = self.count + 1, 0
        if self.count > self.most:
            return UserError(
                f"{error}, after {self.most} new starts (data.worker_restarts={self.most}); 'mmldlm data verify' "
                f"checks the store, data.num_workers=0 reads it in the main process"
            )
        log.warning("%s; starting it anew at document %d, nothing is lost", error, position)
        return None
