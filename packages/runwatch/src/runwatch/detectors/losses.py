"""Losses that are not finite, jump, rise for good, or no longer fall."""

from __future__ import annotations

import math
from collections import deque

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import TO_DEVIATION, Curve, Window, median, spread, sureness
from runwatch.names import is_adversarial
from runwatch.records import LOSSES, Record
from runwatch.settings import MonitorSettings

Lists = dict[str, list[float]]
_LOSSES = frozenset(LOSSES)
_ENORMOUS = 100
"""Where something is learned by playing, only a loss so many times as large as any of its first lines diverges."""
_BUCKET_LINES = 1024
"""Lines of losses per time bucket that are kept: as far back as their baselines reach when the loss jumps."""


class NonfiniteLoss(Detector):
    """M101."""

    needs = frozenset((*LOSSES, "nan_steps"))

    def line(self, record: Record) -> None:
        values = record.values
        bad = [name for name, value in values.items() if name in _LOSSES and not math.isfinite(value)]
        if bad:
            name = min(bad, key=LOSSES.index)
            what = "a part of the loss" if name == "bad_part" else name
            self.book.fire("M101", f"{what} is {values[name]} at step {record.step}")
            return
        if values.get("nan_steps"):
            self.book.fire(
                "M101", f"{values['nan_steps']:.0f} steps with a loss of nan up to step {record.step}"
            )

    def event(self, record: Record) -> None:
        if record.event == "bad_loss" or record.facts.get("cause") == "bad_loss":
            self.book.fire("M101", record.text, step=record.step)


class LossMissing(Detector):
    """M105: steps go on, but their loss is gone, or exactly 0 for good. Some trainers print that instead of nan."""

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent: deque[float] = deque(maxlen=5)
        self.before: list[float] = []
        self.zeros = self.missing = self.num_losses = 0

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        if loss is None:
            self._without(record)
            return
        self.num_losses += 1
        self.missing = 0
        self.zeros = self.zeros + 1 if loss == 0 else 0
        if self.zeros == 1:
            self.before = list(self.recent)
        self.recent.append(loss)
        if self.zeros >= self.settings.zero_lines and self._fell_at_once(record):
            before = f", {self.before[-1]:.3g} before" if self.before else ""
            self.book.fire(
                "M105", f"loss is exactly 0 for {self.zeros} lines up to step {record.step}{before}"
            )
        elif loss != 0:
            self.book.clear("M105")

    def _without(self, record: Record) -> None:
        self.missing = self.missing + 1 if record.without_loss else self.missing
        if self.missing >= self.settings.missing_lines and self.num_losses >= 2:
            self.book.fire("M105", f"{self.missing} lines without a loss up to step {record.step}", sure=0.9)

    def _fell_at_once(self, record: Record) -> bool:
        """A loss that was learned away gets small first; one that is 0 from large was replaced."""
        norm = record.values.get("grad_norm")
        is_broken = norm is not None and (norm == 0 or not math.isfinite(norm))
        return is_broken or (len(self.before) == 5 and min(self.before) >= 0.02)


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
        size = max(abs(usual), 0.05 * self.largest, 1e-12)  # once a loss is near 0, doubling means nothing
        excess = self._excess(value - usual, size)
        self.outliers = self.outliers + 1 if excess >= 1.0 else 0
        if excess < 1.0 or self.outliers > self.settings.history_lines:
            if len(self.history) >= 5:
                self.tail = max(0.999 * self.tail, (value - usual) / size)
            self.history.add(value)
        return excess

    def _excess(self, rise: float, size: float) -> float:
        settings, history = self.settings, self.history
        if len(history) < settings.warmup_lines:
            return 0.0
        if rise <= settings.spike_rise * size:
            return 0.0
        by_noise = rise / (settings.spike_z * history.deviation())
        if history.lowest() > 0:
            by_noise = min(by_noise, self._in_logarithms(rise))
        else:  # a loss around 0, as in reinforcement learning, has no usual size
            by_noise = min(by_noise, rise / max(settings.spike_z * spread(list(history.recent)), 1e-12))
        by_tail = rise / max(settings.spike_tail * self.tail * size, 1e-12)
        return min(by_noise, by_tail, rise / max(settings.spike_rise * size, 1e-12))

    def _in_logarithms(self, rise: float) -> float:
        """The same for factors: the loss of single batches has a long tail, but not in logarithms."""
        logs = [math.log(value) for value in self.history.recent]
        center = median(logs)
        deviation = max(TO_DEVIATION * median(abs(value - center) for value in logs), 1e-3)
        return math.log1p(rise / math.exp(center)) / (self.settings.spike_z * deviation)


