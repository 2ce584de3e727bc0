"""Two threads that show that the run is alive, and detect a step or a disk that hangs.

One writes: it replaces `heartbeat.json` every few seconds; of several ranks, the main one does. When a step takes too
long, it writes the stacks of all threads into `stacks.txt` (`stacks_1.txt` on rank 1); so does the interpreter itself
in a crash, or when nothing else gets a turn. The other one only watches the clock (the one that never jumps), so that a
disk that hangs cannot hold it; what it sees it reports on stderr, before anything is written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import queue
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
DISK_SECONDS = 30.0
"""How long a write of a few bytes may take before the disk is said to hang."""
_LAST_SECONDS = 10.0
"""How long the end of a run waits for the thread that writes."""
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
        self,
        run: RunFolder,
        timeout: float,
        on_hung: Hung,
        *,
        leave: Callable[[int], Any] | None = None,
        rank: int = 0,
    ) -> None:
        """`leave`, if there is one, ends the process with an exit code when a step hangs."""
        self.run, self.timeout, self.on_hung, self.leave = run, timeout, on_hung, leave
        self.rank, self.file = rank, run.stacks if rank == 0 else run.path / f"stacks_{rank}.txt"
        self._now: tuple[int, str, float, float] = (0, "start", time.monotonic(), time.time())
        self._reported: tuple[int, str, float, float] | None = None
        self._stop, self._work = threading.Event(), queue.SimpleQueue[Callable[[], None] | None]()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watch, self._write)]
        self._writing_since: float | None = None
        self._disk_reported = False
        self._stacks: IO[str] | None = None
        self._quiet = False

    def __enter__(self) -> Watchdog:
        with contextlib.suppress(OSError):
            self._stacks = open(self.file, "a")
            self._had_handler = faulthandler.is_enabled()
            faulthandler.enable(self._stacks)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        self.at(self._now[0], "stopped" if kind else "finished")
        self._stop.set()
        self._work.put(self._beat)
        self._work.put(None)
        for thread in self._threads:
            thread.join(_LAST_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is None:
            return
        faulthandler.disable()
        if self._had_handler and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        with contextlib.suppress(OSError):  # a disk that has become read-only
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

    def _write(self) -> None:
        """Do what touches the disk, one thing after another."""
        for work in iter(self._work.get, None):
            self._writing_since = time.monotonic()
            work()
            self._writing_since = None

    def _watch(self) -> None:
        pause = min(BEAT_SECONDS, self.timeout / 4) if self.timeout else BEAT_SECONDS
        self._work.put(self._beat)
        asked = time.monotonic()
        while not self._stop.wait(pause):
            if time.monotonic() - asked >= BEAT_SECONDS and self._writing_since is None:
                self._work.put(self._beat)
                asked = time.monotonic()
            self._check_disk()
            if self.timeout:
                self._check()

    def _check_disk(self) -> None:
        """Say once that a write does not end; nothing is written for it."""
        since = self._writing_since
        hangs = since is not None and time.monotonic() - since >= DISK_SECONDS
        if hangs and not self._disk_reported:
            _report_now(
                f"{self.run.path}: the disk has not answered for {DISK_SECONDS:.0f} s, step {self._now[0]}, "
                f"{self._now[1]}; the run waits for it. Checkpoints that are there stay as they are"
            )
        elif self._disk_reported and not hangs:
            _report_now(f"{self.run.path}: the disk answers again")
        self._disk_reported = hangs

    def _check(self) -> None:
        """Report a step past its deadline, once; what is compiled in it takes as long as it takes."""
        if self._stacks is not None:
            # if this thread gets no turn for so long, the interpreter's own watchdog writes the stacks
            later = self.timeout + 2 * BEAT_SECONDS
            faulthandler.dump_traceback_later(later, file=self._stacks, exit=self.leave is not None)
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
        _report_now(f"step {step + 1} has taken {seconds:.0f} s, which is too long; stacks go to {self.file}")
        done = threading.Event()
        self._work.put(lambda: self._report(step + 1, seconds, done))
        if self.leave is not None:
            done.wait(_LAST_SECONDS)
            self.leave(HUNG)

    def _report(self, step: int, seconds: float, done: threading.Event) -> None:
        self._dump(step, seconds)
        self.on_hung(step, seconds, self.file.name)
        done.set()

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
        try:
            with durable.staged_file(self.run.heartbeat, flushed=False) as staged:
                staged.write_text(json.dumps(content) + "\n")
            self._quiet = False
        except OSError as error:
            if not self._quiet and not self.run.path.exists():
                log.error(
                    "run folder %s was deleted under the run; the next checkpoint makes it again",
                    self.run.path,
                )
            elif not self._quiet:
                log.warning("%s; the run continues", durable.explain(error, self.run.heartbeat))
            self._quiet = True


def _report_now(message: str) -> None:
    """On stderr, past the log, whose file may be on the disk that hangs."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            sys.__stderr__.write(f"mmldlm: {message}\n")
            sys.__stderr__.flush()


def compiling() -> bool:
    """Whether any thread of this process is inside a compiler."""
    for start in sys._current_frames().values():
        frame = start
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COMPILERS):
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False
