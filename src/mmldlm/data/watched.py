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
from typing import Any

from torch.utils.data import DataLoader

from mmldlm.errors import UserError

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How long a loader waits before it looks whether its processes live."""
_GOOD_STEPS = 100
"""After so many, earlier trouble is forgotten."""


class LoaderError(RuntimeError):
    """Loader processes died or hang; the steps can be had again from a new loader."""


class WatchedSteps:
    """Iterates over a loader made with `poll_seconds`, and gives up after `patience` seconds (0: never)."""

    def __init__(self, loader: DataLoader[Any], patience: float) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD)
        self._steps: Any = iter(loader)
        if in_main and before is not None:
            signal.signal(signal.SIGCHLD, before)
        self.workers: list[Any] = list(getattr(self._steps, "_workers", []))
        self.patience = patience

    def __iter__(self) -> WatchedSteps:
        return self

    def __next__(self) -> Any:
        began = time.monotonic()
        while True:
            try:
                return next(self._steps)
            except RuntimeError as error:
                trouble = self._trouble(time.monotonic() - began)
                if trouble:
                    self.kill()
                    raise LoaderError(trouble) from error
                if not self.workers or "timed out" not in str(error):
                    raise

    def _trouble(self, waited: float) -> str:
        dead = [worker for worker in self.workers if not worker.is_alive()]
        if dead:
            return f"loader process {dead[0].pid} died ({_how(dead[0].exitcode)})"
        if self.workers and self.patience and waited >= self.patience:
            return f"the loader gave nothing for {waited:.0f} s (data.worker_timeout={self.patience:g})"
        return ""

    def kill(self) -> None:
        """End the processes, also those that listen to nothing any more."""
        for worker in self.workers:
            with contextlib.suppress(ValueError, OSError):
                worker.kill()
        for worker in self.workers:
            worker.join(5.0)


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
