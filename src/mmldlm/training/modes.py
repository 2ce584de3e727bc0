"""Which parameters a stage of the modes trains, and the change from one stage to the next.

What gets no loss gets no update at all: no gradient step, no weight decay, no momentum, and its average stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmldlm.config import Config
from mmldlm.corruption.times import Stage, mode_weights_at, stage_at
from mmldlm.data.loader import StepRange
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import part_of, unused_parameters
from mmldlm.objective.joint import Active

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
    """Follows the stages of a run; the number of the current one is kept in checkpoints."""

    def __init__(self, config: Config, denoiser: Denoiser, record: Callable[..., None]) -> None:
        self.config, self.denoiser, self.record = config, denoiser, record
        self.number = 0
        self._known: dict[tuple[frozenset[str], tuple[str, ...]], Trained] = {}

    def trained_at(self, where: StepRange, epoch: float) -> Trained:
        """What a step trains, which begins after so many passes over the documents. A new stage is reported.

        Asked at every step, because a resume or a rollback may lead into any stage.
        """
        stage = stage_at(self.config.corruption, where.step, epoch)
        key = (stage.modes, stage.frozen)
        if key not in self._known:
            self._known[key] = trained_in(stage, self.config, self.denoiser)
        if stage.number != self.number:
            self.number = stage.number
            self._report(where, epoch, stage, self._known[key])
        return self._known[key]

    def fields(self) -> dict[str, int]:
        """For a line of the log, where there are stages."""
        return {"mode_stage": self.number} if self.config.corruption.mode_schedule else {}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"stage": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.number = state["stage"]

    def _report(self, where: StepRange, epoch: float, stage: Stage, trained: Trained) -> None:
        weights = vars(mode_weights_at(self.config.corruption, where.step, epoch))
        losses = [name for name, active in vars(trained.active).items() if active]
        frozen = sorted({*stage.frozen, *self.config.train.frozen})
        log.info(
            "step %d: stage %d of the modes: %s, losses %s, frozen %s", where.step, stage.number,
            ", ".join(f"{mode} {weight:g}" for mode, weight in weights.items()), ", ".join(losses),
            ", ".join(frozen) or "none",
        )  # fmt: skip
        self.record(
            "modes", step=where.step, stage=stage.number, mode_weights=weights, losses=losses, frozen=frozen,
            trained_parameters=len(trained.names),
        )  # fmt: skip
