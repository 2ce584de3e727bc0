"""Children that are killed: forks, so that torch is imported once, which may die at a chosen system call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

CALLS = ("write", "fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir")
"""Functions of `os` that change the disk."""


def fork(work: Callable[[], None]) -> int:
    """The id of a child that does the work and leaves with 0, or with 1 if the work fails."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def die_at(number: int, counts: Callable[[], bool] = lambda: True) -> None:
    """The `number`-th changing call that counts is this process's last; a write gets half of its bytes out."""
    count, counting = 0, threading.Lock()

    def guard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if counts():
                with counting:
                    count += 1
                    last = count == number
                if last:
                    if name == "write":
                        call(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return guarded

    for name in CALLS:
        setattr(os, name, guard(name, getattr(os, name)))
