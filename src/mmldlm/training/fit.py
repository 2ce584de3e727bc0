"""The training loop: steps, log, validation, checkpoints, recovery, and an orderly end.

`Trainer.fit` starts and resumes. What the run does at a step depends on (settings, step, position) alone. A run is the
list of named parts in `Trainer.parts`; saving, resuming and rolling back are loops over that list.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from typing import Any

import torch

from mmldlm.checkpoint.export import write_description
from mmldlm.checkpoint.save import SCORE
from mmldlm.checkpoint.state import HeldWeights, ModuleWeights, Part, Snapshot, take_snapshot
from mmldlm.config.recipe import config_to_dict, config_to_yaml
from mmldlm.data.loader import StepBatch
from mmldlm.distributed.ranks import Muted
from mmldlm.distributed.replicas import weights_digest
from mmldlm.distributed.stop_broadcast import StopBroadcast
from mmldlm.distributed.straggler import Straggler
from mmldlm.durable import Written
from mmldlm.errors import Interrupted, UserError
from mmldlm.metrics import TrainingLog
from mmldlm.model.denoiser import Denoiser
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import synchronize, versions
from mmldlm.trackers import TrackedRun, open_trackers
from mmldlm.training.checkpoints import (
    WHOLE,
    Checkpoints,
    check_resume,
    check_room,
    report_ignored_init,
    report_other_modes,
)
from mmldlm.training.graphs import LaunchWatch
from mmldlm.training.log_window import LogWindow, gpu_memory
from mmldlm.training.optim import Plateau, judged_loss, lr_at
from mmldlm.training.profile import StepProfiler
from mmldlm.training.recovery import (
    Attempts,
    Resizing,
    Rollbacks,
    explain_memory,
    over_budget,
    report_skipped,
)
from mmldlm.training.setup import Batches, Fields, Hooks, Progress, Setup, launch_key
from mmldlm.training.signals import AskedToStopError, StopFlag, exit_code
from mmldlm.training.start import StartClock
from mmldlm.training.step import BalanceState, ModeStages
from mmldlm.training.watchdog import Watchdog

log = logging.getLogger(__name__)

_LOG = "training_log"
"""Key in a checkpoint's meta: what the log of the curve was when it was saved."""
_STOP, _BAD_DATA = 1, 2
"""Why a rank has no documents for a step; of several ranks, the largest counts."""


