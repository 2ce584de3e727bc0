"""What a run does about trouble: memory that runs out, a compiler that fails, updates that have to be skipped.

- Out of memory: the same step is done again in micro-batches of half the size; after a while they grow again. A step
  keeps its documents and its noise, so its loss does not change. Only gradients are computed again: the update comes
  once they are complete.
- A compiler that fails is switched off. And the first steps show whether the host launches slower than the device
  computes; then micro-batches are recorded as CUDA graphs.
- A skipped update changes nothing, so one is harmless. Many mean that the weights, or the data that follows, cannot be
  trained on. Then the run restores a checkpoint that was saved while updates were not being skipped, leaves out the
  data on which it failed, and continues, with a smaller learning rate if the settings say so.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmldlm.checkpoint.files import DamagedError, published
from mmldlm.checkpoint.load import load_checkpoint
from mmldlm.checkpoint.state import Snapshot
from mmldlm.config import BatchConfig, TrainConfig
from mmldlm.data.loader import StepBatch, StepRange, StepReader
from mmldlm.data.packing import Order, StepShape
from mmldlm.data.store import Split
from mmldlm.distributed.ranks import is_compiler_error
from mmldlm.errors import UserError
from mmldlm.objective.joint import LossTerms
from mmldlm.training.graphs import LaunchWatch
from mmldlm.training.step import Stepper, StepResult
from mmldlm.types import Piece

if TYPE_CHECKING:  # FSDP2 is loaded where it is needed
    from mmldlm.distributed.shards import Shards

log = logging.getLogger(__name__)

MOST_IDS = 1000
"""Documents that an event names; positions identify the rest."""
_MOST_TRIES = 96
"""Parts of a step that are tried: two for each halving and bad document."""
_MOST_SEARCHED = 3
"""Skipped steps of a line of the log in which the document behind it is searched for."""


@dataclass
class Attempt:
    """How a step ended: a result, or the reason why memory ran out."""

    result: StepResult | None = None
    out_of_memory: str = ""


@dataclass
class Attempts:
    """Runs steps. What can go wrong on the device is returned, or worked around, instead of ending the run."""

    stepper: Stepper
    watch: LaunchWatch | None = None
    """Measures whether recording micro-batches is worth it; None once that is decided."""
    _compiled: bool = field(init=False)
    _may_blame_compiler: bool = field(init=False)
    _chosen: bool = field(init=False)
    """No setting asked for recording, so it may end: the first pass of a new shape needs memory beside recordings."""

    def __post_init__(self) -> None:
        self._chosen = self.watch is not None
        self._compiled = self._may_blame_compiler = self.stepper.runtime.compile
        if self.watch is not None:
            self._record_if(self.watch.remembered())

    def __call__(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        """One step; nothing of a failed one remains."""
        if self.watch is None:
            attempt, slow = self._step(batch, lr, step), None
        else:
            attempt, slow = self.watch.measure(lambda: self._step(batch, lr, step))
        if attempt.out_of_memory and self.stepper.graphs is not None and self._chosen:
            return self._without_recording(batch, lr, step)
        self._record_if(slow)
        return attempt

    def _without_recording(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        """The step again. Recording ends if that helps; if it does not, the micro-batch is too large either way."""
        self.stepper.record(False)
        attempt = self._step(batch, lr, step)
        if attempt.out_of_memory:
            self.stepper.record(True)
        else:
            log.info("recorded steps take too much memory; micro-batches are no longer recorded")
            self.watch = None
        return attempt

    def _record_if(self, slow: bool | None) -> None:
        """Record micro-batches from now on, or do not; None: nothing new is known."""
        if slow is None or self.watch is None:
            return
        if slow != (self.stepper.graphs is not None):
            self.stepper.record(slow)
        if self.watch.decided:
            self.watch = None

    def expect_compilation(self) -> None:
        """Other parameters are trained from now on, so that blocks may be compiled once more."""
        self._may_blame_compiler = self._compiled

    def _step(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        terms = self._gradients(batch)
        if isinstance(terms, str):
            gc.collect()  # the failed step's activations hang on its traceback
            self.stepper.forget()
            return Attempt(out_of_memory=terms)
        try:
            return Attempt(self.stepper.update(terms, lr, step))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory in the update of step {step + 1} ({_first_sentence(error)}): weights, gradients, "
                f"moments and average alone need more; try optim.ema_decay=0 or a smaller model; "
                f"the last checkpoint is kept"
            ) from error

    def _gradients(self, batch: StepBatch) -> LossTerms | str:
        """Terms of the loss, or why memory ran out."""
        try:
            terms = self.stepper.gradients(batch)
        except torch.OutOfMemoryError as error:
            return _first_sentence(error)
        except Exception as error:
            if not self._may_blame_compiler or not is_compiler_error(error):
                raise
            log.warning("torch.compile failed, continuing without it: %s", str(error).strip().split("\n")[0])
        else:
            self._may_blame_compiler = False
            return terms
        self._compiled = self._may_blame_compiler = False
        self.stepper.run_eagerly()
        return self._gradients(batch)


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0]


@dataclass
class Resizing:
    """How often the micro-batch is halved at present, and when it may grow. Kept in checkpoints."""

    config: BatchConfig
    halvings: int = 0
    good_steps: int = 0
    """Since the last change."""
    patience: int = 1
    """Growing waits this many times longer than `batch.grow_after`: it doubles whenever growing was too early."""
    grew: bool = False

    def halve(self) -> None:
        """Memory ran out."""
        if self.grew:
            self.patience *= 2
        self.halvings, self.good_steps, self.grew = self.halvings + 1, 0, False

    def step_done(self) -> bool:
        """A step went well; true if the micro-batch is now twice as large."""
        self.good_steps += 1
        due = self.config.grow_after * self.patience
        if not self.halvings or not due or self.good_steps < due:
            return False
        self.halvings, self.good_steps, self.grew = self.halvings - 1, 0, True
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, with the settings that it holds for."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; under other settings of the batch the micro-batch has its full size again."""
        saved = asdict(BatchConfig()) | state.get("config", {})
        if not self.config.adapt or saved != asdict(self.config):
            state = {}
        for name in ("halvings", "good_steps", "patience", "grew"):
            setattr(self, name, state.get(name, getattr(Resizing, name)))


