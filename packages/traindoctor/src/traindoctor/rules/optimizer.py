"""Optimizers: fused kernels, weight decay, clearing of gradients, order of calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.choices import ANY, names_called
from traindoctor.effective_calls import is_marker, is_open
from traindoctor.expressions import argument, has_spread, is_constant, is_method, number
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import (
    FUSABLE,
    FUSED_RAISES,
    KERNEL_CHOICES,
    UNFUSED,
    coupled_decay_block,
    unfused_block,
)
from traindoctor.rules.edits import set_keyword
from traindoctor.types import Finding, Fix, Kind, NodeEdit, Severity
from traindoctor.yaml_file import YamlFile

OPTIM_DOCS = "PyTorch docs, torch.optim"
_CHOOSES = set(KERNEL_CHOICES)


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="OPT001",
    name="unfused-optimizer",
    severity=Severity.WARNING,
    summary="Adam, AdamW or SGD without its fused kernel",
    why="fused=True computes the whole update of a group of tensors in one pass. The default makes one pass for each "
    "operation of the update and keeps temporaries of the size of the gradients.",
    effect="Measured on the CPU, 60 matrices of 256x256: 7.6 ms a step without, 2.3 ms with fused (3.35x). "
    "Not measured on a "
    "GPU here; PyTorch documents fused as the fastest implementation.",
    source=f"{OPTIM_DOCS}, AdamW(fused=...)",
    fix="unsafe",
    remedy="Unsafe because the fused kernel adds in another order: losses differ in the last bits. No fix is offered "
    "where the program has sparse gradients. Programs with Lightning are not reported: its mixed precision cannot clip "
    "gradients with a fused optimizer. Needs PyTorch 2.4 for SGD and for parameters on the CPU.",
    bad="torch.optim.AdamW(model.parameters(), lr=1e-4)",
    good="torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)",
)
def unfused(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from unfused_block(file, about)
        return
    chosen_later = any(keyword.arg in _CHOOSES for n in file.of(ast.Call) for keyword in n.keywords)
    for call in file.calls_of(*FUSABLE):
        given = {keyword.arg for keyword in call.keywords}
        if is_open(call):
            if chosen_later or any(k.arg is None and not is_marker(k) for k in call.keywords):
                continue  # whoever calls the partial may choose the kernel
        elif has_spread(call) or not (call.args or "params" in given):
            continue
        if given & _CHOOSES or _is_small(file, call):
            continue
        message = f"{file.text(call.func)} without fused=True updates the parameters in several passes instead of one"
        fix = set_keyword(file, call, "fused", "True", safe=False, dropped_if=FUSED_RAISES)
        yield about.at(file.path, file.span(call), message, fix, unless=UNFUSED)
    for call, names in picked_optimizers(file):
        if (
            has_spread(call)
            or not call.args
            or {k.arg for k in call.keywords} & _CHOOSES
            or _is_small(file, call)
        ):
            continue
        fusable = names & set(FUSABLE)
        if fusable or ANY in {name.rsplit(".", 1)[-1] for name in names}:
            message = "the optimizer that is picked here never gets fused=True: several passes per step instead of one"
            certain = fusable == names
            fix = (
                set_keyword(file, call, "fused", "True", safe=False, dropped_if=FUSED_RAISES)
                if certain
                else None
            )
            severity = None if certain else Severity.INFO
            yield about.at(file.path, file.span(call), message, fix, severity=severity, unless=UNFUSED)


def picked_optimizers(file: PythonFile) -> Iterator[tuple[ast.Call, frozenset[str]]]:
    """Calls of an optimizer that is chosen from a dictionary or by its name, with all that it may be."""
    if "optim" not in file.identifiers and not file.uses("torch.optim"):
        return
    for call, name in file.calls:
        if name is not None or not call.args or isinstance(call.func, ast.Lambda):
            continue
        names = names_called(file, call)
        if any(_is_optimizer(picked) for picked in names):
            yield call, names


def _is_optimizer(name: str) -> bool:
    """`torch.optim.AdamW`, `torch.optim.?`; no scheduler, no function of the module."""
    return name.startswith("torch.optim.") and name.count(".") == 2 and name != "torch.optim.lr_scheduler"


def _makes_optimizer(file: PythonFile, made: ast.AST) -> bool:
    """Whether an expression makes an optimizer of torch, however it is chosen."""
    names = names_called(file, made) if isinstance(made, ast.Call) else frozenset()
    return any(_is_optimizer(name) for name in names)


def _is_small(file: PythonFile, call: ast.Call) -> bool:
    """Whether a few named tensors are optimized: one kernel each is no burden."""
    params = file.value_of(call.args[0]) if call.args else None
    return (
        isinstance(params, ast.List | ast.Tuple)
        and 0 < len(params.elts) < 5
        and all(isinstance(element, ast.Name | ast.Attribute) for element in params.elts)
    )


def _all_parameters(file: PythonFile, node: ast.expr) -> bool:
    """Whether an expression is `something.parameters()`, perhaps through one name."""
    value = file.value_of(node)
    return is_method(value, "parameters") and not getattr(value, "args", [1])


@rule(
    Kind.PYTHON,
    code="OPT002",
    name="decay-on-norms-and-biases",
    severity=Severity.INFO,
    summary="Weight decay applies to every parameter, norms and biases included",
    why="Decay pulls gains of norms towards 0 and has no use on biases; common practice gives "
    "one-dimensional parameters "
    "their own group without decay.",
    effect="No number was measured: a matter of quality, not speed.",
    source="nanoGPT's and BERT's optimizer groups; Loshchilov and Hutter, Decoupled Weight Decay Regularization",
    remedy="Two groups: parameters with at least two dimensions decay, the others have weight_decay=0.",
    bad="AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)",
    good='AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-4, weight_decay=0.1)',
)
def decays_everything(file: PythonFile, about: Rule) -> Iterator[Finding]:
    picked = [call for call, names in picked_optimizers(file) if "torch.optim.AdamW" in names]
    for call in [*file.calls_of("torch.optim.AdamW"), *picked]:
        decay = argument(call, "weight_decay", 4)
        if decay is None or number(decay) == 0 or not call.args or has_spread(call):
            continue
        if _all_parameters(file, call.args[0]):
            yield about.at(
                file.path,
                file.span(call),
                "weight decay also pulls norms and biases; give them their own group",
            )


@rule(
    Kind.PYTHON,
    code="OPT003",
    name="gradients-set-to-zero",
    severity=Severity.INFO,
    summary="zero_grad(set_to_none=False) keeps and fills all gradients",
    why="Setting gradients to None (the default since PyTorch 2.0) frees their memory between steps and "
    "saves a pass over it.",
    effect="Memory of one gradient set during the forward; documented in torch.optim.",
    source=f"{OPTIM_DOCS}, Optimizer.zero_grad",
    fix="unsafe",
    remedy="Unsafe because code that reads p.grad after zero_grad sees None instead of zeros.",
    bad="optimizer.zero_grad(set_to_none=False)",
    good="optimizer.zero_grad()",
)
def set_to_zero(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, _ in file.calls:
        if is_method(call, "zero_grad") and is_constant(argument(call, "set_to_none", 0), False):
            edits = (NodeEdit(file.span(call), "remove_keyword", ("set_to_none",)),)
            fix = Fix("use the default", False, node_edits=edits) if call.keywords else None
            yield about.at(
                file.path,
                file.span(call),
                "zero_grad fills all gradients with zeros instead of freeing them",
                fix,
            )


@rule(
    Kind.PYTHON,
    code="OPT004",
    name="gradients-never-cleared",
    severity=Severity.ERROR,
    summary="A loop steps the optimizer but nothing ever clears the gradients",
    why="backward() adds to .grad. Without zero_grad every step uses the sum of all gradients since the start.",
    effect="The run trains something else than was asked for.",
    source=f"{OPTIM_DOCS}, taking an optimization step",
    remedy="Call optimizer.zero_grad() once per step.",
    bad="loss.backward()\noptimizer.step()",
    good="loss.backward()\noptimizer.step()\noptimizer.zero_grad()",
)
def never_cleared(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if {"zero_grad", "zero_", "zero_grad_"} & file.identifiers or _assigns_grad(file):
        return
    for loop in file.training_loops:
        if "backward" not in _method_names(file, loop):
            continue
        for node in file.inside(loop):
            if (
                is_method(node, "step")
                and isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
            ):
                made = file.value_of(node.func.value)
                if isinstance(made, ast.Call) and file.loop_of(made) is loop:
                    continue  # a new optimizer in every round
                if _makes_optimizer(file, made):
                    message = "nothing in this file clears the gradients: they accumulate over all steps"
                    yield about.at(file.path, file.span(node), message)


def _method_names(file: PythonFile, scope: ast.AST) -> set[str]:
    return {
        n.func.attr
        for n in file.inside(scope)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }


def _assigns_grad(file: PythonFile) -> bool:
    return any(n.attr == "grad" and isinstance(n.ctx, ast.Store) for n in file.of(ast.Attribute))


@rule(
    Kind.PYTHON,
    code="OPT005",
    name="scheduler-before-optimizer",
    severity=Severity.WARNING,
    summary="The learning-rate scheduler steps before the optimizer",
    why="Since PyTorch 1.1 optimizer.step() comes first; the other way round skips the first value of the schedule.",
    effect="The schedule is shifted by one step; torch prints a warning.",
    source="PyTorch docs, torch.optim, how to adjust learning rate",
    remedy="Swap the two calls.",
    bad="scheduler.step()\noptimizer.step()",
    good="optimizer.step()\nscheduler.step()",
)
def scheduler_first(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for scope in [*file.training_loops, *file.step_functions]:
        seen: list[tuple[ast.Call, str]] = []
        for statement in getattr(scope, "body", []):
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                seen.append((call, _step_kind(file, call, call.func)))
        kinds = [kind for _, kind in seen]
        schedule = kinds.index("schedule") if "schedule" in kinds else None
        update = kinds.index("update") if "update" in kinds else None
        if schedule is not None and update is not None and schedule < update:
            yield about.at(
                file.path, file.span(seen[schedule][0]), "the scheduler steps before the optimizer; swap them"
            )


def _step_kind(file: PythonFile, call: ast.Call, function: ast.Attribute) -> str:
    """Whether a call updates the weights (also `scaler.step(opt)`, `xm.optimizer_step(opt)`) or the schedule."""
    if function.attr not in ("step", "optimizer_step"):
        return ""
    made = file.value_of(function.value)
    if isinstance(made, ast.Call):
        origin = file.resolve(made.func) or ""
        if origin.startswith("torch.optim.lr_scheduler."):
            return "schedule"
    given = file.value_of(call.args[0]) if call.args else None
    return "update" if any(_makes_optimizer(file, n) for n in (made, given) if n is not None) else ""


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="OPT006",
    name="adam-with-coupled-decay",
    severity=Severity.INFO,
    summary="Adam with weight_decay adds decay to the gradient",
    why="In Adam the decay term passes through the second moment, so parameters with large gradients are "
    "decayed less. "
    "AdamW decouples it.",
    effect="A matter of quality; see the paper.",
    source="Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101)",
    remedy="torch.optim.AdamW, with a newly tuned decay.",
    bad="torch.optim.Adam(params, lr=1e-4, weight_decay=0.01)",
    good="torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01)",
)
def coupled_decay(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from coupled_decay_block(file, about)
        return
    picked = [call for call, names in picked_optimizers(file) if names == {"torch.optim.Adam"}]
    for call in [*file.calls_of("torch.optim.Adam"), *picked]:
        decay = number(argument(call, "weight_decay", 4))
        if decay and not has_spread(call) and argument(call, "decoupled_weight_decay") is None:
            yield about.at(
                file.path,
                file.span(call),
                "Adam couples weight decay with the gradient's scale; AdamW does not",
            )


@rule(
    Kind.PYTHON,
    code="OPT007",
    name="clipping-after-the-step",
    severity=Severity.ERROR,
    summary="Gradients are clipped after the optimizer has used them",
    why="clip_grad_norm_ changes gradients in place; after optimizer.step() it has no effect on the update.",
    effect="No clipping at all.",
    source="PyTorch docs, torch.nn.utils.clip_grad_norm_",
    remedy="Clip between backward() and step().",
    bad="loss.backward()\noptimizer.step()\nclip_grad_norm_(model.parameters(), 1.0)",
    good="loss.backward()\nclip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
)
def clipping_too_late(file: PythonFile, about: Rule) -> Iterator[Finding]:
    names = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
    for clip in file.calls_of(*names):
        statement = file.statement_of(clip)
        for block in _blocks_of(file.parents.get(statement)):
            if statement in block and _steps_since_backward(block[: block.index(statement)]):
                message = "clips gradients after optimizer.step() has used them"
                yield about.at(file.path, file.span(clip), message)


def _blocks_of(owner: ast.AST | None) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(owner, name, None)
        if isinstance(block, list):
            yield block


def _steps_since_backward(block: list[ast.stmt]) -> bool:
    """Whether the optimizer steps in these statements and no backward pass follows."""
    stepped = False
    for statement in block:
        for part in ast.walk(statement):
            if is_method(part, "backward"):
                stepped = False
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step":
            held = (dotted(call.func.value) or "").lower().rsplit(".", 1)[-1]
            stepped = stepped or held in ("opt", "scaler", "grad_scaler") or "optim" in held
    return stepped
