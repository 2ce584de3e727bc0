"""Memory: graphs kept alive, caches emptied, evaluation with gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_method
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.edits import replace_node
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity


@rule(
    Kind.PYTHON,
    code="MEM003",
    name="graph-kept-for-a-running-sum",
    severity=Severity.WARNING,
    summary="The loss is summed or stored with its graph",
    why="`total += loss` keeps the autograd graph of every step alive until the sum is dropped; memory grows "
    "each step.",
    effect="Documented in PyTorch's FAQ. Checked on the CPU: the sum's graph grows by one node each step. "
    "The fix is safe only "
    "where every read of the sum is seen to end in a number (.item(), float(), a format).",
    source="PyTorch FAQ, 'My model reports out of memory', don't accumulate history across your training loop",
    fix="safe or unsafe",
    bad="total_loss += loss",
    good="total_loss += loss.detach()",
)
def graph_kept(file: PythonFile, about: Rule) -> Iterator[Finding]:
    around = {
        function: _trained_in(file, function) for function in map(file.function_of, file.training_loops)
    }
    for scope in [*file.training_loops, *file.step_functions]:
        in_loop = not isinstance(scope, ast.FunctionDef)
        trained = _trained_in(file, scope)
        summed = around[file.function_of(scope)] if in_loop else trained
        for node in file.inside(scope):
            target, value = _kept_by(node)
            # What a step function keeps in a name of its own is gone when it returns.
            lasting = target not in summed and (in_loop or target.startswith("self."))
            if (
                isinstance(value, ast.Name)
                and value.id in trained
                and lasting
                and not _rebound_to_number(file, scope, value.id)
            ):
                safe = in_loop and _only_read_as_number(file, node, target)
                fix = replace_node(file, value, f"{value.id}.detach()", "detach the loss", safe=safe)
                yield about.at(
                    file.path, file.span(node), f"keeps the graph of every `{value.id}` alive; detach it", fix
                )


_TO_NUMBERS = ("item", "tolist", "detach")
_ON_THE_WAY = ("mean", "sum", "median", "std", "max", "min")
_GATHERS = ("torch.stack", "torch.cat")


def _only_read_as_number(file: PythonFile, keeps: ast.AST, target: str) -> bool:
    """Whether nothing can differentiate what is kept: it has a local name, and every read of it ends in a number."""
    function = file.function_of(keeps)
    if not target.isidentifier() or target in file.hidden(keeps):
        return False
    if function is file.tree and any(target in scope.names for scope in file.of(ast.Global)):
        return False
    for name in file.of(ast.Name):
        if name.id != target:
            continue
        if file.function_of(name) is not function:
            return False  # a closure, or another function's view of a module's name
        if (
            isinstance(name.ctx, ast.Load)
            and not _is_kept(file, name, target)
            and not _ends_in_number(file, name)
        ):
            return False
    exported = function is file.tree and "__main__" not in file.source.text and not file.training_loops
    return not exported


def _is_kept(file: PythonFile, name: ast.Name, target: str) -> bool:
    """Whether a use of the name is the keeping itself: `total = total + loss`, `history.append(loss)`."""
    statement = file.statement_of(name)
    node = statement.value if isinstance(statement, ast.Expr) else statement
    return _kept_by(node)[0] == target


def _ends_in_number(file: PythonFile, name: ast.Name) -> bool:
    """Whether an expression around a name turns it into a number before anything else can use it."""
    node: ast.AST = name
    while True:
        parent = file.parents[node]
        if isinstance(parent, ast.FormattedValue):
            return parent.conversion == -1 and parent.format_spec is not None
        if isinstance(parent, ast.Attribute):
            call = file.parents[parent]
            if not isinstance(call, ast.Call) or call.func is not parent:
                return False
            if parent.attr in _TO_NUMBERS:
                return True
            if parent.attr not in _ON_THE_WAY:
                return False
            node = call
        elif isinstance(parent, ast.BinOp) or (isinstance(parent, ast.Subscript) and node is parent.value):
            node = parent
        elif isinstance(parent, ast.Call) and node in parent.args:
            called = dotted(parent.func)
            if called in ("float", "int", "len"):
                return True
            if called != "sum" and file.resolve(parent.func) not in _GATHERS:
                return False
            node = parent
        else:
            return False


def _kept_by(node: ast.AST) -> tuple[str, ast.expr | None]:
    """Where a statement adds or appends something, and what: `a += x`, `a = a + x`, `a.append(x)`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return dotted(node.target) or "", node.value
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
    ):
        target, sides = dotted(node.targets[0]), (node.value.left, node.value.right)
        for own, other in (sides, sides[::-1]):
            if target is not None and dotted(own) == target:
                return target, other
    if is_method(node, "append") and isinstance(node, ast.Call) and len(node.args) == 1:
        assert isinstance(node.func, ast.Attribute)
        return dotted(node.func.value) or "", node.args[0]
    return "", None


def _trained_in(file: PythonFile, scope: ast.AST) -> set[str]:
    """Names of the losses that a scope trains on: `x.backward()`, `scaler.scale(x).backward()`, `engine.backward(x)`,
    `(x / n).backward()`, and what a step of Lightning returns."""
    found: list[ast.expr] = []
    for node in file.inside(scope):
        if isinstance(node, ast.Call) and is_method(node, "backward", "manual_backward"):
            assert isinstance(node.func, ast.Attribute)
            held = node.args[0] if node.args else node.func.value
            if isinstance(held, ast.Call) and is_method(held, "scale") and held.args:
                held = held.args[0]
            found.append(held)
        elif isinstance(node, ast.Return) and getattr(scope, "name", "") == "training_step" and node.value:
            found.append(node.value)
    bare = [node.left if isinstance(node, ast.BinOp) else node for node in found]
    return {node.id for node in bare if isinstance(node, ast.Name)}


