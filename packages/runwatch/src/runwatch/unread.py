"""Numbers that were read but not used: what a log that cannot be judged is reported with."""

from __future__ import annotations

import re
from collections import Counter

from runwatch.tokens import Layout


class Unread:
    """Numbers that were read but not used, for a log that cannot be judged: names, and lines that hold them."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.lines: list[str] = []

    def add_header(self, line: str) -> None:
        """The names of columns without a loss among them."""
        names = [name.strip(" \"'") for name in re.split(r"[,;\t]", line)]
        if len(names) > 1 and all(name and len(name) <= 40 for name in names):
            self.keys.update(names)
            self.lines.append(line.strip()[:160])

    def add(self, line: str, layout: Layout) -> None:
        if len(self.keys) > 200:
            return
        keys = [
            field.key
            for field in layout.fields
            if field.key and len(field.key) <= 40 and not field.key.isspace()
        ]
        self.keys.update(keys)
        if keys and len(self.lines) < 5:
            self.lines.append(line.strip()[:160])
