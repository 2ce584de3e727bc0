"""Numbers that were read but not used: what a log that cannot be judged is reported with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Unread:
    """Numbers that were read but not used, for a log that cannot be judged: names, and lines that hold them."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.lines: list[str] = []

    def add(self, line: str, names: Iterable[str]) -> None:
        """A line, with the names of the numbers in it or below it."""
        if len(self.keys) > 200:
            return
        keys = [name for name in names if name and len(name) <= 40 and not name.isspace()]
        self.keys.update(keys)
        if keys and len(self.lines) < 5:
            self.lines.append(line.strip()[:160])
