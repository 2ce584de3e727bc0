"""A step tried: what can go wrong on a device is turned into an answer instead of the end of the run.

Out of memory is reported, so that the step can be done again in smaller pieces. A compiler that fails is switched off.
And the first steps show whether the host launches slower than the device computes; then micro-batches are recorded.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import torch

from mmldlm.data.loader import StepBatch
from mmldlm.distributed.failures import is_compiler_error
from mmldlm.train.graphs import Graphs, LaunchWatch
from mmldlm.train.setup import Setup, plain_blocks
from mmldlm.train.step import Stepper, StepResult

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
    _compiled_once: bool = False

    def __post_init__(self) -> None:
        device = self.setup.runtime.device
        undecided = self.setup.config.speed.cuda_graphs is None and device.type == "cuda"
        undecided = undecided and not self.setup.ranks.several
        self.watch = LaunchWatch(device) if undecided else None

    def __call__(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        """One step; nothing of a failed one remains."""
        attempt = self._watched(batch, lr, step)
        if attempt.result is None:
            gc.collect()  # the failed step's activations hang on its traceback
            self.stepper.forget()
        return attempt

    def _watched(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        if self.watch is None:
            return self._tried(batch, lr, step)
        kept: list[Attempt] = []
        slow = self.watch.measure(lambda: kept.append(self._tried(batch, lr, step)))
        if slow is not None:
            share = sorted(self.watch.shares)[len(self.watch.shares) // 2]
            log.info(
                "launching takes %.0f %% of a step%s",
                100 * share,
                "; micro-batches are recorded" if slow else "",
            )
            self.stepper.graphs = Graphs() if slow else None
            self.watch = None
        return kept[0]

    def _tried(self, batch: StepBatch, lr: float, step: int) -> Attempt:
        try:
            result = self.stepper(batch, lr, step)
        except torch.OutOfMemoryError as error:
            return Attempt(out_of_memory=str(error).split(". ")[0])
        except Exception as error:
            if self._compiled_once or not self.setup.runtime.compile or not is_compiler_error(error):
                raise
            log.warning("torch.compile failed, going on without it: %s", str(error).strip().split("\n")[0])
        else:
            self._compiled_once = True
            return Attempt(result)
        plain_blocks(self.setup)
        self.stepper.objective = self.setup.objective
        self.stepper.forget()
        return self._tried(batch, lr, step)
