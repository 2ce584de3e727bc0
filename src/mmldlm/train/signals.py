"""Ctrl-C and SIGTERM only raise a flag; the loop looks at it at the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopFlag:
    """Inside the `with`, a first signal asks for an orderly stop; a second one leaves at once. May be nested."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._depth = 0

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
        self.received = signal.Signals(number)
        for name in self.SIGNALS:
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
