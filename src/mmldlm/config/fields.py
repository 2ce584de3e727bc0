"""How a setting says what it allows; `checks.py` reads it."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any


def number(
    default: Any, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> Any:
    """A number in [low, high]; `above` and `below` leave out the ends."""
    return field(default=default, metadata={"low": low, "high": high, "above": above, "below": below})


def choice(default: Any, *allowed: str) -> Any:
    """One of these words."""
    return field(default=default, metadata={"allowed": allowed})
