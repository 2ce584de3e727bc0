"""One measurement in a fresh process: started, watched, and its end told apart, whatever the end was."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.job import Job, Measurement
from mmldlm.benchmark.options import Options
from mmldlm.benchmark.processes import Failure, end, explain_death, start

WORKER = "mmldlm.benchmark.worker"
Show = Callable[[str], None]
"""Called with a line for people."""


@dataclass
class Trial:
    """One process: which arm, and what came of it."""

    arm: str
    repeat: int
    settings: tuple[str, ...]
    seconds: float
    measurement: Measurement | None = None
    failure: Failure | None = None

    def line(self) -> str:
        """What came of it, for people."""
        if self.measurement is None:
            return f"{self.arm}: {self.failure.reason if self.failure else 'no result'}"
        peak = f"{self.measurement.memory.peak / 2**30:.2f} GiB, {self.seconds:.0f} s"
        if not self.measurement.blocks:
            return f"{self.arm}: {len(self.measurement.losses)} losses, {peak}"
        rate = statistics.median(block.tokens_per_second for block in self.measurement.blocks)
        return f"{self.arm}: {rate:,.0f} tokens/s, {peak}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = {
            "arm": self.arm,
            "repeat": self.repeat,
            "settings": list(self.settings),
            "seconds": self.seconds,
        }
        found["measurement"] = self.measurement.to_json() if self.measurement else None
        found["failure"] = asdict(self.failure) if self.failure else None
        return found


@dataclass
class Bench:
    """Runs trials and remembers them."""

    options: Options
    logs: Path
    """Folder for what the processes said."""
    show: Show
    progress: Callable[[int, int, str], None]
    """Called before each trial with the number done, the number of all, and what is measured now."""
    total: int = 0
    trials: list[Trial] = field(default_factory=list)
    after_trial: Callable[[], None] = lambda: None

    def run(self, arm: Arm, repeat: int = 0, *, timed: bool = True, gated: bool = False) -> Trial:
        """Measure an arm once."""
        job = self.options.job(arm, timed=timed, gated=gated)
        self.progress(len(self.trials), max(self.total, len(self.trials) + 1), arm.name)
        began = time.monotonic()
        found = run_job(job, self._log_path(arm, repeat), self.options.timeout)
        trial = Trial(arm.name, repeat, arm.settings, time.monotonic() - began)
        if isinstance(found, Failure):
            trial.failure = found
        else:
            trial.measurement = found
        self.trials.append(trial)
        self.show(f"{len(self.trials)} of {max(self.total, len(self.trials))}: {trial.line()}")
        self.after_trial()
        return trial

    def _log_path(self, arm: Arm, repeat: int) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in arm.name)
        return self.logs / f"{len(self.trials):03d}-{name}-{repeat}.log"


def run_job(job: Job, log_path: Path, timeout: float) -> Measurement | Failure:
    """Run a job to its end. Ctrl-C ends the process with all its loaders and is passed on."""
    with tempfile.TemporaryDirectory(prefix="mmldlm-job-") as folder, open(log_path, "ab") as log:
        job_path, result_path = Path(folder) / "job.json", Path(folder) / "result.json"
        job_path.write_text(json.dumps(job.to_json()))
        process = start(WORKER, [str(job_path), str(result_path)], log)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return Failure("timeout", f"no result within {timeout:g} s; --timeout allows more")
        finally:
            end(process)
        return _read(result_path, code, log_path)


def _read(path: Path, code: int, log_path: Path) -> Measurement | Failure:
    if not path.is_file():
        return explain_death(code, log_path)
    found = json.loads(path.read_text())
    if "failure" in found:
        return Failure(**found["failure"])
    return Measurement.from_json(found["measurement"])
