"""Runs the jobs of an ablation, some of them at once, each in a fresh process; one that dies stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.ablation.work import Job, Work
from mmldlm.benchmark.processes import end, explain_death, last_line, start
from mmldlm.durable import replace_file

COMMAND = "mmldlm"
RUN_JOB = "ablate-run"
"""Hidden command that does one job; it lives in `cli`, like training and evaluation."""
PATIENCE = 300.0
"""Seconds that processes have for their last checkpoint."""
_POLL = 0.1


@dataclass(frozen=True)
class Ended:
    """A job that is over."""

    job: Job
    seconds: float
    failure: str | None = None


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log_path: Path
    began: float


@dataclass
class Rounds:
    """Jobs that wait, run and have ended."""

    work: Work
    num_jobs: int
    changed: Callable[[Rounds], None]
    """Called whenever a job has begun or ended, and every now and then."""
    ended_one: Callable[[Ended], None]
    waiting: deque[Job] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    stopped: bool = False
    """Whether Ctrl-C ended the rounds before their time."""

    @property
    def failed(self) -> list[Ended]:
        """Jobs without a result."""
        return [one for one in self.ended if one.failure is not None]

    def run(self) -> None:
        """All jobs to their end. Ctrl-C asks the running ones to save and leave; a second one ends them at once."""
        self.waiting.extend(self.work.jobs())
        try:
            self._work_off()
        except KeyboardInterrupt:
            self.stopped = True
            with contextlib.suppress(KeyboardInterrupt):
                self._ask_to_stop()
        finally:
            for one in self.running:
                end(one.process)
            self.running.clear()

    def _work_off(self) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.num_jobs:
                self._start(self.waiting.popleft())
            self._collect()
            self.changed(self)
            time.sleep(_POLL)

    def _start(self, job: Job) -> None:
        log_path = self.work.log_path(job)
        job_path = log_path.with_suffix(".json")
        replace_file(job_path, json.dumps(job.to_json()).encode())
        with open(log_path, "ab") as log:
            process = start(COMMAND, [RUN_JOB, str(job_path), str(os.getpid())], log, self._environment())
        self.running.append(_Running(job, process, log_path, time.monotonic()))

    def _environment(self) -> dict[str, str]:
        """Processes side by side share the cores, unless the user has divided them already."""
        if self.num_jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.num_jobs))}

    def _collect(self) -> None:
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            end(one.process)  # loaders that outlived it
            done = Ended(one.job, time.monotonic() - one.began, self._failure(one))
            self.ended.append(done)
            self.ended_one(done)

    def _failure(self, one: _Running) -> str | None:
        by_name = {arm.name: arm for arm in self.work.plan.arms}
        missing = [
            check for check in one.job.checks if self.work.record(by_name[check.arm], one.job.seed) is None
        ]
        code = one.process.returncode
        if code == 0 and not missing:
            return None
        line = last_line(one.log_path)
        return explain_death(code, one.log_path).reason if code < 0 or not line else line

    def _ask_to_stop(self) -> None:
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process.pid, signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < until:
            for one in [one for one in self.running if one.process.poll() is not None]:
                self.running.remove(one)
                end(one.process)
            self.changed(self)
            time.sleep(_POLL)
