"""Which checkpoints outlive the newest few: the best ones, every so many steps, and always the last good ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mmldlm.checkpoint import strict_json
from mmldlm.checkpoint.manifest import DamagedError, read_manifest
from mmldlm.checkpoint.resume import META

SCORE = "valid_loss"
"""Key in a checkpoint's meta, where it was validated at its step; smaller is better."""
GOOD = 2
"""So many good ones stay: the newest of them may be found damaged on the day that it is needed."""


@dataclass(frozen=True)
class Retention:
    """Called with all checkpoints that look whole, oldest first; returns those that must stay."""

    best: int = 0
    """So many with the smallest score."""
    every: int = 0
    """All whose step is a multiple of this; 0: none."""
    is_good: Callable[[Path], bool] | None = None
    """The newest two checkpoints that this is true of stay, whatever came after them."""

    def __call__(self, paths: Sequence[Path]) -> set[Path]:
        kept = set(self._best(paths))
        if self.every:
            kept |= {path for path in paths if _step(path) % self.every == 0}
        if self.is_good is not None:
            kept |= set(islice(filter(self.is_good, reversed(paths)), GOOD))
        return kept

    def _best(self, paths: Sequence[Path]) -> list[Path]:
        if not self.best:
            return []
        scored = [(score, path) for path in paths if (score := _score(path)) is not None]
        return [path for _, path in sorted(scored, key=lambda pair: pair[0])[: self.best]]


def _score(path: Path) -> float | None:
    try:
        score = strict_json.load((path / META).read_bytes()).get(SCORE)
    except (OSError, ValueError):
        return None
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except DamagedError:
        return 0