class _Buckets:
    """Losses per time bucket, which are judged only when the loss itself has jumped.

    Until then the last lines are kept as they are, so that a run in good health pays next to nothing for them.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings = settings
        self.baselines: dict[str, list[_Baseline]] = {}
        self.waiting: deque[Lists] = deque(maxlen=_BUCKET_LINES)
        self.num_waiting = 0

    def add(self, lists: Lists) -> None:
        """Lines to be judged some day; the oldest are forgotten."""
        self.waiting.append(lists)
        self.num_waiting += 1

    def excess(self) -> float | None:
        """Of the newest line, the median bucket's excess in the worse modality; None where there is no history yet."""
        if self.num_waiting > _BUCKET_LINES:
            self.baselines = {}  # what lies between is gone
        excess = None
        for lists in self.waiting:
            excess = self._judge(lists)
        self.waiting.clear()
        self.num_waiting = 0
        return excess

    def _judge(self, lists: Lists) -> float | None:
        excesses_of_kinds = []
        for name, values in lists.items():
            baselines = self.baselines.setdefault(name, [])
            baselines += [_Baseline(self.settings) for _ in values[len(baselines) :]]
            pairs = [
                (one, value) for one, value in zip(baselines, values, strict=False) if math.isfinite(value)
            ]
            ready = [len(one.history) >= self.settings.warmup_lines for one, _ in pairs]
            excesses = [one.judge(value) for one, value in pairs]
            if any(ready):
                excesses_of_kinds.append(median(excesses))
        return max(excesses_of_kinds, default=None)


class LossSpike(Detector):
    """M102."""

    needs = frozenset(("loss",))

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.loss, self.buckets = _Baseline(settings), _Buckets(settings)

    def line(self, record: Record) -> None:
        if record.lists:
            self.buckets.add(record.lists)
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


