"""Losses that are not finite, jump, rise for good, or no longer fall."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice

from runwatch.alerts import AlertBook
from runwatch.blocks import Block
from runwatch.bucket_lists import lists_of
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Curve, Window, median, spread, sureness
from runwatch.records import LOSSES, Record
from runwatch.settings import MonitorSettings

Lists = dict[str, list[float]]
_BUCKET_LINES = 1024
"""Lines of losses per time bucket that are kept: as far back as their baselines reach when the loss jumps."""


class NonfiniteLoss(Detector):
    """M101."""

    def line(self, record: Record) -> None:
        values = record.values
        for name in LOSSES:
            value = values.get(name)
            if value is not None and not math.isfinite(value):
                self.book.fire("M101", f"{name} is {value} at step {record.step}")
                return

    def absorb(self, block: Block) -> bool:
        return True  # blocks are finite

    def event(self, record: Record) -> None:
        if record.event == "bad_loss":
            self.book.fire("M101", record.text, step=record.step)


class _Baseline:
    """History of one loss. Spikes stay out of it; a level that lasts for a whole window becomes the new one."""

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings, self.history, self.outliers = settings, Window(settings.history_lines), 0
        self.largest = self.tail = 0.0
        """Largest rise that was no spike, as a share of the usual value; forgotten much more slowly than the window."""

    def judge(self, value: float) -> float:
        """How many times the threshold of a spike is reached (0.0 without enough history), then take it in."""
        usual = self.history.median()
        self.largest = max(self.largest, abs(value)) if len(self.history) < 5 else self.largest
        size = max(abs(usual), 0.01 * self.largest, 1e-12)  # once a loss is near 0, doubling means nothing
        excess = self._excess(value - usual, size)
        self.outliers = self.outliers + 1 if excess >= 1.0 else 0
        if excess < 1.0 or self.outliers > self.settings.history_lines:
            if len(self.history) >= 5:
                self.tail = max(0.999 * self.tail, (value - usual) / size)
            self.history.add(value)
        return excess

    def take(self, block: Block, name: str) -> bool:
        """Judge many values at once; False, and nothing changed, if one is a spike or there is little history."""
        if not self.history.is_full() or len(self.history) < max(5, self.settings.warmup_lines):
            return False
        values, usuals = block.values[name], block.medians(name, self.history)
        least, share, tail = max(0.01 * self.largest, 1e-12), self.settings.spike_rise, self.tail
        for idx, (value, usual) in enumerate(zip(values, usuals, strict=False)):
            size = abs(usual)
            size = size if size > least else least
            rise = value - usual
            if rise > share * size and self._is_spike(rise, size, tail, idx, values):
                return False
            tail = 0.999 * tail
            if rise / size > tail:
                tail = rise / size
        self.outliers, self.tail = 0, tail
        self.history.extend(values)
        return True

    def _is_spike(self, rise: float, size: float, tail: float, idx: int, values: list[float]) -> bool:
        """Whether it is one after `idx` values of a block have passed; most that rise far have done so before."""
        if rise < self.settings.spike_tail * tail * size:
            return False
        then = _Baseline(self.settings)
        then.tail = tail
        then.history.extend([*self.history.recent, *values[:idx]])
        return then._excess(rise, size) >= 1.0

    def _excess(self, rise: float, size: float) -> float:
        settings, history = self.settings, self.history
        if len(history) < settings.warmup_lines:
            return 0.0
        if rise <= settings.spike_rise * size:
            return 0.0
        by_noise = rise / (settings.spike_z * history.deviation())
        by_tail = rise / max(settings.spike_tail * self.tail * size, 1e-12)
        return min(by_noise, by_tail, rise / max(settings.spike_rise * size, 1e-12))


class _Buckets:
    """Losses per time bucket, which are judged only when the loss itself has jumped.

    Until then the last lines are kept as they are, so that a run in good health pays next to nothing for them.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings = settings
        self.baselines: dict[str, list[_Baseline]] = {}
        self.waiting: deque[tuple[int, Callable[[], Iterable[Lists]]]] = deque()
        """How many lines, and a way to get them."""
        self.num_waiting, self.num_kept = 0, 0

    def add(self, count: int, lines: Callable[[], Iterable[Lists]]) -> None:
        """Lines to be judged some day; the oldest are forgotten."""
        self.waiting.append((count, lines))
        self.num_waiting += count
        self.num_kept += count
        while self.num_kept - self.waiting[0][0] >= _BUCKET_LINES:
            self.num_kept -= self.waiting.popleft()[0]

    def excess(self) -> float | None:
        """Of the newest line, the median bucket's excess in the worse modality; None where there is no history yet."""
        if self.num_waiting > _BUCKET_LINES:
            self.baselines = {}  # what lies between is gone
        found, too_many = None, max(0, self.num_kept - _BUCKET_LINES)
        for lists in islice(chain.from_iterable(lines() for _, lines in self.waiting), too_many, None):
            found = self._judge(lists)
        self.waiting.clear()
        self.num_waiting = self.num_kept = 0
        return found

    def _judge(self, lists: Lists) -> float | None:
        found = []
        for name, values in lists.items():
            baselines = self.baselines.setdefault(name, [])
            baselines += [_Baseline(self.settings) for _ in values[len(baselines) :]]
            pairs = [
                (one, value) for one, value in zip(baselines, values, strict=False) if math.isfinite(value)
            ]
            ready = [len(one.history) >= self.settings.warmup_lines for one, _ in pairs]
            excesses = [one.judge(value) for one, value in pairs]
            if any(ready):
                found.append(median(excesses))
        return max(found, default=None)