def explain_memory(step: int, shape: StepShape, reason: str) -> str:
    """Why a run ends for want of memory, and what would help."""
    remedy = "shorter documents" if shape.smallest else "batch.adapt=true"
    return (
        f"out of memory at step {step + 1} with micro-batches of {shape.caps.num_tokens} tokens ({reason}); "
        f"try speed.activation_checkpointing=block, a smaller model, or {remedy}"
    )


@dataclass
class Rollbacks:
    """What earlier rollbacks mean for the steps to come. Kept in checkpoints."""

    count: int = 0
    lr_factor: float = 1.0
    left_out: list[list[int]] = field(default_factory=list)
    """Ranges of positions in the order of documents that were never trained on."""
    last_step: int | None = None
    """The step that the last rollback restored."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in (asdict(Rollbacks()) | dict(state)).items():
            setattr(self, name, value)

    def add(self, to_step: int, left_out: tuple[int, int], lr_factor: float) -> None:
        """A rollback was done."""
        self.count += 1
        self.lr_factor *= lr_factor
        self.left_out.append(list(left_out))
        self.last_step = to_step

    def choose(
        self, folder: Path, report: Callable[[str], None], held: Mapping[str, Piece] | None = None
    ) -> Snapshot | None:
        """The newest good checkpoint; an older one, where the newest is the one that did not help last time."""
        good = [path for path in reversed(published(folder)) if is_good(path)]
        steps = {path: int(path.name.rpartition("_")[2]) for path in good}
        if good and self.last_step is not None and steps[good[0]] <= self.last_step:
            good.sort(key=lambda path: steps[path] >= (self.last_step or 0))  # stable: older ones first
        for path in good:
            try:
                return load_checkpoint(path, held=held)
            except DamagedError as error:
                report(f"{error}; trying an older checkpoint")
        return None

    def report(self, failed_at: int, most: int, record: Callable[..., None]) -> None:
        """Write the last one into log and ledger; up to step `failed_at` too many updates had been skipped."""
        log.warning(
            "step %d: too many updates skipped; rolling back to step %d (rollback %d of at most %d), leaving out "
            "documents %d to %d of the order, learning rate x %.3g",
            failed_at, self.last_step, self.count, most, *self.left_out[-1], self.lr_factor,
        )  # fmt: skip
        record(
            "rolled_back", step=self.last_step, reason=f"too many updates skipped up to step {failed_at}",
            count=self.count, from_step=failed_at, left_out=self.left_out[-1], lr_factor=self.lr_factor,
        )  # fmt: skip

    def explain_end(self, step: int, settings: TrainConfig, lr: float, folder: Path) -> str:
        """Why no rollback is possible any more, and what would help."""
        why = f"after {self.count} rollbacks (train.max_rollbacks={settings.max_rollbacks})"
        if self.count < settings.max_rollbacks:
            why = "and there is no good checkpoint to return to"
        return (
            f"too many updates up to step {step} were skipped because the gradient was not finite "
            f"(train.skip_budget={settings.skip_budget}), {why}; try optim.lr={lr / 3:.2g} in a new run folder, "
            f"or speed.precision=fp32; the checkpoints are kept in {folder}"
        )


def over_budget(budget: int, skipped: int, longest: int) -> bool:
    """Whether too many updates were skipped: in a row, or between two lines of the log."""
    return max(skipped, longest) >= budget


def is_good(path: Path) -> bool:
    """Whether a checkpoint was saved while updates were not being skipped."""
    try:
        sums = load_checkpoint(path, groups=("log",)).tensors.get("log", {})
    except UserError:
        return False
    return float(sums.get("streak", torch.zeros(()))) == 0.0


def find_bad_documents(stepper: Stepper, reader: StepReader, steps: Sequence[StepRange]) -> list[int]:
    """Positions of documents whose gradient alone is not finite, on this rank, with the weights of now.

    Halves of a step are tried, then halves of those: noise belongs to a document, so it is the same in any company.
    """
    alone = replace(reader, rank=0, world_size=1)
    bad: list[int] = []
    try:
        for where in steps[:_MOST_SEARCHED] if _finite_weights(stepper) else []:
            bad += _bad_within(where, lambda part: not _finite(stepper, _made(stepper, alone, part)))
    except (torch.OutOfMemoryError, UserError) as error:
        log.warning(
            "the search for the document behind a skipped update ended early: %s", _first_sentence(error)
        )
    return bad


def _bad_within(where: StepRange, is_bad: Callable[[StepRange], bool]) -> list[int]:
    """Bad documents of a range; empty if more than half are bad: then the weights are the reason, no document is."""
    bad: list[int] = []
    parts = [where]
    most = max(1, (where.end - where.start) // 2)
    for _ in range(_MOST_TRIES):
        if not parts or len(bad) > most:
            return bad if len(bad) <= most else []
        part = parts.pop()
        if not is_bad(part):
            continue
        if part.end - part.start == 1:
            bad.append(part.start)
        else:
            middle = (part.start + part.end) // 2
            parts += [replace(part, start=middle), replace(part, end=middle)]
    return []


def _finite_weights(stepper: Stepper) -> bool:
    """Where they are not, no document is the reason."""
    shards = stepper.shards
    weights = stepper.denoiser.parameters() if shards is None else shards.held.values()
    sums = torch.stack([weight.detach().double().sum().cpu() for weight in weights])
    finite = bool(torch.isfinite(sums).all())
    return finite if shards is None else not shards.ranks.any(not finite)


def _made(stepper: Stepper, reader: StepReader, where: StepRange) -> StepBatch:
    """Documents of a range; where ranks search together, all have them or all raise."""
    if stepper.shards is None:
        return reader.make(where)
    error: UserError | None = None
    try:
        batch = reader.make(where)
    except UserError as reason:
        error = reason
    if stepper.shards.ranks.any(error is not None):
        raise error or UserError("another rank could not read its documents")
    return batch


def _finite(stepper: Stepper, batch: StepBatch) -> bool:
    """Whether loss and gradients of these documents are; nothing is collected, so DDP and recordings see nothing."""
    if stepper.shards is not None:
        return _finite_together(stepper.shards, stepper, batch)
    weights = [parameter for parameter in stepper.denoiser.parameters() if parameter.requires_grad]
    for parcel in batch.to(stepper.runtime.device).micro_batches:
        part = parcel.open()
        with stepper.runtime.autocast(), torch.compiler.set_stance("force_eager"):
            terms = stepper.objective(stepper.denoiser, part.noisy, part.counts, active=stepper.active)
            gradients = torch.autograd.grad(terms.trained, weights, allow_unused=True)
        sums = [gradient.double().sum() for gradient in gradients if gradient is not None]
        if not torch.isfinite(torch.stack([terms.trained.double(), *sums])).all():
            return False
    return True


def _finite_together(shards: Shards, stepper: Stepper, batch: StepBatch) -> bool:
    """The same where each rank holds a part of the weights: all of them try the same documents."""
    parts = [parcel.open() for parcel in batch.to(stepper.runtime.device).micro_batches]
    with torch.compiler.set_stance("force_eager"):
        terms = shards.run([partial(stepper.pass_over, part) for part in parts])
    sums = [part.grad.double().sum().cpu() for part in shards.held.values() if part.grad is not None]
    losses = [part.trained.double().cpu() for part in terms]
    stepper.optimizers.zero_grad(set_to_none=True)
    return not shards.ranks.any(not bool(torch.isfinite(torch.stack([*losses, *sums])).all()))


def report_skipped(
    stepper: Stepper, reader: StepReader, steps: Sequence[StepRange], what: str
) -> dict[str, Any]:
    """Log which documents were the reason of skipped updates; for the ledger, these and all that were in them."""
    split, order = reader.split, reader.order
    bad = order.documents(np.array(find_bad_documents(stepper, reader, steps), dtype=np.int64))
    ids = split.read(bad).ids.tolist() if len(bad) else []
    named = ", ".join(f"{index} (id {name})" for index, name in zip(bad[:8], ids[:8], strict=True))
    reason = (
        f"the reason is document {named} of split {split.name}" if ids else "no single document is the reason"
    )
    log.warning("%s skipped, their gradient was not finite; %s", what, reason)
    return {"bad_documents": ids, **describe_documents(split, order, steps)}


def describe_documents(split: Split, order: Order, steps: Sequence[StepRange]) -> dict[str, Any]:
    """Steps, positions and document ids of steps, for the ledger."""
    ids: list[int] = []
    for where in steps:
        if len(ids) >= MOST_IDS:
            break
        positions = np.arange(where.start, where.end)[: MOST_IDS - len(ids)]
        ids += split.read(order.documents(positions)).ids.tolist()
    return {
        "steps": [where.step + 1 for where in steps],
        "positions": [[where.start, where.end] for where in steps],
        "documents": ids,
    }
