"""What a PATH means: a run folder, a log, a folder of torchrun's per-rank logs, or a pattern of any of these."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from runwatch.errors import UserError
from runwatch.tfevents import is_event_file

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[_\-.]?(\d+)", re.I)
_STREAMS = ("stdout.log", "stderr.log")
_LOGS = (".log", ".out", ".err", ".txt", ".jsonl", ".json")
_OWN = ("training_log.jsonl", "events.jsonl", "heartbeat.json", ".lock")
"""Others have a train.log or a config.yaml too."""


class RunFolder:
    """Where a run of MM-LDLM keeps its files."""

    def __init__(self, path: Path) -> None:
        self.config, self.training_log = path / "config.yaml", path / "training_log.jsonl"
        self.train_log, self.events = path / "train.log", path / "events.jsonl"
        self.checkpoints, self.samples = path / "checkpoints", path / "samples.jsonl"
        self.heartbeat, self.lock_file = path / "heartbeat.json", path / ".lock"


@dataclass(frozen=True)
class LogFile:
    """One file to follow."""

    path: Path
    rank: int | None = None
    only_messages: bool = False
    """Its numbers stand in another file already."""


@dataclass
class RunSource:
    """All files of one run."""

    name: str
    path: Path
    files: list[LogFile] = field(default_factory=list)
    folder: RunFolder | None = None
    """Set for a run of ours: its ledger, settings, samples and lock are read too."""
    is_guess: bool = False
    """It only lies in a folder that was named: it may be something else than a log."""

    @property
    def is_own(self) -> bool:
        """Whether MM-LDLM's trainer wrote it."""
        return self.folder is not None or self.path.name == "training_log.jsonl"


def find_runs(paths: list[str]) -> list[RunSource]:
    """The runs that the paths mean, in order; a path that does not exist yet is waited for if its parent is there."""
    if not paths:
        raise UserError("nothing to watch: give a log, a folder of logs, a run folder or a pattern")
    runs: list[RunSource] = []
    for path in paths:
        matches = [Path(name) for name in sorted(glob.glob(path))] if glob.has_magic(path) else [Path(path)]
        if not matches:
            raise UserError(f"{path}: no file matches this pattern; start the run first, or give a path")
        for item in matches:
            runs += _runs_of(item)
    _name_apart(runs)
    return runs


def folders_of(paths: list[str]) -> list[str]:
    """Folders of plain logs among the paths: more logs may appear in them."""
    return [
        path
        for path in paths
        if Path(path).is_dir() and not _is_own(Path(path)) and not _rank_logs(Path(path))
    ]


def _runs_of(path: Path) -> list[RunSource]:
    if not path.exists():
        return [_awaited(path)]
    if path.is_dir():
        return _runs_of_folder(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path}: is not a regular file; give a log file or a folder")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read; check its permissions")
    return [RunSource(_name(path), path, [LogFile(path)])]


def _awaited(path: Path) -> RunSource:
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: neither this nor its folder exists; give a run folder or a log")
    if path.suffix in _LOGS:
        return RunSource(_name(path), path, [LogFile(path)])
    return _own_run(path)


def _is_own(path: Path) -> bool:
    return any((path / name).exists() for name in _OWN)


def _runs_of_folder(path: Path) -> list[RunSource]:
    """A run of ours, one run with a log for each rank, or several logs and runs of ours that are several runs."""
    if _is_own(path):
        return [_own_run(path)]
    if logs := _rank_logs(path):
        return [RunSource(path.absolute().name, path, logs)]
    runs = [_own_run(child) for child in sorted(path.iterdir()) if child.is_dir() and _is_own(child)]
    runs += _plain_logs(path)
    if not runs:
        raise UserError(f"{path}: contains no logs; give a log or another folder")
    return runs


def _own_run(path: Path) -> RunSource:
    run = RunFolder(path)
    files = [LogFile(run.events), LogFile(run.training_log), LogFile(run.train_log, only_messages=True)]
    return RunSource(path.absolute().name or str(path), path, files, folder=run)


def _rank_logs(folder: Path) -> list[LogFile]:
    """Logs of the ranks of one run: torchrun's `.../attempt_0/3/stderr.log`, or names that hold `rank3`."""
    logs = []
    for path in sorted(folder.rglob("*")):
        if len(path.relative_to(folder).parts) > 6 or not path.is_file():
            continue
        if path.name in (*_STREAMS, "error.json") and path.parent.name.isdigit():
            logs.append(LogFile(path, int(path.parent.name)))
        elif path.suffix in _LOGS and (rank := _RANK_IN_NAME.search(path.stem)):
            logs.append(LogFile(path, int(rank[1])))
    return logs[:4096]


def _plain_logs(folder: Path) -> list[RunSource]:
    """Each log of a folder is a run; `job.out` and `job.err` belong together."""
    runs: dict[str, RunSource] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not (path.suffix in (*_LOGS, ".csv", ".tsv") or is_event_file(path)):
            continue
        name = path.stem if path.suffix in (".out", ".err") else path.name
        run = runs.setdefault(name, RunSource(_name(path), path, is_guess=True))
        run.files.append(LogFile(path))
    return list(runs.values())[:512]


def new_files(source: RunSource) -> list[LogFile]:
    """Logs of ranks that appeared since the run was found, such as those of a second attempt."""
    if source.folder is not None or not source.path.is_dir():
        return []
    known = {file.path for file in source.files}
    return [file for file in _rank_logs(source.path) if file.path not in known]


def _name(path: Path) -> str:
    return path.absolute().parent.name if path.name == "training_log.jsonl" else path.stem


def _name_apart(runs: list[RunSource]) -> None:
    """Two runs of the same name get their paths as names."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
