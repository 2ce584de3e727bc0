"""Ctrl-C, SIGTERM and SIGUSR1 only raise a flag; the loop looks at it at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

REQUEUE = 75
"""Exit code after an orderly stop that a machine asked for: start the same command again."""
_ONE_PRESS = 0.5
"""Seconds. A launcher may pass on a Ctrl-C that the process got already."""


def exit_code(received: signal.Signals) -> int:
    """Of a run that stopped in order: a person who pressed Ctrl-C wants it stopped, a scheduler wants it back later."""
    return 130 if received == signal.SIGINT else REQUEUE


class StopFlag:
    """Inside the `with`, a signal asks for an orderly stop; a second Ctrl-C leaves at once. May be nested."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pressed_at: float | None = None
        self._before: dict[signal.Signals, object] = {}
        self._depth = 0
        self._pid = os.getpid()

    def __enter__(self) -> StopFlag:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._handle) for name in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        for name, handler in self._before.items():
            signal.signal(name, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            now, before = time.monotonic(), self._pressed_at
            self._pressed_at = now if before is None else before
            # loader processes inherit this, and leave when their parent does
            if before is not None and now - before > _ONE_PRESS and os.getpid() == self._pid:
                raise KeyboardInterrupt
