"""Which parameters a stage of the modes trains, and the change from one stage to the next.

What gets no loss gets no update at all: no gradient step, no weight decay, no momentum, and its average stands still.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmldlm.config import Config
from mmldlm.corruption.times import Stage, mode_weights_at, stage_at
from mmldlm.data.loader import StepRange
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import part_of, unused_parameters
from mmldlm.objective.joint import Active

if TYPE_CHECKING:
    from mmldlm.training.loop import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The losses that exist and the parameters that are updated."""

    active: Active
    names: frozenset[str]
    still: dict[str, slice] = field(default_factory=dict)
    """Parameter -> rows of it that no loss depends on."""


def trained_in(stage: Stage, config: Config, denoiser: Denoiser) -> Trained:
    """What a stage trains: all that its losses depend on, but for the parts that the settings freeze."""
    modelled = denoiser.length_head is not None
    active = Active.of_modes(stage.modes, config.objective, length_modelled=modelled)
    unused = unused_parameters(denoiser, text=active.text, latent=active.latent, length=active.length)
    frozen = {*stage.frozen, *config.train.frozen}
    names = frozenset(
        name
        for name, _ in denoiser.named_parameters()
        if name not in unused.names and part_of(name) not in frozen
    )
    return Trained(active, names, {name: rows for name, rows in unused.rows.items() if name in names})


class ModeStages:
    """Follows the stages of a run and changes what is trained once, at the first step of each."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.number = 0
        """The last stage that was entered; a checkpoint keeps it."""
        self._known: dict[tuple[frozenset[str], tuple[str, ...]], Trained] = {}

    def enter(self, where: StepRange) -> None:
        """Be ready for a step: nothing happens inside a stage."""
        trainer = self.trainer
        epoch = trainer.setup.order.epoch_of(where.start)
        stage = stage_at(trainer.config.corruption, where.step, epoch)
        # asked at every step, because a resume or a rollback may lead into any stage
        trained = self._trained(stage)
        if trainer.stepper.train_only(trained):
            trainer.attempts.expect_compilation()
        if stage.number == self.number:
            return
        self.number = stage.number
        self._tell(where, epoch, stage, trained)

    def fields(self) -> dict[str, int]:
        """For a line of the log, where there are stages."""
        return {"mode_stage": self.number} if self.trainer.config.corruption.mode_schedule else {}

    def _trained(self, stage: Stage) -> Trained:
        key = (stage.modes, stage.frozen)
        if key not in self._known:
            self._known[key] = trained_in(stage, self.trainer.config, self.trainer.setup.denoiser)
        return self._known[key]

    def _tell(self, where: StepRange, epoch: float, stage: Stage, trained: Trained) -> None:
        trainer, config = self.trainer, self.trainer.config
        weights = vars(mode_weights_at(config.corruption, where.step, epoch))
        losses = [name for name, active in vars(trained.active).items() if active]
        frozen = sorted({*stage.frozen, *config.train.frozen})
        log.info(
            "step %d: stage %d of the modes: %s, losses %s, frozen %s", where.step, stage.number,
            ", ".join(f"{mode} {weight:g}" for mode, weight in weights.items()), ", ".join(losses),
            ", ".join(frozen) or "none",
        )  # fmt: skip
        trainer.events.record(
            "modes", step=where.step, stage=stage.number, mode_weights=weights, losses=losses, frozen=frozen,
            trained_parameters=len(trained.names),
        )  # fmt: skip
