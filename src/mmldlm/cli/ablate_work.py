"""`mmldlm ablate-run`, hidden: the fresh process of one run of an ablation; trains it, then evaluates it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mmldlm.ablation.work import Check, Job
    from mmldlm.checkpoint.loaded import LoadedModel

_LOOK_EVERY = 0.5
"""Seconds between two looks whether the ablation is still there."""


def ablate_run(
    job: Annotated[Path, typer.Argument(help="The job, as 'mmldlm ablate' writes it.")],
    parent: Annotated[int, typer.Argument(help="Process of the ablation; when it goes, so does this one.")],
) -> None:
    """Train one run of an ablation and evaluate it."""
    import json

    from mmldlm.ablation.work import Job
    from mmldlm.cli.train import train_shown
    from mmldlm.config.recipe import config_from_dict

    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    work = Job.from_json(json.loads(job.read_bytes()))
    train_shown(config_from_dict(work.settings), Path(work.run))
    _give_back_memory()
    for check in work.checks:
        _evaluate(work, check)


def _leave_with(parent: int) -> None:
    """Stop in order, with a checkpoint, when the ablation was killed: nobody would collect what comes."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def _give_back_memory() -> None:
    """Runs side by side share the device, and evaluation needs less of it than training."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _evaluate(job: Job, check: Check) -> None:
    from mmldlm.ablation.record import make_record, write_record
    from mmldlm.cli.evaluate import measure
    from mmldlm.config.recipe import config_from_dict
    from mmldlm.data.store import PairStore
    from mmldlm.run_folder import RunFolder

    typer.echo(f"evaluating {check.arm!r}", err=True)
    model, config = _load(job, check), config_from_dict(check.settings)
    model.config.sampling, model.config.evaluation = config.sampling, config.evaluation
    store = PairStore.open_of_run(model.config.data.store, None)
    tools = {"sts": None, "reference_lm": None, "no_encoder": not job.encoder}
    result = measure(model, store, job.split, config.evaluation, tools, job.eval_seed)
    log = RunFolder(Path(job.run)).training_log
    record = make_record(check.arm, job.seed, check.identity, result, log)
    write_record(Path(check.folder), record, result)


def _load(job: Job, check: Check) -> LoadedModel:
    """The run's model, on the device that it was trained on."""
    from mmldlm.ablation.plan import LAST
    from mmldlm.api.runs import export_run
    from mmldlm.checkpoint.loaded import load_model
    from mmldlm.cli.device import device_of

    run, device = Path(job.run), device_of(job.settings["train"]["device"])
    if check.weights != LAST:
        return load_model(run, device)
    with tempfile.TemporaryDirectory(prefix="mmldlm-ablate-") as folder:
        export_run(run, Path(folder) / "export", averaged=False)
        return load_model(Path(folder) / "export", device)
