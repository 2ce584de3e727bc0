"""Short ways to write the fixes that many rules share."""

from __future__ import annotations

import ast

from mmldlm.diagnostics.doctor.python_file import PythonFile
from mmldlm.diagnostics.doctor.types import Fix, NodeEdit


def set_keyword(file: PythonFile, call: ast.Call, name: str, value: str, *, safe: bool) -> Fix | None:
    """Give a call `name=value`, replacing what is there; None where the call cannot take a keyword."""
    lone_generator = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.GeneratorExp)
    if lone_generator:
        return None
    edit = NodeEdit(file.span(call), "set_keyword", (name, value))
    return Fix(f"set {name}={value}", safe, node_edits=(edit,))


def replace_node(file: PythonFile, node: ast.AST, text: str, title: str, *, safe: bool) -> Fix:
    """Write another expression in its place."""
    return Fix(title, safe, node_edits=(NodeEdit(file.span(node), "replace", (text,)),))
