"""A signal that one rank received, passed on to the others while they wait.

At the end of each step the ranks agree whether to stop. But a rank that waits for data, perhaps for ever, does not
reach that point, and the others wait for it inside an agreement, where they handle no signals. So a thread of each rank
receives the signals (the kernel writes each into a pipe at once, whatever Python is doing), and checks once a second
whether another rank received one. The message goes through the store by which the ranks found each other; it is no
agreement, it only ends the waiting.

A launcher that was killed can send no signal. Its ranks would train on, and hold their devices, with nobody to stop
them; so they also stop when they have lost their parent process.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Collection
from typing import Any, Protocol

import torch.distributed as dist

from mmldlm.distributed.ranks import Ranks

log = logging.getLogger(__name__)
_SECONDS = 1.0
_numbers = itertools.count()


class Stoppable(Protocol):
    """Whoever can be asked to stop."""

    received: signal.Signals | None

    def pass_on(self, received: signal.Signals) -> None:
        """Another rank was asked."""
        ...


class StopBroadcast:
    """Inside the `with`, a signal to any rank is passed on to all; to be entered by all ranks as often."""

    def __init__(self, ranks: Ranks, target: Stoppable, signals: Collection[signal.Signals]) -> None:
        self.target, self.signals, self._end = target, signals, threading.Event()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._thread: threading.Thread | None = None
        # the store that the ranks met at; PyTorch gives it out by this name only, and a second one needs a port
        self._store: Any = dist.distributed_c10d._get_default_store() if ranks.several else dist.HashStore()
        self._key = f"mmldlm/stop/{next(_numbers)}"  # a process may do several runs, one after the other
        if ranks.several or self._launcher is not None:
            self._thread = threading.Thread(target=self._watch, name="stop-broadcast", daemon=True)

    def __enter__(self) -> StopBroadcast:
        if self._thread is not None:
            self._ours, self._pipe = socket.socketpair()
            self._pipe.setblocking(False)
            if threading.current_thread() is threading.main_thread():  # else Python handles no signals for us
                self._before = signal.set_wakeup_fd(self._pipe.fileno(), warn_on_full_buffer=False)
                _listening.add(self)
            self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._end.set()
        if self._thread is not None:
            if self in _listening:
                signal.set_wakeup_fd(self._before)
                _listening.remove(self)
            self._pipe.close()
            self._thread.join(_SECONDS)
            self._ours.close()

    def _watch(self) -> None:
        while not self._end.is_set() and not self._passed_on():
            if self._launcher is not None and os.getppid() != self._launcher:
                log.warning("the launcher is gone; the run stops")
                self.target.pass_on(signal.SIGTERM)
                return

    def _passed_on(self) -> bool:
        """Whether a signal that came within the next second was passed on, to others or from them."""
        try:
            if number := self.target.received or self._received():
                self._store.set(self._key, str(int(number)))
                return True
            if self._store.check([self._key]):
                number = signal.Signals(int(self._store.get(self._key)))
                if not self._end.is_set():
                    self.target.pass_on(number)
                return True
        except OSError:
            return True  # the pipe is closed: the run is over
        except RuntimeError:
            pass  # who keeps the store is gone: a rank, which all notice at the next agreement, or the launcher
        return False

    def _received(self) -> signal.Signals | None:
        """A signal that came within the next second, if one of those that ask to stop did."""
        if not select.select([self._ours], [], [], _SECONDS)[0]:
            return None
        numbers = [number for number in self._ours.recv(64) if number in self.signals]
        return signal.Signals(numbers[0]) if numbers else None


_listening: set[StopBroadcast] = set()


def _detach_in_child() -> None:
    """Loader processes are ended by signals, which must not reach their parent's pipe."""
    if _listening and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_detach_in_child)