class Divergence(Detector):
    """M103. Against the best median of a whole history window: the best of short ones would be a lucky draw."""

    needs = frozenset(("loss",))

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent, self.history = Window(settings.divergence_lines), Window(settings.history_lines)
        self.best, self.best_deviation, self.start, self.lines = math.inf, math.inf, math.inf, 0
        self.best_high = math.inf
        """What a twentieth of the lines of the best window was above: of two kinds of batches the median is either."""
        self.start_high = math.inf
        self.far_above = self.num_above = self.num_enormous = 0
        self.rewards = Window(settings.divergence_lines)
        self.first_reward = self.best_reward = 0.0
        self.first_high = 0.0
        """The largest loss of the first window."""
        self.is_signed = False
        """Losses below 0, as in reinforcement learning, and those of adversaries have no size to compare with."""

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.is_signed = self.is_signed or loss < 0 or is_adversarial(record.series)
        self.recent.add(loss)
        self.history.add(loss)
        self.lines += 1
        if self.lines <= 3:
            self.start, self.start_high = median(self.recent.recent), max(self.recent.recent)
        if self.lines <= self.settings.history_lines:
            self.first_high = max(self.first_high, abs(loss))
        if record.is_played and not self._lost_reward(record.reward):
            self._keep_best()
            self._judge_played(loss, record)
            return
        if self._exploded(loss, record):
            return
        if len(self.recent) < self.settings.divergence_lines or self._worse_than_at_start(record):
            return
        if len(self.history) < self.settings.warmup_lines:
            return
        self._keep_best()
        self._judge(record)

    def _keep_best(self) -> None:
        if len(self.history) >= self.settings.warmup_lines and (middle := self.history.median()) < self.best:
            kept = 0.9 * self.best_deviation if math.isfinite(self.best_deviation) else 0.0
            self.best, self.best_deviation = middle, max(self.history.deviation(), kept)
            self.best_high = self.history.quantile(0.95)

    def _lost_reward(self, reward: float | None) -> bool:
        """Whether most of what was won is lost again: then the loss may be judged like any other."""
        if reward is None or not math.isfinite(reward):
            return False
        self.rewards.add(reward)
        now = self.rewards.median()
        if not self.rewards.is_full():
            self.first_reward = self.best_reward = now
            return False
        self.best_reward = max(self.best_reward, now)
        won, lost = self.best_reward - self.first_reward, self.best_reward - now
        return lost > 0.6 * won > 0 and lost > 3 * self.rewards.deviation()

    def _judge_played(self, loss: float, record: Record) -> None:
        """Better play meets higher rewards and with them higher losses: only what is enormous and lasts counts."""
        limit = _ENORMOUS * self.first_high
        is_enormous = self.lines > self.settings.history_lines and abs(loss) > limit > 0
        self.num_enormous = self.num_enormous + 1 if is_enormous else 0
        if self.num_enormous >= 2 * self.settings.divergence_lines:
            evidence = (
                f"loss {loss:.4g} at step {record.step}, the largest of the start was {self.first_high:.4g}"
            )
            self.book.fire("M103", evidence, sure=sureness(abs(loss) / limit))
        elif not is_enormous:
            self.book.clear("M103")

    def _exploded(self, loss: float, record: Record) -> bool:
        """Three lines in a row far above everything before: no history is needed for that."""
        limit = 10 * self.settings.divergence_start * self.start if not self.is_signed else 0.0
        self.far_above = self.far_above + 1 if self.lines > 3 and 0 < limit < loss else 0
        if self.far_above < 3:
            return False
        evidence = f"loss {loss:.4g} at step {record.step}, at the start it was {self.start:.4g}"
        self.book.fire("M103", evidence, sure=sureness(loss / limit))
        return True

    def _worse_than_at_start(self, record: Record) -> bool:
        """A run that explodes in its first lines has no good history to be compared with."""
        now, limit = self.recent.median(), self.settings.divergence_start * self.start
        if self.is_signed or not 0 < limit < now or self.recent.quantile(0.2) < self.start_high:
            return False
        evidence = f"median loss {now:.4g} up to step {record.step}, at the start it was {self.start:.4g}"
        self.book.fire("M103", evidence, sure=sureness(now / limit))
        return True

    def _judge(self, record: Record) -> None:
        now, best = self.recent.median(), self.best
        limit = self.settings.divergence_rise * max(
            abs(best), 0.1 * abs(self.start)
        )  # near 0, doubling means nothing
        noise = self.settings.spike_z * self.best_deviation
        if (
            not self.is_signed
        ):  # the level of a policy's loss means nothing: only what leaves its noise counts
            noise *= 1.4 / math.sqrt(self.settings.divergence_lines)
        is_above = now - best > limit and self.recent.quantile(0.2) - best > noise and now > self.best_high
        self.num_above = self.num_above + 1 if is_above else 0
        if self.num_above >= self.settings.divergence_lines // 2 or (is_above and now - best > 2 * limit):
            evidence = f"median loss {now:.4g} up to step {record.step}, best was {best:.4g}"
            self.book.fire("M103", evidence, sure=sureness((now - best) / max(limit, 1e-12)))
        elif now - best < 0.5 * limit:
            self._came_back()
            if self.history.median() - best < 0.5 * limit:  # whatever it has come back from was noise
                self.best_deviation = max(self.best_deviation, self.history.deviation())

    def _came_back(self) -> None:
        """What did not stay up was no divergence, but worth a warning."""
        if self.book.is_open("M103"):
            self.book.alerts["M103", ""].level = "warn"
            self.book.clear("M103")


class Plateau(Detector):
    """M104. Says nothing at the end of a schedule, where a flat loss is what one wants."""

    needs = frozenset(("loss", "lr"))

    compares = True

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

    def _judge(self, record: Record) -> None:
        if len(_last_third(self.curve)) < 20:
            return  # most of the curve was cut away by a rollback
        flat = self._flat_since(self.curve)
        if flat is not None and not self._late(record):
            self.book.fire("M104", f"loss {flat[1]:.4g} since step {flat[0]:.0f}", sure=0.7)
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
