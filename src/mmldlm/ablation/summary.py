"""The table of an ablation: means over seeds, and differences from the first arm paired by seed.

As in `compare`, no arm wins a figure of generated pairs by texts that have collapsed or repeat more, or one under the
condition of another document by ignoring its own, or what the right condition saves, or calibration, by costing more
nats, or a cosine by latents that are the same for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmldlm.ablation.plan import Arm, Plan, default_names
from mmldlm.ablation.work import Record
from mmldlm.evaluation.compare import cost_behind, reason_to_withhold
from mmldlm.statistics import (
    BETTER,
    WORSE,
    Difference,
    Mean,
    holm,
    mean_over_seeds,
    paired_difference,
    verdict,
)

LEVEL = 0.05
_REPEATED = "generated/repeated_1"


@dataclass(frozen=True)
class Column:
    name: str
    title: str
    better: str


@dataclass(frozen=True)
class Cell:
    """One arm in one quantity."""

    mean: Mean
    difference: Difference | None = None
    """From the first arm; None for that arm itself, and where they share no seed."""
    verdict: str = ""
    p_holm: float | None = None
    """The p-value corrected for all comparisons of the table."""

    @property
    def survives(self) -> bool:
        """Whether the difference is still there after the correction."""
        return self.p_holm is not None and self.p_holm < LEVEL


@dataclass(frozen=True)
class Row:
    arm: Arm
    seeds: tuple[int, ...]
    num_parameters: int | None
    train_seconds: Mean | None
    cells: dict[str, Cell]
    """By name of the quantity; what the arm has no value of is missing."""

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm.name,
            "change": self.arm.change,
            "seeds": list(self.seeds),
            "num_parameters": self.num_parameters,
            "train_seconds": asdict(self.train_seconds) if self.train_seconds else None,
            "quantities": {name: asdict(cell) for name, cell in self.cells.items()},
        }


@dataclass(frozen=True)
class Summary:
    """The whole table."""

    columns: list[Column]
    rows: list[Row]

    @property
    def num_seeds(self) -> int:
        """Seeds of the arm that has most of them."""
        return max((len(row.seeds) for row in self.rows), default=0)

    @property
    def comparisons(self) -> list[Cell]:
        """All differences that have an interval."""
        return [cell for row in self.rows for cell in row.cells.values() if cell.p_holm is not None]


def summarise(plan: Plan, records: Sequence[Record]) -> Summary:
    """Means and differences of what there is."""
    columns = _columns(plan, records)
    values = {
        (arm.name, column.name): {
            record.seed: record.values[column.name].value
            for record in records
            if record.arm == arm.name and column.name in record.values
        }
        for arm in plan.arms
        for column in columns
    }
    rows = [_row(plan, arm, columns, values, records) for arm in plan.arms]
    return Summary(columns, _corrected(rows))


def _columns(plan: Plan, records: Sequence[Record]) -> list[Column]:
    known = {name: value for record in reversed(records) for name, value in record.values.items()}
    names = plan.quantities or default_names(known, plan.evaluation.steps)
    return [Column(name, known[name].title, known[name].better) for name in names if name in known]


def _row(
    plan: Plan,
    arm: Arm,
    columns: list[Column],
    values: dict[tuple[str, str], dict[int, float]],
    records: Sequence[Record],
) -> Row:
    mine, base = (
        [record for record in records if record.arm == name] for name in (arm.name, plan.arms[0].name)
    )
    seconds = [record.train_seconds for record in mine if record.train_seconds is not None]
    cells = {}
    for column in columns:
        ours, first = values[arm.name, column.name], values[plan.arms[0].name, column.name]
        if not ours:
            continue
        difference = None if arm is plan.arms[0] else paired_difference(ours, first)
        judged = verdict(difference, column.better) if difference is not None else ""
        judged = _unless_withheld(judged, column.name, mine, base)
        cells[column.name] = Cell(mean_over_seeds([ours[seed] for seed in sorted(ours)]), difference, judged)
    return Row(
        arm,
        tuple(sorted(record.seed for record in mine)),
        mine[0].num_parameters if mine else None,
        mean_over_seeds(seconds) if seconds and arm.of is None else None,
        cells,
    )


def _unless_withheld(judged: str, figure: str, ours: list[Record], base: list[Record]) -> str:
    """The verdict, unless the winner is degenerate: see `reason_to_withhold`."""
    if judged not in (BETTER, WORSE):
        return judged
    winner, loser = (ours, base) if judged == BETTER else (base, ours)
    cost = cost_behind(figure)
    withheld = reason_to_withhold(
        figure, winner[0].arm, loser[0].arm,
        blind=any(figure in one.blind for one in winner),
        dearer=cost is not None and _has_more(cost, winner, loser),
        collapsed=any(one.collapsed for one in winner), natural=not any(one.repetitive for one in loser),
        dull=any(one.repetitive for one in winner) and _has_more(_REPEATED, winner, loser),
    )  # fmt: skip
    return withheld or judged


def _has_more(figure: str, ours: list[Record], theirs: list[Record]) -> bool:
    """Whether a figure of one arm is measurably above that of another."""
    mine, others = (
        {one.seed: one.values[figure].value for one in side if figure in one.values}
        for side in (ours, theirs)
    )
    apart = paired_difference(mine, others)
    return apart is not None and apart.low is not None and apart.low > 0.0


def _corrected(rows: list[Row]) -> list[Row]:
    """Holm's correction over all arms and quantities of the table.

    Another way to use the same runs leaves the other quantities unchanged: these are no comparisons.
    """
    tested = [
        (idx, name, apart.p_value)
        for idx, row in enumerate(rows)
        for name, cell in row.cells.items()
        if (apart := cell.difference) is not None and apart.p_value is not None
        if row.arm.of is None or (apart.low, apart.high) != (0.0, 0.0)
    ]
    for (idx, name, _), corrected in zip(tested, holm([p for _, _, p in tested]), strict=True):
        rows[idx].cells[name] = replace(rows[idx].cells[name], p_holm=corrected)
    return rows
