"""Short ways to write the fixes that many rules share."""

from __future__ import annotations

import ast

from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.types import Fix, NodeEdit, Span


def set_keyword(
    file: PythonFile,
    call: ast.Call,
    name: str,
    value: str,
    *,
    safe: bool,
    unsafe_if: frozenset[str] = frozenset(),
    dropped_if: frozenset[str] = frozenset(),
) -> Fix | None:
    """Give a call `name=value`, replacing what is there; None where the call cannot take a keyword.

    A value that comes from a dictionary or a partial elsewhere is changed there, which others may see: never safe.
    """
    lone_generator = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.GeneratorExp)
    if lone_generator or any(isinstance(outer, ast.JoinedStr) for outer in file.ancestors(call)):
        return None
    if dotted(call.func) in file.alias_names and file.resolve(call.func) is None:
        safe = False  # a subclass or a caller may have put something else under this name
    place = file.span(call)
    edit = NodeEdit(place, "set_keyword", (name, value))
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is not None and not isinstance(file.parents.get(given), ast.keyword):
        edit, safe = NodeEdit(file.span(given), "replace", (value,)), False  # {"name": value}
    elif given is not None and not _within(file.span(given), place):
        edit, safe = (
            NodeEdit(file.span(given), "replace", (value,)),
            False,
        )  # dict(name=value), partial(..., name=value)
    return Fix(f"set {name}={value}", safe, node_edits=(edit,), unsafe_if=unsafe_if, dropped_if=dropped_if)


def _within(inner: Span, outer: Span) -> bool:
    starts = (outer.line, outer.column) <= (inner.line, inner.column)
    return starts and (inner.end_line, inner.end_column) <= (outer.end_line, outer.end_column)


def replace_node(file: PythonFile, node: ast.AST, text: str, title: str, *, safe: bool) -> Fix:
    """Write another expression in its place."""
    return Fix(title, safe, node_edits=(NodeEdit(file.span(node), "replace", (text,)),))
