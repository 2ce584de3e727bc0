"""What can happen to a run of our own trainer, injected where it would happen: data, memory, disk, time, weights.

Each function takes a trainer that is set up but not started. Time is simulated: a step costs half a second of it, so
that rates and waits are the same on every machine.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from mmldlm.metrics import text_log
from mmldlm.training.fit import Trainer
from tests.health.judging import START
from tests.runs import hit_loader

STEP_SECONDS = 0.5
Inject = Callable[[Trainer, "SimulatedTime"], None]


class SimulatedTime:
    """Stands in for the module `time` where the trainer asks for the hour or measures a rate."""

    def __init__(self, seed: int = 0) -> None:
        self.now = START
        self.seconds = STEP_SECONDS
        self._random = random.Random(seed)

    def time(self) -> float:
        return self.now

    perf_counter = time

    def pass_step(self) -> None:
        """A step, with the small unevenness of a quiet machine."""
        self.now += self.seconds * (1 + 0.05 * self._random.random())

    @contextlib.contextmanager
    def inside(self, trainer: Trainer) -> Iterator[None]:
        """The trainer's log, ledger and text log in this time."""
        record = trainer.events.record

        def stamped(event: str, **fields: Any) -> None:
            at = datetime.datetime.fromtimestamp(self.now, datetime.UTC).isoformat(timespec="milliseconds")
            record(event, **{"at": at, **fields})

        before_each_step(trainer, lambda batch: self.pass_step())
        trainer.save = self._taking(0.2, trainer.save)  # type: ignore[method-assign]
        trainer.hooks.validate = self._taking(0.3, trainer.hooks.validate)
        trainer.roll_back = self._taking(0.2, trainer.roll_back)  # type: ignore[method-assign]
        trainer.events.record = stamped  # type: ignore[method-assign]
        with contextlib.ExitStack() as patches:
            for module in (
                "mmldlm.training.log_window",
                "mmldlm.training.fit",
                "mmldlm.metrics",
                "mmldlm.api.train",
            ):
                patches.enter_context(mock.patch(f"{module}.time", self))
            root = patches.enter_context(text_log(trainer.run.train_log, console=logging.NullHandler()))
            for handler in root.handlers:
                handler.addFilter(self._stamp)
            yield

    def _taking(self, seconds: float, act: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*args: Any, **words: Any) -> Any:
            self.now += seconds
            return act(*args, **words)

        return taking

    def _stamp(self, record: logging.LogRecord) -> bool:
        record.created, record.msecs = self.now, 1000 * (self.now % 1)
        return True


def before_each_step(trainer: Trainer, act: Callable[[Any], object]) -> None:
    """Something that happens when the data of a step is there; `trainer.step` steps are done by then."""
    run = trainer.train_step

    def one_step(batch: Any, waited: float) -> None:
        act(batch)
        run(batch, waited)

    trainer.train_step = one_step  # type: ignore[method-assign]


def after_each_step(trainer: Trainer, act: Callable[[], object]) -> None:
    """Something that happens when a step is done."""
    run = trainer.train_step

    def one_step(batch: Any, waited: float) -> None:
        run(batch, waited)
        act()

    trainer.train_step = one_step  # type: ignore[method-assign]


