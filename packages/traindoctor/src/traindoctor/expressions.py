"""Questions about single expressions: arguments, constants, names, conditions on the rank."""

from __future__ import annotations

import ast
import re

from traindoctor.names import dotted

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def parameter_names(function: ast.AST) -> list[str]:
    """Names of a function's parameters."""
    if not isinstance(function, FUNCTIONS):
        return []
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in [*every, *filter(None, (arguments.vararg, arguments.kwarg))]]


def is_method(node: ast.AST, *names: str) -> bool:
    """Whether a node is a call `<something>.name(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def has_spread(call: ast.Call) -> bool:
    """Whether a call passes `*args` or `**kwargs`, so that its arguments cannot be known."""
    return any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The value given for a parameter, by keyword or position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Whether a node is literally one of these values (True is not 1)."""
    return isinstance(node, ast.Constant) and any(
        node.value == value and type(node.value) is type(value) for value in values
    )


def number(node: ast.AST | None) -> float | None:
    """The number that a literal or a product of literals stands for."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left, right = number(node.left), number(node.right)
        if left is not None and right is not None:
            return left * right if isinstance(node.op, ast.Mult) else left + right
    return None


def words_of(node: ast.AST) -> set[str]:
    """Names, attributes and string constants below a node, in lower case."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id.lower())
        elif isinstance(part, ast.Attribute):
            found.add(part.attr.lower())
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value.lower())
    return found


_RANK = re.compile(
    r"(^|_)(rank|main|master|primary|chief|rank0|rank_zero|process_index|zero)(_|$)|is_main|is_master"
)


def mentions_rank(test: ast.AST) -> bool:
    """Whether a condition asks which process this is."""
    words = words_of(test) - {"zero_grad", "zero_"}
    return any(_RANK.search(word) for word in words if len(word) < 60)


def holds_on_one_rank(test: ast.expr) -> bool:
    """Whether a condition only picks a process (`rank == 0`, `is_main_process and log is not None`): it "
    "holds somewhere."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(mentions_rank, test.values)) and all(
            holds_on_one_rank(part) or _is_present(part) for part in test.values
        )
    simple = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Compare)
    periodic = any(isinstance(part, ast.Mod) for part in ast.walk(test))
    return simple and not periodic and mentions_rank(test)


def _is_present(test: ast.expr) -> bool:
    """`x is not None`."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and is_constant(test.comparators[0], None)
    )


def is_given_loss_and_optimizer(call: ast.Call) -> bool:
    """`loss_scaler(loss, optimizer, ...)`: a helper of another file that runs the backward pass."""
    names = [(dotted(value) or "").rsplit(".", 1)[-1].lower() for value in call.args]
    return (
        bool(names)
        and re.fullmatch(r"(\w+_)?loss", names[0]) is not None
        and bool({"optimizer", "optim", "opt"} & set(names[1:]))
    )


_MEASURES = re.compile(
    r"bench|profil|warm_?up|measure|(^|_)probe|timing|(^|_)(validate|check)_?kernel|kernel_(validate|check)|"
    r"diagnos|(^|_)(diag|verify|analy[sz]e)(_|\.|$)"
)


def is_measurement(name: str) -> bool:
    """Whether a file or function is named as one that measures or checks kernels instead of training."""
    return bool(_MEASURES.search(name.lower()))
