"""Other code in the cells of a notebook, written into its own JSON text.

Outputs, metadata, indentation, order of keys and escapes are never printed again: a change replaces the characters of
the changed lines and no others.
"""

from __future__ import annotations

import difflib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

from traindoctor.notebook_json import UNIT, RawCell, split_at_newlines


def rewrite(raw: str, changes: list[tuple[RawCell, str]]) -> str:
    """The text of the file with other code in these cells."""
    parts, done = [], 0
    for start, end, new in sorted(edit for cell, text in changes for edit in _edits(raw, cell, text)):
        parts += [raw[done:start], new]
        done = end
    return "".join([*parts, raw[done:]])


def _edits(raw: str, cell: RawCell, text: str) -> Iterator[tuple[int, int, str]]:
    """Replacements in the file that give a cell another text; pieces that stay are not touched."""
    pieces, escape = cell.pieces, raw.isascii()
    offset, old, new = _changed_pieces(cell, text)
    for action, first, last, begin, end in difflib.SequenceMatcher(None, old, new).get_opcodes():
        first, last = first + offset, last + offset
        added = [_escaped(line, escape) for line in new[begin:end]]
        if action == "equal":
            continue
        if last - first == end - begin:
            for piece, line in zip(pieces[first:last], new[begin:end], strict=True):
                yield piece.start, piece.end, _patched(raw[piece.start : piece.end], piece.text, line, escape)
        elif action == "replace":
            yield pieces[first].start, pieces[last - 1].end, cell.joint.join(added)
        elif action == "insert" and first < len(pieces):
            at = pieces[first].start
            yield at, at, "".join(line + cell.joint for line in added)
        elif action == "insert":
            at = pieces[-1].end
            yield at, at, "".join(cell.joint + line for line in added)
        elif last < len(pieces):
            yield pieces[first].start, pieces[last].start, ""
        else:
            yield (pieces[first - 1].end if first else pieces[0].start), pieces[-1].end, ""


def _changed_pieces(cell: RawCell, text: str) -> tuple[int, list[str], list[str]]:
    """How many pieces stay at the beginning; the old ones from there to those that stay at the end; the new ones."""
    head, tail = _common(cell.text, text)
    ends = list(accumulate(len(piece.text) for piece in cell.pieces))
    first = bisect_right(ends, head)
    last = max(bisect_left(ends, ends[-1] - tail) + 1, first)
    begin, end = ends[first - 1] if first else 0, len(text) - (ends[-1] - ends[last - 1])
    return first, [piece.text for piece in cell.pieces[first:last]], split_at_newlines(text[begin:end])


def _common(old: str, new: str) -> tuple[int, int]:
    """How many characters at the beginning and, apart from these, at the end are the same."""
    shorter = min(len(old), len(new))
    head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)
    return head, tail


def _patched(content: str, old: str, new: str, escape: bool) -> str:
    """A piece with the characters that differ written anew, the others as they were escaped before."""
    units = UNIT.findall(content)
    head, tail = _common(old, new)
    middle = _escaped(new[head : len(new) - tail], escape)
    return "".join([*units[:head], middle, *units[len(old) - tail :]])


def _escaped(text: str, escape: bool) -> str:
    """The inside of a JSON string; a file without characters beyond ASCII gets none."""
    return json.dumps(text, ensure_ascii=escape)[1:-1]
