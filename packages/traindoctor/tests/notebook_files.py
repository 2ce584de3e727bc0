"""Notebooks for tests: as Jupyter writes them, and made from a Python file by cutting it between statements."""

from __future__ import annotations

import ast
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

OUTPUT = {"name": "stdout", "output_type": "stream", "text": ["loss 0.1 \u00e9\n"]}


def code(source: str | list[str]) -> dict[str, Any]:
    """A code cell that was run."""
    return {
        "cell_type": "code",
        "execution_count": 7,
        "metadata": {"tags": []},
        "outputs": [OUTPUT],
        "source": source,
    }


def markdown(text: str) -> dict[str, Any]:
    """A cell that is no code."""
    return {"cell_type": "markdown", "metadata": {}, "source": [text]}


def lines_of(text: str) -> list[str]:
    """The list of lines that Jupyter writes for a text."""
    return text.splitlines(keepends=True)


def notebook(*cells: dict[str, Any] | str, **about: Any) -> dict[str, Any]:
    """A notebook of nbformat 4; a string is a code cell, written as a list of lines."""
    written = [cell if isinstance(cell, dict) else code(lines_of(cell)) for cell in cells]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": written, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5, **about}


def write(path: Path, content: dict[str, Any]) -> bytes:
    """Write a notebook as Jupyter does; returns the bytes."""
    data = (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
    path.write_bytes(data)
    return data


def codes_of(data: bytes) -> list[str]:
    """The code of every code cell."""
    cells = json.loads(data)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def cut(text: str) -> list[str]:
    """A Python file in parts, one for each statement of the module with the comments right above it."""
    lines = lines_of(text)
    starts = {0}
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while start and lines[start - 1].startswith("#"):
            start -= 1
        starts.add(start)
    edges = [*sorted(starts), len(lines)]
    return ["".join(lines[a:b]) for a, b in pairwise(edges)]


def as_notebook(text: str) -> dict[str, Any]:
    """A Python file as a notebook with a cell for each statement; the last newline of a cell is not written."""
    cells = [code(lines_of(part.removesuffix("\n"))) for part in cut(text)]
    return notebook(markdown("# Training"), *cells)


def as_python(data: bytes) -> str:
    """The Python file that a notebook made by `as_notebook` came from."""
    return "".join(f"{part}\n" for part in codes_of(data))