class Trainer:
    """A run in progress: its parts, and the loop over its steps."""

    def __init__(
        self, setup: Setup, run: RunFolder, hooks: Hooks, *, stop: StopFlag | None = None,
        clock: StartClock | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock
        """Of the start; None once the first step is done."""
        self.setup, self.config, self.ranks = setup, setup.config, setup.ranks
        self.run, self.hooks, self.stop = run, hooks, stop or StopFlag()
        settings, speed, device = self.config.train, self.config.speed, setup.runtime.device
        self.events: Any = run.open_events() if self.ranks.main else Muted()
        if self.ranks.peers is not None:
            self.ranks.peers.on_silent = self._record
        self.log: Any = Muted()
        self._log_before: Written | None = None
        self.samples: Any = Muted()
        self.profiler: StepProfiler | None = None
        self.stepper = setup.stepper()
        self.shards = self.stepper.shards
        self.checkpoints = Checkpoints(run.checkpoints, settings, self.ranks, self._record, self.shards)
        self.progress = Progress()
        self.window = LogWindow(device, setup.flops_of, setup.peak_flops, self.ranks)
        self.resizing = Resizing(self.config.batch)
        self.rollbacks = Rollbacks()
        self.plateau = Plateau()
        self.straggler = Straggler()
        self.modes = ModeStages(self.config, setup.denoiser, self._record)
        undecided = speed.cuda_graphs is None and device.type == "cuda" and self.shards is None
        together = self.ranks.largest if self.ranks.joined else None
        watch = LaunchWatch(device, launch_key(setup), together) if undecided else None
        self.attempts = Attempts(self.stepper, watch)
        self.batches = Batches(setup, self.stop, self._record)
        leave = hooks.leave if settings.step_timeout_action == "exit" else None
        self.watchdog = Watchdog(run, settings.step_timeout, self._hung, leave=leave, rank=self.ranks.rank)

    @property
    def parts(self) -> dict[str, Part]:
        """All that the next step depends on; a new stateful part is one line here."""
        stepper = self.stepper
        parts: dict[str, Part | None] = {
            "model": HeldWeights(self.shards.held) if self.shards else ModuleWeights(self.setup.denoiser),
            "optimizer": stepper.optimizers,
            "ema": stepper.ema,
            "balance": BalanceState(stepper.balance) if stepper.balance is not None else None,
            "scaler": stepper.scaler,
            "progress": self.progress,
            "log": self.window,
            "resizing": self.resizing,
            "rollbacks": self.rollbacks,
            "plateau": self.plateau,
            "modes": self.modes,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.progress.step

    def fit(self) -> None:
        """Train until the last step, or until a signal asks to stop. Resumes by itself."""
        resumed = self._resume_or_start()
        self._compared = self.step
        self._compare_weights()
        if self.ranks.main:
            self._open_logs(resumed)
        event = "resumed" if resumed else "started"
        self.events.record(event, step=self.step, world_size=self.ranks.world_size)
        try:
            with self.stop, self.watchdog, StopBroadcast(self.ranks, self.stop, self.stop.SIGNALS):
                self.hooks.reporter.start(self.step, self.config.train.steps)
                self._loop()
            self._record_end()
        except BaseException as error:
            orderly = {"exit_code": error.exit_code} if isinstance(error, Interrupted) else {}
            self.events.record(
                "stopped", step=self.step, reason=f"{type(error).__name__}: {error}", **orderly
            )
            if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C does not wait for the disk
                self.checkpoints.saver.leave()
            raise
        finally:
            self.close()

    def _record_end(self) -> None:
        """A run whose last state is not on the disk is not finished: its last steps have to be done again."""
        if self.checkpoints.holds(self.step):
            self.events.record("finished", step=self.step)
        else:
            self.events.record("stopped", step=self.step, reason=self.checkpoints.unsaved or "not saved")

    def close(self) -> None:
        """End the loader and finish what is being written."""
        for part in (
            self.batches,
            self.profiler,
            self.checkpoints.saver,
            self.log,
            self.samples,
            self.events,
        ):
            if part is not None:
                part.close()

    def _loop(self) -> None:
        due, steps = self.config.train, self.config.train.steps
        if received := self._signal_received():
            raise self._interrupted(received)
        self._started("trainer")
        self.setup.settle()
        self._started("kernels and imports")
        self.window.restart_clock()
        while self.step < steps:
            self.watchdog.at(self.step, "step")
            self.train_step(*self.next_batch())
            last, received = self.step == steps, self._signal_received()
            if (self.step % due.log_every == 0 or last) and self._write_line():
                self.roll_back()
                continue
            if last or (due.valid_every and self.step % due.valid_every == 0):
                self._validate()
            if self.step % due.checkpoint_every == 0 or last or received:
                self.save(wait=last or received is not None)
            if received and not last:
                raise self._interrupted(received)

    def train_step(self, batch: StepBatch, waited: float = 0.0) -> None:
        """One update with documents that are on the device, for which the host waited so many seconds."""
        self.setup.denoiser.train()
        if self.stepper.train_only(self.modes.trained_at(batch.where, self._epoch(batch.where.start))):
            self.attempts.expect_compilation()
        self._started("first documents")
        self.window.clock.begin(waited)
        lr = self.lr_at(self.step)
        while not (attempt := self.attempts(batch, lr, self.step)).result:
            batch = self._halved(batch, attempt.out_of_memory)
        self.window.clock.end()
        self.window.add(attempt.result, batch)
        self.progress.advance(batch)
        if self.clock is not None:
            self._report_start(self.clock)
        if self.resizing.step_done():
            self._resized("grown", self.resizing.halvings + 1)
            self.continue_at(self.progress.position)
        if self.profiler is not None:
            self.profiler.step()

    def _started(self, part: str) -> None:
        """A part of the start is done."""
        if self.clock is not None:
            self.clock.done(part)

    def _report_start(self, clock: StartClock) -> None:
        synchronize(self.setup.runtime.device)
        clock.done("first step, compilation included" if self.setup.runtime.compile else "first step")
        self.events.record("first_step", step=self.step, seconds=clock.report())
        self.clock = None

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rate = lr_at(step, self.config.train.steps, self.config.optim, self.plateau.reduction)
        return self.rollbacks.lr_factor * rate

    def next_batch(self) -> tuple[StepBatch, float]:
        """The next step's documents and the seconds waited for them; all ranks have theirs, or all of them stop."""
        began = time.perf_counter()
        batch = next(self.batches)
        kind = 0 if isinstance(batch, StepBatch) else _BAD_DATA
        trouble = self.ranks.largest(_STOP if isinstance(batch, AskedToStopError) else kind)
        if not trouble and isinstance(batch, StepBatch):
            return batch, time.perf_counter() - began
        received = self._signal_received() if trouble == _STOP else None
        self._save_last()
        if received:
            raise self._interrupted(received)
        raise batch if isinstance(batch, UserError) else self.ranks.lost("it could not read its data")

    def _write_line(self) -> bool:
        """Write a line of the log; true if so many updates were skipped that the run has to roll back."""
        self._name_straggler()
        fields = self.window.fields()
        self._compare_weights()
        graphs, balance = self.stepper.graphs, self.stepper.balance
        fields |= {
            "lr": self.lr_at(self.step - 1),
            "epoch": self._epoch(self.progress.position),
            "tokens": self.progress.tokens,
            "documents": self.progress.documents,
            "micro_tokens": self._micro_tokens(self.resizing.halvings, self.step - 1),
            **(balance.fields() if balance is not None else {}),
            **gpu_memory(self.setup.runtime.device, graphs.peak if graphs else 0),
            **self.modes.fields(),
        }
        self.log.write(self.step, **fields)
        self.hooks.reporter.update(self.step, fields)
        self._judge_lr("loss", fields["loss"])
        skipped = int(fields["skipped_steps"])
        bad = self.window.take_skipped(wanted=skipped > 0)
        if skipped and (self.ranks.main or self.shards is not None):
            setup = self.setup
            event = report_skipped(self.stepper, setup.reader(), bad, f"step {self.step}: {skipped} updates")
            self.events.record("skipped", step=self.step, count=skipped, **event)
        return over_budget(self.config.train.skip_budget, skipped, int(fields["longest_skip"]))

    def _name_straggler(self) -> None:
        """In the log and the ledger, when a rank begins to keep the others waiting, and when that is over."""
        if (
            not self.ranks.several
            or not self.straggler.judge(*self.ranks.own_seconds())
            or not self.ranks.main
        ):
            return
        slow = self.straggler.rank
        name = None if slow is None else self.ranks.name_of(slow)
        if name:
            log.warning("step %d: the other ranks wait for %s; look at that machine", self.step, name)
        else:
            log.info("step %d: no rank is waited for any longer", self.step)
        self.events.record("straggler", step=self.step, rank=slow, name=name)

    def _compare_weights(self) -> None:
        """Several ranks train one network: weights that differ end the run before they are saved."""
        if self.shards is not None:
            self.shards.compare(self.step, self._compared)
        elif self.ranks.several:
            digest = weights_digest(self.setup.denoiser.parameters())
            self.ranks.compare_weights(digest, self.step, self._compared)
        self._compared = self.step

    def _validate(self) -> None:
        self.ranks.own.pause()
        with self.watchdog.phase("validation"):
            denoiser = self._averaged()
            if self.ranks.main and denoiser is not None:
                self._validate_here(denoiser)
            self.ranks.barrier()  # the others' next step does not wait for it
        validated = self.progress.validated
        self._judge_lr("valid_loss", validated[1] if validated else float("nan"))

    def _averaged(self) -> Denoiser | None:
        """What is validated; where the network is divided, its average is gathered on the main rank. By all ranks."""
        denoiser, ema = self.setup.denoiser, self.stepper.ema
        if self.shards is None:
            return denoiser
        whole: Denoiser | None = None
        if self.ranks.main:
            with torch.device(self.setup.runtime.device):
                whole = Denoiser(self.config.model, self.setup.data_shape, seed=None)
            whole.to(self.setup.runtime.device).kernels = denoiser.kernels
        parameters = {} if whole is None else dict(whole.named_parameters())
        with torch.no_grad():
            for name, tensor in self.shards.whole(ema.average if ema else self.shards.held):
                if whole is not None:
                    parameters[name].copy_(tensor)
        return whole

    def weights_for_use(self) -> dict[str, torch.Tensor]:
        """The averaged weights for an export, on the main rank. To be called by all ranks."""
        ema = self.stepper.ema
        if self.shards is not None:
            gathered = self.shards.whole(ema.average if ema else self.shards.held)
            host = ((name, tensor.cpu() if self.ranks.main else None) for name, tensor in gathered)
            return {name: tensor for name, tensor in host if tensor is not None}
        return ema.average if ema else self.setup.denoiser.state_dict()

    def _validate_here(self, denoiser: Denoiser) -> None:
        synchronize(self.setup.runtime.device)  # what is still being computed is training
        began = time.perf_counter()
        ema = None if self.shards is not None else self.stepper.ema
        denoiser.eval()
        # decoding changes shape at every step; compiling for each would take longer than it saves
        compiled = self.setup.runtime.compile
        eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
        average = ema.swapped_in() if ema else contextlib.nullcontext()
        with torch.no_grad(), eager, average:
            fields = self.hooks.validate(denoiser)
            samples = self.hooks.decode(denoiser, self.step)
        denoiser.train()
        self.progress.validated = [self.step, float(fields["valid_loss"])] if "valid_loss" in fields else None
        self.log.write(self.step, **fields)
        if samples:
            self.samples.write(self.step, samples=samples)
        self.hooks.reporter.update(self.step, fields)
        log.info("step %d: validation %s", self.step, ", ".join(f"{k} {v:.4f}" for k, v in fields.items()))
        self.window.exclude(time.perf_counter() - began)

    def _judge_lr(self, name: str, loss: float) -> None:
        """Show the plateau schedule a loss, if it is judged on this one; all ranks take the main one's."""
        if judged_loss(self.config) != name:
            return
        before, loss = self.lr_at(self.step), self.ranks.total(loss if self.ranks.main else 0.0)
        if self.plateau.judge(self.step, name, loss, self.config.optim):
            after = self.lr_at(self.step)
            log.info(
                "step %d: %s stopped falling, learning rate %.3g -> %.3g", self.step, name, before, after
            )
            facts = {"judged": name, "best": self.plateau.best, "lr_before": before, "lr_after": after}
            self.events.record("lr_reduced", step=self.step, **facts)

    def save(self, *, wait: bool) -> None:
        """A checkpoint of this step; `wait` until it is durable."""
        self._compare_weights()
        with self.watchdog.phase("save"):
            self.log.sync()
            self.samples.sync()
            self.checkpoints.save(self.snapshot(), wait=wait)
        self.window.clock.forget()
        self.ranks.own.pause()

    def snapshot(self) -> Snapshot:
        """Everything that the next step depends on, and what identifies the run."""
        store, validated = self.setup.store, self.progress.validated
        about: Fields = {
            "settings": config_to_dict(self.config),
            "fingerprint": store.fingerprint,
            "content": store.content,
            WHOLE: True,
            "versions": versions(),
        }
        if self.ranks.main and isinstance(self.log, TrainingLog):
            about[_LOG] = vars(self.log.written())
        if validated is not None and validated[0] == self.step:
            about[SCORE] = validated[1]
        return take_snapshot(self.parts, self.step, about)

    def _resume_or_start(self) -> bool:
        """Restore the newest checkpoint; false if there is none, and the run starts at its first step."""
        snapshot = self.checkpoints.latest()
        if snapshot is None:
            check_room(self.run.path, self.setup.denoiser)
            return False
        report_ignored_init(self.config, snapshot.meta)
        check_resume(self.config, self.setup.store, snapshot.meta, str(self.run.path))
        report_other_modes(self.config, snapshot.meta, self.setup.train_split)
        self.checkpoints.restore(self.parts, snapshot)
        if _LOG in snapshot.meta:
            self._log_before = Written(**snapshot.meta[_LOG])
        self.continue_at(self.progress.position)
        before, now = snapshot.meta["settings"]["train"]["steps"], self.config.train.steps
        if self.step >= now:
            log.info("nothing to do: all %d steps are done; a larger train.steps continues the run", now)
        else:
            log.info("resuming from step %d of %d", self.step, now)
        if now != before:
            rates = [lr_at(self.step, n, self.config.optim, self.plateau.reduction) for n in (before, now)]
            log.warning(
                "train.steps %d -> %d: the learning rate changes from %.2g to %.2g", before, now, *rates
            )
        return True

    def continue_at(self, position: int) -> None:
        """Take the next documents from a position in the order, in micro-batches of the current size."""
        self.progress.position = position
        self.batches.restart(self.step, position, self.setup.plan_halved(self.resizing.halvings))

    def _save_last(self) -> None:
        """Save the last whole step, unless that was done already."""
        self.checkpoints.saver.wait()
        saved = self.checkpoints.holds(self.step) or not self.ranks.main
        if self.step and self.ranks.any(not saved):
            self.save(wait=True)

    def roll_back(self) -> None:
        """Restore the last good checkpoint, and continue past the documents that came after it."""
        settings, failed_at, end = self.config.train, self.step, self.progress.position
        allowed = self.rollbacks.count < settings.max_rollbacks
        snapshot = self.checkpoints.last_good(self.rollbacks) if allowed else None
        if snapshot is None:
            lr, folder = self.config.optim.lr, self.run.path
            raise UserError(self.rollbacks.explain_end(self.step, settings, lr, folder))
        before = self.rollbacks.state_dict()
        self.checkpoints.restore(self.parts, snapshot)
        self.checkpoints.restored_step = None  # that checkpoint has another position
        self.rollbacks.load_state_dict(before)
        self.rollbacks.add(self.step, (self.progress.position, end), settings.rollback_lr_factor)
        self.window.forget_skips()
        self.stepper.forget()
        self.continue_at(end)
        self.rollbacks.report(failed_at, settings.max_rollbacks, self.events.record)
        self.save(wait=True)  # from here on a crash resumes after the rollback, and cuts the log itself
        if self.checkpoints.last_saved == self.step:  # else the next start cuts them, where it resumes
            for lines in (self.log, self.samples):
                lines.rewind(self.step)

    def _halved(self, batch: StepBatch, reason: str) -> StepBatch:
        """The same step in smaller micro-batches, after memory ran out."""
        if self.profiler is not None:
            self.profiler.out_of_memory(self.step)
        shape = self.setup.plan_halved(self.resizing.halvings).at(self.step)
        if not self.config.batch.adapt or shape.smallest:
            raise UserError(explain_memory(self.step, shape, reason))
        self.resizing.halve()
        self._resized("out_of_memory", self.resizing.halvings - 1)
        plan = self.setup.plan_halved(self.resizing.halvings)
        self.batches.restart(self.step + 1, batch.where.end, plan)
        return self.batches.make(batch.where, plan)

    def _resized(self, event: str, halvings_before: int) -> None:
        self.stepper.forget()
        before = self._micro_tokens(halvings_before, self.step)
        after = self._micro_tokens(self.resizing.halvings, self.step)
        log.warning(
            "step %d: %s, micro-batch %d -> %d tokens; the loss stays the same", self.step, event, before, after
        )  # fmt: skip
        self.events.record(event, step=self.step, micro_tokens_before=before, micro_tokens_after=after)

    def _hung(self, step: int, seconds: float, stacks: str) -> None:
        """Called by the watchdog's thread."""
        settings = self.config.train
        leaves = settings.step_timeout_action == "exit"
        log.error(
            "step %d has taken %.0f s (train.step_timeout=%g); the stacks of all threads are in %s%s",
            step, seconds, settings.step_timeout, self.run.path / stacks, "; leaving" if leaves else "",
        )  # fmt: skip
        self.events.record("hung_step", step=step, seconds=round(seconds, 1), stacks=stacks, left=leaves)

    def _signal_received(self) -> signal.Signals | None:
        """The signal that any rank has received: all stop at the same step."""
        number = self.ranks.largest(self.stop.received or 0)
        return signal.Signals(number) if number else None

    def _interrupted(self, received: signal.Signals) -> Interrupted:
        code, again = exit_code(received), "run the same command to resume"
        if not self.step:
            return Interrupted(f"stopped before the first step; {again}", code)
        saved = self.checkpoints.holds(self.step)
        state = (
            "checkpoint saved"
            if saved
            else f"its checkpoint could not be saved, the last is in {self.run.path}"
        )
        return Interrupted(f"stopped after step {self.step}, {state}; {again}", code)

    def _open_logs(self, resumed: bool) -> None:
        """The curve, the samples and the profile; the settings and what the data are are written along."""
        write_description(self.run, self.setup.store)
        self.run.write_config(config_to_yaml(self.config))
        settings, since = self.config.train, self.step if resumed else None
        tracked = TrackedRun(self.run.path, self.config.name, config_to_dict(self.config), since)
        trackers = open_trackers(settings.trackers, tracked)
        self.log = TrainingLog(
            self.run.training_log, resume_step=since, trackers=trackers, expected=self._log_before
        )
        self.samples = TrainingLog(self.run.samples, resume_step=since)
        if settings.profile:
            self.profiler = StepProfiler(self.run.path / "profile", settings, self.setup.runtime.device)

    def _record(self, event: str, **fields: Any) -> None:
        self.events.record(event, **fields)

    def _epoch(self, position: int) -> float:
        return self.setup.order.epoch_of(position)

    def _micro_tokens(self, halvings: int, step: int) -> int:
        return self.setup.plan_halved(halvings).at(step).caps.num_tokens
