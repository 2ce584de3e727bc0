"""Which functions run in every training step: a step in a function of its own, and what it calls.

A loop that calls `.backward()` is a training loop. Where the body of the step is a function instead, called from a
loop of the same module or class, named like a step, or called by Lightning or the Hugging Face Trainer, everything in
it that stands behind no condition runs in every step, and so does what it calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import holds_on_one_rank, is_measurement
from traindoctor.syntax import SyntaxTree

_STEP_NAME = re.compile(
    r"^_?((train|training|optimi[sz]ation|run|forward_backward|update)_?(one_)?(step|batch|iter|iteration)"
    r"|forward_backward|optimize_parameters|step_fn)$"
)
_FRAMEWORK_STEPS = {
    "lightning": {"training_step"},
    "pytorch_lightning": {"training_step"},
    "transformers": {"training_step", "compute_loss"},
}
_OWNER = tuple[ast.AST | None, str]


def step_functions(file: SyntaxTree) -> set[ast.AST]:
    """Functions and methods of this file whose body runs once in every training step."""
    definitions = file.definitions
    found = {function for function in definitions.values() if _is_step(file, function)}
    todo = [*found, *file.training_loops]
    while todo:
        scope = todo.pop()
        for call in _certain_calls(file, scope):
            target = definitions.get(_target(file, call))
            if target is not None and target not in found and not _is_generator(target):
                found.add(target)
                todo.append(target)
    return found


def function_called(file: SyntaxTree, call: ast.Call) -> ast.AST | None:
    """The function of this file that a call reaches, or None."""
    return file.definitions.get(_target(file, call))


def _target(file: SyntaxTree, call: ast.Call) -> _OWNER:
    """The key of the function that a call of `name(...)` or `self.name(...)` reaches."""
    if isinstance(call.func, ast.Name):
        return None, call.func.id
    if (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self"
    ):
        return file.class_of(call), call.func.attr
    return None, ""


def _is_step(file: SyntaxTree, function: ast.AST) -> bool:
    assert isinstance(function, ast.FunctionDef)
    owner = file.class_of(function)
    if owner is not None and any(
        function.name in names and file.uses(framework) and _inherits(owner, framework)
        for framework, names in _FRAMEWORK_STEPS.items()
    ):
        return True
    inside = file.backward_calls.get(function, [])
    if not inside or any(file.loop_of(node) is not None for node in inside):
        return False  # with a loop of its own it is the training loop, not the step
    if is_measurement(function.name) or is_measurement(file.path.rsplit("/", 1)[-1]):
        return False
    return bool(_STEP_NAME.match(function.name)) or _called_in_loop(file, function)


def _inherits(owner: ast.ClassDef, framework: str) -> bool:
    wanted = "Trainer" if framework == "transformers" else "Module"
    return any(ast.unparse(base).endswith(wanted) for base in owner.bases)


def _called_in_loop(file: SyntaxTree, function: ast.FunctionDef) -> bool:
    owner = file.parents.get(function)
    key = (owner if isinstance(owner, ast.ClassDef) else None, function.name)
    return any(
        _target(file, call) == key
        and file.loop_of(call) is not None
        and file.function_of(call) is not function
        for call in file.of(ast.Call)
    )


def _certain_calls(file: SyntaxTree, scope: ast.AST) -> Iterator[ast.Call]:
    for node in file.inside(scope):
        if isinstance(node, ast.Call) and is_certain(file, node, scope):
            yield node


def is_certain(file: SyntaxTree, node: ast.AST, scope: ast.AST) -> bool:
    """Whether a node of a loop or function runs whenever the scope does: no `if`, no inner loop, no early way out."""
    if any(not holds_on_one_rank(test) for test in file.conditions(node, scope)):
        return False
    if isinstance(scope, ast.For | ast.While | ast.AsyncFor):
        return file.loop_of(node) is scope
    return file.loop_of(node) is None and not _left_before(file, node, scope)


def _left_before(file: SyntaxTree, node: ast.AST, function: ast.AST) -> bool:
    """Whether the function may have returned before it reaches the node, other than for a broken loss."""
    if any(isinstance(outer, ast.Raise) for outer in file.ancestors(node)):
        return True
    line = file.span(node).line
    return any(
        isinstance(way_out, ast.Return)
        and file.span(way_out).line < line
        and not any(_asks_for_broken(test) for test in file.conditions(way_out, function))
        for way_out in file.inside(function)
    )


def _asks_for_broken(test: ast.expr) -> bool:
    """`isnan(x)`, `isinf(x)` or `not isfinite(x)`: true only when something is wrong."""
    asked = {part.attr for part in ast.walk(test) if isinstance(part, ast.Attribute)}
    negated = any(isinstance(part, ast.Not) for part in ast.walk(test))
    return bool(asked & {"isnan", "isinf"}) or ("isfinite" in asked and negated)


def _is_generator(function: ast.AST) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
