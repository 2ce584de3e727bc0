"""What a run does about trouble: updates that were skipped, steps that hang, loaders that die.

Each decision is one function of numbers that the host has anyway, so that several ranks can come to the same one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mmldlm.data.workers import LoaderError, Restarts
from mmldlm.errors import UserError
from mmldlm.training.rollback import BadSteps, Rollbacks, describe_documents, over_budget
from mmldlm.training.watchdog import HUNG, Watchdog

if TYPE_CHECKING:
    from mmldlm.training.loop import Trainer

log = logging.getLogger(__name__)


class Faults:
    """The memory of a run for what went wrong, and its answers."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.settings = trainer, trainer.config.train
        self.rollbacks, self.bad_steps = Rollbacks(), BadSteps()
        self.restarts = Restarts(trainer.config.data.worker_restarts)
        leaves = self.settings.step_timeout_action == "exit"
        self.watchdog = Watchdog(
            trainer.run, self.settings.step_timeout, self._hung, last_resort=leaves, rank=trainer.ranks.rank
        )

    def judge(self, fields: dict[str, Any]) -> bool:
        """Look at a line of the log; true if so many updates were skipped that the run has to go back."""
        step, events = self.trainer.step, self.trainer.events
        skipped, longest = int(fields["skipped_steps"]), int(fields["longest_skip"])
        bad = self.bad_steps.take(wanted=skipped > 0)
        if skipped:
            log.warning("step %d: %d updates skipped, their gradient was not finite", step, skipped)
            events.record("skipped", step=step, count=skipped, **describe_documents(self.trainer.setup, bad))
        return over_budget(self.settings.skip_budget, skipped, longest)

    def roll_back(self) -> None:
        """Go on from the last good checkpoint, past the data that came after it."""
        trainer, rollbacks = self.trainer, self.rollbacks
        failed_at, end = trainer.step, trainer.position
        trainer.saver.wait()
        trainer.ranks.barrier()  # all ranks find the same checkpoints
        allowed = rollbacks.count < self.settings.max_rollbacks
        snapshot = rollbacks.choose(trainer.run.checkpoints, log.warning) if allowed else None
        trainer.check_alike(snapshot)
        if snapshot is None:
            raise UserError(self._beyond_repair())
        before = rollbacks.state()
        trainer.restore(snapshot)
        rollbacks.load(before)
        rollbacks.went(trainer.step, (trainer.position, end), self.settings.rollback_lr_factor)
        self.bad_steps.take(wanted=False)
        trainer.interval.forget_skips()
        trainer.go_on_at(end)
        self._tell_rollback(failed_at)
        trainer.save(wait=True)  # from here on a crash resumes after the rollback, and cuts the log itself
        if trainer.saver.last_saved == trainer.step:  # else the next start cuts them, where it resumes
            for lines in (trainer.log, trainer.samples):
                lines.rewind(trainer.step)

    def _tell_rollback(self, failed_at: int) -> None:
        done, step = self.rollbacks, self.trainer.step
        log.warning(
            "step %d: too many updates skipped; going back to step %d (rollback %d of at most %d), leaving out "
            "documents %d to %d of the order, learning rate x %.3g",
            failed_at, step, done.count, self.settings.max_rollbacks, *done.left_out[-1], done.lr_factor,
        )  # fmt: skip
        facts = {"from_step": failed_at, "left_out": done.left_out[-1], "lr_factor": done.lr_factor}
        reason = f"too many updates skipped up to step {failed_at}"
        self.trainer.events.record("rolled_back", step=step, reason=reason, count=done.count, **facts)

    def _beyond_repair(self) -> str:
        settings, config = self.settings, self.trainer.config
        why = f"after {self.rollbacks.count} rollbacks (train.max_rollbacks={settings.max_rollbacks})"
        if self.rollbacks.count < settings.max_rollbacks:
            why = "and there is no good checkpoint to go back to"
        return (
            f"too many updates up to step {self.trainer.step} were skipped because the gradient was not finite "
            f"(train.skip_budget={settings.skip_budget}), {why}; try optim.lr={config.optim.lr / 3:.2g} in a new "
            f"--run folder, or speed.precision=fp32; the checkpoints are kept in {self.trainer.run.path}"
        )

    def loader_failed(self, error: LoaderError) -> UserError | None:
        """Loader processes died or hung: none if they may be started anew, else what the run ends with."""
        self.trainer.events.record("loader_failed", step=self.trainer.step, reason=str(error))
        return self.restarts.failed(error, self.trainer.position)

    def _hung(self, step: int, seconds: float, stacks: str) -> None:
        """Called by the watchdog's thread."""
        leaves = self.settings.step_timeout_action == "exit"
        log.error(
            "step %d has taken %.0f s (train.step_timeout=%g); where all threads are stands in %s%s",
            step, seconds, self.settings.step_timeout, self.trainer.run.path / stacks, "; leaving" if leaves else "",
        )  # fmt: skip
        self.trainer.events.record(
            "hung_step", step=step, seconds=round(seconds, 1), stacks=stacks, left=leaves
        )
        if leaves:
            self.trainer.hooks.leave(HUNG)