def not_finite(is_bad: Callable[[int], bool], *, times: int = 10**9) -> Inject:
    """Documents that are not numbers, at steps (counted from 1) that are bad, so often at most."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        left = iter(range(times))

        def act(batch: Any) -> None:
            if is_bad(trainer.step + 1) and next(left, None) is not None:
                batch.micro_batches[0].open().noisy.noisy_latents[0] = float("nan")

        before_each_step(trainer, act)

    return inject


def little_memory(most_tokens: Callable[[int], int]) -> Inject:
    """A micro-batch with more tokens than fit at a step does not."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        run = trainer.stepper.pass_over

        def pass_over(micro_batch: Any) -> Any:
            if len(micro_batch.noisy.tokens) > most_tokens(trainer.step + 1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return run(micro_batch)

        trainer.stepper.pass_over = pass_over  # type: ignore[method-assign]

    return inject


def slow_reader(from_step: int, seconds: float) -> Inject:
    """The store answers late from a step on."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        read = trainer.setup.train_split.read

        def late(indices: Any) -> Any:
            if trainer.step + 1 >= from_step:
                clock.now += seconds
            return read(indices)

        trainer.setup.train_split.read = late  # type: ignore[method-assign]

    return inject


def slow_steps(from_step: int, factor: float) -> Inject:
    """The machine is slower from a step on."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        def act(batch: Any) -> None:
            clock.seconds = STEP_SECONDS * (factor if trainer.step + 1 >= from_step else 1.0)

        before_each_step(trainer, act)

    return inject


def full_disk(from_step: int) -> Inject:
    """No checkpoint can be written from a step on."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        publish = trainer.checkpoints.saver._publish

        def refuse(step: int, *rest: Any) -> Any:
            if step >= from_step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return publish(step, *rest)

        trainer.checkpoints.saver._publish = refuse  # type: ignore[method-assign]

    return inject


def hung_step(at: int, *, released: bool) -> Inject:
    """A step that does not end until the watchdog has told of it, or never; its seconds pass in real time too."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        told = trainer.watchdog.on_hung
        seen: list[int] = []
        trainer.watchdog.on_hung = lambda step, seconds, stacks: (  # type: ignore[assignment]
            told(step, seconds, stacks),
            seen.append(step),
        )

        def act(batch: Any) -> None:
            until = time.monotonic() + 60
            while trainer.step + 1 == at and not (seen and released) and time.monotonic() < until:
                time.sleep(0.02)
            clock.now += 40.0 if trainer.step + 1 == at else 0.0

        before_each_step(trainer, act)

    return inject


def killed(at: int) -> Inject:
    """kill -9 by whoever."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        before_each_step(
            trainer, lambda batch: os.kill(os.getpid(), signal.SIGKILL) if trainer.step + 1 == at else None
        )

    return inject


def stopped(at: int) -> Inject:
    """SIGTERM by a scheduler."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        def act(batch: Any) -> None:
            if trainer.step + 1 == at:
                trainer.stop.received = signal.SIGTERM

        before_each_step(trainer, act)

    return inject


def killed_loader(at: int) -> Inject:
    """The loader processes of a step are killed."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        left = [at]

        def act(batch: Any) -> None:
            if trainer.step + 1 in left:
                left.clear()
                hit_loader(trainer, signal.SIGKILL)

        before_each_step(trainer, act)

    return inject


def damaged_shard(at: int) -> Inject:
    """A shard is cut off under the run."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        from mmldlm.errors import UserError

        read = trainer.setup.train_split.read

        def broken(indices: Any) -> Any:
            if trainer.step + 1 >= at:
                raise UserError("shard-00000.arrow: is damaged; run mmldlm prepare again")
            return read(indices)

        trainer.setup.train_split.read = broken  # type: ignore[method-assign]

    return inject


def shrinking_latents(from_step: int, factor: float) -> Inject:
    """The head that predicts latents loses a share of its weights after every step: a decay far too strong."""

    def inject(trainer: Trainer, clock: SimulatedTime) -> None:
        head = trainer.setup.denoiser.latent_head

        def act() -> None:
            if trainer.step >= from_step:
                with torch.no_grad():
                    for weight in head.parameters():
                        weight.mul_(factor)

        after_each_step(trainer, act)

    return inject


def empty_latents(trainer: Trainer, clock: SimulatedTime) -> None:
    """The text stream never sees the latent: what is embedded of it is zero."""
    trainer.setup.denoiser.latent_embed.register_forward_hook(lambda module, inputs, output: 0 * output)


def nothing(trainer: Trainer, clock: SimulatedTime) -> None:
    """All is well."""
