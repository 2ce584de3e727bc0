"""Edits of Python code through LibCST: the tree is changed, everything else is printed as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from traindoctor.types import NodeEdit, Span


class EditRefusedError(Exception):
    """The code cannot be edited without a risk; the text says why."""


def apply_node_edits(text: str, edits: Sequence[NodeEdit]) -> tuple[str, set[NodeEdit]]:
    """The changed text, and the edits whose place was not found (they were not made).

    Only the outermost expressions or statements that edits name are given to LibCST, each as a small module of its
    own: everything around them stays as it is, and a long file costs no more than a short one.
    """
    starts = _line_starts(text)
    missed: set[NodeEdit] = set()
    for outer, inner in sorted(_group(edits).items(), reverse=True):
        begin = starts[outer.line - 1] + outer.column - 1
        end = starts[outer.end_line - 1] + outer.end_column - 1
        moved = {_relative(edit, outer): edit for edit in inner}
        try:
            whole = all(edit.span == outer for edit in inner)
            piece, left = (_edit_whole if whole else _edit_module)(text[begin:end], list(moved))
        except EditRefusedError:
            # Part of a bracketed expression over several lines: no module by itself.
            return _edit_module(text, edits)
        text = text[:begin] + piece + text[end:]
        missed |= {moved[edit] for edit in left}
    return text, missed


def _line_starts(text: str) -> list[int]:
    """Where lines begin; a line ends with LF, CR LF or CR, as for Python's tokenizer."""
    return [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", text))]


def _group(edits: Sequence[NodeEdit]) -> dict[Span, list[NodeEdit]]:
    """Outermost span -> the edits in it."""
    groups: dict[Span, list[NodeEdit]] = {}
    for edit in sorted(
        edits, key=lambda e: (e.span.line, e.span.column, -e.span.end_line, -e.span.end_column)
    ):
        last = next(reversed(groups), None)
        end = (edit.span.end_line, edit.span.end_column)
        if last is not None and end <= (last.end_line, last.end_column):
            groups[last].append(edit)
        else:
            groups[edit.span] = [edit]
    return groups


def _relative(edit: NodeEdit, outer: Span) -> NodeEdit:
    """The same edit with a span that counts from the beginning of the outer one."""

    def move(line: int, column: int) -> tuple[int, int]:
        return line - outer.line + 1, column - outer.column + 1 if line == outer.line else column

    span = edit.span
    moved = Span(*move(span.line, span.column), *move(span.end_line, span.end_column))
    return NodeEdit(moved, edit.action, edit.values)


def _edit_whole(text: str, edits: Sequence[NodeEdit]) -> tuple[str, set[NodeEdit]]:
    """Edits of the expression or statement that a text consists of; no position has to be looked up."""
    module = _parse(text)
    line = module.body[0] if len(module.body) == 1 else None
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return _edit_module(text, edits)
    small = line.body[0]
    node: Any = small.value if isinstance(small, cst.Expr) else small
    for edit in edits:
        needed, change = ACTIONS[edit.action]
        if not isinstance(node, needed):
            return _edit_module(text, edits)
        node = change(node, *edit.values)
    changed = small.with_changes(value=node) if isinstance(small, cst.Expr) else node
    return module.with_changes(body=[line.with_changes(body=[changed])]).code, set()


def _edit_module(text: str, edits: Sequence[NodeEdit]) -> tuple[str, set[NodeEdit]]:
    editor = _Editor(edits)
    changed = MetadataWrapper(_parse(text), unsafe_skip_copy=True).visit(editor)
    return changed.code, set(edits) - editor.done


def _parse(text: str) -> cst.Module:
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, RecursionError, ValueError) as error:
        raise EditRefusedError(f"LibCST cannot parse it: {str(error).splitlines()[0]}") from error
    if module.code != text:
        raise EditRefusedError("LibCST would not print it back unchanged")
    return module


