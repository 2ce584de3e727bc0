"""`mmldlm.validate`: the plain path against the optimised one in real runs, each a process of `mmldlm train`.

FOLDER/plain/ optimised/    both paths, the same steps
FOLDER/resumed/             the optimised run again from its last checkpoint but one
FOLDER/ranks/               the same on several ranks
FOLDER/logs/ recipe.yaml validation.json

Checkpoints and exports are deleted at the end; logs and curves stay.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmldlm.benchmark.arms import reference_settings
from mmldlm.benchmark.checklist import (
    KEPT,
    Check,
    Figures,
    Validation,
    check_checkpoints,
    check_course,
    check_ranks,
    check_resumed,
    compare_runs,
    read_figures,
)
from mmldlm.benchmark.machine import describe_environment, end, explain_death, last_line, start
from mmldlm.checkpoint.files import published, read_manifest
from mmldlm.config import Config
from mmldlm.config.recipe import config_to_yaml, make_config
from mmldlm.data.store import PairStore
from mmldlm.durable import discard, replace_file, require_writable
from mmldlm.errors import UserError
from mmldlm.json_lines import encode
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import choose_device, settle_runtime

STEPS, LONG, FEWEST = 1000, 10_000, 10
RESULT = "validation.json"
Progress = Callable[[int, int, str], None]
"""Called with the steps done, the steps of all runs, and the run at work."""
_POLL, _PATIENCE = 0.2, 60.0
"""Seconds between two looks at a run; seconds that it has to save and leave when asked to."""


def validate(
    recipe: str | Path | Config | Mapping[str, Any],
    *,
    store: str | Path | PairStore | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    steps: int = STEPS,
    out: str | Path | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Train a recipe on the plain and on the optimised path, resume it, run it on several ranks, and judge all of it.

    `recipe`, `store` and `overrides` are those of `mmldlm.train`. `out` is a new folder, default
    `validations/<date-time>`. Ctrl-C ends the run at work; the result is then `partial`.

    >>> import mmldlm
    >>> result = mmldlm.validate("laptop", store=store, steps=200)  # doctest: +SKIP
    >>> [check.line() for check in result.checks if check.passed is False]  # doctest: +SKIP
    []
    >>> mmldlm.validate("laptop", steps=5)
    Traceback (most recent call last):
    mmldlm.errors.UserError: steps=5: at least 10 are needed for checkpoints and a curve
    """
    if steps < FEWEST:
        raise UserError(f"steps={steps}: at least {FEWEST} are needed for checkpoints and a curve")
    config = make_config(recipe, overrides)
    if store is not None:
        config.data.store = str(store.path if isinstance(store, PairStore) else store)
    dated = Path("validations") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = dated if out is None else Path(out)
    work = _Work(_settled(config, steps), folder, steps, progress or (lambda *state: None))
    work.prepare()
    partial = False
    try:
        work.run_all()
    except KeyboardInterrupt:
        partial = True
    return work.finish(partial)