class LossSpike(Detector):
    """M102."""

    compares = wide = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.loss, self.buckets = _Baseline(settings), _Buckets(settings)

    def line(self, record: Record) -> None:
        if record.lists:
            lists = record.lists
            self.buckets.add(1, lambda: (lists,))
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        usual, excess = self.loss.history.median(), self.loss.judge(loss)
        if excess < 1.0:
            return
        in_buckets = self.buckets.excess() if record.lists else None
        if in_buckets is None or in_buckets >= 1.0:
            where = "" if in_buckets is None else ", in most time buckets too"
            evidence = f"loss {loss:.4g} at step {record.step}, usual {usual:.4g}{where}"
            self.book.fire("M102", evidence, sure=sureness(excess))

    def absorb(self, block: Block) -> bool:
        if "loss" in block.values and not self.loss.take(block, "loss"):
            return False
        if block.texts:
            self.buckets.add(len(block), partial(map, lists_of, block.texts))
        return True


class Divergence(Detector):
    """M103. Against the best median of a whole history window: the best of short ones would be a lucky draw."""

    compares = wide = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent, self.history = Window(settings.divergence_lines), Window(settings.history_lines)
        self.best, self.best_deviation, self.start, self.lines = math.inf, math.inf, math.inf, 0

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.recent.add(loss)
        self.history.add(loss)
        self.lines += 1
        if self.lines <= 3:
            self.start = min(self.start, loss)
        if len(self.recent) < self.settings.divergence_lines or self._worse_than_at_start(record):
            return
        if len(self.history) < self.settings.warmup_lines:
            return
        if (median := self.history.median()) < self.best:
            self.best, self.best_deviation = median, self.history.deviation()
        self._judge(record)

    def absorb(self, block: Block) -> bool:
        losses = block.values.get("loss")
        if losses is None:
            return True
        if not self.history.is_full() or not self.recent.is_full() or self.book.is_open("M103"):
            return False
        if len(self.history) < self.settings.warmup_lines or self.lines <= 3:
            return False
        last = [*self.recent.recent, *losses]
        if 0 < self.settings.divergence_start * self.start < max(last):
            return False
        best = self._best_of(block, last)
        if best is None:
            return False
        self.lines += len(losses)
        self.recent.extend(losses)
        if best[0] < self.best:
            upto = [*self.history.recent, *losses[: best[1]]]
            window = Window(self.settings.history_lines)
            window.extend(upto)
            self.best, self.best_deviation = best[0], window.deviation()
        self.history.extend(losses)
        return True

    def _best_of(self, block: Block, last: list[float]) -> tuple[float, int] | None:
        """The best median in a block, or before it, and after how many of its lines; nothing if a line may diverge."""
        size, share = self.settings.divergence_lines, self.settings.divergence_rise
        best, at, largest = self.best, 0, max(last)
        half, other = size // 2, (size - 1) // 2
        for idx, middle in enumerate(block.medians("loss", self.history)[1:], start=1):
            if middle < best:
                best, at = middle, idx
            if largest - best > share * abs(best):
                ordered = sorted(last[idx : idx + size])
                if 0.5 * (ordered[half] + ordered[other]) - best > share * abs(best):
                    return None
        return best, at

    def _worse_than_at_start(self, record: Record) -> bool:
        """A run that explodes in its first lines has no good history to be compared with."""
        now, limit = self.recent.median(), self.settings.divergence_start * self.start
        if not 0 < limit < now:
            return False
        evidence = f"median loss {now:.4g} up to step {record.step}, at the start it was {self.start:.4g}"
        self.book.fire("M103", evidence, sure=sureness(now / limit))
        return True

    def _judge(self, record: Record) -> None:
        now, best = self.recent.median(), self.best
        limit = self.settings.divergence_rise * abs(best)
        noise = self.settings.spike_z * self.best_deviation / math.sqrt(self.settings.divergence_lines)
        if now - best > limit and self.recent.quantile(0.2) - best > noise:
            evidence = f"median loss {now:.4g} up to step {record.step}, best was {best:.4g}"
            self.book.fire("M103", evidence, sure=sureness((now - best) / max(limit, 1e-12)))
        elif now - best < 0.5 * limit:
            self.book.clear("M103")