def _rebound_to_number(file: PythonFile, loop: ast.AST, name: str) -> bool:
    for node in file.inside(loop):
        if isinstance(node, ast.Assign) and any(dotted(target) == name for target in node.targets):
            if is_method(node.value, "item", "detach", "float"):
                return True
            if (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "float"
            ):
                return True
    return False


@rule(
    Kind.PYTHON,
    code="MEM004",
    name="cache-emptied-every-step",
    severity=Severity.WARNING,
    summary="torch.cuda.empty_cache() in every step",
    why="It synchronises, gives all cached blocks back to the driver and makes the next step ask for them "
    "again. It frees "
    "nothing that PyTorch could not use itself.",
    effect="Documented: it 'doesn't increase the amount of GPU memory available for PyTorch'.",
    source="PyTorch docs, torch.cuda.empty_cache and CUDA semantics, memory management",
    remedy="Remove it from the loop; PYTORCH_ALLOC_CONF=expandable_segments:True helps against fragmentation.",
    bad="for batch in loader:\n    loss.backward()\n    torch.cuda.empty_cache()",
    good="for batch in loader:\n    loss.backward()",
)
def empties_cache(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.cuda.empty_cache"):
        if file.runs_every_step(call):
            yield about.at(file.path, file.span(call), "empties the allocator's cache in every step")


@rule(
    Kind.PYTHON,
    code="MEM005",
    name="evaluation-with-gradients",
    severity=Severity.WARNING,
    summary="An evaluation loop builds autograd graphs",
    why="model.eval() only switches dropout and norms; without torch.no_grad() every forward still stores "
    "its activations.",
    effect="Memory of a training forward, for nothing. Silent where the file mentions no_grad or "
    "inference_mode at all.",
    source="PyTorch notes, autograd mechanics, evaluation mode",
    remedy="Decorate with @torch.inference_mode().",
    bad="def evaluate(model, loader):\n    model.eval()\n    for x in loader:\n        model(x)",
    good="@torch.inference_mode()\ndef evaluate(model, loader): ...",
)
def evaluates_with_gradients(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if {"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"} & file.identifiers or not file.uses(
        "torch"
    ):
        return
    if file.uses("lightning") or file.uses("pytorch_lightning"):
        return  # its loops switch gradients off
    trains = bool(file.training_loops or file.step_functions)
    for call, _ in file.calls:
        forward = _forward_after(file, call)
        if forward is not None and (trains or file.loop_of(forward) is not None):
            message = "the model is evaluated without torch.no_grad(): graphs are built for nothing"
            yield about.at(file.path, file.span(forward), message)


def _forward_after(file: PythonFile, call: ast.Call) -> ast.Call | None:
    """The first forward behind `model.eval()`, where no `model.train()` and no use of gradients comes first."""
    if not is_method(call, "eval") or call.args or not isinstance(file.parents.get(call), ast.Expr):
        return None
    assert isinstance(call.func, ast.Attribute)
    held = dotted(call.func.value)
    function = file.function_of(call)
    later = [n for n in file.inside(function) if isinstance(n, ast.Call) and file.span(n) > file.span(call)]
    back = min((file.span(n) for n in later if dotted(n.func) == f"{held}.train"), default=None)
    later = sorted((n for n in later if back is None or file.span(n) < back), key=file.span)
    if any(
        is_method(n, "backward", "requires_grad_", "attack") or "grad" in ast.unparse(n.func) for n in later
    ):
        return None
    return next((n for n in later if held is not None and _calls(file, n, held)), None)


def _calls(file: PythonFile, call: ast.Call, held: str) -> bool:
    """Whether a call is one of the model, or of a method of the same class that only evaluates `self.model`."""
    if dotted(call.func) == held:
        return True
    function = function_called(file, call)
    if function is None or not held.startswith("self."):
        return False
    calls = [n for n in file.inside(function) if isinstance(n, ast.Call)]
    return any(dotted(n.func) == held for n in calls) and not any(is_method(n, "backward") for n in calls)


@rule(
    Kind.PYTHON,
    code="MEM006",
    name="backward-keeps-its-graph",
    severity=Severity.WARNING,
    summary="backward(retain_graph=True) in every step of a training loop",
    why="The graph's saved tensors stay until the loss is dropped. It is needed only for a second backward "
    "through the "
    "same graph; usually it hides a state that should have been detached.",
    effect="No number was measured: activations of the step live longer; with carried state, memory grows.",
    source="PyTorch docs, torch.Tensor.backward",
    remedy="Detach what is carried to the next step and drop retain_graph.",
    bad="loss.backward(retain_graph=True)",
    good="loss.backward()",
)
def keeps_graph(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, _ in file.calls:
        if not is_method(call, "backward") or has_spread(call):
            continue
        given = argument(call, "retain_graph")
        if not (isinstance(given, ast.Constant) and given.value is True) or not file.runs_every_step(call):
            continue
        scope = file.in_training_loop(call) or file.function_of(call)
        backwards = [n for n in file.inside(scope) if is_method(n, "backward") or _is_grad(file, n)]
        if len(backwards) == 1:
            yield about.at(
                file.path, file.span(call), "retain_graph=True, but this step has no second backward"
            )


def _is_grad(file: PythonFile, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and file.resolve(node.func) == "torch.autograd.grad"
