"""One ablation from its plan to its report: checks, the folder's lock, the rounds of trainings, and a training.

Jobs run in fresh processes, some of them at once; one that dies stops no other. Such a process trains a run, then
evaluates it in every way of the plan (`run_job`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.ablation.plan import LAST, Plan, load_plan
from mmldlm.ablation.report import Report
from mmldlm.ablation.summary import Summary
from mmldlm.ablation.work import RECORD, Check, Job, Work, make_record, open_work, write_plan
from mmldlm.api.evaluate import evaluate
from mmldlm.api.runs import export_run
from mmldlm.api.train import train
from mmldlm.benchmark.machine import describe_environment, end, explain_death, last_line, start
from mmldlm.config.recipe import config_from_dict
from mmldlm.data.store import PairStore
from mmldlm.durable import replace_file, require_writable
from mmldlm.errors import UserError
from mmldlm.evaluation.report import number_files
from mmldlm.evaluation.results import Evaluation
from mmldlm.json_lines import encode, from_plain
from mmldlm.preparation.encoders import open_encoder
from mmldlm.reports import publish
from mmldlm.run_folder import RunFolder, lock_run
from mmldlm.runtime import choose_device, empty_cache, settle_runtime

COMMAND = "mmldlm"
RUN_JOB = "ablate-run"
"""Hidden command that does one job; it lives in `cli`, like training and evaluation."""
PATIENCE = 300.0
"""Seconds that processes have for their last checkpoint."""
_POLL = 0.1
_LOOK_EVERY = 0.5
"""Seconds between two checks whether the ablation still runs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
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
    ended_one: Callable[[Ended], None]
    waiting: deque[Job] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    stopped: bool = False
    """Whether Ctrl-C ended the rounds before their time."""

    @property
    def failed(self) -> list[Ended]:
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
        replace_file(job_path, json.dumps(asdict(job)).encode())
        with open(log_path, "ab") as log:
            process = start(COMMAND, [RUN_JOB, str(job_path), str(os.getpid())], log, self._environment())
        self.running.append(_Running(job, process, log_path, time.monotonic()))

    def _environment(self) -> dict[str, str]:
        """Processes side by side share the cores, unless the user has divided them already."""
        if self.num_jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.num_jobs))}

    def _collect(self) -> None:
        for one in self._reap():
            done = Ended(one.job, time.monotonic() - one.began, self._failure(one))
            self.ended.append(done)
            self.ended_one(done)

    def _reap(self) -> list[_Running]:
        """Those that have ended since, with loaders that outlived them."""
        ended = [one for one in self.running if one.process.poll() is not None]
        for one in ended:
            self.running.remove(one)
            end(one.process)
        return ended

    def _failure(self, one: _Running) -> str | None:
        code, records = one.process.returncode, (check.record() for check in one.job.checks)
        if code == 0 and all(record is not None for record in records):
            return None
        line = last_line(one.log_path)
        return explain_death(code, one.log_path).reason if code < 0 or not line else line

    def _ask_to_stop(self) -> None:
        for one in self.running:
            one.process.terminate()
        until = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < until:
            self._reap()
            self.changed(self)
            time.sleep(_POLL)


@dataclass(frozen=True)
class Finished:
    """What an ablation measured and wrote."""

    report: Report
    rounds: Rounds
    summary: Summary
    values: dict[str, Any]
    """`result.json`."""

    @property
    def folder(self) -> Path:
        return self.report.work.folder


def plan_ablation(
    plan: str,
    settings: list[str] | None = None,
    out: Path | None = None,
    num_seeds: int = 3,
    device: str = "auto",
) -> Work:
    """A plan by name or file in its folder, by default `ablations/<plan>`; every arm is checked."""
    loaded = load_plan(plan, settings, choose_device(device, option="device").type)
    return open_work(loaded, out or Path("ablations") / loaded.path.stem, num_seeds)


