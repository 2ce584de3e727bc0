"""From the layout of a line to its numbers: worked out once for all lines with the same texts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from runwatch.assembly import Row
from runwatch.names import Name, Names
from runwatch.steps import Marks
from runwatch.tokens import Field, Layout, to_float

Place = tuple[int, int | None]
"""Where a counter stands among the numbers, and its total."""


@dataclass
class Plan:
    """Which number of a line is what."""

    layout: Layout
    values: list[tuple[Name, int, float]] = field(default_factory=list)
    step: Place | None = None
    step_rank: int = 99
    step_factor: float = 1.0
    """Some trainers count steps in thousands: 200K."""
    epoch: Place | None = None
    counters: list[Place] = field(default_factory=list)
    step_total: int | None = None
    is_known: bool = False
    """Whether such a line was a record before."""

    def row(self, numbers: list[str]) -> Row:
        """The numbers of a line in their places."""
        values = [(name, to_float(numbers[idx]) * factor) for name, idx, factor in self.values]
        row = Row(values, is_eval=self.layout.is_eval, step_rank=self.step_rank)
        marks = row.marks
        if self.step is not None:
            marks.step, marks.step_total = _counter(numbers, self.step)
            marks.step = marks.step * self.step_factor if marks.step is not None else None
            if marks.step is not None and marks.step != int(marks.step):
                marks.step = None  # a duration or a share, not a count
        if self.epoch is not None:
            marks.epoch, marks.epoch_total = _counter(numbers, self.epoch)
        if self.step_total is not None:
            marks.step_total = to_float(numbers[self.step_total])
        counters = [_counter(numbers, place) for place in self.counters]
        full = [
            (done, total)
            for done, total in counters
            if done is not None and total and total > 1 and done <= 1.1 * total
        ]
        if full:
            marks.counter = full[0]
            if len(full) > 1 and marks.epoch is None:  # [epoch/epochs][batch/batches]
                (marks.epoch, marks.epoch_total), marks.counter = full[0], full[1]
        return row


def make_plan(layout: Layout, names: Names) -> Plan:
    """What the fields of a layout mean together."""
    plan = Plan(layout)
    for item in layout.fields:
        name = item.name
        if name is None or (item.total_idx is not None and name.role in ("bare_loss", "bare_valid")):
            _unnamed(plan, item, names)
        elif name.role == "step":
            if name.rank < plan.step_rank:
                plan.step, plan.step_rank, plan.step_factor = (
                    (item.idx, item.total_idx),
                    name.rank,
                    item.factor,
                )
        elif name.role == "total_steps":
            plan.step_total = item.idx
        else:
            if name.role == "epoch" and item.factor == 1:  # what is counted in thousands are episodes
                plan.epoch = item.idx, item.total_idx
            if name.role == "plain_seconds" and item.factor == 1e-3:  # in milliseconds only steps are timed
                name = names.of("step_time") or name
            plan.values.append((name, item.idx, item.factor * name.factor))
    if plan.step is None and not plan.counters:
        _step_with_share(plan)
    return plan


def _step_with_share(plan: Plan) -> None:
    """`1m 24s (5000 50%)`: a count in brackets with its share of the whole behind it."""
    for count, share in itertools.pairwise(plan.layout.fields):
        is_plain = count.name is None and share.name is None and not share.key
        if is_plain and count.in_brackets and count.factor == 1 and share.factor == 0.01:
            plan.step = count.idx, None


def _unnamed(plan: Plan, item: Field, names: Names) -> None:
    if item.unit_role and (name := names.of(item.unit_role)) is not None:
        plan.values.append((name, item.idx, item.factor))
    elif item.total_idx is not None and (item.in_brackets or not item.key):
        plan.counters.append((item.idx, item.total_idx))


def _counter(numbers: list[str], place: Place) -> tuple[float | None, float | None]:
    value = to_float(numbers[place[0]])
    total = to_float(numbers[place[1]]) if place[1] is not None else None
    return (value, total) if math.isfinite(value) else (None, None)


def whole_marks(marks: Marks) -> Marks | None:
    """The epoch of a line that only tells the epoch."""
    if marks.epoch is None or marks.epoch != int(marks.epoch):
        return None
    return Marks(epoch=marks.epoch, epoch_total=marks.epoch_total)
