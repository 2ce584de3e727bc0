"""Small training runs for tests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from mmldlm.config.recipe import load_recipe
from mmldlm.distributed.ranks import Ranks
from mmldlm.metrics import read_log
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import start_runtime
from mmldlm.training.fit import Trainer
from mmldlm.training.setup import Hooks, set_up

RECIPE = """
name: small
data: {{store: {store}}}
batch: {{tokens_per_step: 256}}
model: {{preset: tiny, depth: 2, width: 32, latent_width: 16, num_heads: 2, head_width: 8, time_width: 16}}
optim: {{lr: 3.0e-3, warmup_steps: 5, ema_decay: 0.9}}
train: {{steps: 12, log_every: 3, valid_every: 6, checkpoint_every: 4, trackers: []}}
"""
TIMED = {"time", "documents_per_second", "tokens_per_second", "flops_per_second", "mfu", "data_wait"}
"""Fields of the log that no two runs share."""


class Silent:
    """Shows nothing."""

    def start(self, step: int, num_steps: int) -> None:
        pass

    def update(self, step: int, fields: dict) -> None:
        pass


def write_recipe(folder: Path, store: Path) -> Path:
    """A recipe file for a run of a second or two."""
    path = folder / "small.yaml"
    path.write_text(RECIPE.format(store=store))
    return path


def make_trainer(folder: Path, store: Path, *overrides: str, ranks: Ranks | None = None) -> Trainer:
    """A run that is set up but not started."""
    ranks, run = ranks or Ranks(), RunFolder(folder / "run")
    if ranks.main:
        folder.mkdir(exist_ok=True)
        write_recipe(folder, store)
        run.create()
    ranks.barrier()
    config = load_recipe(str(folder / "small.yaml"), list(overrides))
    return Trainer(
        set_up(config, start_runtime(config), ranks),
        run,
        Hooks(lambda d: {"valid_loss": 1.0}, lambda d, s: [], Silent()),
    )


def untimed(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, without what the clock decides."""
    return [{key: value for key, value in line.items() if key not in TIMED} for line in read_log(log)]


def curve(trainer: Trainer) -> list[dict[str, Any]]:
    """All that a run logged and that must be the same when it is done again."""
    return untimed(trainer.run.training_log)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, their averages and moments."""
    assert trainer.stepper.ema is not None
    averages = {f"ema {name}": tensor for name, tensor in trainer.stepper.ema.average.items()}
    return {**trainer.setup.denoiser.state_dict(), **averages, **trainer.stepper.optimizers.state_dict()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether the same tensors are there, with the same values."""
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def hit_loader(trainer: Trainer, number: int) -> None:
    """Send a signal to the processes of the run's own loader; one that has gone already is past it."""
    assert trainer.batches.watched is not None
    for worker in trainer.batches.watched.workers:
        if worker.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)
