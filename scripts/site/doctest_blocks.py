"""A Griffe extension: examples in docstrings (`>>> ...`) become code blocks of the page."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Puts each run of doctest lines, with its output, into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that is loaded."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(text: str) -> str:
    """The docstring with fences around its examples."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
