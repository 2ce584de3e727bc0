"""What makes the host wait for the GPU in every training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import is_constant, is_measurement, is_method, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import anomaly_detection_asked_for
from traindoctor.steps import is_certain
from traindoctor.types import Finding, Kind, Severity
from traindoctor.yaml_file import YamlFile

SYNC_DOCS = "PyTorch performance tuning guide, avoid unnecessary CPU-GPU synchronization"


@rule(
    Kind.PYTHON,
    code="SYN001",
    name="item-in-every-step",
    severity=Severity.WARNING,
    summary=".item() or float(loss) runs in every step",
    why="It waits until the GPU has finished everything queued so far; the host cannot prepare the next step "
    "meanwhile.",
    effect="No number was measured here (needs a GPU): the launch queue runs empty once per call. Calls "
    "behind an `if` "
    "are not reported, unless its `else` makes the same call; a step in a function of its own counts when a loop of "
    "the same file calls it, when it is named like a step, or when Lightning or the Trainer calls it.",
    source=SYNC_DOCS,
    remedy="Add up tensors on the device and call .item() every n steps.",
    bad="running += loss.item()",
    good="running += loss.detach()",
)
def item_every_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch"):
        return
    for call, _ in file.calls:
        reads = is_method(call, "item") and not call.args
        if not reads and isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1:
            reads = dotted(call.args[0]) in ("loss", "total_loss", "train_loss")  # float(loss) calls .item()
        if reads and _reads_in_comprehension(file, call):
            continue  # SYN006 speaks of these
        if not reads or _on_host(file, call):
            continue
        message = f"{file.text(call)[:60]} waits for the GPU in every step"
        if file.runs_every_step(_branches_alike(file, call) or call):
            yield about.at(file.path, file.span(call), message)
        elif _in_forward(file, call):
            message = f"{file.text(call)[:60]} in forward waits for the GPU in every step"
            yield about.at(file.path, file.span(call), message, needs=["training"])


def _branches_alike(file: PythonFile, call: ast.Call) -> ast.If | None:
    """The `if` whose other branch makes the same call: one of the two runs."""
    owner = file.parents.get(file.statement_of(call))
    while isinstance(owner, ast.With):
        owner = file.parents.get(owner)
    if not isinstance(owner, ast.If):
        return None
    here = any(part is call for statement in owner.body for part in ast.walk(statement))
    other = owner.orelse if here else owner.body
    wanted = ast.dump(call)
    alike = any(
        isinstance(part, ast.Call)
        and ast.dump(part) == wanted
        and file.conditions(part, owner) == [owner.test]
        for statement in other
        for part in ast.walk(statement)
    )
    return owner if alike else None


def _in_forward(file: PythonFile, node: ast.AST) -> bool:
    """Whether a node certainly runs in the forward of a torch module."""
    function = file.function_of(node)
    owner = file.parents.get(function)
    if (
        not isinstance(function, ast.FunctionDef)
        or function.name != "forward"
        or not isinstance(owner, ast.ClassDef)
    ):
        return False
    modules = ("Module", "LightningModule", "PreTrainedModel")
    return any(ast.unparse(base).endswith(modules) for base in owner.bases) and is_certain(
        file, node, function
    )


_HOST_MAKERS = (
    "torch.rand",
    "torch.randn",
    "torch.randint",
    "torch.randperm",
    "torch.multinomial",
    "torch.tensor",
)


def _on_host(file: PythonFile, call: ast.Call) -> bool:
    """Whether what is read was made on the host here: `torch.rand(1).item()`, a numpy scalar."""
    made: ast.expr = call.func.value if isinstance(call.func, ast.Attribute) else call
    while isinstance(made, ast.Subscript | ast.Attribute):
        made = made.value
    made = file.value_of(made.args[0] if made is call else made)
    if not isinstance(made, ast.Call):
        return False
    if is_method(made, "item", "tolist", "astype"):
        return True  # a number that was read before, an array of numpy
    name = file.resolve(made.func) or ""
    on_device = any(keyword.arg in ("device", None) for keyword in made.keywords)
    return name.startswith("numpy.") or (name in _HOST_MAKERS and not on_device)


@rule(
    Kind.PYTHON,
    code="SYN002",
    name="print-in-every-step",
    severity=Severity.INFO,
    summary="print() of a tensor in every step",
    why="Printing a tensor copies it to the host, and a line per step on every rank fills the log.",
    effect="No number was measured: one host wait per printed tensor.",
    source=SYNC_DOCS,
    remedy="Print every n steps, on one rank.",
    bad="print(loss)",
    good="if step % 100 == 0 and rank == 0:\n    print(loss.item())",
)
def print_every_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch"):
        return
    for call, _ in file.calls:
        if (
            isinstance(call.func, ast.Name) and call.func.id == "print" and file.runs_every_step(call)
        ) and any("loss" in word for argument in call.args for word in words_of(argument)):
            yield about.at(file.path, file.span(call), "prints in every step; print every n steps")


_CHECKS = ("torch.isnan", "torch.isinf", "torch.isfinite")


@rule(
    Kind.PYTHON,
    code="SYN003",
    name="finite-check-in-every-step",
    severity=Severity.INFO,
    summary="A branch on torch.isnan or isfinite in every step",
    why="`if torch.isnan(loss)` needs the value on the host: a wait per step, for every tensor asked.",
    effect="No number was measured here (needs a GPU). A fused optimizer can skip the update on the device "
    "through found_inf.",
    source=SYNC_DOCS,
    remedy="Check one scalar (the gradient norm) late in the step, or every n steps.",
    bad="if torch.isnan(loss):",
    good="if step % 50 == 0 and not torch.isfinite(grad_norm):",
)
def finite_check(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(*_CHECKS):
        owner = _branch_of(file, call)
        if owner is None or not file.runs_every_step(owner):
            continue
        if not _asks_every_nth(owner.test):
            message = f"{file.text(call)[:60]} in an `if` waits for the GPU in every step"
            yield about.at(file.path, file.span(call), message)


def _asks_every_nth(test: ast.expr) -> bool:
    """`step % 100 == 0`."""
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in ast.walk(test))


def _branch_of(file: PythonFile, node: ast.AST) -> ast.If | None:
    child: ast.AST = node
    for parent in file.ancestors(node):
        if isinstance(parent, ast.If) and child is parent.test:
            return parent
        if isinstance(parent, ast.stmt):
            return None
        child = parent
    return None


@rule(
    Kind.PYTHON,
    code="SYN004",
    name="synchronize-in-every-step",
    severity=Severity.WARNING,
    summary="torch.cuda.synchronize() in every step",
    why="It stops the host until the GPU is idle, so the GPU is idle until the host has launched again.",
    effect="No number was measured here (needs a GPU).",
    source=SYNC_DOCS,
    remedy="Time with CUDA events, or synchronise every n steps.",
    bad="loss.backward()\ntorch.cuda.synchronize()",
    good="loss.backward()",
)
def synchronize_every_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.cuda.synchronize"):
        if file.runs_every_step(call):
            yield about.at(file.path, file.span(call), "stops host and GPU in every step")


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="SYN005",
    name="anomaly-detection-left-on",
    severity=Severity.WARNING,
    summary="Autograd anomaly detection is on",
    why="It records a traceback for every operation and checks every gradient for NaN.",
    effect="Documented: 'will slow down your program execution'; measured on the CPU, 20 layers: 11.0 ms "
    "with, 1.4 ms without (8.1x).",
    source="PyTorch docs, torch.autograd.set_detect_anomaly",
    fix="unsafe",
    remedy="Behind a debug switch. Only the key detect_anomaly of a settings file has a fix.",
    bad="torch.autograd.set_detect_anomaly(True)",
    good="torch.autograd.set_detect_anomaly(args.debug)",
)
def anomaly_left_on(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from anomaly_detection_asked_for(file, about)
        return
    for keyword in file.of(ast.keyword):
        if keyword.arg == "detect_anomaly" and is_constant(keyword.value, True):
            yield about.at(
                file.path,
                file.span(keyword.value),
                "anomaly detection slows every step; put it behind a debug switch",
            )
    for call in file.calls_of("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly"):
        switched = file.resolve(call.func) == "torch.autograd.detect_anomaly" or (
            call.args and is_constant(call.args[0], True)
        )
        in_test = "test" in file.path.rsplit("/", 1)[-1]
        if (
            switched
            and not file.conditions(call, file.tree)
            and not in_test
            and not _is_for_tracing(file, call)
        ):
            yield about.at(
                file.path, file.span(call), "anomaly detection slows every step; put it behind a debug switch"
            )


def _is_for_tracing(file: PythonFile, call: ast.Call) -> bool:
    """Whether anomaly mode wraps something else than a backward pass: a tracer that wants its stack traces."""
    block = file.statement_of(call)
    if not isinstance(block, ast.With):
        return False
    works = any(
        is_method(part, "backward") or isinstance(part, ast.For | ast.While) for part in ast.walk(block)
    )
    return not works


@rule(
    Kind.PYTHON,
    code="SYN006",
    name="sync-per-parameter",
    severity=Severity.WARNING,
    summary="One .item() for every parameter",
    why="A loop over parameters that calls .item() waits for the GPU hundreds of times; norms can be added "
    "on the device.",
    effect="No number was measured here (needs a GPU): as many waits as there are parameter tensors.",
    source=f"{SYNC_DOCS}; torch.nn.utils.get_total_norm",
    remedy="torch.nn.utils.get_total_norm([p.grad for p in parameters]) and one .item().",
    bad="for p in model.parameters():\n    total += p.grad.norm().item() ** 2",
    good="total = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())",
)
def sync_per_parameter(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if is_measurement(file.path.rsplit("/", 1)[-1]):
        return
    for call in file.of(ast.Call):
        if is_method(call, "item") and _reads_in_comprehension(file, call):
            message = "waits for the GPU once per parameter; add norms on the device"
            yield about.at(file.path, file.span(call), message)
    for node in file.of(ast.For):
        over = (dotted(node.iter) or "").rsplit(".", 1)[-1]
        if not is_method(node.iter, "parameters", "named_parameters") and over not in (
            "parameters",
            "params",
        ):
            continue
        if any(_asks_every_nth(test) for test in file.conditions(node, file.function_of(node))):
            continue
        names = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        names |= {
            target.id
            for part in file.inside(node)
            if isinstance(part, ast.Assign) and "grad" in words_of(part.value) and names & _names(part.value)
            for target in part.targets
            if isinstance(target, ast.Name)
        }
        derived = names - {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        for part in file.inside(node):
            if (
                (
                    is_method(part, "item")
                    and isinstance(part, ast.Call)
                    and isinstance(part.func, ast.Attribute)
                )
                and ("grad" in words_of(part.func.value) or derived & _names(part.func.value))
                and names & _names(part.func.value)
            ) or (isinstance(part, ast.If) and _asks_gradient(file, part.test, names)):
                yield about.at(
                    file.path,
                    file.span(part.test if isinstance(part, ast.If) else part),
                    "waits for the GPU once per parameter; add norms on the device",
                )
                break


def _reads_in_comprehension(file: PythonFile, call: ast.Call) -> bool:
    """`sum(p.grad.norm().item() for p in model.parameters())`."""
    for outer in file.ancestors(call):
        if isinstance(outer, ast.GeneratorExp | ast.ListComp | ast.DictComp):
            over = [
                part for part in outer.generators if is_method(part.iter, "parameters", "named_parameters")
            ]
            names = {name for part in over for name in _names(part.target)}
            return "grad" in words_of(call) and bool(names & _names(call))
    return False


def _asks_gradient(file: PythonFile, test: ast.expr, names: set[str]) -> bool:
    """`if torch.isnan(p.grad).any():` for a parameter of the loop."""
    return any(
        isinstance(part, ast.Call)
        and file.resolve(part.func) in _CHECKS
        and "grad" in words_of(part)
        and bool(names & _names(part))
        for part in ast.walk(test)
    )


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@rule(
    Kind.PYTHON,
    code="SYN007",
    name="copy-to-host-in-every-step",
    severity=Severity.WARNING,
    summary="A result of the step is copied to the host in every step",
    why=".cpu() waits for the GPU like .item(), and copies the whole tensor.",
    effect="No number was measured here (needs a GPU).",
    source=SYNC_DOCS,
    remedy="Keep it on the device, copy every n steps.",
    bad="history.append(loss.detach().cpu().numpy())",
    good="history.append(loss.detach())",
)
def copy_every_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch"):
        return
    for call, _ in file.calls:
        if is_method(call, "cpu") and not call.args and file.runs_every_step(call):
            if getattr(file.parents[call], "attr", "") == "item":
                continue  # SYN001 speaks of these
            assert isinstance(call.func, ast.Attribute)
            holder = call.func.value
            while isinstance(holder, ast.Call) and isinstance(holder.func, ast.Attribute):
                holder = holder.func.value
            if "loss" in (dotted(holder) or "").lower():
                yield about.at(
                    file.path, file.span(call), f"{file.text(call)[:60]} waits for the GPU in every step"
                )
