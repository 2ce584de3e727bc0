"""One ablation from its plan to its report: checks, the folder's lock, the rounds of trainings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmldlm.ablation.plan import Plan, load_plan
from mmldlm.ablation.report import Report
from mmldlm.ablation.rounds import Ended, Rounds
from mmldlm.ablation.summary import Summary
from mmldlm.ablation.work import Work, open_work, write_plan
from mmldlm.benchmark.environment import describe_environment
from mmldlm.data.store import PairStore
from mmldlm.durable import require_writable
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import open_encoder
from mmldlm.run_folder import RunFolder, lock_run
from mmldlm.runtime import choose_device, settle_runtime


class Watcher(Protocol):
    """Follows the rounds."""

    def update(self, rounds: Rounds) -> None:
        """Called whenever a job has begun or ended, and every now and then."""

    def ended(self, one: Ended) -> None:
        """Called for each job that is over."""


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
        """Where all of it lies."""
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


def run_ablation(work: Work, num_jobs: int, watcher: Watcher) -> Finished:
    """Train and evaluate what is still missing, `num_jobs` runs at a time, and write the report."""
    require_writable(work.folder)
    _check_machine(work.plan)
    with _folder_held(work):
        _check_encoder(work)
        report = Report(work, describe_environment(["mmldlm", *sys.argv[1:]]), num_jobs)

        def ended(one: Ended) -> None:
            if one.failure is not None:
                report.failures[one.job.title] = one.failure
            watcher.ended(one)
            report.write(whole=False, picture=False)

        rounds = Rounds(work, num_jobs, watcher.update, ended)
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
