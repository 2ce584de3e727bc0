"""Lines of text that differ in their digits only: their numbers without looking for names again.

Most logs say the same sentence a million times. Where a line was read whose words hold no message, no rank and no bar,
a pattern is made of it: the words as they are, the digits free. Whether a pair of a name and a number is one, and
which, depends on the words and on where there are digits, not on which or how many; so the pattern finds what the long
way would.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from runwatch.blocks import Block, block_of
from runwatch.pairs import Pair

_DIGITS = re.compile(r"[0-9]+")
_LIKE_A_STAMP = re.compile(r"\d+-\d+-\d+[ T]\d+:\d+:\d+")
_MOST = 8
_MOST_MADE = 64
"""A log that never says the same twice is read the long way."""


@dataclass
class Template:
    """A pattern, and what its groups are."""

    pattern: re.Pattern[str]
    pairs: list[Pair]
    has_stamp: bool

    def block(self, rows: list[tuple[str, ...]], seconds: Callable[[str], float]) -> Block | None:
        """Lines that matched, as columns."""
        columns = list(zip(*rows, strict=True))
        try:
            times = list(map(seconds, columns.pop(0))) if self.has_stamp else None
            values = {
                pair.name: _numbers(pair, column) for pair, column in zip(self.pairs, columns, strict=True)
            }
            steps = [int(step) for step in values.pop("step")]
        except (ValueError, OverflowError):
            return None
        return block_of(steps, times, values)


def _numbers(pair: Pair, column: tuple[str, ...]) -> list[float]:
    if "," in column[0]:
        column = tuple(text.replace(",", "") for text in column)
    if pair.factor == 1.0:
        return list(map(float, column))
    return [float(text) * pair.factor for text in column]


class Templates:
    """The patterns of one file, the one that matched last first."""

    def __init__(self) -> None:
        self.known: list[Template] = []
        self._seen: dict[str, None] = {}
        self._num_made = 0

    def match(self, line: str) -> tuple[Template, tuple[str, ...]] | None:
        """The pattern that a line follows, and its numbers."""
        for idx, template in enumerate(self.known):
            if found := template.pattern.fullmatch(line):
                if idx:
                    self.known.insert(0, self.known.pop(idx))
                return template, found.groups()
        return None

    def learn(
        self, line: str, pairs: list[Pair], stamp: re.Match[str] | None, fixed: tuple[int, int]
    ) -> None:
        """Make a pattern of a line, if one like it was seen before; the digits in `fixed` must stay as they are."""
        words = _DIGITS.sub("0", line)
        if words not in self._seen:
            self._seen[words] = None
            if len(self._seen) > 4 * _MOST:
                del self._seen[next(iter(self._seen))]
            return
        if self._num_made >= _MOST_MADE or not _is_plain(line, pairs, stamp):
            return
        self._num_made += 1
        pattern = _pattern(line, pairs, stamp.span() if stamp else None, fixed)
        self.known = [Template(re.compile(pattern), pairs, stamp is not None), *self.known[: _MOST - 1]]


def _is_plain(line: str, pairs: list[Pair], stamp: re.Match[str] | None) -> bool:
    """Whether other digits could not change what the line is."""
    if stamp is None:
        clear = not _LIKE_A_STAMP.search(line)
    else:
        clear = pairs[0].start >= stamp.end()
    digits = all(_DIGITS.search(line, pair.start, pair.end) for pair in pairs)
    return clear and digits and line.isascii()


def _pattern(line: str, pairs: list[Pair], stamp: tuple[int, int] | None, fixed: tuple[int, int]) -> str:
    groups = [(pair.start, pair.end) for pair in pairs]
    parts, at, settled = [], 0, 0
    if stamp is not None:  # digits before it stay, so that it stays where it is
        parts += [re.escape(line[: stamp[0]]), f"({_free(line[stamp[0] : stamp[1]], exact=True)})"]
        at = settled = stamp[1]
    for start, end in groups:
        parts += [_between(line, at, start, fixed), f"({_free(line[start:end])})"]
        at = end
    assert at >= settled, "pairs come after the stamp"
    return "".join([*parts, _between(line, at, len(line), fixed)])


def _between(line: str, start: int, end: int, fixed: tuple[int, int]) -> str:
    """Words with free digits; a part that is fixed lies in it as a whole or not at all."""
    if start <= fixed[0] < fixed[1] <= end:
        inner = re.escape(line[fixed[0] : fixed[1]])
        return f"{_free(line[start : fixed[0]])}{inner}{_free(line[fixed[1] : end])}"
    return _free(line[start:end])


def _free(text: str, *, exact: bool = False) -> str:
    """A pattern for the same text with other digits."""
    parts, at = [], 0
    for found in _DIGITS.finditer(text):
        count = f"{{{len(found[0])}}}" if exact else "+"
        parts += [re.escape(text[at : found.start()]), f"[0-9]{count}"]
        at = found.end()
    return "".join([*parts, re.escape(text[at:])])
