"""The folder of a run, `saved/<name>/`: where everything lies, and who may write there.

config.yaml           the settings as they were resolved
data.json             what the data is: vocabulary, latents, normaliser, encoder, fingerprint
tokenizer/            the tokenizer's own files
training_log.jsonl    the curve, one line per interval
train.log             the same story in words
checkpoints/          step_00001000/ ..., latest
export/               the weights for use
samples.jsonl         what the model decoded at each validation
events.jsonl          ledger: starts, stops, saves, skipped updates, rollbacks; only ever appended to
heartbeat.json        step, phase and time, replaced every few seconds
stacks.txt            where all threads were, when a step hung or the process crashed
tensorboard/  reports/
.lock                 held by the process that trains
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm import durable
from mmldlm.errors import UserError
from mmldlm.json_lines import LineWriter


class _Inside:
    """A file or folder of a run, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, kind: type[RunFolder]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """Names of all that a run leaves behind."""

    path: Path

    config, data, tokenizer = _Inside("config.yaml"), _Inside("data.json"), _Inside("tokenizer")
    training_log, train_log = _Inside("training_log.jsonl"), _Inside("train.log")
    checkpoints, export = _Inside("checkpoints"), _Inside("export")
    samples, events = _Inside("samples.jsonl"), _Inside("events.jsonl")
    heartbeat, stacks = _Inside("heartbeat.json"), _Inside("stacks.txt")
    tensorboard, reports, lock_file = _Inside("tensorboard"), _Inside("reports"), _Inside(".lock")

    def is_run(self) -> bool:
        """Whether a run was started here."""
        known = (
            self.config, self.training_log, self.train_log, self.checkpoints, self.export, self.lock_file,
        )  # fmt: skip
        return any(path.exists() for path in known)

    def check(self) -> None:
        """Reject a folder in which no run could be; nothing remains."""
        try:
            durable.require_writable(self.path)
        except UserError as error:
            raise UserError(f"run folder {error}") from error
        self._check_content()

    def _check_content(self) -> None:
        if self.path.is_dir() and any(self.path.iterdir()) and not self.is_run():
            raise UserError(
                f"run folder {self.path}: holds something else than a run; choose another run folder"
            )

    def create(self) -> None:
        """Make the folder and try to write into it, so that a mistake shows before the first step."""
        self._check_content()
        try:
            for folder in (self.path, self.checkpoints, self.reports):
                folder.mkdir(parents=True, exist_ok=True)
            durable.replace_file(self.path / ".writable", b"yes\n")
            (self.path / ".writable").unlink(missing_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"run folder {error.filename}: is a file; choose another run folder") from error
        except OSError as error:
            plain = OSError(error.errno, error.strerror)  # without the name of the file that tried it
            raise UserError(f"run folder {durable.explain(plain, self.path)}") from error

    def write_config(self, text: str) -> None:
        """Keep the resolved settings; the file is replaced atomically."""
        try:
            durable.replace_file(self.config, text.encode("utf-8"))
        except OSError as error:
            raise UserError(durable.explain(error, self.config)) from error

    def open_events(self) -> Events:
        return Events(self.events)

    def heartbeat_step(self) -> int:
        """How far the run is, by its heartbeat; 0 where that cannot be read."""
        try:
            return int(json.loads(self.heartbeat.read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0


def existing_run(path: Path) -> RunFolder:
    """A run that was started before; a clear line when there is none."""
    run = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run; give the folder that 'mmldlm train' wrote")
    if not (run.config.exists() or run.training_log.exists()):
        raise UserError(
            f"{path}: is not a run, config.yaml is missing; give the folder that 'mmldlm train' wrote"
        )
    return run


class Events:
    """The ledger of a run: what happened, when. May be written from several threads."""

    def __init__(self, path: Path) -> None:
        self._lines = LineWriter(path)

    def record(self, event: str, **fields: Any) -> None:
        """Append an event and make it durable."""
        stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._lines.write({"event": event, "at": stamp, **fields})
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


@contextlib.contextmanager
def lock_run(run: RunFolder, *, patience: float = 2.0) -> Iterator[None]:
    """Hold the folder for this process; a second run there is rejected.

    A crash never leaves a folder locked. `patience` covers a killed process that still needs a moment to leave.
    Half-written files that a crash left in the folder are deleted.
    """
    what = f"{run.path}: another run is writing here; wait for it, stop it, or choose another run folder"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(durable.file_lock(run.lock_file, timeout=patience, what=what))
            deleted = f"{what} (its lock file was deleted, but it still runs)"
            stack.enter_context(durable.folder_lock(run.path, timeout=patience, what=deleted))
        except OSError as error:
            raise UserError(f"run folder {durable.explain(error, run.lock_file)}") from error
        durable.clean_leftovers(run.path)
        yield
