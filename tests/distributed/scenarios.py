"""Runs on two real ranks, one after another in the same pair of processes; each leaves what it saw as JSON.

Started by `pair.py` as `python -m tests.distributed.scenarios FOLDER STORE` with the variables that torchrun would set.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmldlm.config import Config
from mmldlm.distributed import replicas
from mmldlm.distributed.launch import start_ranks
from mmldlm.distributed.ranks import Ranks
from mmldlm.errors import Interrupted, UserError
from mmldlm.training.fit import Trainer
from mmldlm.training.graphs import Graphs
from tests import runs

EXTRA: list[str] = []
"""Words for every run from here on."""
SCENARIOS: dict[str, Callable[[Ranks, Path, Path], Trainer]] = {}
PLAIN: dict[str, tuple[str, ...]] = {
    "plain": (),
    "micro_batches": ("batch.micro_tokens=64",),
    "uneven": ("batch.micro_tokens=32", "batch.slack=0.0"),
    "padded": ("speed.layout=padded", "batch.micro_documents=5"),
    "static_graph": ("distributed.static_graph=true", "distributed.bucket_mb=0.01"),
    "batch_modes": ("corruption.mode_choice=batch", "corruption.mode_weights.joint=0"),
    "mode_stages": (
        "corruption.mode_schedule=[{until: 4, mode_weights: {l2t: 1}}, "
        "{until: 8, mode_weights: {t2l: 1}, frozen: [shared]}]",
    ),
    "recompute": ("speed.activation_checkpointing=block", "distributed.bucket_mb=0.01"),
    "muon": ("optim.name=muon",),
    "one_part": (
        "train.frozen=[latent,shared,token_head,latent_head,length_head]",
        "optim.ema_decay=0",
    ),
    "bf16_sums": ("distributed.compression=bf16",),
    "fp16_sums": ("distributed.compression=fp16",),
    "plateau": ("optim.schedule=plateau", "optim.plateau_patience=2", "train.valid_every=2"),
    "gradient_norm": (
        "objective.balance=gradient_norm",
        "objective.balance_every=3",
        "batch.micro_tokens=64",
    ),
}
"""Runs without any accident, by name; the same words on one rank must give the same curve."""


def make_trainer(folder: Path, store: Path, *words: str, ranks: Ranks) -> Trainer:
    return runs.make_trainer(folder, store, *words, *EXTRA, ranks=ranks)


def scenario(run: Callable[[Ranks, Path, Path], Trainer]) -> Callable[[Ranks, Path, Path], Trainer]:
    SCENARIOS[run.__name__] = run
    return run


def stop_at(trainer: Trainer, step: int, *, here: bool = True) -> None:
    """As if a signal came during that step."""
    run = trainer.train_step

    def one_step(*args: Any) -> None:
        if trainer.step + 1 == step and here:
            trainer.stop.received = signal.SIGTERM
        run(*args)

    trainer.train_step = one_step  # type: ignore[method-assign]


def watch_documents(trainer: Trainer) -> dict[int, list[str]]:
    """Step -> a digest of each document that this rank trains on, with its noise."""
    seen: dict[int, list[str]] = {}
    run = trainer.stepper.pass_over

    def pass_over(micro_batch: Any) -> Any:
        joined = trainer.stepper.replicas
        if joined is None or joined.ddp is not None:  # no trial
            seen.setdefault(trainer.step, []).extend(digests(micro_batch.noisy))
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over  # type: ignore[method-assign]
    return seen


def digests(noisy: Any) -> list[str]:
    found = []
    for document in range(len(noisy.text_time)):
        rows = (noisy.layout.document == document) & noisy.layout.real
        if not rows.any():
            continue
        parts = [noisy.tokens[rows], noisy.noisy_tokens[rows]]
        parts += [part[document] for part in (noisy.noisy_latents, noisy.latent_noise)]
        parts += [part[document] for part in (noisy.text_time, noisy.latent_time)]
        found.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16])
    return found


@scenario
def recorded(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """As with recorded graphs: passes without DDP, then the sum. Recording itself fails on a CPU, and is given up."""
    words = ("train.log_every=1", "batch.micro_tokens=64", "distributed.bucket_mb=0.01")
    trainer = make_trainer(folder, store, *words, ranks=ranks)
    trainer.stepper.graphs = Graphs()
    return trainer


def apart_for_a_while(trainer: Trainer) -> Trainer:
    """Its passes run without DDP from the fifth step to the eighth."""
    run = trainer.train_step

    def one_step(*args: Any) -> None:
        if trainer.step in (4, 8):
            trainer.stepper.record(trainer.step == 4)
        run(*args)

    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


@scenario
def recorded_later(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """With DDP, from the fifth step on without, as where recording seems to help, and with it again from the ninth."""
    words = ("train.log_every=1", "distributed.bucket_mb=0.01")
    return apart_for_a_while(make_trainer(folder, store, *words, ranks=ranks))


@scenario
def resumed(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """The middle of a run that one rank began and one rank will end."""
    trainer = make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    trainer.seen = watch_documents(trainer)
    stop_at(trainer, 8, here=ranks.rank == 1)
    return trainer


@scenario
def not_finite(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """At step 6, one document of rank 1 is not a number."""
    trainer = make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    run = trainer.train_step

    def one_step(batch: Any, waited: float) -> None:
        if trainer.step == 5:
            trainer.before = state_of(trainer)
            if ranks.rank == 1:
                batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        run(batch, waited)
        if trainer.step == 6:
            trainer.after = state_of(trainer)

    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


@scenario
def rolled_back(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Three bad steps in a row on rank 1: more than the budget."""
    trainer = make_trainer(folder, store, "train.log_every=1", "train.skip_budget=3", ranks=ranks)
    run, bad = trainer.train_step, iter(range(3))

    def one_step(batch: Any, waited: float) -> None:
        if trainer.step >= 5 and next(bad, None) is not None and ranks.rank == 1:
            batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")
        run(batch, waited)

    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