def _settled(config: Config, steps: int) -> Config:
    """The recipe with as many steps, checkpoints and lines of the log as the checks need."""
    config.data.store = str(Path(config.data.store).absolute())
    return replace(
        config,
        train=replace(
            config.train, steps=steps, log_every=max(1, min(10, steps // 20)), valid_every=steps // 5, valid_samples=0,
            checkpoint_every=steps // 5, keep_checkpoints=KEPT, keep_best=0, keep_every=0, trackers=[], profile=False,
        ),
    )  # fmt: skip


@dataclass
class _Work:
    """The runs of one validation, and what is known of them."""

    config: Config
    folder: Path
    steps: int
    progress: Progress
    runs: dict[str, Figures] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    done: int = 0
    """Steps of the runs that have ended."""

    def prepare(self) -> None:
        """Reject what could not work, before anything is spent."""
        store = PairStore.open(self.config.data.store)
        for split in (self.config.data.train_split, self.config.data.valid_split):
            store.split(split)
        self.runtime = settle_runtime(self.config, choose_device(self.config.train.device))
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"out={self.folder}: is not empty; choose a new folder")
        require_writable(self.folder)
        (self.folder / "logs").mkdir(parents=True)
        replace_file(self.folder / "recipe.yaml", config_to_yaml(self.config).encode())

    @property
    def due(self) -> list[int]:
        """Steps at which a checkpoint is saved."""
        every = self.config.train.checkpoint_every
        return sorted({*range(every, self.steps + 1, every), self.steps})

    @property
    def total(self) -> int:
        return 2 * self.steps + 2 * (self.steps - self.due[-2])

    @property
    def precision(self) -> str:
        """Of the products on the optimised path."""
        rounded = self.config.speed.tf32 and self.runtime.device.type == "cuda"
        return "tf32" if rounded and self.runtime.precision == "fp32" else self.runtime.precision

    def folder_of(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)

    def run_all(self) -> None:
        """All runs, each followed by the checks that it makes possible: an interruption keeps those before it."""
        precision, on_gpu = self.precision, self.runtime.device.type == "cuda"
        self.train("plain", (*reference_settings(), f"train.checkpoint_every={self.steps}"))
        optimised = self.train("optimised", self._profiled() if on_gpu else ())
        self.checks += compare_runs(self.runs["plain"], optimised, precision, on_gpu)
        self.checks.append(check_checkpoints(self.folder_of("optimised"), self.due))
        self.checks.append(self._resume())
        self.checks.append(self._several_ranks())

    def _profiled(self) -> tuple[str, ...]:
        """Records some steps in the middle of the run: how busy the device is."""
        recorded = max(1, min(20, self.steps // 4))
        return (
            "train.profile=true", "train.profile_details=false", f"train.profile_wait={self.steps // 2}",
            f"train.profile_warmup={max(1, min(10, self.steps // 20))}", f"train.profile_steps={recorded}",
        )  # fmt: skip

    def _resume(self) -> Check:
        since = self._copy_checkpoint("resumed")
        if since is None:
            return Check("resume", False, "the optimised run left no two checkpoints")
        failure = self.train("resumed", (), since=since).failure
        if failure:
            return Check("resume", False, failure)
        return check_resumed(self.folder_of("optimised"), self.folder_of("resumed"), since, self.steps)

    def _several_ranks(self) -> Check:
        """One rank for each GPU. Two share one GPU, or the cores of a CPU, by way of gloo."""
        import torch

        kind, gpus = self.runtime.device.type, torch.cuda.device_count()
        if kind not in ("cpu", "cuda"):
            return Check(
                "ranks", None, f"not run: several ranks need GPUs of CUDA or a CPU, here it is {kind}"
            )
        count = gpus if kind == "cuda" and gpus > 1 else 2
        since = self._copy_checkpoint("ranks")
        if since is None:
            return Check("ranks", False, "the optimised run left no two checkpoints")
        words = () if kind == "cuda" and gpus > 1 else ("distributed.backend=gloo",)
        launch = (
            "launch",
            "--nproc-per-node",
            str(count),
            "--log-dir",
            str(self.folder / "logs" / "ranks"),
            "--",
        )
        several = self.train("ranks", words, since=since, before=launch)
        return check_ranks(self.runs["optimised"], several, since, count, self.precision)

    def _copy_checkpoint(self, name: str) -> int | None:
        """A new run folder that stands where the optimised run stood at its last checkpoint but one."""
        source, target = self.folder_of("optimised"), self.folder_of(name)
        kept = published(source.checkpoints)
        if len(kept) < 2:
            return None
        target.path.mkdir()
        shutil.copytree(kept[-2], target.checkpoints / kept[-2].name)
        shutil.copy2(source.training_log, target.training_log)
        return read_manifest(kept[-2]).step

    def train(
        self, name: str, words: Sequence[str], *, since: int = 0, before: Sequence[str] = ()
    ) -> Figures:
        """One run in a process of its own, from a step on."""
        run, output = self.folder_of(name), self.folder / "logs" / f"{name}.log"
        command = [
            *before,
            "train",
            "--recipe",
            str(self.folder / "recipe.yaml"),
            "--run",
            str(run.path),
            *words,
        ]
        with open(output, "ab") as log:
            process = start("mmldlm", command, log)
            code, resident = self._wait(process, run, name, since)
        failure = None
        if code:
            failure = last_line(output) or explain_death(code, output).reason
        self.runs[name] = read_figures(run, output, failure, resident)
        self.done += self.steps - since
        return self.runs[name]

    def _wait(
        self, process: subprocess.Popen[bytes], run: RunFolder, name: str, since: int
    ) -> tuple[int, int]:
        """Exit code and peak of the memory in bytes. Whatever comes between, no process is left behind."""
        unit = 1 if sys.platform == "darwin" else 1024
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    return process.returncode, usage.ru_maxrss * unit
                self.progress(self.done + max(0, run.heartbeat_step() - since), self.total, name)
                time.sleep(_POLL)
        finally:
            if process.returncode is None:
                process.terminate()  # a launched run passes it on to its ranks, which end then
                with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.wait(_PATIENCE)
            end(process)

    def finish(self, partial: bool) -> Validation:
        """Judge the course of the runs that ended and write the result; what only served the checks is deleted.

        A run that was interrupted is not judged: its last lines may come from the interruption.
        """
        settings = {
            "recipe": self.config.name, "steps": self.steps, "device": str(self.runtime.device),
            "precision": self.precision,
        }  # fmt: skip
        environment = describe_environment()
        checks = [*self.checks, *check_course(self.runs)]
        result = Validation(checks, self.runs, environment, settings, self.folder, partial)
        replace_file(self.folder / RESULT, encode(result.to_json(), indent=1))
        for name in ("plain", "optimised", "resumed", "ranks"):
            for path in (self.folder_of(name).checkpoints, self.folder_of(name).export):
                if path.exists():
                    discard(path)
        return result
