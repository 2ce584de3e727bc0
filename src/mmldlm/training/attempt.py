"""A step tried: what can go wrong on a device is turned into an answer instead of the end of the run.

Out of memory is reported, so that the step can be done again in smaller pieces. A compiler that fails is switched off.
And the first steps show whether the host launches slower than the device computes; then micro-batches are recorded.
Only gradients are tried again: the update comes once they are complete.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import torch

from mmldlm.data.loader import StepBatch
from mmldlm.distributed.failures import is_compiler_error
from mmldlm.errors import UserError
from mmldlm.objective.joint import LossTerms
from mmldlm.training.graphs import Graphs, LaunchWatch
from mmldlm.training.setup import Setup, plain_blocks
from mmldlm.training.step import Stepper, StepResult

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """How a step ended: a result, or out of memory."""

    result: StepResult | None = None
    out_of_memory: str = ""


@dataclass
class Attempts:
    """Runs steps."""

    setup: Setup
    stepper: Stepper
    watch: LaunchWatch | None = field(init=False)
    _may_blame_compiler: bool = field(init=False)

    def __post_init__(self) -> None:
        device = self.setup.runtime.device
        undecided = self.setup.config.speed.cuda_graphs is None and device.type == "cuda"
        undecided = undecided and not self.setup.ranks.several
        self.watch = LaunchWatch(device) if undecided else None
        self._may_blame_compiler = self.setup.runtime.compile

    def __call__(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        """One step; nothing of a failed one remains."""
        if self.watch is None:
            return self._step(batch, lr, step)
        attempt, slow = self.watch.measure(lambda: self._step(batch, lr, step))
        if slow is not None:
            log.info(
                "launching takes %.0f %% of a step%s",
                100 * self.watch.median(),
                "; micro-batches are recorded" if slow else "",
            )
            self.stepper.graphs = Graphs() if slow else None
            self.watch = None
        return attempt

    def expect_compilation(self) -> None:
        """Other parameters are trained from now on, so that blocks may be compiled once more."""
        self._may_blame_compiler = self.setup.objective.compiled

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
            log.warning("torch.compile failed, going on without it: %s", str(error).strip().split("\n")[0])
        else:
            self._may_blame_compiler = False
            return terms
        self._may_blame_compiler = False
        plain_blocks(self.setup)
        self.stepper.forget()
        return self._gradients(batch)


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0]
