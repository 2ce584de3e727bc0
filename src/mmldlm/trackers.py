"""Mirrors of the training log in experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

A tracker is imported only when `train.trackers` names it, and never asks a question: without an account W&B writes off
line, MLflow and trackio write local files. Numbers have the same names everywhere, such as `train/loss` and
`valid/loss`. Trackers other than TensorBoard work in a thread of their own, so a slow or dead server never stops a run;
`training_log.jsonl` has everything in any case.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import netrc
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from mmldlm.config.old_settings import flatten
from mmldlm.errors import UserError, first_line

logger = logging.getLogger(__name__)

PROJECT = "mmldlm"
TAIL_SECONDS = 20.0
"""So long a run waits at its end for what trackers have not written yet."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker needs to know about a run; `resume_step` is None for a new one."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    resume_step: int | None = None


class Tracker(Protocol):
    """A place where numbers go."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step."""

    def rewind(self, step: int) -> None:
        """The run went back to this step."""

    def close(self) -> None:
        """Write the rest and let go."""


def check_trackers(names: Sequence[str]) -> None:
    """A tracker that is not installed is a mistake that the user can correct; nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"train.trackers: {name} is not installed; pip install {name}, or leave it out")


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """The trackers that `train.trackers` names."""
    return [
        TensorBoard(run) if name == "tensorboard" else Background(name, OPENERS[name], run)
        for name in dict.fromkeys(names)
    ]


def named_numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a line of the log, by the names that all trackers show."""
    return {
        f"valid/{key[6:]}" if key.startswith("valid_") else f"train/{key}": value
        for key, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard:
    """Event files in the run folder; TensorBoard itself hides the events past the resumed step."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer = _summary_writer(self._folder, run.resume_step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Trouble switches the mirror off with a warning."""
        if self._writer is None:
            return
        try:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        except Exception as error:
            logger.warning("%s: TensorBoard stopped (%s); the log continues", self._folder, error)
            self._writer = None

    def rewind(self, step: int) -> None:
        """Start a file that hides what lies past the step."""
        self.close()
        self._writer = _summary_writer(self._folder, step)

    def close(self) -> None:
        """A full disk ends its thread; there is nothing left to save then."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()


def _silence_writer_threads() -> None:
    """A disk that fails ends TensorBoard's own thread with a traceback; the next `write` reports it in one line."""
    usual = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            usual(failure)

    if getattr(usual, "__module__", "") != __name__:
        threading.excepthook = report


def _summary_writer(folder: Path, resume_step: int | None) -> Any:
    _silence_writer_threads()
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only wanted when switched on

    return SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)


class Background:
    """A tracker in a thread: opening it, writing and closing never hold the run up, and its errors end it alone."""

    def __init__(self, name: str, opener: Opener, run: TrackedRun) -> None:
        self._name = name
        self._lines: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(maxsize=100_000)
        self._thread = threading.Thread(
            target=self._work, args=(opener, run), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand the numbers over; a queue that is full means a tracker that hangs, and loses them."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((step, numbers))

    def rewind(self, step: int) -> None:
        """These trackers cannot take points back; the same steps follow again."""

    def close(self) -> None:
        """Wait at most `TAIL_SECONDS` for what is still to be written."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(TAIL_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s did not finish in %.0f s; the log has everything", self._name, TAIL_SECONDS)

    def _work(self, opener: Opener, run: TrackedRun) -> None:
        try:
            write, close = opener(run)
            while (line := self._lines.get()) is not None:
                write(*line)
            close()
        except (Exception, SystemExit) as error:
            logger.warning("%s stopped (%s); the log continues without it", self._name, first_line(error))


Opener = Callable[[TrackedRun], tuple[Callable[[int, Mapping[str, float]], Any], Callable[[], Any]]]
"""Opens a tracker; returns how numbers are written and how it is closed."""


def _open_wandb(run: TrackedRun) -> Any:
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not _has_wandb_key():
        mode = "offline"  # online it would ask for an account
        logger.info(
            "W&B: no API key, so the run is written off line; 'wandb sync %s/wandb/*' sends it", run.folder
        )
    settings = wandb.Settings(console="off", silent=True, init_timeout=60)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.name, id=_identity(run, "wandb")[0], resume="allow",
        dir=str(run.folder), config=flatten(run.settings), mode=mode, settings=settings, reinit="create_new",
    )  # fmt: skip
    opened.define_metric("*", step_metric="step")
    return (lambda step, numbers: opened.log({"step": step, **numbers})), opened.finish


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _open_mlflow(run: TrackedRun) -> Any:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    address = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
    client = MlflowClient(tracking_uri=address)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    identity, new = _identity(run, "mlflow", lambda: client.create_run(number, run_name=run.name).info.run_id)
    if new:
        client.log_batch(
            identity, params=[Param(key, str(value)[:500]) for key, value in flatten(run.settings).items()]
        )

    def write(step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(identity, metrics=[Metric(key, value, now, step) for key, value in numbers.items()])

    return write, lambda: client.set_terminated(identity)


def _open_trackio(run: TrackedRun) -> Any:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    resume = "never" if run.resume_step is None else "allow"
    opened = trackio.init(
        project=project,
        name=_identity(run, "trackio")[0],
        config=flatten(run.settings),
        resume=resume,
        embed=False,
    )
    return (lambda step, numbers: opened.log(dict(numbers), step=step)), opened.finish


OPENERS: dict[str, Opener] = {"wandb": _open_wandb, "mlflow": _open_mlflow, "trackio": _open_trackio}


def _identity(run: TrackedRun, tracker: str, make: Callable[[], str] | None = None) -> tuple[str, bool]:
    """The name under which a tracker knows the run, and whether it is new: a resumed run keeps its own."""
    path = run.folder / f"tracker_{tracker}.json"
    if run.resume_step is not None:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text())["id"]), False
    identity = make() if make else f"{run.name}-{secrets.token_hex(6)}"
    path.write_text(json.dumps({"id": identity}))
    return identity, True