@scenario
def bad_data(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """What rank 1 reads is damaged from step 7 on."""
    trainer = make_trainer(folder, store, "train.log_every=1", ranks=ranks)
    read = trainer.setup.train_split.read

    def broken(indices: Any) -> Any:
        if trainer.step >= 6 and ranks.rank == 1:
            raise UserError("shard-00000.arrow: is damaged")
        return read(indices)

    trainer.setup.train_split.read = broken  # type: ignore[method-assign]
    return trainer


def waiting(ranks: Ranks, folder: Path, store: Path, num_workers: int, signalled: int) -> Trainer:
    """Rank 1 waits for the documents of step 7 that never come, rank 0 for rank 1; one of them gets a signal."""
    trainer = make_trainer(folder, store, f"data.num_workers={num_workers}", ranks=ranks)
    read, run = trainer.setup.reader, trainer.train_step

    def reader(plan: Any) -> Any:
        made = read(plan)
        make = made.make
        made.make = lambda where: time.sleep(300) if where.step >= 6 else make(where)  # type: ignore[method-assign]
        return made

    def one_step(*args: Any) -> None:
        run(*args)
        if trainer.step == 6 and ranks.rank == signalled:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    if ranks.rank == 1:
        trainer.setup.reader = reader  # type: ignore[method-assign]
    trainer.train_step = one_step  # type: ignore[method-assign]
    return trainer


@scenario
def waiting_and_told(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """The one that waits for its loader is told to stop."""
    return waiting(ranks, folder, store, num_workers=1, signalled=1)


@scenario
def waiting_and_another_told(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """The one that waits for the other is told to stop."""
    return waiting(ranks, folder, store, num_workers=0, signalled=0)


def limited(ranks: Ranks, folder: Path, store: Path, *words: str, at: tuple[int, ...]) -> Trainer:
    """Rank 1 has no room for more than 80 tokens at some steps."""
    trainer = make_trainer(folder, store, "train.log_every=1", "batch.grow_after=3", *words, ranks=ranks)
    run = trainer.stepper.pass_over

    def pass_over(micro_batch: Any) -> Any:
        if ranks.rank == 1 and trainer.step in at and len(micro_batch.noisy.tokens) > 80:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over  # type: ignore[method-assign]
    return trainer


@scenario
def memory_before(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out before the backward pass."""
    return limited(ranks, folder, store, at=(4, 5))


@scenario
def memory_after_recording(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out in the first step with DDP after some without it."""
    return apart_for_a_while(limited(ranks, folder, store, "distributed.bucket_mb=0.01", at=(8,)))


@scenario
def memory_at_once(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out in the very first pass, the one that looks for gradients."""
    return limited(ranks, folder, store, at=(0,))


@scenario
def memory_inside(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out on rank 1 in the backward pass, when some buckets are summed already."""
    words = ("train.log_every=1", "batch.grow_after=3", "distributed.bucket_mb=0.01")
    trainer = make_trainer(folder, store, *words, ranks=ranks)
    trainer.summed = []

    def give_up(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.step in (3, 9) and trainer.resizing.halvings == 0:
            trainer.summed.append(len(trainer.stepper.replicas._works))
            if ranks.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return gradient

    trainer.setup.denoiser.time_embed.hidden.weight.register_hook(give_up)
    return trainer


@scenario
def memory_in_sums(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Passes run without DDP. Memory runs out on rank 1 when its gradients are rounded for the sum."""
    words = ("train.log_every=1", "batch.grow_after=3", "distributed.compression=bf16")
    trainer = make_trainer(folder, store, *words, ranks=ranks)
    trainer.stepper.graphs = Graphs()

    class Kinds(dict[str, torch.dtype]):
        def __getitem__(self, name: str) -> torch.dtype:
            if ranks.rank == 1 and trainer.step == 5 and trainer.resizing.halvings == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return super().__getitem__(name)

    replicas.KINDS = Kinds(replicas.KINDS)
    return trainer


@scenario
def memory_measuring(ranks: Ranks, folder: Path, store: Path) -> Trainer:
    """Memory runs out on rank 1 while the norms of the gradients are measured."""
    words = ("train.log_every=1", "batch.grow_after=3", *PLAIN["gradient_norm"][:2])
    trainer = make_trainer(folder, store, *words, ranks=ranks)
    sums = trainer.stepper.replicas.summed

    def summed(work: Callable[[], torch.Tensor]) -> torch.Tensor:
        def limited_work() -> torch.Tensor:
            if ranks.rank == 1 and trainer.step == 6 and trainer.resizing.halvings == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return work()

        return sums(limited_work)

    trainer.stepper.replicas.summed = summed  # type: ignore[method-assign]
    return trainer


def state_of(trainer: Trainer) -> dict[str, str]:
    """Name -> digest of each weight and moment."""
    snapshot = trainer.snapshot()
    tensors = {**snapshot.tensors["model"], **snapshot.tensors["optimizer"]}
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def play(name: str, ranks: Ranks, folder: Path, store: Path) -> dict[str, Any]:
    if name in PLAIN:
        trainer = make_trainer(folder / name, store, "train.log_every=1", *PLAIN[name], ranks=ranks)
    else:
        trainer = SCENARIOS[name](ranks, folder / name, store)
    code, told = 0, ""
    try:
        trainer.fit()
    except Interrupted as stop:
        code = stop.exit_code
    except UserError as error:
        told = str(error)
    extra = {key: getattr(trainer, key, None) for key in ("seen", "before", "after", "summed")}
    return {"state": state_of(trainer), "step": trainer.step, "code": code, "told": told, **extra}


def main(folder: Path, store: Path) -> None:
    config = Config()
    config.distributed.timeout_minutes = 1.0
    torch.set_num_threads(1)
    with start_ranks(config) as ranks:
        for name in [*PLAIN, *SCENARIOS]:
            found = play(name, ranks, folder, store)
            (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
