"""Ctrl-C, SIGTERM and their like only set a flag; the loop looks at it at the end of a step.

Where the loop waits for data, the signal ends the waiting at once: a store that hangs must not delay the stop. A signal
that the parent process had ignored stays ignored: SIGINT of a shell's background jobs, SIGHUP under `nohup`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from mmldlm.errors import UserError

REQUEUE = 75
"""Exit code after an orderly stop that a machine asked for: start the same command again."""
_ONE_PRESS = 0.5
"""Seconds. A launcher may pass on a Ctrl-C that the process got already."""


def exit_code(received: signal.Signals) -> int:
    """Of a run that stopped in order: a person who pressed Ctrl-C wants it stopped, a scheduler wants it back later."""
    return 130 if received == signal.SIGINT else REQUEUE


class AskedToStopError(UserError):
    """In the place of data, where a run is to stop instead of waiting for them."""


class StopWaiting(BaseException):
    """Asked to stop while waiting; nothing that reads data may take it for an error of its own."""


class StopFlag:
    """Inside the `with`, a signal asks for an orderly stop; a second Ctrl-C leaves at once. May be nested."""

    SIGNALS = (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    )  # fmt: skip

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pressed_at: float | None = None
        self._before: dict[signal.Signals, object] = {}
        self._terminals: list[int] = []
        """Standard output and error where they are a terminal: after SIGHUP it is gone, and writing there fails."""
        self._waiting = False
        self._depth = 0
        self._pid = os.getpid()

    def __enter__(self) -> StopFlag:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handled = [name for name in self.SIGNALS if signal.getsignal(name) != signal.SIG_IGN]
            self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
            self._before = {name: signal.signal(name, self._handle) for name in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        for name, handler in self._before.items():
            signal.signal(name, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a signal raises `StopWaiting` at once, also one that came before. What is cut off is thrown away."""
        self._waiting = True
        try:
            if self.received is not None:
                raise StopWaiting
            yield
        finally:
            self._waiting = False

    def pass_on(self, received: signal.Signals) -> None:
        """Another rank got the signal; called from any thread. It ends the waiting here too."""
        self.received = self.received or received
        if self._before:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)  # no press of Ctrl-C

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGHUP and self._terminals and os.getpid() == self._pid:
            silence = os.open(os.devnull, os.O_WRONLY)
            for fd in self._terminals:
                os.dup2(silence, fd)
        if number == signal.SIGINT:
            now, before = time.monotonic(), self._pressed_at
            self._pressed_at = now if before is None else before
            # loader processes inherit this, and leave when their parent does
            if before is not None and now - before > _ONE_PRESS and os.getpid() == self._pid:
                raise KeyboardInterrupt
        if self._waiting and os.getpid() == self._pid:
            self._waiting = False  # once: what follows, such as the last checkpoint, is not cut off
            raise StopWaiting
