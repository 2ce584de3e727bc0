"""Three ranks that run out of memory at random places.

Started by a test as `python -m tests.distributed.chaos FOLDER STORE SEED KIND`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from mmldlm.config import Config
from mmldlm.distributed.launch import start_ranks
from mmldlm.distributed.ranks import Ranks
from mmldlm.training.fit import Trainer
from tests.distributed.scenarios import state_of
from tests.runs import make_trainer

WORDS = ("train.steps=40", "train.log_every=1", "batch.micro_tokens=64", "batch.slack=0.2")


def starve(trainer: Trainer, ranks: Ranks, seed: int) -> list[int]:
    """In any module, forward or backward, memory may run out; returns at which exchange of a step that is known."""
    dice, failed = random.Random(seed * 10 + ranks.rank), []

    def maybe(*args: Any) -> None:
        trainer.resizing.patience = 1  # full size again soon, so that it can happen again
        if trainer.resizing.halvings < 1 and dice.random() < 0.001:
            lockstep = trainer.stepper.joined.lockstep
            failed.append(len(lockstep._begun) if lockstep._ahead is not None else -1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    def watch(module: Any, inputs: Any, output: Any) -> None:
        maybe()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(maybe)

    for module in trainer.setup.denoiser.modules():
        if not list(module.children()):
            module.register_forward_hook(watch)
    return failed


def main(folder: Path, store: Path, seed: int, kind: str) -> None:
    torch.set_num_threads(1)
    with start_ranks(Config()) as ranks:
        words = (*WORDS, "batch.grow_after=1", "distributed.bucket_mb=0.005", f"distributed.parallel={kind}")
        trainer = make_trainer(folder / "run", store, *words, ranks=ranks)
        failed = starve(trainer, ranks, seed)
        trainer.fit()
        told = {"failed": failed, "state": state_of(trainer)}
        (folder / f"{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
