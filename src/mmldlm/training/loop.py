"""The training loop: steps, log, validation, checkpoints, and an orderly end.

The same command starts and resumes. What the run does at a step depends on (settings, step, position) alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mmldlm.checkpoint.load import load_latest
from mmldlm.checkpoint.save import Retention, Saver
from mmldlm.checkpoint.state import Snapshot
from mmldlm.config.recipe import config_to_yaml
from mmldlm.data.loader import Feed, StepBatch, make_loader, plan_steps
from mmldlm.data.workers import POLL_SECONDS, LoaderError, WatchedSteps
from mmldlm.distributed.stop_news import StopNews
from mmldlm.distributed.unheard import unheard
from mmldlm.errors import Interrupted, UserError
from mmldlm.metrics import TrainingLog
from mmldlm.model.denoiser import Denoiser
from mmldlm.run_folder import RunFolder
from mmldlm.training.attempt import Attempts
from mmldlm.training.faults import Faults
from mmldlm.training.interval import Interval
from mmldlm.training.lr import Plateau, judged_loss, lr_at
from mmldlm.training.modes import ModeStages
from mmldlm.training.profile import StepProfiler
from mmldlm.training.resize import Resizing
from mmldlm.training.resume import check_resume, report_ignored_init, start_from
from mmldlm.training.rollback import is_good
from mmldlm.training.setup import Setup
from mmldlm.training.signals import AskedToStopError, StopFlag, StopWaiting, exit_code
from mmldlm.training.state import restore_snapshot, take_snapshot

log = logging.getLogger(__name__)

Fields = dict[str, Any]
_STOP, _BAD_DATA = 1, 2
"""Why a rank has no documents for a step; of several ranks, the largest counts."""


class Reporter(Protocol):
    """Whoever shows the run to people."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins, or goes on, at a step."""
        ...

    def update(self, step: int, fields: Fields) -> None:
        """A line was logged."""
        ...


@dataclass
class Hooks:
    """What the loop calls but does not know: validation and decoding of samples, on the averaged weights."""

    validate: Callable[[Denoiser], Fields]
    decode: Callable[[Denoiser, int], list[Fields]]
    reporter: Reporter
    leave: Callable[[int], Any] = os._exit
    """Ends the process at once with an exit code, when a step hangs and the settings want that."""


