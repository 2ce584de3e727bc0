"""Losses and stability: clamps, local counts, bad batches, swallowed errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_measurement, is_method
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity

_FINITE = tuple(
    f"{module}.{name}" for module in ("torch", "math", "numpy") for name in ("isnan", "isinf", "isfinite")
)
_LOSS = re.compile(r"(^|_)loss(es)?$")


def _is_loss(node: ast.AST | None) -> bool:
    name = dotted(node) if node is not None else None
    return bool(name and _LOSS.search(name.rsplit(".", 1)[-1].lower()))


def _is_likelihood(node: ast.AST | None) -> bool:
    """A loss, or a term that is about to become one."""
    name = dotted(node) if node is not None else None
    return _is_loss(node) or bool(name and re.search(r"(^|_)(nll|nelbo|elbo|ce|bce|mse)$", name.lower()))


@rule(
    Kind.PYTHON,
    code="LOS001",
    name="bad-batch-skipped-on-one-rank",
    severity=Severity.ERROR,
    summary="One rank skips a bad batch while the others go on",
    why="NaN usually appears on one rank. `continue` skips its backward, and with it DDP's all-reduce: the "
    "other ranks wait, "
    "or pair their gradients with those of its next batch.",
    effect="Measured with 2 ranks over gloo (this project): gradients of different steps are mixed, then the "
    "job hangs or dies.",
    source="PyTorch DDP notes, 'all ranks must run the same number of backward passes'",
    remedy="Agree first: all_reduce a flag (MAX) over the ranks and skip on all of them.",
    bad="if torch.isnan(loss):\n    optimizer.zero_grad()\n    continue",
    good="bad = torch.isnan(loss).float()\ndist.all_reduce(bad, op=dist.ReduceOp.MAX)\nif bad:\n    continue",
)
def local_skip(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for node in file.of(ast.If):
        if not node.body or not isinstance(node.body[-1], ast.Continue | ast.Return):
            continue
        asked = [
            n for n in ast.walk(node.test) if isinstance(n, ast.Call) and file.resolve(n.func) in _FINITE
        ]
        function = file.function_of(node)
        loop = file.loop_of(node)
        if not asked:
            continue
        if isinstance(node.body[-1], ast.Return):
            # A training step in a function of its own: the backward that is skipped comes later in it.
            ends = file.span(node).end_line
            later = any(is_method(n, "backward") and file.span(n).line > ends for n in file.inside(function))
            # Lightning runs the backward itself; a step that returns None skips it.
            called = isinstance(function, ast.FunctionDef) and function.name == "training_step"
            if not later and not (called and function in file.step_functions):
                continue
        elif loop is None or loop not in file.training_loops:
            continue
        agreed = any(
            is_method(n, "all_reduce", "all_gather", "gather", "reduce") for n in file.inside(function)
        )
        if not agreed:
            message = "this rank skips the batch alone; the others wait in their all-reduce or mix steps"
            yield about.at(file.path, file.span(node.test), message, needs=["distributed"])


@rule(
    Kind.PYTHON,
    code="LOS002",
    name="clamped-loss",
    severity=Severity.WARNING,
    summary="The loss is clamped from above",
    why="Where a clamp is active its gradient is 0: exactly the batches that need correcting teach nothing.",
    effect="Checked on the CPU: the gradient through clamp(max=...) is exactly 0 above the bound.",
    source="PyTorch docs, torch.clamp; derivative of a constant",
    remedy="Clip the gradient norm, or use a robust loss (Huber).",
    bad="loss = torch.clamp(loss, max=10.0)",
    good="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
def clamped(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch"):
        return
    for call, name in file.calls:
        if name in ("torch.clamp", "torch.clip", "torch.clamp_max"):
            value, upper = (call.args[0] if call.args else argument(call, "input")), argument(call, "max", 2)
            if name == "torch.clamp_max":
                upper = argument(call, "max", 1)
        elif is_method(call, "clamp", "clip", "clamp_", "clamp_max") and isinstance(call.func, ast.Attribute):
            value = call.func.value
            upper = argument(call, "max", 0 if call.func.attr == "clamp_max" else 1)
        else:
            continue
        if not _is_likelihood(value) or upper is None or is_constant(upper, None) or has_spread(call):
            continue
        parent = file.parents[call]
        kept = isinstance(parent, ast.Assign) and _is_loss(parent.targets[0])
        kept = (
            kept
            or (isinstance(parent, ast.Return))
            or is_method(file.parents.get(parent, parent), "backward")
        )
        if kept:
            yield about.at(
                file.path, file.span(call), f"above the bound the gradient of {file.text(call)[:50]} is 0"
            )


@rule(
    Kind.PYTHON,
    code="LOS003",
    name="loss-divided-by-local-count",
    severity=Severity.INFO,
    summary="The loss is divided by this rank's own count, in a distributed project",
    why="DDP averages gradients over ranks with equal weight. If every rank divides by its own number of "
    "tokens, tokens on "
    "ranks with few of them count more.",
    effect="Arithmetic: mean of means is not the mean. Grows with the spread of lengths.",
    source="Hugging Face, 'Fixing gradient accumulation' (2024) describes the same error over micro-batches",
    remedy="Divide the local sum by the all-reduced count, times the world size.",
    bad="loss = (losses * mask).sum() / mask.sum()",
    good="loss = (losses * mask).sum() * world_size / global_count",
)
def local_count(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if any(file.uses(other) for other in ("jax", "flax", "tensorflow")):
        return
    for node in file.of(ast.Assign):
        if not _is_loss(node.targets[0]):
            continue
        value = node.value
        if re.match(
            r"(mean|avg|average|eval|val|log|per)_", (dotted(node.targets[0]) or "").rsplit(".", 1)[-1]
        ):
            continue  # a number for the log
        if (
            not isinstance(value, ast.BinOp)
            or not isinstance(value.op, ast.Div)
            or not _is_sum(value.left, "", file)
        ):
            continue
        if _is_sum(value.right, "mask", file) or _weighs_by(value.left, value.right):
            function = file.function_of(node)
            if not any(is_method(n, "all_reduce") for n in file.inside(function)):
                message = "every rank divides by its own count; DDP then averages means of different sizes"
                yield about.at(file.path, file.span(value), message, needs=["distributed"])


def _weighs_by(numerator: ast.expr, denominator: ast.expr) -> bool:
    """`(losses * weight).sum() / weight.sum()`: whatever it is called, it is a mask."""
    factors = {
        dotted(side)
        for part in ast.walk(numerator)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
        for side in (part.left, part.right)
    }
    summed = {
        dotted(part.func.value)
        for part in ast.walk(denominator)
        if is_method(part, "sum") and isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
    }
    return bool((factors & summed) - {None})


def _is_sum(node: ast.expr, word: str, file: PythonFile) -> bool:
    """`x.sum()`, perhaps clamped, shifted by a small constant or through a name; `word` occurs in what is summed."""
    if isinstance(node, ast.Name):
        value = file.value_of(node)
        return value is not node and _is_sum(value, word, file)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_sum(node.left, word, file)
    if is_method(node, "clamp", "clamp_min", "float", "to") and isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)
        return _is_sum(node.func.value, word, file)
    if (
        is_method(node, "sum")
        and isinstance(node, ast.Call)
        and not node.args
        and not node.keywords  # with a dim it is one number for each sequence
        and isinstance(node.func, ast.Attribute)
    ):
        return word in ast.dump(node.func.value).lower()
    return False


@rule(
    Kind.PYTHON,
    code="LOS004",
    name="nan-replaced-in-loss",
    severity=Severity.WARNING,
    summary="NaN in the loss or a gradient is replaced by a number",
    why="nan_to_num turns the sign of a broken batch into an ordinary value: the update is made with garbage "
    "and nobody sees it.",
    effect="No number was measured: hides the fault that it was written against.",
    source="PyTorch docs, torch.nan_to_num",
    remedy="Skip the update on all ranks and log the step.",
    bad="loss = torch.nan_to_num(loss)",
    good="if not torch.isfinite(loss): raise FloatingPointError(f'loss at step {step}')",
)
def nan_replaced(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, name in file.calls:
        if name == "torch.nan_to_num" and call.args:
            value: ast.expr = call.args[0]
        elif (
            is_method(call, "nan_to_num", "nan_to_num_")
            and name is None
            and isinstance(call.func, ast.Attribute)
        ):
            value = call.func.value
        else:
            continue
        is_grad = (dotted(value) or "").endswith(".grad")
        if is_grad or (_is_loss(value) and file.uses("torch")):
            yield about.at(
                file.path,
                file.span(call),
                f"a broken {'gradient' if is_grad else 'loss'} becomes an ordinary number",
            )


@rule(
    Kind.PYTHON,
    code="LOS005",
    name="errors-of-the-step-swallowed",
    severity=Severity.ERROR,
    summary="Every error of a training step is caught and ignored",
    why="`except Exception: continue` around the step hides wrong shapes, CUDA faults and full disks alike; "
    "under DDP the rank "
    "that failed leaves the others waiting.",
    effect="Work is lost without a trace.",
    source="PyTorch FAQ (out of memory must be handled outside the except block)",
    remedy="Catch torch.OutOfMemoryError only, agree over the ranks, and re-raise the rest.",
    bad="try:\n    loss.backward()\nexcept Exception:\n    continue",
    good="try:\n    loss.backward()\nexcept torch.OutOfMemoryError:\n    out_of_memory = True",
)
def swallowed(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for node in file.of(ast.Try):
        names = [file.path.rsplit("/", 1)[-1], getattr(file.function_of(node), "name", "")]
        if file.loop_of(node) is None or any(map(is_measurement, names)):
            continue
        tried = [
            part for statement in node.body for part in ast.walk(statement) if isinstance(part, ast.Call)
        ]
        if not any(is_method(call, "backward") or _runs_backward(file, call) for call in tried):
            continue
        for handler in node.handlers:
            broad = handler.type is None or dotted(handler.type) in ("Exception", "BaseException")
            leaves = any(isinstance(n, ast.Raise | ast.Return | ast.Break) for n in ast.walk(handler))
            exits = any(
                isinstance(n, ast.Call) and dotted(n.func) in ("sys.exit", "exit", "os._exit")
                for n in ast.walk(handler)
            )
            if broad and not leaves and not exits:
                yield about.at(
                    file.path, file.span(handler), "any error of the step is swallowed and training goes on"
                )


def _runs_backward(file: PythonFile, call: ast.Call) -> bool:
    """Whether a call reaches a function of the training step that runs the backward pass itself."""
    function = function_called(file, call)
    if function is None or function not in file.step_functions:
        return False
    return any(is_method(part, "backward") for part in file.inside(function))
