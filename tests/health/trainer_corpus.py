"""Labelled logs of our own trainer: small real runs with faults injected, and healthy ones of several kinds.

    python -m tests.health.trainer_corpus FOLDER NAME [OFFSET]

makes one run in this process (a killed run needs a process of its own); OFFSET changes its seed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmldlm.api.train import Health
from mmldlm.errors import Interrupted, UserError
from mmldlm.evaluation.validation import make_validation
from mmldlm.run_folder import lock_run
from mmldlm.training.fit import Trainer
from tests import warm
from tests.distributed.pair import end, environment, start_pair
from tests.health import trainer_faults as faults
from tests.health.judging import Label
from tests.runs import make_trainer
from tests.stores import write_store

AT = 61
"""Faults come at this step."""
USUAL = (
    "train.steps=120", "train.log_every=1", "train.valid_every=20", "train.checkpoint_every=20",
    "train.skip_budget=1000", "data.num_workers=0",
)  # fmt: skip


RATES = ("M301", "M302", "M303")
"""A run that is judged by the real clock has the rates of a machine that others use too."""


@dataclass
class TrainerCase:
    """A run of our trainer and the truth about it."""

    name: str
    expected: tuple[str, ...] = ()
    delay: int = 0
    also: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    inject: faults.Inject = faults.nothing
    from_step: int = AT
    store: str = "store"
    alone: bool = False
    """Ends its process, so that it needs one of its own."""
    again: bool = False
    """Is started a second time, without the fault."""
    away: bool = False
    """Read as if from another machine: only the heartbeat tells that the process is gone."""
    seed: int = 0
    offset: int = 0
    """Added to the seed."""

    def label(self) -> Label:
        """The truth, as `judging` takes it."""
        from_step, later = self.from_step if self.expected else 0, 300.0 if self.alone else 0.0
        return Label(
            f"trainer_{self.name}", self.expected, self.delay, self.also, from_step, self.alone, later
        )


def _healthy() -> Iterator[TrainerCase]:
    yield TrainerCase("fine")
    yield TrainerCase("fine_seed", seed=7, words=("train.log_every=2",))
    yield TrainerCase("fine_muon", words=("optim.name=muon", "optim.lr=3e-3"))
    yield TrainerCase("fine_micro_batches", words=("batch.micro_tokens=64",))
    stages = "batch.schedule=[{until: 40, tokens_per_step: 128}, {until: 80, tokens_per_step: 192}]"
    yield TrainerCase("fine_batch_schedule", words=(stages,))
    yield TrainerCase("fine_l2t", words=("corruption.mode_weights.t2l=0", "corruption.mode_weights.joint=0"))
    yield TrainerCase("fine_padded", words=("speed.layout=padded", "batch.micro_documents=5"))
    yield TrainerCase("fine_resumed", inject=faults.stopped(AT), again=True)
    yield TrainerCase(
        "fine_resumed_smaller", inject=faults.stopped(AT), again=True, words=("train.log_every=5",)
    )


def _numbers() -> Iterator[TrainerCase]:
    seen = ("M101", "M201", "M205")
    yield TrainerCase("nan_once", seen, inject=faults.not_finite(lambda step: step == AT))
    rare = faults.not_finite(lambda step: step == AT)
    yield TrainerCase("nan_once_of_five", ("M205",), 4, words=("train.log_every=5",), inject=rare)
    often = faults.not_finite(lambda step: step >= AT and step % 7 == AT % 7)
    yield TrainerCase("nan_often", seen, inject=often)
    four = faults.not_finite(lambda step: step >= AT, times=4)
    budget = ("train.skip_budget=4", "train.rollback_lr_factor=0.5")
    yield TrainerCase("rollback", ("M205", "M504"), 3, words=budget, inject=four, also=("M101", "M201"))
    line = ("train.skip_budget=4", "train.log_every=2")
    yield TrainerCase("rollback_sparse", ("M205", "M504"), 4, words=line, inject=four, also=("M101", "M201"))
    always = faults.not_finite(lambda step: step >= AT)
    lost = ("M205", "M504", "M502")
    yield TrainerCase("rollback_in_vain", lost, 4, words=budget, inject=always, also=("M101", "M201"))
    hot = ("optim.lr=30", "optim.clip_norm=0", "optim.warmup_steps=60")
    echo = ("M101", "M102", "M201", "M202", "M203", "M205", "M801", "M802", "M803")
    yield TrainerCase("hot", ("M103",), 100, words=hot, also=echo, from_step=1)


def _resources() -> Iterator[TrainerCase]:
    few = ("batch.grow_after=10",)
    once = faults.little_memory(lambda step: 80 if AT <= step < AT + 3 else 10**9)
    yield TrainerCase("memory_once", ("M401",), 0, words=few, inject=once, also=("M402",), from_step=AT - 1)
    for_good = faults.little_memory(lambda step: 80 if step >= AT else 10**9)
    yield TrainerCase("memory_often", ("M401", "M402"), 6, words=few, inject=for_good, from_step=AT - 1)
    fatal = ("batch.adapt=false",)
    yield TrainerCase("memory_fatal", ("M401", "M502"), 0, words=fatal, inject=for_good, from_step=AT - 1)
    yield TrainerCase("slow_data", ("M303",), 10, inject=faults.slow_reader(AT, 0.4), also=("M301",))
    yield TrainerCase("slow_steps", ("M301",), 6, inject=faults.slow_steps(AT, 2.2))
    stopped = ("M502",)  # the last state is not on the disk, so the run is not finished
    yield TrainerCase("full_disk", ("M403", "M702", "M701"), 60, inject=faults.full_disk(AT), also=stopped)
    loader = ("data.num_workers=1", "data.prefetch=1")
    yield TrainerCase("killed_loader", ("M304",), 2, words=loader, inject=faults.killed_loader(AT))
    yield TrainerCase("damaged_shard", ("M502",), 0, inject=faults.damaged_shard(AT), from_step=AT - 1)


def _processes() -> Iterator[TrainerCase]:
    soon = ("train.step_timeout=1",)
    yield TrainerCase("hung_step", ("M501",), 0, words=soon, inject=faults.hung_step(AT, released=True))
    leave = (*soon, "train.step_timeout_action=exit")
    never = faults.hung_step(AT, released=False)
    yield TrainerCase("hung_and_left", ("M501", "M502"), 0, words=leave, inject=never, also=RATES, alone=True)
    yield TrainerCase("killed", ("M502",), 0, inject=faults.killed(AT + 1), also=RATES, alone=True)
    yield TrainerCase(
        "killed_elsewhere", ("M502",), 0, inject=faults.killed(AT + 1), also=RATES, alone=True, away=True
    )


def _learning() -> Iterator[TrainerCase]:
    longer = ("train.steps=300", "train.log_every=2", "train.valid_every=15", "optim.lr=1e-2")
    yield TrainerCase("memorising", ("M801",), 200, words=longer, from_step=15, store="few", also=("M803",))
    shrink = ("train.valid_every=5",)
    yield TrainerCase(
        "latent_collapse",
        ("M802",),
        40,
        words=shrink,
        inject=faults.shrinking_latents(AT, 0.8),
        also=("M103", "M102", "M202"),
    )
    yield TrainerCase(
        "latent_ignored", ("M803",), 240, words=longer, inject=faults.empty_latents, from_step=15
    )


def trainer_cases(offset: int = 0) -> list[TrainerCase]:
    """All of them, without those of two ranks; with an offset, the same faults in trainings of other seeds."""
    found = [*_healthy(), *_numbers(), *_resources(), *_processes(), *_learning()]
    for case in found:
        case.offset = offset
    return found


def trainer_logs(folder: Path, offset: int = 0) -> Iterator[tuple[Label, Path]]:
    """Run everything and give each log with its label."""
    write_stores(folder)
    for case in trainer_cases(offset):
        yield case.label(), make_run(case, folder)
    yield from two_ranks(folder)


def write_stores(folder: Path) -> None:
    """What the runs train on."""
    folder.mkdir(parents=True, exist_ok=True)
    easy = {"vocab_size": 8, "min_length": 2, "max_length": 4}  # a latent tells much about so short a text
    write_store(folder / "store", num_train=8000, **easy)
    write_store(folder / "few", num_train=12)


def make_run(case: TrainerCase, folder: Path) -> Path:
    """Train, with the fault; returns the run folder."""
    if case.alone:
        module = "tests.health.trainer_corpus"
        words = [sys.executable, "-m", module, str(folder), case.name, str(case.offset)]
        warm.run(words, env=environment(), capture_output=True, timeout=280, check=False)
    else:
        train(case, folder)
    run = folder / case.name / "run"
    if case.away:
        (run / ".lock").unlink()
    return run


def train(case: TrainerCase, folder: Path) -> None:
    """In this process; a run that ends by its fault is what is wanted."""
    clock = faults.SimulatedTime()
    for inject in (case.inject, faults.nothing) if case.again else (case.inject,):
        seed = f"train.seed={case.seed + case.offset}"
        trainer = prepare(folder / case.name, folder / case.store, *USUAL, *case.words, seed)
        inject(trainer, clock)
        # a run that ends its process is judged by the real clock, as its heartbeat is
        times = clock.inside(trainer) if not case.alone else contextlib.nullcontext()
        with lock_run(trainer.run), times, contextlib.suppress(UserError, Interrupted):
            trainer.fit()
        clock.now += 20.0


def prepare(folder: Path, store: Path, *words: str) -> Trainer:
    """A run with the real validation, and with the detectors inside as in the command."""
    trainer = make_trainer(folder, store, *words)
    health = Health(
        trainer.config,
        lambda *a, **k: trainer.events.record(*a, **k),
        lambda: trainer.checkpoints.saver.last_saved,
    )
    trainer.hooks.validate = make_validation(trainer.setup)
    trainer.hooks.reporter.update = health.update  # type: ignore[method-assign]
    return trainer


def two_ranks(folder: Path) -> Iterator[tuple[Label, Path]]:
    """Two processes over gloo: healthy, one slow, one killed; rates are the real machine's."""
    labels = {
        "ranks_fine": Label("trainer_ranks_fine", also=(*RATES, "M601")),
        "ranks_slow": Label("trainer_ranks_slow", ("M301",), 10, ("M302", "M303", "M601"), from_step=AT),
        "ranks_killed": Label("trainer_ranks_killed", ("M502",), 1, RATES, from_step=AT - 1),
    }
    for name, case in labels.items():
        end(start_pair("tests.health.trainer_ranks", str(folder), name))
        case.real_clock = True
        yield case, folder / name / "run"


if __name__ == "__main__":
    place, chosen, added = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0
    train(next(case for case in trainer_cases(added) if case.name == chosen), place)
