"""Named numbers of one line -> one record: which loss is *the* loss, units, totals, what belongs to validation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from runwatch.names import Name
from runwatch.records import LARGEST, OLDEST_TIME, Record
from runwatch.steps import Marks, Stepper

_ONLY_TRAINING = (
    "lr", "grad_norm", "tokens_per_second", "documents_per_second", "steps_per_second", "step_seconds",
    "gpu_memory_allocated", "text_accuracy",
)  # fmt: skip
_OF_STEPS = frozenset(
    ("lr", "skipped_steps", "step_seconds", "tokens_per_second", "documents_per_second", "steps_per_second")
)
_PROOF = ("loss", "valid_loss", "grad_norm", "text_loss", "latent_loss", "nan_steps")


@dataclass
class Row:
    """The numbers of a line before they are put together."""

    values: list[tuple[Name, float]] = field(default_factory=list)
    plain: dict[str, float] = field(default_factory=dict)
    """Numbers that are alone in their role already."""
    marks: Marks = field(default_factory=Marks)
    step_rank: int = 99
    """Rank of the name that told the step."""
    is_eval: bool = False
    time: float | None = None
    rank: int | None = None
    lists: dict[str, list[float]] = field(default_factory=dict)


_PLAYED = 3
"""So many lines with a reward, and the log is one of reinforcement learning."""
_UNMARKED = 7
"""By so much the rank of a loss is worse in a line without a step."""


class MainLoss:
    """Which of several names is the loss of a run: the best rank at first, then the one that comes most often.

    A closing mean under another name is no point of the curve, so a line without the main name has no loss.
    """

    def __init__(self) -> None:
        self.key = ""
        self._rank = 99
        self._counts: Counter[str] = Counter()

    @property
    def is_error(self) -> bool:
        """Whether it is only an error such as RMSE: without a step or an epoch that is the result of a fit."""
        return self._rank >= 12 + _UNMARKED

    def choose(
        self, candidates: list[tuple[Name, float]], *, is_marked: bool = True
    ) -> tuple[Name, float] | None:
        """The loss of a line, if it has one; a line that tells its step has the better one."""
        if len(candidates) == 1 and candidates[0][0].key == self.key:
            self._counts[self.key] += 1
            return candidates[0]
        best = min(candidates, key=_order)
        rank = best[0].rank + (0 if is_marked else _UNMARKED)
        main = next((item for item in candidates if item[0].key == self.key), None)
        counts = self._counts
        for name, _ in candidates[:16]:
            counts[name.key] += 1
        if main is None or (rank < self._rank and counts[best[0].key] >= counts[self.key]):
            better = rank < self._rank and counts[self.key] <= 3
            if rank >= self._rank + 10 and counts[self.key] > 3:
                return (
                    main  # parts that are printed all the time do not replace a loss that was printed often
                )
            margin = 2 if rank <= self._rank + 2 else 4  # a name that comes far more often wins in the end
            if not self.key or better or counts[best[0].key] > margin * counts[self.key] + 3:
                self.key, self._rank = best[0].key, rank
                return best
        return main


def _order(item: tuple[Name, float]) -> tuple[int, float]:
    """Best rank first; among parts of equal rank the largest, because the sum follows it."""
    name, value = item
    return name.rank, -abs(value) if name.rank >= 10 and math.isfinite(value) else 0.0


class Assembler:
    """Builds the records of one file."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.main = MainLoss()
        self.valid = MainLoss()
        self._skipped: float | None = None
        self._num_marked = self._num_unmarked = 0
        self._num_rewards = 0
        self._reward: float | None = None
        self._reward_key = ""
        self._begins = False
        self._offset = 0.0
        self._num_lone = 0
        self._step_rank: int | None = None
        """Rank of the counter beside the losses."""
        self._before: tuple[float | None, float | None] = None, None
        self._shape: set[str] = set()
        self._shape_size = -1
        self._plain_seconds: list[float] = []
        self._plain_is_total: bool | None = None

    def record(self, row: Row, *, needs_proof: bool = True) -> Record | None:
        """The record of a row; None if nothing in it is a number of a training curve."""
        values = self._values(row)
        if (
            needs_proof
            and not any(name in values for name in _PROOF)
            and not self._is_without_loss(values, row)
        ):
            return None
        if self._is_lone(row, values):
            return None
        has_loss = "loss" in values and not self._is_closing(values, row)
        falls_back = row.marks.step is not None and row.marks.step < (self.stepper.inner or 0)
        is_beside = falls_back or self._is_other_counter(row, values)
        is_aside = row.is_eval or (not has_loss and bool(self.main.key) and is_beside)
        if falls_back and self._step_rank is not None and row.step_rank > self._step_rank:
            is_aside = True  # `[5000] loss 2.5`, then `Batches[100] loss 2.6`: counted within something else
        if is_aside and self.stepper.is_counting():  # its counter may be that of the evaluation
            row.marks = Marks(epoch=row.marks.epoch, epoch_total=row.marks.epoch_total)
        if has_loss and row.marks.step is not None:
            self._step_rank = row.step_rank
        begins = (
            self.stepper.place(row.marks, has_loss=has_loss, is_valid="valid_loss" in values) or self._begins
        )
        self._skipped = None if begins else self._skipped
        self._begins = begins and not values and not row.lists
        if not values and not row.lists:
            return None
        record = Record(self.stepper.step, row.time, values, row.lists, row.rank)
        record.by_lines = self.stepper.counts_lines()
        record.new_run, record.by_epoch, record.total = begins, self.stepper.by_epoch, self.stepper.total
        record.series = self.main.key if has_loss else ""
        record.is_played, record.reward = self._num_rewards >= _PLAYED, self._reward
        if has_loss:
            record.begins_epoch = self.stepper.offset > self._offset
            self._offset = self.stepper.offset
        self._compare_shape(record, row, has_loss=has_loss)
        return record

    def enter(self, marks: Marks) -> None:
        """A line without numbers of its own that tells where the next ones stand."""
        self._begins = self.stepper.place(marks, has_loss=False) or self._begins

    def _compare_shape(self, record: Record, row: Row, *, has_loss: bool) -> None:
        """A line with all names of a line of training but its loss: the trainer left it out."""
        if row.marks.step is None or (has_loss and len(row.values) + len(row.plain) == self._shape_size):
            return
        keys = {
            name.key for name, _ in row.values if name.role not in ("loss", "other_loss")
        } | row.plain.keys()
        if has_loss:
            self._shape, self._shape_size = keys, len(row.values) + len(row.plain)
        elif len(self._shape) >= 2 and not row.is_eval:
            record.without_loss = keys >= self._shape

    def _is_lone(self, row: Row, values: dict[str, float]) -> bool:
        """A single loss without a step, an epoch or anything beside it may be a setting; twice it is a curve.

        An error such as RMSE without them never is.
        """
        if (
            len(values) != 1
            or row.marks.any()
            or self.stepper.step is not None
            or self.stepper.epoch is not None
        ):
            return False
        if not all(math.isfinite(value) for value in values.values()):
            return False
        self._num_lone += 1
        return self._num_lone == 1 or self.main.is_error

    def _is_closing(self, values: dict[str, float], row: Row) -> bool:
        """A loss without a step where every loss has one is a summary of the run, no point of its curve."""
        is_marked = row.marks.step is not None or row.marks.counter is not None
        if is_marked or not math.isfinite(values["loss"]):
            self._num_marked += is_marked
            return False
        self._num_unmarked += 1
        if self._num_marked < max(3, self._num_unmarked):
            return False
        del values["loss"]
        return True

    def _is_other_counter(self, row: Row, values: dict[str, float]) -> bool:
        """`Update[4781]: learning rate 1e-4` where losses are counted by batches."""
        return "valid_loss" not in values and self._step_rank not in (None, row.step_rank)

    def _is_without_loss(self, values: dict[str, float], row: Row) -> bool:
        """A line of training whose loss is missing: a step with a learning rate or a count of skipped updates."""
        return row.marks.step is not None and not row.is_eval and bool(values.keys() & _OF_STEPS)

    def _values(self, row: Row) -> dict[str, float]:
        values: dict[str, float] = row.plain
        ranks: dict[str, int] = {}
        losses: list[tuple[Name, float]] = []
        valid: list[tuple[Name, float]] = []
        bad = False
        is_played = values.pop("played", None) is not None
        if (reward := values.pop("reward", None)) is not None:
            is_played, self._reward = True, reward
        for item in row.values:
            name, value = item
            role = name.role
            if name.key == "error" and not row.marks.any():
                continue  # the number of an error
            if role in ("reward", "played"):
                is_played = True
                self._take_reward(name, value)
            elif role == "loss":
                (valid if row.is_eval else losses).append(item)
            elif role == "valid_loss":
                valid.append(item)
            elif role == "other_loss":
                bad = bad or not math.isfinite(value)
            elif name.rank < ranks.get(role, 99) and (abs(value) < LARGEST or not math.isfinite(value)):
                ranks[role], values[role] = name.rank, value
        self._num_rewards += is_played
        self._bare(row, values, losses, valid)
        self._losses(values, losses, valid, bad=bad, is_marked=row.marks.any())
        if row.is_eval or ("valid_loss" in values and "loss" not in values):
            for role in _ONLY_TRAINING:
                values.pop(role, None)
        self._derive(values, row)
        return values

    def _take_reward(self, name: Name, value: float) -> None:
        """Of several rewards the first name is the one that is followed."""
        if name.role == "reward" and self._reward_key in ("", name.key):
            self._reward_key, self._reward = name.key, value

    def _bare(
        self,
        row: Row,
        values: dict[str, float],
        losses: list[tuple[Name, float]],
        valid: list[tuple[Name, float]],
    ) -> None:
        """`loss train: 2.5, val: 2.6` and CatBoost's `learn: 0.5 test: 0.6`: names that only mean a loss beside one."""
        bare_loss, bare_valid = values.pop("bare_loss", None), values.pop("bare_valid", None)
        is_tied = any("train" in name.key or "learn" in name.key for name, _ in losses)
        if bare_valid is not None and bare_loss is None and is_tied and not valid:
            valid.append((Name("valid_loss", "bare", 9), bare_valid))

    def _losses(
        self,
        values: dict[str, float],
        losses: list[tuple[Name, float]],
        valid: list[tuple[Name, float]],
        *,
        bad: bool,
        is_marked: bool,
    ) -> None:
        if losses and (chosen := self.main.choose(losses, is_marked=is_marked)) is not None:
            values["loss"] = chosen[1]
        if valid and (chosen := self.valid.choose(valid)) is not None:
            values["valid_loss"] = chosen[1]
        for name, value in (*losses, *valid):
            if name.rank < 12 and not math.isfinite(
                value
            ):  # a part that is not finite counts, whichever loss is the main one
                target = "loss" if name.role == "loss" and "valid_loss" not in values else "valid_loss"
                if (target in values and math.isfinite(values[target])) or target not in values:
                    values["bad_part"] = value
        if bad:
            values["bad_part"] = math.nan

    def _derive(self, values: dict[str, float], row: Row) -> None:
        """Units that stand nowhere, shares, counts since the start of a run."""
        plain = values.pop("plain_seconds", None)
        if plain is not None and plain > OLDEST_TIME:
            row.time = row.time if row.time is not None else plain
        elif plain is not None and "loss" in values:
            self._take_plain_seconds(values, plain, row)
        data = values.pop("data_seconds", None)
        seconds = values.get("step_seconds")
        if (
            data is not None
            and seconds
            and "loss" in values
            and 0 <= data <= seconds
            and "data_wait" not in values
        ):
            values["data_wait"] = data / seconds
        if (total := values.pop("skipped_total", None)) is not None:
            values["skipped_steps"] = max(
                0.0, total - (self._skipped if self._skipped is not None else total)
            )
            self._skipped = total
        if (memory := values.get("gpu_memory_allocated")) is not None:
            values["gpu_memory_allocated"] = _bytes(memory)
        if (mfu := values.get("mfu")) is not None and mfu > 1:
            values["mfu"] = mfu / 100
        if (accuracy := values.get("text_accuracy")) is not None and accuracy > 1:
            values["text_accuracy"] = accuracy / 100

    def _take_plain_seconds(self, values: dict[str, float], seconds: float, row: Row) -> None:
        """`time` may be that of a step or of the whole run so far: only one that ever falls is that of a step."""
        if self._plain_is_total is None:
            known = self._plain_seconds
            known.append(seconds)
            if len(known) > 1 and seconds < known[-2] and len(known) < 200:
                falls = sum(later < earlier for earlier, later in itertools.pairwise(known))
                if falls >= max(
                    2, 0.3 * len(known)
                ):  # the time since the start of an epoch falls more seldom
                    self._plain_is_total = False
            elif len(known) >= 200:
                self._plain_is_total = True
        if self._plain_is_total is False and "step_seconds" not in values:
            values["step_seconds"] = seconds / self._steps_of_line(row, seconds)

    def _steps_of_line(self, row: Row, seconds: float) -> float:
        """How many steps a time belongs to: all since the line before if it is as long as that lasted, else one."""
        before, self._before = self._before, (row.time, row.marks.step)
        if row.time is None or row.marks.step is None or before[0] is None or before[1] is None:
            return 1.0
        elapsed, steps = row.time - before[0], row.marks.step - before[1]
        return steps if steps > 1 and elapsed > 0 and seconds > elapsed / math.sqrt(steps) else 1.0


def _bytes(size: float) -> float:
    """Memory without a unit: bytes if large, MB as most trainers print it, GB if small."""
    if not math.isfinite(size) or size >= 1e7:
        return size
    return size * 2.0**20 if size >= 200 else size * 2.0**30
