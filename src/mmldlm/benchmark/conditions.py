"""`--fail-if`: conditions on the result that make the command fail, for use in continuous integration."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from mmldlm.benchmark.ladder import Comparison, Row
from mmldlm.benchmark.options import parse_bytes
from mmldlm.errors import UserError

_WRITTEN = re.compile(r"\s*(\w+)\(([^()]*)\)\s*(<=|>=|<|>)\s*([\w.+-]+)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _tokens(row: Row) -> float | None:
    return row.tokens_per_second.median if row.tokens_per_second else None


FIGURES: dict[str, Callable[[Row], float | None]] = {
    "tokens_per_second": _tokens,
    "documents_per_second": lambda row: row.documents_per_second,
    "memory": lambda row: row.memory,
    "mfu": lambda row: row.mfu,
    "loss_difference": lambda row: row.loss_difference,
}
KNOWN = ("speedup(arm,arm)", *(f"{name}(arm)" for name in FIGURES))


@dataclass(frozen=True)
class Condition:
    """`figure(arm) < number`."""

    text: str
    figure: str
    arms: tuple[str, ...]
    sign: str
    limit: float

    def value(self, comparison: Comparison) -> float | None:
        """The figure; none where an arm gave no measurement."""
        rows = [comparison.row(name) for name in self.arms]
        if self.figure != "speedup":
            return FIGURES[self.figure](rows[0])
        ours, theirs = (_tokens(row) for row in rows)
        return ours / theirs if ours and theirs else None


@dataclass(frozen=True)
class Outcome:
    """What a condition came to."""

    text: str
    value: float | None
    failed: bool

    def line(self) -> str:
        """For people."""
        if self.value is None:
            return f"{self.text}: fails, because there is no such measurement"
        return f"{self.text}: {'fails' if self.failed else 'holds off'}, the value is {self.value:.4g}"


def parse_condition(text: str, arms: list[str]) -> Condition:
    """Read a condition; its arms must be among those that are measured."""
    found = _WRITTEN.fullmatch(text)
    if not found or (found[1] != "speedup" and found[1] not in FIGURES):
        raise UserError(
            f"--fail-if {text!r}: write a figure, a sign and a number, such as speedup(everything,baseline)<1.2; "
            f"figures are {', '.join(KNOWN)}"
        )
    names = tuple(name.strip() for name in found[2].split(","))
    wanted = 2 if found[1] == "speedup" else 1
    if len(names) != wanted:
        raise UserError(f"--fail-if {text!r}: {found[1]} takes {wanted} arms, here are {len(names)}")
    for name in names:
        if name not in arms:
            raise UserError(f"--fail-if {text!r}: no arm is called {name!r}; the arms are {', '.join(arms)}")
    return Condition(text, found[1], names, found[3], _limit(found[1], found[4], text))


def _limit(figure: str, word: str, text: str) -> float:
    if figure == "memory":
        return parse_bytes(word, f"--fail-if {text!r}:")
    try:
        return float(word)
    except ValueError:
        raise UserError(f"--fail-if {text!r}: {word!r} is no number") from None


def judge(conditions: list[Condition], comparison: Comparison) -> list[Outcome]:
    """Each condition with its value. One that cannot be judged fails."""
    outcomes = []
    for condition in conditions:
        value = condition.value(comparison)
        failed = value is None or _OPERATORS[condition.sign](value, condition.limit)
        outcomes.append(Outcome(condition.text, value, failed))
    return outcomes