class Plateau(Detector):
    """M104. Says nothing at the end of a schedule, where a flat loss is what one wants."""

    compares = wide = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.curve, self.lines, self.due = Curve(), 0, 3 * settings.plateau_lines
        self.peak_lr = self.lr = 0.0

    def line(self, record: Record) -> None:
        values = record.values
        if "lr" in values:
            self.lr = values["lr"]
            self.peak_lr = max(self.peak_lr, self.lr)
        loss = values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.curve.add(record.step or self.lines, loss)
        self.lines += 1
        if self.lines >= self.due:
            self.due = int(1.03 * self.lines) + 1
            self._judge(record)

    def absorb(self, block: Block) -> bool:
        rates, losses = block.values.get("lr"), block.values.get("loss")
        if losses is not None and (block.steps[0] <= 0 or self._is_due_flat(block.steps, losses)):
            return False
        if rates is not None:
            self.lr, self.peak_lr = rates[-1], max(self.peak_lr, *rates)
        if losses is not None:
            self.curve.extend(block.steps, losses)
            self.lines += len(losses)
            while self.lines >= self.due:
                self.due = int(1.03 * self.due) + 1
        return True

    def _is_due_flat(self, steps: list[int], losses: list[float]) -> bool:
        """Whether a judgement that falls into a block would find, or end, a plateau."""
        curve, at, due = self.curve.copy(), 0, self.due
        while self.lines + len(losses) >= due:
            until = max(due - self.lines, 1)
            curve.extend(steps[at:until], losses[at:until])
            if self.book.is_open("M104") or self._flat_since(curve) is not None:
                return True
            at, due = until, int(1.03 * due) + 1
        return False

    def _judge(self, record: Record) -> None:
        if len(_last_third(self.curve)) < 20:
            return  # most of the curve was cut away by a rollback
        found = self._flat_since(self.curve)
        if found is not None and not self._late(record):
            self.book.fire("M104", f"loss {found[1]:.4g} since step {found[0]:.0f}", sure=0.7)
        else:
            self.book.clear("M104")

    def _flat_since(self, curve: Curve) -> tuple[float, float] | None:
        """The step since which a curve is flat and its level there; nothing if it is not, or too short."""
        third = _last_third(curve)
        if len(third) < 20:
            return None
        halves = third[: len(third) // 2], third[len(third) // 2 :]
        first, last = median(halves[0]), median(halves[1])
        noise = 2.5 * math.hypot(
            *(spread(half) / math.sqrt(len(half)) for half in halves)
        )  # two errors of medians
        change = 2 * abs(first - last)  # the middles of the halves are half a window apart
        flat = change + 2 * noise < self.settings.plateau_gain * abs(first)
        return (curve.points()[0][-len(third)], last) if flat else None

    def _late(self, record: Record) -> bool:
        total = self.facts.total_steps
        over = bool(total and record.step is not None and record.step > 0.8 * total)
        return over or self.lr < self.settings.plateau_lr * self.peak_lr


def _last_third(curve: Curve) -> list[float]:
    losses = curve.points()[1]
    return [loss for loss in losses[-(len(losses) // 3) :] if math.isfinite(loss)]
