"""The process group: how long it waits, who ends it, who chooses its port."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.effective_calls import known_items
from traindoctor.expressions import argument, has_spread, is_constant, number
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import waits_for_days
from traindoctor.rules.ddp import PASSED_ON
from traindoctor.rules.edits import replace_node
from traindoctor.types import Finding, Fix, Kind, NodeEdit, Severity
from traindoctor.yaml_file import YamlFile

DAY = 86_400
_WAITS = (
    "accelerate.InitProcessGroupKwargs",
    "accelerate.utils.InitProcessGroupKwargs",
    *(name for name in PASSED_ON if name.endswith("DDPStrategy")),
)


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DDP006",
    name="process-group-timeout-in-days",
    severity=Severity.ERROR,
    summary="The process group waits longer than a day for a lost rank",
    why="init_process_group(timeout=...) is the time after which a collective that never completes ends the job.",
    effect="A hang costs that long on all GPUs.",
    source="PyTorch docs, torch.distributed.init_process_group",
    fix="unsafe",
    remedy="Unsafe because ranks that wait for hours on purpose (rank 0 prepares data) would be ended.",
    bad='init_process_group("nccl", timeout=timedelta(days=7))',
    good='init_process_group("nccl", timeout=timedelta(minutes=30))',
)
def timeout_in_days(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from waits_for_days(file, about)
        return
    for call in file.calls_of("torch.distributed.init_process_group", *_WAITS):
        given = argument(call, "timeout")
        value = file.value_of(given) if given is not None else None
        seconds = _timedelta_seconds(file, value)
        if seconds is not None and seconds > DAY and isinstance(value, ast.Call):
            text = f"{file.text(value.func)}(minutes=30)"
            fix = replace_node(file, value, text, "wait 30 minutes", safe=False)
            message = f"the process group waits {seconds / DAY:,.1f} days for a lost rank"
            yield about.at(file.path, file.span(value), message, fix)


def _timedelta_seconds(file: PythonFile, node: ast.expr | None) -> float | None:
    if not isinstance(node, ast.Call) or file.resolve(node.func) != "datetime.timedelta" or has_spread(node):
        return None
    unit = {"weeks": 7 * DAY, "days": DAY, "hours": 3600, "minutes": 60, "seconds": 1, "milliseconds": 1e-3}
    order = ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks")
    parts = [*zip(order, node.args, strict=False), *((k.arg or "", k.value) for k in node.keywords)]
    total = 0.0
    for name, value in parts:
        amount = number(value)
        if amount is None:
            return None
        total += amount * unit.get(name, 1e-6)
    return total


@rule(
    Kind.PYTHON,
    code="DDP008",
    name="process-group-never-destroyed",
    severity=Severity.INFO,
    summary="init_process_group without destroy_process_group anywhere in the project",
    why="Since PyTorch 2.4 leaving without it prints a warning, and a rank that exits early can abort the "
    "communicators "
    "the others still use.",
    effect="A warning at exit; sometimes a non-zero exit code after a finished run.",
    source="PyTorch docs, torch.distributed, shutdown",
    remedy="Call torch.distributed.destroy_process_group() at the end of the program.",
    bad='init_process_group("nccl")\ntrain()',
    good='init_process_group("nccl")\ntrain()\ndestroy_process_group()',
)
def never_destroyed(file: PythonFile, about: Rule) -> Iterator[Finding]:
    is_program = any(node.value == "__main__" for node in file.of(ast.Constant))
    for call in file.calls_of("torch.distributed.init_process_group"):
        if not is_program and file.function_of(call) is not file.tree:
            continue  # a library; its users end the program
        message = "the process group is never destroyed; call destroy_process_group() before the program ends"
        yield about.at(file.path, file.span(call), message, unless=["destroy_process_group"])


@rule(
    Kind.PYTHON,
    code="DDP009",
    name="master-port-overwritten",
    severity=Severity.WARNING,
    summary="MASTER_PORT or MASTER_ADDR is fixed in the code",
    why="Assigning os.environ['MASTER_PORT'] throws away what torchrun or the scheduler chose, and two jobs "
    "on one machine "
    "meet on the same port.",
    effect="'Address already in use', or two jobs talking to each other's store.",
    source="PyTorch docs, torchrun and environment-variable initialisation",
    fix="unsafe",
    remedy="Unsafe because a program that starts its own ranks (mp.spawn) then obeys a variable left by the scheduler.",
    bad="os.environ['MASTER_PORT'] = '29500'",
    good="os.environ.setdefault('MASTER_PORT', '29500')",
)
def port_overwritten(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("os.environ.update"):
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        given |= known_items(file, call.args[0]) or {} if call.args else {}
        for name in ("MASTER_PORT", "MASTER_ADDR"):
            if isinstance(given.get(name), ast.Constant) and not file.conditions(
                call, file.function_of(call)
            ):
                message = f"{name} overwrites what the launcher chose; two jobs on one machine collide"
                yield about.at(file.path, file.span(given[name]), message, unless=["spawns"])
    for node in file.of(ast.Assign):
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Subscript):
            continue
        target = node.targets[0]
        if file.resolve(target.value) != "os.environ" or not is_constant(
            target.slice, "MASTER_PORT", "MASTER_ADDR"
        ):
            continue
        if not isinstance(node.value, ast.Constant) or file.conditions(node, file.function_of(node)):
            continue
        text = f"{file.text(target.value)}.setdefault({file.text(target.slice)}, {file.text(node.value)})"
        edit = NodeEdit(file.span(node), "replace_statement", (text,))
        fix = Fix("use setdefault, so that the launcher wins", False, node_edits=(edit,))
        message = f"{file.text(target)} overwrites what the launcher chose; two jobs on one machine collide"
        yield about.at(file.path, file.span(node), message, fix, unless=["spawns"])