def run_ablation(
    work: Work, num_jobs: int, changed: Callable[[Rounds], None], ended_one: Callable[[Ended], None]
) -> Finished:
    """Train and evaluate what is still missing, `num_jobs` runs at a time, and write the report.

    `changed` is called whenever a job has begun or ended, and every now and then; `ended_one` for each that is over.
    """
    require_writable(work.folder)
    _check_machine(work.plan)
    with _folder_held(work):
        _check_encoder(work)
        report = Report(work, describe_environment(), num_jobs)

        def ended(one: Ended) -> None:
            if one.failure is not None:
                report.failures[one.job.title] = one.failure
            ended_one(one)
            report.write(whole=False, picture=False)

        rounds = Rounds(work, num_jobs, changed, ended)
        rounds.run()
        summary, values = report.write(whole=not rounds.stopped and not rounds.failed)
        return Finished(report, rounds, summary, values)


def _check_machine(plan: Plan) -> None:
    """Reject settings that only a GPU has before the first run begins; with a GPU the runs check it themselves."""
    device = choose_device(plan.device)
    if device.type == "cuda":
        return
    for arm in plan.trained:
        try:
            settle_runtime(plan.config(arm, 0), device)
        except UserError as error:
            raise UserError(f"{plan.path}: arm {arm.name!r}: {error}") from error


def _check_encoder(work: Work) -> None:
    """Load the encoder once, where it will be used: a mistake must not wait until the first run is trained."""
    plan = work.plan
    if not plan.evaluation.encoder:
        return
    store = PairStore.open(plan.configs[plan.arms[0].name].data.store)
    if store.manifest.encoder is None or store.tokenizer_path() is None:
        raise UserError(
            f"{plan.path}: eval: encoder: true: {store.path} was made without a known encoder or tokenizer"
        )
    try:
        open_encoder(store.manifest.encoder, device="cpu")
    except UserError as error:
        raise UserError(f"{plan.path}: eval: encoder: true: {error}") from error


@contextlib.contextmanager
def _folder_held(work: Work) -> Iterator[None]:
    """A second ablation in the same folder is rejected."""
    work.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_run(RunFolder(work.folder), patience=0.5))
        except UserError as error:
            raise UserError(
                f"{work.folder}: another ablation is writing here; wait for it, or choose another folder with --out"
            ) from error
        write_plan(work)
        yield


def run_job(path: Path, parent: int) -> None:
    """Train and evaluate; stops with a checkpoint when the process `parent` is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    threading.Thread(target=_stop_with, args=(parent,), daemon=True).start()
    job = from_plain(Job, json.loads(path.read_bytes()))
    train(config_from_dict(job.settings), run=job.run)
    gc.collect()  # runs side by side share the device, and evaluation needs less of it than training
    empty_cache(choose_device())
    for check in job.checks:
        logger.info("evaluating %r", check.arm)
        result = _evaluate(job, check)
        log = RunFolder(Path(job.run)).training_log
        record = make_record(check.arm, job.seed, check.identity, result, log)
        publish(Path(check.folder), number_files(result) | {RECORD: encode(record.to_json(), indent=2)})


def _stop_with(parent: int) -> None:
    """A killed ablation would never collect the result."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def _evaluate(job: Job, check: Check) -> Evaluation:
    """The run with its averaged weights, or with those of the last step."""
    if check.weights != LAST:
        return _measure(job, check, Path(job.run))
    with tempfile.TemporaryDirectory(prefix="mmldlm-ablate-") as folder:
        export, _ = export_run(job.run, Path(folder) / "export", averaged=False)
        return _measure(job, check, export)


def _measure(job: Job, check: Check, source: Path) -> Evaluation:
    settings = {
        f"{section}.{name}": value
        for section in ("evaluation", "sampling")
        for name, value in check.settings[section].items()
    }
    return evaluate(
        source, split=job.split, overrides=settings, encoder=job.encoder, seed=job.eval_seed,
        device=job.settings["train"]["device"],
    )  # fmt: skip
