"""Calls as they take effect: through another name, through a partial, with keyword dictionaries spelled out.

`kw = dict(num_workers=0); DataLoader(data, **kw)`, `make = partial(DataLoader, num_workers=0); make(data)` and
`self.loader_cls = DataLoader; self.loader_cls(data, num_workers=0)` are all the call `DataLoader(data, num_workers=0)`.
Where nothing has to be followed, the node of the file itself is given.
"""

from __future__ import annotations

import ast

from traindoctor.names import dotted
from traindoctor.syntax import SyntaxTree

PARTIAL = "functools.partial"
Items = dict[str, ast.expr]
_LATER = "given by whoever calls the partial"


def find_calls(file: SyntaxTree, calls: list[tuple[ast.Call, str | None]]) -> dict[str, list[ast.Call]]:
    """Canonical name -> calls of it, in order of appearance; partials that this file never calls come last."""
    found: dict[str, list[ast.Call]] = {}
    called: set[ast.Call] = set()
    for call, name in calls:
        through = name is None and dotted(call.func) in file.alias_names
        made = _single_value(file, call.func) if through else None
        if isinstance(made, ast.Call) and made.args and file.resolve(made.func) == PARTIAL:
            name = file.resolve(made.args[0])
            called.add(made)
            call = _merged(file, made, call)
        if name:
            found.setdefault(name, []).append(_spelled_out(file, call))
    for made in found.get(PARTIAL, []):
        name = file.resolve(made.args[0]) if made.args else None
        if name and made not in called:
            found.setdefault(name, []).append(_open(file, made))
    return found


def is_open(call: ast.Call) -> bool:
    """Whether a call is a partial that others complete: what it does not say may be said later."""
    return bool(call.keywords) and is_marker(call.keywords[-1])


def is_marker(keyword: ast.keyword) -> bool:
    """Whether a keyword stands for arguments that are given later."""
    return keyword.arg is None and isinstance(keyword.value, ast.Constant) and keyword.value.value == _LATER


def alias_of(file: SyntaxTree, node: ast.expr) -> str | None:
    """The canonical name of what a local name, module name, `self.x` or class attribute stands for."""
    if not file.alias_names or dotted(node) not in file.alias_names:
        return None
    value = _single_value(file, node)
    return file.resolve(value) if isinstance(value, ast.Name | ast.Attribute) else None


def _single_value(file: SyntaxTree, node: ast.expr) -> ast.expr | None:
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        base = base.value
    if not isinstance(base, ast.Name) or (base.id != "self" and base.id in file.hidden(node)):
        return None
    values = file.values_of(node)
    return values[0] if len(values) == 1 else None


def _copy(file: SyntaxTree, call: ast.Call, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
    """A call that stands where another stands; the parts keep their own places."""
    copy = ast.copy_location(ast.Call(call.func, args, keywords), call)
    if call in file.parents:
        file.parents[copy] = file.parents[call]
    return copy


def _merged(file: SyntaxTree, made: ast.Call, call: ast.Call) -> ast.Call:
    given = {keyword.arg for keyword in call.keywords}
    kept = [keyword for keyword in made.keywords if keyword.arg is None or keyword.arg not in given]
    return _copy(file, call, [*made.args[1:], *call.args], [*kept, *call.keywords])


def _open(file: SyntaxTree, made: ast.Call) -> ast.Call:
    later = ast.keyword(None, ast.Constant(_LATER))
    copy = _copy(file, made, made.args[1:], [*made.keywords, later])
    copy.func = made.args[0]
    return copy


def _spelled_out(file: SyntaxTree, call: ast.Call) -> ast.Call:
    """The call with every known `**dictionary` replaced by its keywords."""
    if all(keyword.arg is not None for keyword in call.keywords):
        return call
    keywords: list[ast.keyword] = []
    known_any = False
    for keyword in call.keywords:
        items = None if keyword.arg is not None or is_marker(keyword) else known_items(file, keyword.value)
        if items is None:
            keywords.append(keyword)
        else:
            known_any = True
            keywords += [ast.keyword(name, value) for name, value in items.items()]
    return _copy(file, call, call.args, keywords) if known_any else call


def known_items(file: SyntaxTree, node: ast.expr, depth: int = 0) -> Items | None:
    """The content of a dictionary with literal keys, or None where it cannot be known."""
    if depth > 4:
        return None
    if isinstance(node, ast.Dict):
        return _joined(file, list(zip(node.keys, node.values, strict=True)), depth)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return _joined(file, _dict_parts(node), depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _joined(file, [(None, node.left), (None, node.right)], depth)
    value = _single_value(file, node)
    if value is None or not isinstance(value, ast.Dict | ast.Call | ast.BinOp):
        return None
    items = known_items(file, value, depth + 1)
    return None if items is None else _with_changes(file, node, value, items)


def _dict_parts(call: ast.Call) -> list[tuple[ast.expr | None, ast.expr]]:
    parts: list[tuple[ast.expr | None, ast.expr]] = [(None, value) for value in call.args]
    for keyword in call.keywords:
        parts.append((ast.Constant(keyword.arg) if keyword.arg else None, keyword.value))
    return parts


def _joined(file: SyntaxTree, parts: list[tuple[ast.expr | None, ast.expr]], depth: int = 0) -> Items | None:
    items: Items = {}
    for key, value in parts:
        if key is None:
            inner = known_items(file, value, depth + 1)
            if inner is None:
                return None
            items |= inner
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            items[key.value] = value
        else:
            return None
    return items


def _with_changes(file: SyntaxTree, use: ast.expr, made: ast.expr, items: Items) -> Items | None:
    """The dictionary after the changes made to it before its use; None where one of them is not certain."""
    function = file.function_of(made)
    for change in file.dictionary_changes.get(dotted(use) or "", []):
        certain = (
            file.function_of(change) is function
            and file.loop_of(change) is file.loop_of(made)
            and not file.conditions(change, function)
        )
        update = _changed_items(file, change) if certain else None
        if update is None:
            return None
        if file.span(change) < file.span(use):
            items = items | update
    return items


def _changed_items(file: SyntaxTree, change: ast.AST) -> Items | None:
    if isinstance(change, ast.Assign):  # kw["num_workers"] = 0
        target = change.targets[0]
        assert isinstance(target, ast.Subscript)
        return _joined(file, [(target.slice, change.value)])
    if (
        isinstance(change, ast.Call)
        and isinstance(change.func, ast.Attribute)
        and change.func.attr == "update"
    ):
        return _joined(file, _dict_parts(change))
    return None
