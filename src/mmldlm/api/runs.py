"""Runs on the disk: what state they are in, and exporting one."""

from __future__ import annotations

import datetime
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runwatch import machine

from mmldlm.errors import UserError
from mmldlm.json_lines import read_lines, read_tail
from mmldlm.run_folder import RunFolder, existing_run

TRAINING, FINISHED, STOPPED, FAILED = "training", "finished", "stopped", "failed"
_SILENT_SECONDS = 60.0
"""A process that trains replaces its heartbeat every few seconds; after this long without one it counts as ended."""
_HEADLINE = ("valid_loss", "loss")


@dataclass(frozen=True)
class Run:
    """A training run: a folder, how far it is, and its last measurements.

    >>> run = mmldlm.list_runs(folder)[0]
    >>> run.name, run.state, run.step, run.finished
    ('demo', 'finished', 2, True)
    >>> run.headline[0]
    'valid_loss'
    """

    path: Path
    state: str = STOPPED
    """training, finished, stopped (in order, resumable) or failed (an error, or the process was killed)."""
    step: int = 0
    steps: int | None = None
    """How many steps it is meant to take; None where the settings cannot be read."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last validation, or the last line of the log where there has been none."""
    updated_at: datetime.datetime | None = None
    """When something was last written."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        return self.state == FINISHED

    @property
    def headline(self) -> tuple[str, float] | None:
        """Name and value of the metric to look at first."""
        name = next((name for name in _HEADLINE if name in self.metrics), None)
        return None if name is None else (name, self.metrics[name])

    def __fspath__(self) -> str:
        return str(self.path)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "step": self.step,
            "steps": self.steps,
            "metrics": self.metrics,
            "updated_at": None if self.updated_at is None else self.updated_at.isoformat(timespec="seconds"),
        }


def read_run(path: str | Path) -> Run:
    """The state of the run in a folder, as its files show."""
    run = existing_run(Path(path))
    metrics, logged = _last_metrics(run)
    step, train = max(logged, run.heartbeat_step()), machine.read_config(run.config).get("train")
    steps = machine.whole(train.get("steps")) if isinstance(train, dict) else None
    age = machine.heartbeat_age(run.heartbeat, time.time())
    alive = age is not None and age <= _SILENT_SECONDS and machine.process_alive(run.heartbeat) is not False
    state = TRAINING if alive else _ended(run)
    if state == FINISHED and steps is not None and step < steps:
        state = STOPPED  # its steps were raised after it had finished
    times = [path.stat().st_mtime for path in (run.training_log, run.events, run.config) if path.exists()]
    updated_at = datetime.datetime.fromtimestamp(max(times)).astimezone() if times else None
    return Run(run.path, state, step, steps, metrics, updated_at)


def list_runs(folder: str | Path = "saved") -> list[Run]:
    """All runs in a folder, the one that was last written to first; runs in folders below it are not looked for.

    >>> [run.name for run in mmldlm.list_runs(folder)]
    ['demo']
    """
    place = Path(folder)
    if not place.is_dir():
        raise UserError(f"{place}: there is no such folder of runs; train one first, or name the folder")
    runs = [read_run(path) for path in sorted(place.iterdir()) if RunFolder(path).config.is_file()]
    return sorted(runs, key=lambda run: run.updated_at.timestamp() if run.updated_at else 0.0, reverse=True)


def export_run(
    run: str | Path | os.PathLike[str],
    out: str | Path | None = None,
    *,
    averaged: bool = True,
    precision: str = "fp32",
) -> tuple[Path, int | None]:
    """Write the weights of a run's newest valid checkpoint for use; returns the folder and the step.

    `run` may also be an export, `builtin:NAME` or a name on the Hugging Face Hub; the last two need `out`.
    `precision` of the stored weights: fp32, fp16, or int8 with a scale for each row of a matrix.
    """
    from mmldlm import durable
    from mmldlm.api.values import local_folder
    from mmldlm.checkpoint.export import write_export
    from mmldlm.checkpoint.load import find_model, read_weights

    path = local_folder(run)
    if out is None and path != Path(run).expanduser():
        raise UserError(
            f"out: {run} is not a run of yours, whose folder could hold its export; name a folder"
        )
    folder = find_model(path)
    target = RunFolder(folder).export if out is None else Path(out)
    durable.require_writable(target)
    export = read_weights(folder, averaged=averaged)
    write_export(target, export, precision)
    return target, export.data.get("step")


def _ended(run: RunFolder) -> str:
    """How a run ended that no process works on."""
    ends = ("started", "resumed", "finished", "stopped")
    events = [event for event in read_lines(run.events) if event.get("event") in ends]
    if not events:
        return STOPPED
    if events[-1]["event"] == "stopped":
        return STOPPED if "exit_code" in events[-1] else FAILED
    return FINISHED if events[-1]["event"] == "finished" else FAILED


def _last_metrics(run: RunFolder) -> tuple[dict[str, float], int]:
    """The last validation (else the last line of the log), and the last step."""
    lines = read_tail(run.training_log)
    if not lines:
        return {}, 0
    validated = [line for line in lines if "valid_loss" in line]
    chosen = validated[-1] if validated else lines[-1]
    metrics = {
        key: float(value)
        for key, value in chosen.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "time")
    }
    last = lines[-1].get("step")
    return {key: value for key, value in metrics.items() if math.isfinite(value)}, (
        last if isinstance(last, int) else 0
    )