@dataclass
class Trainer:
    """A run in progress."""

    setup: Setup
    run: RunFolder
    hooks: Hooks
    step: int = 0
    position: int = 0
    tokens: int = 0
    documents: int = 0
    unsaved: str | None = None
    """Why the newest checkpoint could not be saved, if so."""
    stop: StopFlag = field(default_factory=StopFlag)

    def __post_init__(self) -> None:
        self.config = self.setup.config
        self.stepper = self.setup.stepper()
        self.ranks = self.setup.ranks
        self.interval = Interval(
            self.setup.runtime.device, self.setup.flops_of, self.setup.peak_flops, self.ranks
        )
        self.resizing = Resizing(self.config.batch)
        self.plateau = Plateau()
        self.attempts = Attempts(self.setup, self.stepper)
        self.profiler: StepProfiler | None = None
        self.faults = Faults(self)
        self.stages = ModeStages(self)
        self._resumed_step: int | None = None
        self.watched: WatchedSteps | None = None
        """The loader at work."""
        self.valid_loss: tuple[int, float] | None = None
        """Step and loss of the last validation."""
        self.events = self.run.open_events() if self.ranks.main else unheard()
        self.saver = self._open_saver() if self.ranks.main else unheard()

    def _open_saver(self) -> Saver:
        due = self.config.train
        return Saver(
            self.run.checkpoints,
            keep=due.keep_checkpoints,
            spared=Retention(due.keep_best, due.keep_every, is_good),
            on_error=self._save_failed,
            on_saved=self._saved,
        )

    def fit(self) -> None:
        """Train until the last step or until told to stop; resumes by itself."""
        resumed = self._resume()
        self.log: TrainingLog
        self.samples: TrainingLog
        self.log, self.samples = self._open_logs(resumed) if self.ranks.main else (unheard(), unheard())
        self.events.record(
            "resumed" if resumed else "started", step=self.step, world_size=self.ranks.world_size
        )
        if self.config.train.profile and self.ranks.main:
            self.profiler = StepProfiler(
                self.run.path / "profile", self.config.train, self.setup.runtime.device
            )
        try:
            with self.stop, self.faults.watchdog, StopNews(self.ranks, self.stop, self.stop.SIGNALS):
                self.hooks.reporter.start(self.step, self.config.train.steps)
                self._train()
            self.events.record("finished", step=self.step)
        except BaseException as error:
            orderly = {"exit_code": error.exit_code} if isinstance(error, Interrupted) else {}
            reason = f"{type(error).__name__}: {error}"
            self.events.record("stopped", step=self.step, reason=reason, **orderly)
            if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C does not wait for the disk
                self.saver.leave()
            raise
        finally:
            if self.profiler is not None:
                self.profiler.close()
            for part in (self.saver, self.log, self.samples, self.events):
                part.close()

    def _open_logs(self, resumed: bool) -> tuple[TrainingLog, TrainingLog]:
        """The curve and the samples; the settings are written along."""
        self.run.write_config(config_to_yaml(self.config))
        tensorboard = self.run.tensorboard if self.config.train.tensorboard else None
        since = self.step if resumed else None
        curve = TrainingLog(self.run.training_log, resume_step=since, tensorboard=tensorboard)
        return curve, TrainingLog(self.run.samples, resume_step=since)

    def _asked_to_stop(self) -> signal.Signals | None:
        """The signal that any rank has received: all leave at the same step."""
        number = self.ranks.largest(self.stop.received or 0)
        return signal.Signals(number) if number else None

    def _train(self) -> None:
        if stopped := self._asked_to_stop():
            raise self._interrupted(stopped)
        with contextlib.closing(self._batches()) as batches:
            self.interval.restart_clock()
            self._steps(batches)

    def _steps(self, batches: Iterator[StepBatch | UserError]) -> None:
        while self.step < self.config.train.steps:
            self.faults.watchdog.at(self.step, "step")
            began = time.perf_counter()
            batch = next(batches)
            trouble = self.ranks.largest(_trouble(batch))
            if trouble:
                raise self._stopped_waiting() if trouble == _STOP else self._without_data(batch)
            assert isinstance(batch, StepBatch)
            self._one_step(batch, time.perf_counter() - began)
            due, last = self.config.train, self.step == self.config.train.steps
            stopped = self._asked_to_stop()
            if (self.step % due.log_every == 0 or last) and self._write_log():
                self.faults.roll_back()
                continue
            if last or (due.valid_every and self.step % due.valid_every == 0):
                self._validate()
            if self.step % due.checkpoint_every == 0 or last or stopped:
                self.save(wait=last or stopped is not None)
            if stopped and not last:
                raise self._interrupted(stopped)

    def _without_data(self, batch: StepBatch | UserError) -> UserError:
        """Bad data, met in a worker of any rank, is told here, and nothing is lost."""
        self._save_last()
        return batch if isinstance(batch, UserError) else self.ranks.lost("it could not read its data")

    def _save_last(self) -> None:
        """Save the last whole step, unless it is there already."""
        self.saver.wait()
        saved = self.step in (self.saver.last_saved, self._resumed_step) if self.ranks.main else True
        if self.step and self.ranks.any(not saved):
            self.save(wait=True)

    def _stopped_waiting(self) -> Interrupted:
        """A rank was asked to stop while it waited for data; the others have theirs, or do not wait any more."""
        stopped = self._asked_to_stop()
        assert stopped is not None
        self._save_last()
        return self._interrupted(stopped)

    def _interrupted(self, received: signal.Signals) -> Interrupted:
        if not self.step:
            return Interrupted(
                "stopped before the first step; run the same command to go on", exit_code(received)
            )
        saved = self.step in (self.saver.last_saved, self._resumed_step)
        state = (
            "checkpoint saved"
            if saved
            else f"but the checkpoint could not be saved; the last is in {self.run.path}"
        )
        return Interrupted(
            f"stopped after step {self.step}, {state}; run the same command to go on", exit_code(received)
        )

    def _batches(self) -> Generator[StepBatch | UserError, None, None]:
        """The steps from here on, on the device; begun anew when the micro-batch has changed its size."""
        setup, runtime = self.setup, self.setup.runtime
        while True:
            self._begin_anew = False
            steps = plan_steps(setup.order, setup.train_split.lengths, setup.plan, self.position, self.step)
            loader = make_loader(
                setup.reader(), steps, num_workers=runtime.num_workers,
                prefetch=self.config.data.prefetch, pin_memory=runtime.pin_memory, poll_seconds=POLL_SECONDS,
            )  # fmt: skip
            watched = self.watched = WatchedSteps(loader, self.config.data.worker_timeout, self.stop.waiting)
            feed = Feed(watched, runtime.device, overlap=self.config.speed.overlap_copies)
            try:
                yield from self._fed(feed)
            finally:
                watched.kill()  # a process that is stuck would keep this one from ending

    def _fed(self, feed: Feed) -> Iterator[StepBatch | UserError]:
        """What one loader gives, until it is to begin anew or fails."""
        while not self._begin_anew:
            try:
                batch = next(feed)
            except StopWaiting:
                yield AskedToStopError("asked to stop while waiting for data")
                return
            except LoaderError as error:
                if told := self.faults.loader_failed(error):
                    yield told
                return
            self.faults.restarts.step_done()
            yield batch

    def _one_step(self, batch: StepBatch, waited: float) -> None:
        self.setup.denoiser.train()
        self.stages.enter(batch.where)
        self.interval.clock.begin(waited)
        lr = self._lr_at(self.step)
        while not (tried := self.attempts(batch, lr, self.step)).result:
            batch = self._smaller(batch, tried.out_of_memory)
        self.interval.clock.end()
        self.interval.add(tried.result, batch)
        self.faults.bad_steps.add(batch.where, tried.result.skipped)
        self.step += 1
        self.position = batch.where.end
        self.tokens += batch.num_tokens
        self.documents += batch.num_documents
        if self.resizing.step_done():
            self._set_halvings("grown")
        if self.profiler is not None:
            self.profiler.step()

    def _smaller(self, batch: StepBatch, reason: str) -> StepBatch:
        """The same step in smaller micro-batches, after memory ran out."""
        if self.profiler is not None:
            self.profiler.out_of_memory(self.step)
        shape = self.setup.plan.at(self.step)
        if not self.config.batch.adapt or shape.smallest:
            raise UserError(
                f"out of memory at step {self.step + 1} with micro-batches of {shape.caps.num_tokens} tokens "
                f"({reason}); try speed.activation_checkpointing=block, a smaller model, or "
                f"{'shorter documents' if shape.smallest else 'batch.adapt=true'}"
            )
        self.resizing.halve()
        self._set_halvings("out_of_memory")
        made = self.setup.reader().make(batch.where)
        return (made.pin_memory() if self.setup.runtime.pin_memory else made).to(self.setup.runtime.device)

    def _set_halvings(self, event: str) -> None:
        before = self.setup.plan.at(self.step).caps.num_tokens
        self.setup.halvings, self._begin_anew = self.resizing.halvings, True
        self.stepper.forget()
        after = self.setup.plan.at(self.step).caps.num_tokens
        log.warning(
            "step %d: %s, micro-batch %d -> %d tokens; the loss stays the same",
            self.step,
            event,
            before,
            after,
        )
        self.events.record(event, step=self.step, micro_tokens_before=before, micro_tokens_after=after)

    def _lr_at(self, step: int) -> float:
        rate = lr_at(step, self.config.train.steps, self.config.optim, self.plateau.reduction)
        return self.faults.rollbacks.lr_factor * rate

    def _judge_lr(self, name: str, loss: float) -> None:
        """Show the plateau schedule a loss, if this is the one it is judged on; all ranks take the main one's."""
        if judged_loss(self.config) != name:
            return
        before, loss = self._lr_at(self.step), self.ranks.total(loss if self.ranks.main else 0.0)
        if self.plateau.judge(self.step, name, loss, self.config.optim):
            after = self._lr_at(self.step)
            log.info(
                "step %d: %s has stopped falling, learning rate %.3g -> %.3g", self.step, name, before, after
            )
            facts = {"judged": name, "best": self.plateau.best, "lr_before": before, "lr_after": after}
            self.events.record("lr_reduced", step=self.step, **facts)

    def _write_log(self) -> bool:
        """Write a line; true if so many updates were skipped that the run has to go back."""
        fields = self.interval.fields()
        fields |= {
            "lr": self._lr_at(self.step - 1),
            "epoch": self.position / self.setup.order.num_documents,
            "tokens": self.tokens,
            "documents": self.documents,
            "micro_tokens": self.setup.plan.at(self.step - 1).caps.num_tokens,
            **(self.stepper.balance.fields() if self.stepper.balance is not None else {}),
            **_gpu_memory(self.setup.runtime.device, self.stepper.graphs.peak if self.stepper.graphs else 0),
        }
        fields |= self.stages.fields()
        self.log.write(self.step, **fields)
        self.hooks.reporter.update(self.step, fields)
        self._judge_lr("loss", fields["loss"])
        return self.faults.judge(fields)

    def go_on_at(self, position: int) -> None:
        """After a rollback: take the next documents from another position."""
        self.position, self._begin_anew = position, True
        self._resumed_step = None  # that checkpoint has another position
        self.stepper.forget()

    def _validate(self) -> None:
        with self.faults.watchdog.phase("validation"):
            if self.ranks.main:
                self._validate_here()
            self.ranks.barrier()  # the others' next step does not wait for it
        self._judge_lr("valid_loss", self.valid_loss[1] if self.valid_loss else float("nan"))

    def _validate_here(self) -> None:
        if self.setup.runtime.device.type == "cuda":
            torch.cuda.synchronize()  # what is still being computed is training
        began = time.perf_counter()
        denoiser, ema = self.setup.denoiser, self.stepper.ema
        denoiser.eval()
        # decoding changes shape at every step; compiling for each would take longer than it saves
        eager = torch.compiler.set_stance("force_eager")
        average = ema.swapped_in() if ema else contextlib.nullcontext()
        with torch.no_grad(), eager, average:
            fields = self.hooks.validate(denoiser)
            samples = self.hooks.decode(denoiser, self.step)
        denoiser.train()
        self.valid_loss = (self.step, float(fields["valid_loss"])) if "valid_loss" in fields else None
        self.log.write(self.step, **fields)
        if samples:
            self.samples.write(self.step, samples=samples)
        self.hooks.reporter.update(self.step, fields)
        log.info("step %d: validation %s", self.step, ", ".join(f"{k} {v:.4f}" for k, v in fields.items()))
        self.interval.exclude(time.perf_counter() - began)

    def save(self, *, wait: bool) -> None:
        """A checkpoint of this step; `wait` until it is durable."""
        with self.faults.watchdog.phase("save"):
            self.log.sync()
            self.samples.sync()
            self.saver.save(self.snapshot(), wait=wait)
            self.ranks.barrier()  # nobody leaves before the checkpoint is complete, and no step waits for it
        self.interval.clock.forget()

    def snapshot(self) -> Snapshot:
        """Everything that the next step depends on."""
        return take_snapshot(self)

    def _resume(self) -> bool:
        self.ranks.barrier()  # the main rank has put the folder in order
        snapshot = load_latest(self.run.checkpoints, report=log.warning)
        self.check_alike(snapshot)
        if snapshot is None:
            self._begin()
            return False
        report_ignored_init(self.config, snapshot.meta)
        check_resume(self.config, self.setup.store, snapshot.meta, str(self.run.path))
        self.restore(snapshot)
        self._resumed_step = self.step
        log.info("going on from step %d of %d", self.step, self.config.train.steps)
        before, now = snapshot.meta["settings"]["train"]["steps"], self.config.train.steps
        if now != before:
            rates = [
                lr_at(self.step, steps, self.config.optim, self.plateau.reduction) for steps in (before, now)
            ]
            log.warning("train.steps %d -> %d: the learning rate goes from %.2g to %.2g", before, now, *rates)
        return True

    def _begin(self) -> None:
        """A new run: from new weights, or from those of `train.init`."""
        if self.config.train.init is None:
            return
        start_from(self.config.train.init, self.setup.denoiser, self.setup.store, self.config)
        if self.stepper.ema is not None:
            self.stepper.ema.load(dict(self.setup.denoiser.named_parameters()))

    def check_alike(self, snapshot: Snapshot | None) -> None:
        """Refuse checkpoints that differ from rank to rank."""
        if not self.ranks.all_equal(None if snapshot is None else (snapshot.step, snapshot.meta["position"])):
            raise UserError(
                f"{self.run.checkpoints}: the ranks do not see the same checkpoint there; "
                f"the run folder must be on a disk that all machines share"
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Put everything back that a checkpoint holds."""
        restore_snapshot(self, snapshot)

    def _save_failed(self, error: Exception) -> None:
        log.error("%s", error)
        self.unsaved = str(error)
        self.events.record("save_failed", step=getattr(error, "step", self.step), reason=str(error))

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        self.unsaved = None
        log.info("step %d: checkpoint %s written in %.1f s", step, path.name, seconds)


def _trouble(batch: StepBatch | UserError) -> int:
    if isinstance(batch, StepBatch):
        return 0
    return _STOP if isinstance(batch, AskedToStopError) else _BAD_DATA


def _gpu_memory(device: torch.device, recorded: int) -> Fields:
    """Peaks since the last line; what recorded graphs use is not allocated again when they are replayed."""
    if device.type != "cuda":
        return {"gpu_memory_allocated": None, "gpu_memory_reserved": None}
    peaks = {
        "gpu_memory_allocated": max(recorded, torch.cuda.max_memory_allocated(device)),
        "gpu_memory_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