class _Editor(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, edits: Sequence[NodeEdit]) -> None:
        super().__init__()
        self.wanted: dict[Span, list[NodeEdit]] = {}
        for edit in edits:
            self.wanted.setdefault(edit.span, []).append(edit)
        self.lines = {span.line for span in self.wanted}
        self.done: set[NodeEdit] = set()

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Change a node whose position and type an edit names."""
        updated = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, cst.BaseExpression | cst.BaseSmallStatement):
            return updated
        place = self.get_metadata(PositionProvider, original_node, None)
        if place is None or place.start.line not in self.lines:
            return updated
        span = Span(place.start.line, place.start.column + 1, place.end.line, place.end.column + 1)
        for edit in self.wanted.get(span, []):
            needed, change = ACTIONS[edit.action]
            if edit not in self.done and isinstance(updated, needed):
                updated = change(updated, *edit.values)
                self.done.add(edit)
        return updated


def _expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def _set_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    for index, argument in enumerate(call.args):
        if argument.keyword is not None and argument.keyword.value == name:
            changed = argument.with_changes(value=_expression(value))
            return call.with_changes(args=[*call.args[:index], changed, *call.args[index + 1 :]])
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(_expression(value), cst.Name(name), equal=tight)
    return call.with_changes(args=_append(call, added))


def _append(call: cst.Call, added: cst.Arg) -> list[cst.Arg]:
    """The arguments with one more at the end, in the layout of the others; comments stay where they are."""
    if not call.args:
        return [added]
    last = call.args[-1]
    trailing = isinstance(last.comma, cst.Comma)
    tail = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    if not isinstance(tail, cst.ParenthesizedWhitespace):
        # Everything up to the bracket is on one line: `f(a, b)` -> `f(a, b, c=1)`.
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        kept = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
        ending = cst.Comma(whitespace_after=tail) if trailing else cst.MaybeSentinel.DEFAULT
        return [
            *call.args[:-1],
            kept,
            added.with_changes(comma=ending, whitespace_after_arg=cst.SimpleWhitespace("")),
        ]
    between = _separator(call, tail)
    closing = cst.ParenthesizedWhitespace(indent=tail.indent, last_line=tail.last_line)
    kept = last.with_changes(
        comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace("")
    )
    if trailing:
        new = added.with_changes(comma=cst.Comma(whitespace_after=closing))
    else:
        new = added.with_changes(whitespace_after_arg=closing)
    return [*call.args[:-1], kept, new]


def _separator(call: cst.Call, tail: cst.ParenthesizedWhitespace) -> cst.ParenthesizedWhitespace:
    """What stands between the old last argument and the new one: its comment, then the indent of the arguments."""
    pattern: Any = None
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        pattern = call.args[-2].comma.whitespace_after
    if not isinstance(pattern, cst.ParenthesizedWhitespace):
        pattern = call.whitespace_before_args
    if not isinstance(pattern, cst.ParenthesizedWhitespace):
        deeper = cst.SimpleWhitespace(tail.last_line.value + "    ")
        return tail.with_changes(last_line=deeper)
    return tail.with_changes(indent=pattern.indent, last_line=pattern.last_line)


def _remove_keyword(call: cst.Call, name: str) -> cst.Call:
    kept = [a for a in call.args if a.keyword is None or a.keyword.value != name]
    if kept and len(kept) < len(call.args) and kept[-1] is not call.args[-1]:
        kept[-1] = kept[-1].with_changes(
            comma=call.args[-1].comma, whitespace_after_arg=call.args[-1].whitespace_after_arg
        )
    return call.with_changes(args=kept)


def _callee(call: cst.Call, name: str) -> cst.Call:
    return call.with_changes(func=_expression(name))


def _insert_first(call: cst.Call, value: str) -> cst.Call:
    first = cst.Arg(_expression(value))
    if call.args:
        first = first.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return call.with_changes(args=[first, *call.args])


def _replace(node: cst.BaseExpression, text: str) -> cst.BaseExpression:
    new = _expression(text)
    return new.with_changes(lpar=[*node.lpar, *new.lpar], rpar=[*new.rpar, *node.rpar])


def _replace_statement(node: cst.BaseSmallStatement, text: str) -> cst.BaseSmallStatement:
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.body[0].with_changes(semicolon=node.semicolon)


def _import_from(node: cst.ImportFrom, module: str) -> cst.ImportFrom:
    name = _expression(module)
    assert isinstance(name, cst.Attribute | cst.Name)
    return node.with_changes(module=name)


ACTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "set_keyword": (cst.Call, _set_keyword),
    "remove_keyword": (cst.Call, _remove_keyword),
    "callee": (cst.Call, _callee),
    "insert_first": (cst.Call, _insert_first),
    "replace": (cst.BaseExpression, _replace),
    "replace_statement": (cst.BaseSmallStatement, _replace_statement),
    "import_from": (cst.ImportFrom, _import_from),
}
"""What can be done to a node: the type it must have, and the function that changes it."""
