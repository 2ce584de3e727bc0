"""The curve of a run in `training_log.jsonl`, its mirrors in trackers, and its story in `train.log`.

A resumed run cuts off the lines past its checkpoint, so the curve is that of a run that was never
interrupted. For that, write and `sync` the lines of a step before its checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmldlm.durable import Prefix, Written
from mmldlm.json_lines import LineWriter, cut_lines, read_lines
from mmldlm.trackers import Tracker, named_numbers
from mmldlm.untrusted import printable

logger = logging.getLogger(__name__)


class TrainingLog:
    """Append-only log of a run.

    `resume_step=k` cuts off all lines past step k and whatever a crash tore. `resume_step=None` starts a
    new curve; an older log of the same name is put aside as `training_log.1.jsonl`, never overwritten. All single
    numbers are mirrored in `trackers`.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None,
        trackers: Sequence[Tracker] = (),
        expected: Written | None = None,
    ) -> None:
        """`expected` is what the file began with when its checkpoint was saved; a change since then is reported."""
        self.path = path
        if expected is not None and Prefix.of(path, expected.size).so_far() != expected:
            logger.error(
                "%s is not as it was when the checkpoint of step %s was saved: it was cut off, edited or damaged; its "
                "lines up to that step cannot be trusted", path, resume_step,
            )  # fmt: skip
        if resume_step is None:
            _put_aside(path)
        else:
            cut_lines(path, "step", resume_step)
        self._lines = LineWriter(path)
        self._trackers = trackers

    def write(self, step: int, **fields: Any) -> None:
        """Append one line. Tensors and arrays of one number are allowed; non-finite numbers become null."""
        fields = {key: value.item() if hasattr(value, "item") else value for key, value in fields.items()}
        self._lines.write({"step": step, "time": round(time.time(), 3), **fields})
        numbers = named_numbers(fields)
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def rewind(self, step: int) -> None:
        """Forget all lines past a step, when the run itself rolls back to it."""
        try:
            cut_lines(self.path, "step", step)
        except OSError as error:  # a full disk: the next start cuts them
            logger.warning("%s: lines past step %d stay for now (%s)", self.path, step, error)
            return
        self._lines.close()
        self._lines = LineWriter(self.path)
        for tracker in self._trackers:
            tracker.rewind(step)

    def written(self) -> Written:
        """Size and checksum of the file."""
        return self._lines.written()

    def sync(self) -> None:
        """Make what was written durable."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()
        for tracker in self._trackers:
            tracker.close()


def _put_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


read_log = read_lines
"""The lines of a log, in order, whatever has happened to the file; nothing when there is none."""


class _QuietFile(logging.FileHandler):
    """A full disk must not fill the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        pass


class _Printable(logging.Formatter):
    """Removes terminal control sequences, which a message may quote from a file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextlib.contextmanager
def text_log(
    path: Path, *, console: logging.Handler | None = None, level: int = logging.INFO
) -> Iterator[logging.Logger]:
    """For a while, send what the package logs to `train.log`, and to `console` besides."""
    file = _QuietFile(path, encoding="utf-8", errors="replace")
    file.setFormatter(_Printable("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root, before = logging.getLogger("mmldlm"), logging.getLogger("mmldlm").level
    handlers = [file] if console is None else [file, console]
    root.setLevel(level)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield root
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        root.setLevel(before)
        with contextlib.suppress(OSError):  # lines that a full or read-only disk did not take
            file.close()


def rich_console(console: Any = None) -> logging.Handler:
    """Messages on stderr, through rich where that is a terminal, so that they do not break a progress bar.

    Elsewhere (a file, a batch system) rich would wrap lines at 80 columns; there they stay as they are.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    chosen = console or Console(stderr=True)
    if chosen.is_terminal:
        handler: logging.Handler = RichHandler(
            console=chosen, show_path=False, markup=False, log_time_format="[%X]"
        )
        handler.setFormatter(_Printable("%(message)s"))
        return handler
    handler = logging.StreamHandler(chosen.file)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s: %(message)s"))
    return handler
