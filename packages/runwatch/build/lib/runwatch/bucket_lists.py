"""Losses per time bucket: lists of long numbers in a line of JSON, cut out of it and read only where that is needed.

Only a loss that jumps makes anybody look at them, and they are a third of a line of our own log. A damaged list is an
empty one; the rest of its line still counts.
"""

from __future__ import annotations

import json
import re

from runwatch.records import BUCKETS, bucket_losses

_CUT = r'_by_time": ?\[[^\]]*\]'
"""Such lists hold no others, so they end at the first bracket."""
_IN_TEXT, _IN_BYTES = re.compile(_CUT), re.compile(_CUT.encode())
_MEANT = re.compile(rf'"({"|".join(BUCKETS)})": ?(\[[^\]]*\])')


def without_lists(content: bytes | memoryview) -> bytes:
    """Many lines, each list in them replaced by `true`; a list without its end takes the end of its line with it."""
    return _IN_BYTES.sub(b'_by_time": true', content)


def cut_lists(line: str) -> tuple[str, dict[str, list[float]]]:
    """A line, each list in it replaced by `true`, and the lists that mean something."""
    if '_by_time"' not in line:
        return line, {}
    return _IN_TEXT.sub('_by_time": true', line), lists_of(line)


def lists_of(line: str) -> dict[str, list[float]]:
    """The losses per time bucket of a line; nan where nothing fell into a bucket."""
    return {name: _numbers(text) for name, text in _MEANT.findall(line)}


def _numbers(text: str) -> list[float]:
    try:
        return bucket_losses(json.loads(text))
    except (ValueError, OverflowError, RecursionError):
        return []
