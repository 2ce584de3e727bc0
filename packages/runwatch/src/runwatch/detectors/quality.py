"""What the numbers say about learning: memorising, collapsed latents, latents that nobody reads."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import TO_DEVIATION, Recent, Window, median, sureness
from runwatch.records import Record
from runwatch.settings import MonitorSettings

_SIZES = (
    "latent_prediction_norm", "latent_prediction_std", "latent_prediction_variance", "valid_latent_prediction_norm",
    "valid_latent_prediction_std",
)  # fmt: skip

_NOISE_COUNT = 12
"""So many validations tell how noisy they are."""


class ValidationDrift(Detector):
    """M801: validation rises while training falls; M103: it rises far and for good, whatever training does.

    The training loss is taken from the lines between two validations, so that it belongs to them and does not lag.
    """

    needs = frozenset(("loss", "valid_loss"))

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.since = Recent(200)
        self.best, self.loss_at_best, self.loss, self.streak = math.inf, math.inf, math.nan, 0
        self.recent: deque[float] = deque(maxlen=_NOISE_COUNT)
        self.num_far = self.num_valid = 0
        self.first = math.nan

    def line(self, record: Record) -> None:
        loss, valid = record.values.get("loss"), record.values.get("valid_loss")
        if loss is not None and math.isfinite(loss):
            self.since.add(loss)
        if valid is None or not math.isfinite(valid):
            return
        if len(self.since):
            self.loss = self.since.median()
            self.since.values.clear()
        self.num_valid += 1
        self.recent.append(valid)
        self.first = valid if self.num_valid == 1 else self.first
        self._judge(valid, record)
        self._diverges(valid, record)

    def _judge(self, valid: float, record: Record) -> None:
        now = self.loss
        if valid < self.best:
            self.best, self.loss_at_best, self.streak = valid, now, 0
            self.book.clear("M801")
            return
        least = 0.01 * max(self.first - self.best, 0.0)  # less than a hundredth of what was learned is noise
        rising = valid - self.best > max(self.settings.drift_rise * abs(self.best), least, 4 * self._noise())
        learning = not math.isfinite(now) or now < 0.99 * self.loss_at_best
        self.streak = self.streak + 1 if rising and learning else 0
        if self.streak >= self.settings.drift_count:
            share = (valid - self.best) / max(abs(self.best), 1e-12)
            evidence = (
                f"valid_loss {valid:.4g} at step {record.step}, best {self.best:.4g}; training loss {now:.4g}"
            )
            self.book.fire("M801", evidence, sure=sureness(share / max(self.settings.drift_rise, 1e-9)))

    def _noise(self) -> float:
        """Of single validations, from how the last ones zigzag: a steady rise has none."""
        turns = [
            abs(a - 2 * b + c)
            for a, b, c in zip(
                self.recent, islice(self.recent, 1, None), islice(self.recent, 2, None), strict=False
            )
        ]
        return TO_DEVIATION * median(turns) / math.sqrt(6) if len(turns) >= 3 else 0.0

    def _diverges(self, valid: float, record: Record) -> None:
        """Far above where it started, several times in a row, and training is no better."""
        limit = self.settings.divergence_start * max(self.first, self.best)
        if self.loss > 1.1 * self.loss_at_best > 0:  # training rises too
            limit = 0.75 * limit
        falling = math.isfinite(self.loss) and self.loss < 0.99 * self.loss_at_best
        self.num_far = self.num_far + 1 if 0 < limit < valid and not falling else 0
        if self.num_far >= self.settings.drift_count:
            evidence = f"valid_loss {valid:.4g} at step {record.step}, at the start it was {self.first:.4g}"
            self.book.fire("M103", evidence, subject="validation", sure=sureness(valid / limit))
        elif valid < 1.1 * self.best:
            self.book.clear("M103", "validation")


class LatentCollapse(Detector):
    """M802."""

    needs = frozenset(_SIZES)

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.largest: dict[str, float] = {}
        self.windows: dict[str, Window] = {}
        self.streak: dict[str, int] = {}

    def line(self, record: Record) -> None:
        for name in _SIZES:
            size = record.values.get(name)
            if size is not None and math.isfinite(size):
                self._judge(name, size, record)

    def _judge(self, name: str, size: float, record: Record) -> None:
        window = self.windows.setdefault(name, Window(9))
        window.add(size)
        if len(window) < 5:
            return
        usual = self.largest[name] = max(self.largest.get(name, 0.0), window.median())
        small = size < self.settings.collapse_ratio * usual
        self.streak[name] = self.streak.get(name, 0) + 1 if small else 0
        if self.streak[name] >= self.settings.collapse_lines:
            evidence = f"{name} {size:.3g} at step {record.step}, usual {usual:.3g}"
            self.book.fire(
                "M802", evidence, sure=sureness(self.settings.collapse_ratio * usual / max(size, 1e-12))
            )
        elif not small:
            self.book.clear("M802")


class LatentIgnored(Detector):
    """M803."""

    needs = frozenset(("valid_text_loss_shuffled",))

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.streak = 0

    def line(self, record: Record) -> None:
        right, shuffled = record.values.get("valid_text_loss"), record.values.get("valid_text_loss_shuffled")
        if right is None or shuffled is None or not (math.isfinite(right) and math.isfinite(shuffled)):
            return
        if (record.step or 0) < self.settings.ignored_start * (self.facts.total_steps or 0):
            return
        self._judge(right, shuffled)

    def _judge(self, right: float, shuffled: float) -> None:
        gain = (shuffled - right) / max(abs(right), 1e-12)
        self.streak = self.streak + 1 if gain < self.settings.ignored_gain else 0
        if self.streak >= self.settings.ignored_count:
            evidence = f"text loss {right:.4g} with the right latent, {shuffled:.4g} with a shuffled one"
            self.book.fire("M803", evidence, sure=sureness(self.streak / self.settings.ignored_count))
        elif self.streak == 0:
            self.book.clear("M803")
