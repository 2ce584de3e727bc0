"""Gradient accumulation: how often gradients are reduced, how they are scaled, and what changes inside the step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import is_method, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Kind, Severity

_ACCUMULATION = re.compile(r"accum", re.IGNORECASE)


@rule(
    Kind.PYTHON,
    code="DDP004",
    name="accumulation-without-no-sync",
    severity=Severity.WARNING,
    summary="Gradients are accumulated, but DDP reduces them in every micro-batch",
    why="DDP starts its all-reduce in each backward. Under accumulation only the last one is needed; the "
    "others send the "
    "same bytes again.",
    effect="With n micro-batches, n times the gradient traffic (arithmetic; documented for no_sync).",
    source="PyTorch docs, torch.nn.parallel.DistributedDataParallel.no_sync",
    remedy="Wrap all but the last micro-batch in `with model.no_sync():`.",
    bad="(loss / accumulation_steps).backward()",
    good="with model.no_sync() if not last else nullcontext():\n    (loss / accumulation_steps).backward()",
)
def no_sync_missing(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for scope in [*file.training_loops, *file.step_functions]:
        steps = [n for n in file.inside(scope) if is_method(n, "backward")]
        if any(_ACCUMULATION.search(word) for word in words_of(scope) if len(word) < 60) and steps:
            first = min(steps, key=lambda node: (file.span(node).line, file.span(node).column))
            message = "accumulates gradients, but every backward reduces them over all ranks; use no_sync()"
            yield about.at(file.path, file.span(first), message, needs=["ddp"], unless=["no_sync"])


@rule(
    Kind.PYTHON,
    code="LOS008",
    name="accumulated-loss-not-divided",
    severity=Severity.ERROR,
    summary="Gradients of several micro-batches are added, not averaged",
    why="backward() adds to .grad. Without dividing each loss by the number of micro-batches the update is "
    "that many times larger, "
    "and the learning rate means something else whenever accumulation is changed.",
    effect="Arithmetic: with n micro-batches the gradient is n times that of the same batch in one piece.",
    source="PyTorch docs, automatic mixed precision examples, gradient accumulation",
    remedy="(loss / accumulation_steps).backward().",
    bad="loss.backward()\nif (step + 1) % accumulation_steps == 0:\n    optimizer.step()",
    good="(loss / accumulation_steps).backward()\nif (step + 1) % accumulation_steps == 0:\n    optimizer.step()",
)
def not_divided(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for loop in file.training_loops:
        counts = {name for node in file.inside(loop) if (name := _steps_every(node)) is not None}
        if not counts:
            continue
        function = file.function_of(loop)
        if any(_divides_by(node, counts) for node in ast.walk(function)):
            continue
        for call in file.inside(loop):
            if is_method(call, "backward") and isinstance(call, ast.Call) and not call.args:
                name = sorted(counts)[0]
                message = (
                    f"the loss is not divided by {name}: the gradient grows with the number of micro-batches"
                )
                yield about.at(file.path, file.span(call), message)


def _steps_every(node: ast.AST) -> str | None:
    """The count in `if (i + 1) % count == 0: optimizer.step()`, where its name speaks of accumulation."""
    if not isinstance(node, ast.If) or not any(_is_update(part) for part in ast.walk(node)):
        return None
    for part in ast.walk(node.test):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            name = dotted(part.right)
            if name is not None and _ACCUMULATION.search(name.rsplit(".", 1)[-1]):
                return name
    return None


def _is_update(node: ast.AST) -> bool:
    if (
        not is_method(node, "step")
        or not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
    ):
        return False
    held = (dotted(node.func.value) or "").lower()
    return "opt" in held or "scaler" in held


def _divides_by(node: ast.AST, counts: set[str]) -> bool:
    """`x / count`, `x /= count`, `x * (1 / count)`, or a loss function that is given the count."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        return dotted(node.right) in counts
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
        return dotted(node.value) in counts
    return isinstance(node, ast.Call) and any(
        dotted(value) in counts for value in [*node.args, *(keyword.value for keyword in node.keywords)]
    )


@rule(
    Kind.PYTHON,
    code="DDP010",
    name="frozen-inside-the-step",
    severity=Severity.WARNING,
    summary="requires_grad changes inside forward or the training step, under DDP",
    why="DDP lists the parameters that take part when it wraps the module. Frozen later, a parameter never "
    "becomes ready: DDP "
    "waits, or raises in the next forward; and the optimizer goes on decaying it.",
    effect="Checked with 2 ranks over gloo: frozen in the second forward, the third raises 'Expected to have "
    "finished reduction'.",
    source="PyTorch docs, torch.nn.parallel.DistributedDataParallel (warnings)",
    remedy="Freeze once, at a change of mode, before wrapping; then build the optimizer's groups again.",
    bad="def forward(self, x):\n    self.head.requires_grad_(self.mode != 'l2t')",
    good="set_mode(model, 'l2t')\nmodel = DDP(model)",
)
def frozen_in_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for node in [*file.of(ast.Call), *file.of(ast.Assign)]:
        if not _freezes(node):
            continue
        function = file.function_of(node)
        owner = file.parents.get(function)
        in_forward = (
            isinstance(function, ast.FunctionDef)
            and function.name == "forward"
            and isinstance(owner, ast.ClassDef)
            and any(ast.unparse(base).endswith("Module") for base in owner.bases)
        )
        if in_forward or file.loop_of(node) in file.training_loops or function in file.step_functions:
            message = "parameters are frozen inside the step; DDP has already listed those that take part"
            yield about.at(file.path, file.span(node), message, needs=["ddp"])


def _freezes(node: ast.AST) -> bool:
    """`module.requires_grad_(...)` of parameters, `p.requires_grad = ...`; inputs of the step are no parameters."""
    held: ast.AST | None = None
    if (
        is_method(node, "requires_grad_")
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
    ):
        held = node.func.value
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        held = node.targets[0].value if node.targets[0].attr == "requires_grad" else None
    name = dotted(held) if held is not None else None
    return name is not None and (name.startswith("self.") or name in ("p", "param", "parameter", "model"))
