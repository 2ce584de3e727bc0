"""The fresh process of one run of an ablation: trains it, then evaluates it in every way of the plan."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from mmldlm.ablation.plan import LAST
from mmldlm.ablation.work import Check, Job, make_record, write_record
from mmldlm.api.evaluate import evaluate
from mmldlm.api.runs import export_run
from mmldlm.api.train import train
from mmldlm.config.recipe import config_from_dict
from mmldlm.evaluation.results import Evaluation
from mmldlm.run_folder import RunFolder

_LOOK_EVERY = 0.5
"""Seconds between two checks whether the ablation still runs."""

logger = logging.getLogger(__name__)


def run_job(path: Path, parent: int) -> None:
    """Train and evaluate; stops with a checkpoint when the process `parent` is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    threading.Thread(target=_stop_with, args=(parent,), daemon=True).start()
    job = Job.from_json(json.loads(path.read_bytes()))
    train(config_from_dict(job.settings), run=job.run)
    _release_memory()
    for check in job.checks:
        logger.info("evaluating %r", check.arm)
        result = _evaluate(job, check)
        log = RunFolder(Path(job.run)).training_log
        record = make_record(check.arm, job.seed, check.identity, result, log)
        write_record(Path(check.folder), record, result)


def _stop_with(parent: int) -> None:
    """A killed ablation would never collect the result."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def _release_memory() -> None:
    """Runs side by side share the device, and evaluation needs less of it than training."""
    from mmldlm.runtime import choose_device, empty_cache

    gc.collect()
    empty_cache(choose_device())


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
