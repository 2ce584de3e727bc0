"""Worlds of one to four ranks, one after another, forked from one process that has loaded everything.

Started by a test as `python -m tests.distributed.worlds FOLDER STORE`; each rank leaves what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

from mmldlm.checkpoint.export import make_export, write_export
from mmldlm.config import Config
from mmldlm.distributed.launch import start_ranks
from mmldlm.distributed.ranks import Ranks
from mmldlm.distributed.replicas import weights_digest
from mmldlm.runtime import start_runtime
from mmldlm.training.fit import Trainer
from tests import runs
from tests.distributed import scenarios

FSDP, HYBRID = "distributed.parallel=fsdp", "distributed.parallel=hybrid"
SECONDS = 900
"""For a world on a machine that has other things to do."""


def backward_fails(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out on rank 1 in the middle of the backward pass, when gradients of a block are summed already."""
    trainer = scenarios.make_trainer(folder, store, "train.log_every=1", "batch.grow_after=3", ranks=ranks)

    def give_up(gradient: torch.Tensor) -> torch.Tensor:
        if ranks.rank == 1 and trainer.step in (0, 5) and trainer.resizing.halvings == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return gradient

    trainer.setup.denoiser.blocks[0].register_forward_hook(
        lambda block, inputs, output: output[0].x.register_hook(give_up) and None
    )
    return trainer


def differing(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """After step 2 a bit of rank 3 is not that of its replica, rank 1."""
    trainer = scenarios.make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    run = trainer.train_step

    def one_step(*args: Any) -> None:
        run(*args)
        if trainer.step == 2 and ranks.rank == 3:
            trainer.shards.held["blocks.0.text.qkv.weight"].data.view(torch.int32)[0, 0] ^= 1

    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


def half_precision(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """fp16 with a scaled loss, as on a GPU; at step 5 a gradient in the rows of the last rank alone is not finite."""
    with mock.patch.object(
        runs, "start_runtime", lambda config: replace(start_runtime(config), precision="fp16")
    ):
        trainer = scenarios.make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    trainer.seen, shards, run, collect = {}, trainer.shards, trainer.train_step, trainer.shards._collect

    def spoil() -> None:
        collect()
        if trainer.step == 5 and ranks.rank == ranks.world_size - 1:
            shards.held["blocks.0.text.qkv.weight"].grad[0, 0] = torch.inf

    shards._collect = spoil

    def one_step(*args: Any) -> None:
        before = int(weights_digest(shards.held.values()))
        run(*args)
        same = before == int(weights_digest(shards.held.values()))
        trainer.seen[trainer.step] = [trainer.stepper.scaler.get_scale(), same]

    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


def exported(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """The end of the first world's run once more, by another kind of parallelism, and what it leaves for use."""
    if ranks.main:
        shutil.copytree(folder.parents[1] / "ddp4_plain" / "plain", folder, symlinks=True)
    trainer = scenarios.make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    run = trainer.fit

    def fit() -> None:
        run()
        weights, setup = trainer.weights_for_use(), trainer.setup
        if ranks.main:
            write_export(trainer.run.export, make_export(weights, setup.config, setup.store, trainer.step))

    trainer.fit = fit  # type: ignore[method-assign]
    return trainer


def part(name: str, until: int | None) -> Any:
    """A part of a run, up to a step."""

    def run(ranks: Ranks, folder: Path, store: Path) -> Trainer:
        trainer = scenarios.make_trainer(folder.parents[1] / name, store, "train.log_every=1", ranks=ranks)
        if until is not None:
            scenarios.stop_at(trainer, until)
        return trainer

    return run


OWN: dict[str, Any] = {
    "backward_fails": backward_fails, "differing": differing, "half_precision": half_precision,
    "exported": exported,
}  # fmt: skip
for until in (3, 6, 9, None):
    OWN |= {f"{name}_{until or 12}": part(name, until) for name in ("moved", "resumed")}

WORLDS: list[tuple[int, int, list[tuple[str, list[str]]]]] = [
    (4, 2, [
        ("plain", []), ("plain", [FSDP]), ("plain", [HYBRID]), ("differing", [HYBRID]), ("moved_3", [FSDP]),
        *(("exported", words) for words in ([], [FSDP], [HYBRID])),
    ]),
    (2, 2, [
        *((name, [FSDP]) for name in ("not_finite", "rolled_back", "backward_fails", "one_part")),
        ("muon", [FSDP, "distributed.cpu_offload=true"]),
        ("recompute", [FSDP, "distributed.reshard=false", "distributed.cpu_offload=true"]),
        ("half_precision", [FSDP]),
        ("plain", [FSDP]),
        ("resumed_3", [FSDP]),
        ("resumed_12", [FSDP]),
        ("moved_6", []),
    ]),
    (1, 1, [("plain", [FSDP]), ("moved_9", []), ("exported", [])]),
    (3, 3, [("moved_12", [FSDP])]),
]  # fmt: skip
"""Ranks, ranks on a machine, and runs: a scenario and further words."""
MORE: list[tuple[int, int, list[tuple[str, list[str]]]]] = [
    (4, 2, [(name, [HYBRID]) for name in ("micro_batches", "backward_fails", "half_precision")]),
    (2, 2, [(name, [FSDP]) for name in ("mode_stages", "gradient_norm")]),
    (9, 9, [("plain", [FSDP]), ("muon", [FSDP])]),
]
"""For the long tests. Nine ranks are more than some tensors have rows."""


def label(world: int, name: str, words: list[str]) -> str:
    kind = next((word.partition("=")[2] for word in words if word.startswith("distributed.parallel")), "ddp")
    return f"{kind}{world}_{name}"


def child(folder: Path, store: Path, world: int, plays: list[tuple[str, list[str]]]) -> None:
    config = Config()
    config.distributed.timeout_minutes = 2.0
    config.distributed.parallel = "fsdp"  # so that a single rank has a group too
    torch.set_num_threads(1)
    scenarios.SCENARIOS |= OWN
    with start_ranks(config) as ranks:
        for name, words in plays:
            rarely = [] if name == "rolled_back" else ["train.checkpoint_every=12"]
            scenarios.EXTRA[:] = words + rarely
            where = folder / label(world, name, words)
            where.mkdir(exist_ok=True)
            result = scenarios.play(name, ranks, where, store)
            (folder / f"{where.name}.{ranks.rank}.json").write_text(json.dumps(result))


def run_world(folder: Path, store: Path, world: int, local: int, plays: list[Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(world):
        if not (pid := os.fork()):
            place = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in place.items()}
            try:
                child(folder, store, world, plays)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    _wait(pids)


def _wait(pids: list[int]) -> None:
    left, deadline = set(pids), time.monotonic() + SECONDS
    failed = False
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            failed = failed or status != 0
        elif failed or time.monotonic() > deadline:
            time.sleep(10 if failed else 0)  # the others notice by themselves
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise SystemExit(1)
        else:
            time.sleep(0.02)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    for world, local, plays in MORE if sys.argv[3:] == ["more"] else WORLDS:
        run_world(Path(sys.argv[1]), Path(sys.argv[2]), world, local, plays)
