"""Where a line stands in its run: counters of steps, epochs and bars -> one step that only grows, and run boundaries.

A counter `k/n` without a name, or a bar, that starts again is an epoch. A named step that falls back to where the run
began is a new run; one that falls back less is a rollback. Lines without any counter are counted. An epoch that falls
back beside a step that goes on, as in DeepSpeed's lines of timing, is that of somebody who does not count epochs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STILL = 3
"""So many losses without a counter, and the bar before them was not that of training."""


@dataclass(slots=True)
class Marks:
    """What one line tells about its place."""

    step: float | None = None
    step_total: float | None = None
    epoch: float | None = None
    epoch_total: float | None = None
    counter: tuple[float, float] | None = None
    """An unnamed k/n, such as that of a bar."""

    def any(self) -> bool:
        return self.step is not None or self.counter is not None or self.epoch is not None


class Stepper:
    """Follows the counters of one file."""

    def __init__(self, *, splits: bool = True) -> None:
        self.splits = splits
        """Whether a step that falls back to the start begins a new run."""
        self.run = 0
        self._epoch_before: float | None = None
        """Where the run before this one was left."""
        self._num_returns = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything: another run begins."""
        self.step: int | None = None
        self.total: int | None = None
        self.total_is_sure = False
        """Whether reaching the total is the end: not if a bar may be that of one epoch."""
        self.epoch: float | None = None
        self.epochs: float | None = None
        self.by_epoch = False
        """Whether the only counter is the epoch."""
        self._first_epoch = 0.0
        self.offset = 0.0
        """Steps before the counter started again."""
        self.inner: float | None = None
        self.inner_total: float | None = None
        self._first: float | None = None
        self._named = False
        self._advanced = False
        self._num_losses = 0
        self._epoch_of_loss: float | None = None
        self._counting = False
        self._is_over = self._is_announced = False
        self._is_same_epoch = False
        """The line tells its epoch, and it is that of the line before: its counter did not fall for a new one."""
        self._pair: tuple[float | None, float | None] = None, None
        self._num_swaps, self._is_swapped = 0, False
        self._has_epochs = False
        """Whether epochs are counted beside a bar or above it, so that a bar is that of one epoch."""
        self._num_still = 0
        """Losses since the bar moved; -1 once a line of the bar had one itself."""

    def is_counting(self) -> bool:
        """Whether a counter of training was read."""
        return self.inner is not None

    def counts_lines(self) -> bool:
        """Whether the log has no counter, so that its lines are counted."""
        return self._counting and self.inner is None

    def announce(self) -> None:
        """The program says that a training starts: the next counter that falls back to the start is another run."""
        self._is_announced = self._num_losses > 0

    def repeats_epoch(self, marks: Marks) -> bool:
        """Whether a line counts by epochs alone and its epoch had a loss already, or no epoch had one."""
        is_by_epoch = marks.epoch is not None and marks.step is None and marks.counter is None
        return is_by_epoch and self._epoch_of_loss in (None, marks.epoch)

    def finish(self) -> None:
        """The program says that training is over; a counter that falls back afterwards is another run."""
        self._is_over = True

    def place(self, marks: Marks, *, has_loss: bool, is_valid: bool = False) -> bool:
        """Take a line in; whether it begins a new run."""
        begins, epoch_before = False, self.epoch
        if marks.step is not None and marks.step_total is not None:
            marks = self._unswapped(marks)
        self._doubt_bar(marks, has_loss=has_loss)
        goes_on = not has_loss and marks.step is not None and marks.step >= (self.inner or math.inf)
        if marks.epoch is not None and not (goes_on and marks.epoch < (self.epoch or 0.0)):
            whole = marks.epoch == int(marks.epoch) and (marks.counter is not None or not has_loss)
            self._has_epochs = self._has_epochs or whole
            begins = self._enter_epoch(marks.epoch, marks.epoch_total)
        if marks.step is not None:
            begins = self._count(marks.step, marks.step_total, named=True) or begins
        elif marks.counter is not None and not (self._named and self.inner is not None):
            self._is_same_epoch = marks.epoch is not None and marks.epoch == epoch_before
            begins = self._count(*marks.counter, named=False) or begins
            self._is_same_epoch = False
        elif has_loss and self.inner is None:
            self._count_line()
        elif is_valid and self.inner is None and self.epoch is not None and self._epoch_of_loss is None:
            self.step, self.by_epoch = int(self.epoch), True
        self._num_losses += has_loss or is_valid
        self._is_announced = self._is_announced and not has_loss
        return begins

    def _doubt_bar(self, marks: Marks, *, has_loss: bool) -> None:
        """A bar that stands still while losses come, or has another total before the first loss, read the data."""
        if self._named or self.inner is None or self.offset or marks.step is not None:
            return
        if marks.counter is None:
            self._num_still += has_loss and self._num_still >= 0
            is_other = self._num_still >= _STILL
        else:
            is_other = not self._num_losses and marks.counter[1] != self.inner_total
            self._num_still = -1 if has_loss or self._num_still < 0 else 0
        if is_other:
            self.step = self.total = self.inner = self.inner_total = self._first = None
            self.total_is_sure, self._num_still = False, 0

    def _unswapped(self, marks: Marks) -> Marks:
        """`Batch 3/400` where 3 is the epoch and 400 the step: the total grows while the counter stands still."""
        before, self._pair = self._pair, (marks.step, marks.step_total)
        grows = (
            before[0] == marks.step and (before[1] or 0) < (marks.step_total or 0) and before[1] is not None
        )
        self._num_swaps += grows
        if self._num_swaps < 2:
            return marks
        if not self._is_swapped:
            self._is_swapped, self.inner, self._first, self.epoch, self.epochs = True, None, None, None, None
            self.offset, self.total, self.inner_total = 0.0, None, None
        return Marks(step=marks.step_total, epoch=marks.step)

    def _enter_epoch(self, epoch: float, total: float | None) -> bool:
        begins = False
        if self.epoch is None:
            self._first_epoch = epoch
        elif epoch < self.epoch:
            if self.splits and self._is_long(3) and (epoch <= self._first_epoch or self._is_over):
                begins = self._new_run()
                self._first_epoch = epoch
        else:
            self._advanced = self._advanced or int(epoch) > int(self.epoch)
            if self._first_epoch == self.epoch < epoch - 1 and epoch == self._epoch_before:
                self._num_returns += 1  # two programs write into this file; what falls back is the other one
                self.splits = self.splits and self._num_returns < 2
        self.epoch, self.epochs = epoch, total or self.epochs
        return begins

    def _new_run(self) -> bool:
        self.run += 1
        self._epoch_before = self.epoch
        self.reset()
        return True

    def _count(self, value: float, total: float | None, *, named: bool) -> bool:
        begins = False
        if named and not self._named:
            self._named, self.inner, self.offset, self._first = True, None, 0.0, None
        again = self._advanced and value == self.inner == self._first
        if self.inner is not None and (value < self.inner or again):
            begins = self._fall_back(value, named=named)
        if self.inner is None:
            self._first = value
            if not named and total:
                self.offset = self._before_epoch() * total
        self.inner, self.inner_total, self._advanced = value, total or self.inner_total, False
        if self.by_epoch:
            self.by_epoch, self.total = False, None
        self.step = int(self.offset + value)
        self._find_total(total, named=named)
        return begins

    def _fall_back(self, value: float, *, named: bool) -> bool:
        inner, total, first = self.inner or 0.0, self.inner_total, self._first or 0.0
        if self.splits and self._is_over and self._num_losses >= 3:
            return self._new_run()
        full = bool(total) and inner >= 0.9 * (total or 0.0)
        if self._is_same_epoch and not full:
            is_first = self.epoch is not None and self.epoch <= self._first_epoch and value <= max(first, 1.0)
            return self.splits and is_first and self._is_long(inner - first) and self._restart(named=named)
        if (
            not named
            or self._advanced
            or (full and value <= first + 0.1 * (total or 0.0) and self.epoch is not None)
        ):
            whole = total if total and (full or not named or self._advanced) else inner + (first == 0)
            self.offset += whole
            if total and not named:  # the bars of some epochs may be missing
                self.offset = max(self.offset, self._before_epoch() * total)
        elif self.splits and value <= max(first, 1.0) and self._is_long(inner - first):
            return self._restart(named=named)
        return False

    def _before_epoch(self) -> float:
        """Epochs before this one, if epochs are counted."""
        if self.epoch is None or self.epoch != int(self.epoch):
            return 0.0
        base = 1 if (self.epochs and self._first_epoch >= 1) or self._first_epoch == 1 else 0
        return max(0.0, self.epoch - base)

    def _restart(self, *, named: bool) -> bool:
        """Another run, in the epoch that its line has told already."""
        epoch, epochs = self.epoch, self.epochs
        self._new_run()
        self.epoch, self.epochs, self._first_epoch, self._named = epoch, epochs, epoch or 0.0, named
        return True

    def _is_long(self, num_steps: float) -> bool:
        """Whether a run may have ended here; one that another announced start follows may be short."""
        return self._num_losses >= (1 if self._is_announced else 3) and (num_steps >= 3 or self._is_announced)

    def _find_total(self, total: float | None, *, named: bool) -> None:
        if not total:
            return
        if named and not self.offset:
            self.total, self.total_is_sure = int(total), self.epoch is None or not self.epochs
        elif self.epochs:
            from_zero = self._first_epoch == 0  # `0/9` may be the first of nine or of ten
            is_last = from_zero and self.epoch == self.epochs
            self.total = int((self.epochs + is_last) * total)
            self.total_is_sure = is_last or not from_zero
        elif self.offset or self._has_epochs:
            self.total, self.total_is_sure = None, False
        else:
            self.total, self.total_is_sure = int(total), False

    def _count_line(self) -> None:
        """A loss without a step: by its epoch if every epoch has one, else lines are counted."""
        again = self.epoch is not None and self.epoch == self._epoch_of_loss
        self._epoch_of_loss = self.epoch
        whole = self.epoch is not None and self.epoch == int(self.epoch)
        self._counting = self._counting or again or not whole
        self.by_epoch = not self._counting
        if self._counting:
            self.step, self.total, self.total_is_sure = (self.step or 0) + 1, None, False
        else:
            self.step = int(self.epoch or 0)
            self.total, self.total_is_sure = (
                (int(self.epochs), True) if self.epochs else (self.total, self.total_is_sure)
            )
