"""Classes that are picked by name: `OPTIMIZERS[name](...)`, `getattr(torch.optim, name)(...)`.

Which one it is may be known (a constant key), or only that it is one of several (all values of a dictionary), or only
its module (`torch.optim.?`). Rules ask for all of them and speak where what they say holds for each.
"""

from __future__ import annotations

import ast

from traindoctor.effective_calls import Items, known_items
from traindoctor.names import canonical
from traindoctor.python_file import PythonFile

ANY = "?"
"""Last part of a name that is not known: `torch.optim.?`."""
UNKNOWN = frozenset[str]()


def names_called(file: PythonFile, call: ast.Call) -> frozenset[str]:
    """Every canonical name that a call may reach; empty where one of them cannot be told."""
    return _names_of(file, call.func, 0)


def _names_of(file: PythonFile, node: ast.expr, depth: int) -> frozenset[str]:
    if depth > 4:
        return UNKNOWN
    if isinstance(node, ast.Name | ast.Attribute):
        name = file.resolve(node)
        if name is not None:
            return frozenset([name])
        value = file.value_of(node)
        return UNKNOWN if value is node else _names_of(file, value, depth + 1)
    if isinstance(node, ast.IfExp):
        return _all(file, [node.body, node.orelse], depth)
    if isinstance(node, ast.Subscript):
        return _of_key(file, known_items(file, node.value), node.slice, depth)
    if isinstance(node, ast.Call):
        return _of_lookup(file, node, depth)
    return UNKNOWN


def _of_lookup(file: PythonFile, call: ast.Call, depth: int) -> frozenset[str]:
    """`getattr(module, name)` and `CHOICES.get(name, default)`."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) >= 2:
        owner = file.resolve(call.args[0])
        key = file.value_of(call.args[1])
        if owner is None:
            return UNKNOWN
        known = isinstance(key, ast.Constant) and isinstance(key.value, str)
        return frozenset([canonical(f"{owner}.{ast.literal_eval(key) if known else ANY}")])
    if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args:
        chosen = _of_key(file, known_items(file, call.func.value), call.args[0], depth)
        default = call.args[1] if len(call.args) > 1 else None
        fallback = _names_of(file, default, depth + 1) if default is not None else frozenset()
        return UNKNOWN if default is not None and not fallback else chosen and chosen | fallback
    return UNKNOWN


def _of_key(file: PythonFile, items: Items | None, key: ast.expr, depth: int) -> frozenset[str]:
    if not items:
        return UNKNOWN
    key = file.value_of(key)
    if isinstance(key, ast.Constant):
        return _names_of(file, items[key.value], depth + 1) if key.value in items else UNKNOWN
    return _all(file, list(items.values()), depth)


def _all(file: PythonFile, nodes: list[ast.expr], depth: int) -> frozenset[str]:
    """The names of all of these; empty where one is not known, for the rest would be a guess."""
    found = [_names_of(file, node, depth + 1) for node in nodes]
    return frozenset().union(*found) if all(found) else UNKNOWN
