"""Kill whole training runs at random moments and while they save, resume them, and compare with one that never was.

    python -m tests.training.kill_sweep FOLDER MOMENTS SAVES

Each run is a fork, so that torch is imported once. A run is killed once, by SIGKILL: MOMENTS runs at a random moment,
SAVES runs at a random system call of a saving thread. Then it is run to its end and compared bit by bit: weights,
averages, moments, position and the curve. Prints a JSON object with what was seen.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # imported at the first validation, and slow

from mmldlm.checkpoint.load import load_latest
from tests.kills import die_at, fork
from tests.runs import make_trainer, untimed
from tests.stores import write_store

WORDS = (
    "train.steps=20", "train.checkpoint_every=2", "train.log_every=3", "train.valid_every=7", "train.valid_samples=0"
)  # fmt: skip


def _saving() -> bool:
    """Whether the caller is one of the threads that write a checkpoint."""
    beside = threading.current_thread() is not threading.main_thread()
    return beside and any(thread.name == "checkpoint-saver" for thread in threading.enumerate())


def train(folder: Path, store: Path, dying_call: int = 0) -> None:
    if dying_call:
        die_at(dying_call, _saving)
    make_trainer(folder, store, *WORDS).fit()


def finish(folder: Path, store: Path) -> None:
    _, status = os.waitpid(fork(lambda: train(folder, store)), 0)
    assert status == 0, f"{folder}: the resumed run failed with {status}"


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], dict, list[dict]]:
    """Everything that must not depend on having been killed."""
    found = load_latest(folder / "run" / "checkpoints", report=lambda message: None)
    assert found is not None
    tensors = {f"{group} {name}": t for group, named in found.tensors.items() for name, t in named.items()}
    state = {key: found.meta[key] for key in ("progress", "rollbacks", "resizing", "plateau", "modes")}
    return tensors, state, untimed(folder / "run" / "training_log.jsonl")


def assert_same(folder: Path, wanted: tuple[dict[str, torch.Tensor], dict, list[dict]]) -> None:
    tensors, state, curve = outcome(folder)
    assert state == wanted[1], (folder, state, wanted[1])
    assert tensors.keys() == wanted[0].keys(), folder
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[0][name]), (folder, name)
    assert curve == wanted[2], folder


def sweep(root: Path, moments: int, saves: int) -> dict:
    store, chance = write_store(root / "store", num_train=120).path, random.Random(0)
    began = time.monotonic()
    finish(root / "whole", store)
    length, wanted = time.monotonic() - began, outcome(root / "whole")
    seen = {"kills": 0, "during_a_save": 0, "before_a_checkpoint": 0, "too_late": 0}
    for number in range(4 * (moments + saves)):
        if seen["kills"] == moments + saves:
            break
        folder, in_save = root / f"run{number}", seen["kills"] >= moments
        killed = killed_once(folder, store, chance, length, in_save=in_save)
        if not killed:  # a busy machine made the first run long; the next moment comes earlier
            length *= 0.9
        seen["kills"] += killed
        seen["too_late"] += not killed
        checkpoints = folder / "run" / "checkpoints"
        names = os.listdir(checkpoints) if checkpoints.exists() else []
        seen["during_a_save"] += killed and (in_save or any(name.startswith(".staging") for name in names))
        seen["before_a_checkpoint"] += not any(name.startswith("step_") for name in names)
        finish(folder, store)
        assert_same(folder, wanted)
        left = [name for name in os.listdir(checkpoints) if name.startswith(".")]
        assert not left, left
    return seen


def killed_once(folder: Path, store: Path, chance: random.Random, length: float, *, in_save: bool) -> bool:
    """Start a run and kill it, or let it die in a save; false if it ended before."""
    call = chance.randint(1, 100) if in_save else 0
    pid = fork(lambda: train(folder, store, call))
    if not in_save:
        time.sleep(chance.uniform(0, length))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or (not in_save and status == 0), f"{folder}: left by itself with {status}"
    return killed


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(sweep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
