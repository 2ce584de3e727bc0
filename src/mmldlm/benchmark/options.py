"""What a benchmark was asked to do, checked before anything is spent."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.job import Job
from mmldlm.config import Config
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Options:
    """How everything is measured."""

    recipe: str
    settings: tuple[str, ...]
    """For every arm; an arm's own settings win."""
    store: Path
    steps: int
    warmup: int
    block: int
    repeats: int
    gate_steps: int
    tolerance: float
    """Largest loss difference that passes the gate."""
    timeout: float
    """Seconds after which a process is given up."""
    memory_limit: int | None
    seed: int

    def words(self, arm: Arm) -> tuple[str, ...]:
        """All settings of an arm, in the order in which they win."""
        return (
            f"train.seed={self.seed}",
            "batch.adapt=false",  # out of memory is an answer here
            *self.settings,
            f"data.store={self.store.absolute()}",
            *arm.settings,
        )

    def job(self, arm: Arm, *, timed: bool = True, gated: bool = False) -> Job:
        """The measurement of an arm."""
        return Job(
            recipe=self.recipe,
            settings=self.words(arm),
            steps=self.steps if timed else 0,
            warmup=self.warmup if timed else 0,
            block=self.block,
            gate_steps=self.gate_steps if gated else 0,
            memory_limit=self.memory_limit,
        )

    def config(self, arm: Arm) -> Config:
        """The settings of an arm, resolved; a mistake in them names the arm."""
        try:
            return load_recipe(self.recipe, list(self.words(arm)))
        except UserError as error:
            raise UserError(f"arm {arm.name!r}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"store": str(self.store)}


def parse_bytes(text: str, option: str) -> int:
    """`80GiB` as a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise UserError(f"{option} {text}: write a number with a unit, such as 80GiB; units are "
                        f"{', '.join(unit for unit in _UNITS if unit)}")  # fmt: skip
    return int(float(found[1]) * _UNITS[found[2]])
