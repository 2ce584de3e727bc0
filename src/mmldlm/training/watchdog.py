"""A thread that shows that the run is alive, and detects a step that hangs.

It replaces `heartbeat.json` every few seconds; of several ranks, the main one does. When a step takes too long, it
writes the stacks of all threads into `stacks.txt` (`stacks_1.txt` on rank 1); so does the interpreter itself in a
crash, or when nothing else gets a turn. Only the clock that never jumps is used for waiting.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from mmldlm import durable
from mmldlm.run_folder import RunFolder

log = logging.getLogger(__name__)

HUNG = 76
"""Exit code of a run that was ended because a step hung."""
BEAT_SECONDS = 5.0
_COMPILERS = (
    "_dynamo/convert_frame.py",
    "_inductor/compile_fx.py",
    "_inductor/async_compile.py",
    "triton/compiler/compiler.py",
)
"""Files of PyTorch and Triton; one of them is on the stack only while something is compiled."""

Hung = Callable[[int, float, str], None]
"""Step, seconds, file with the stacks."""


class Watchdog:
    """Inside the `with`, watches the phases that `at` and `phase` announce; only the phase `step` has a deadline."""

    def __init__(
        self, run: RunFolder, timeout: float, on_hung: Hung, *, last_resort: bool = False, rank: int = 0
    ) -> None:
        self.run, self.timeout, self.on_hung = run, timeout, on_hung
        self.rank, self.file = rank, run.stacks if rank == 0 else run.path / f"stacks_{rank}.txt"
        self.last_resort = last_resort
        """Let the interpreter end the process where no thread gets a turn any more."""
        self._now: tuple[int, str, float, float] = (0, "start", time.monotonic(), time.time())
        self._reported: tuple[int, str, float, float] | None = None
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        self._stacks: IO[str] | None = None
        self._quiet = False

    def __enter__(self) -> Watchdog:
        with contextlib.suppress(OSError):
            self._stacks = open(self.file, "a")
            self._had_handler = faulthandler.is_enabled()
            faulthandler.enable(self._stacks)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        self.at(self._now[0], "stopped" if kind else "finished")
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is None:
            return
        faulthandler.disable()
        if self._had_handler and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        empty = os.fstat(self._stacks.fileno()).st_size == 0
        self._stacks.close()
        if empty:
            self.file.unlink(missing_ok=True)

    def at(self, step: int, phase: str) -> None:
        """The run has come to a step, or to something else; its deadline begins now."""
        self._now = (step, phase, time.monotonic(), time.time())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the run does something that is no step."""
        step, before, _, _ = self._now
        self.at(step, name)
        try:
            yield
        finally:
            self.at(step, before)

    def _watch(self) -> None:
        pause = min(BEAT_SECONDS, self.timeout / 4) if self.timeout else BEAT_SECONDS
        self._beat()
        written = time.monotonic()
        while not self._stop.wait(pause):
            if time.monotonic() - written >= BEAT_SECONDS:
                self._beat()
                written = time.monotonic()
            if self.timeout:
                self._check()
        self._beat()

    def _check(self) -> None:
        """Report a step past its deadline, once; what is compiled in it takes as long as it takes."""
        if self._stacks is not None:
            # if this thread gets no turn for so long, the interpreter's own watchdog writes the stacks
            later = self.timeout + 2 * BEAT_SECONDS
            faulthandler.dump_traceback_later(later, file=self._stacks, exit=self.last_resort)
        seen = self._now
        step, phase, since, _ = seen
        seconds = time.monotonic() - since
        if phase != "step" or seconds < self.timeout or seen is self._reported:
            return
        if compiling():
            if self._now is seen:
                self.at(step, phase)
            return
        self._reported = seen
        self._dump(step + 1, seconds)
        self.on_hung(step + 1, seconds, self.file.name)

    def _dump(self, step: int, seconds: float) -> None:
        if self._stacks is None:
            return
        with contextlib.suppress(OSError):
            self._stacks.write(f"step {step} has taken {seconds:.0f} s\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _beat(self) -> None:
        if self.rank:
            return
        step, phase, since, began = self._now
        content: dict[str, Any] = {
            "step": step, "phase": phase, "time": round(began, 3), "seconds": round(time.monotonic() - since, 3),
            "written_at": round(time.time(), 3), "pid": os.getpid(), "host": socket.gethostname(),
        }  # fmt: skip
        staged = durable.volatile(self.run.path, "new", self.run.heartbeat.name)
        try:
            staged.write_text(json.dumps(content) + "\n")
            os.replace(staged, self.run.heartbeat)  # not flushed to the disk: only whole, not durable
            self._quiet = False
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            if not self._quiet:
                log.warning("%s; the run continues", durable.explain(error, self.run.heartbeat))
            self._quiet = True


def compiling() -> bool:
    """Whether any thread of this process is inside a compiler."""
    for start in sys._current_frames().values():
        frame = start
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COMPILERS):
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False
