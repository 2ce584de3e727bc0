"""Learning-rate schedules: their unit, their end, and what a resume makes of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_method, number, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Kind, Severity

SCHEDULER = "torch.optim.lr_scheduler"
_PERIODS = {"CosineAnnealingLR": ("T_max", 1), "CosineAnnealingWarmRestarts": ("T_0", 1)}
_PER_EPOCH = re.compile(r"epoch", re.IGNORECASE)
_PER_STEP = re.compile(r"step|iter|batch|len\(", re.IGNORECASE)


def _steps_of(file: PythonFile, call: ast.Call) -> list[ast.Call]:
    """The `.step()` calls of what a call makes and a name holds."""
    parent = file.parents.get(call)
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return []
    held = dotted(parent.targets[0])
    return [
        node
        for node in file.of(ast.Call)
        if is_method(node, "step")
        and isinstance(node.func, ast.Attribute)
        and dotted(node.func.value) == held
    ]


def _runs_per_batch(file: PythonFile, call: ast.Call) -> bool:
    """Whether a call stands in a loop over batches: in the loop of the backward pass itself."""
    loop = file.loop_of(call)
    return loop is not None and loop in file.training_loops and not file.conditions(call, loop)


@rule(
    Kind.PYTHON,
    code="LRS001",
    name="schedule-in-the-wrong-unit",
    severity=Severity.ERROR,
    summary="A cosine whose period counts epochs is stepped in every batch",
    why="The scheduler counts its own step() calls. With T_max in epochs and one step() per batch the "
    "learning rate is at its "
    "floor after a few batches, rises again, and goes up and down for the rest of the run.",
    effect="Checked on the CPU: CosineAnnealingLR(T_max=10) is back at its start after 20 calls.",
    source=f"PyTorch docs, {SCHEDULER}.CosineAnnealingLR",
    remedy="T_max=epochs * len(loader), or one step() per epoch.",
    bad="scheduler = CosineAnnealingLR(optimizer, T_max=epochs)\nfor x in loader:\n    ...\n    scheduler.step()",
    good="scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))",
)
def wrong_unit(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for name, (keyword, position) in _PERIODS.items():
        for call in file.calls_of(f"{SCHEDULER}.{name}"):
            period = argument(call, keyword, position)
            if period is None or has_spread(call):
                continue
            text = file.text(period) if period in file.parents else ""
            if not _PER_EPOCH.search(text) or _PER_STEP.search(text):
                continue
            for step in _steps_of(file, call):
                if not step.args and _runs_per_batch(file, step):
                    message = f"{keyword}={text} counts epochs, but step() runs in every batch: the rate rises again"
                    yield about.at(file.path, file.span(step), message)


@rule(
    Kind.PYTHON,
    code="LRS002",
    name="cosine-past-its-end",
    severity=Severity.WARNING,
    summary="A hand-written cosine schedule without an end",
    why="cos(pi * progress) falls until progress is 1 and rises again after it: a run that continues past the "
    "planned number of "
    "steps, or resumes with more, trains with a growing learning rate.",
    effect="Arithmetic: at 1.5 times the planned steps the rate is back at half, at 2 times at its peak.",
    source="Loshchilov and Hutter, SGDR (arXiv 1608.03983), the cosine within one period",
    remedy="progress = min(1.0, (step - warmup) / (total - warmup)).",
    bad="return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))",
    good="progress = min(1.0, (step - warmup) / (total - warmup))\nreturn lr * 0.5 * (1 + math.cos(math.pi * "
    "progress))",
)
def no_end(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("math.cos", "numpy.cos"):
        angle = call.args[0] if call.args else None
        if angle is None or not ({"pi"} & words_of(angle)) or not _is_schedule(file, call):
            continue
        function = file.function_of(call)
        if not _is_bounded(file, call, function):
            message = "the cosine rises again after its last step; bound the progress by 1"
            yield about.at(file.path, file.span(call), message)


def _is_schedule(file: PythonFile, call: ast.Call) -> bool:
    """Whether the function around is about the learning rate of a training step."""
    function = file.function_of(call)
    name = function.name if isinstance(function, ast.FunctionDef) else ""
    words = {word for word in words_of(function) if len(word) < 40}
    about_rate = re.search(r"(^|_)(lr|learning_rate)(_|$)|sched|cosine", name.lower()) or words & {
        "lr",
        "learning_rate",
        "max_lr",
        "base_lr",
    }
    counts = any(re.search(r"(^|_)(step|steps|it|iter|iteration|epoch)(_|$|s$)", word) for word in words)
    return bool(about_rate) and counts and "betas" not in words


def _is_bounded(file: PythonFile, call: ast.Call, function: ast.AST) -> bool:
    """Whether the progress is held at 1, or a branch answers for steps behind the end."""
    angle = call.args[0]
    sources = [
        angle,
        *(value for part in ast.walk(angle) if isinstance(part, ast.Name) for value in file.values_of(part)),
    ]
    bounded = {"min", "clip", "clamp", "minimum", "mod", "fmod"}
    for source in sources:
        for part in ast.walk(source):
            called = dotted(part.func) if isinstance(part, ast.Call) else None
            if (called or "").rsplit(".", 1)[-1] in bounded or isinstance(part, ast.Mod):
                return True
    for node in file.inside(function):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Gt | ast.GtE):
            if number(node.comparators[0]) is None:
                return True
        elif isinstance(node, ast.Assert | ast.For | ast.ListComp):
            return True  # a table over the planned steps has an end
    return isinstance(function, ast.Lambda)


@rule(
    Kind.PYTHON,
    code="LRS003",
    name="plateau-counts-batches",
    severity=Severity.WARNING,
    summary="ReduceLROnPlateau is stepped with the loss of every batch",
    why="patience counts step() calls (10 by default) and the loss of one batch is noise: the rate is cut "
    "after a few unlucky "
    "batches, again and again, until nothing is learned.",
    effect="Checked on the CPU: with the default patience a constant loss cuts the rate at the 12th call.",
    source=f"PyTorch docs, {SCHEDULER}.ReduceLROnPlateau",
    remedy="Step it once per evaluation, or give a patience in batches (1000) and a smoothed loss.",
    bad="plateau = ReduceLROnPlateau(optimizer)\nfor x in loader:\n    ...\n    plateau.step(loss)",
    good="plateau = ReduceLROnPlateau(optimizer)\nfor epoch in range(epochs):\n    plateau.step(validation_loss)",
)
def plateau_of_batches(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(f"{SCHEDULER}.ReduceLROnPlateau"):
        patience = argument(call, "patience", 3)
        value = 10.0 if patience is None else number(patience)
        if value is None or value >= 100 or has_spread(call):
            continue
        for step in _steps_of(file, call):
            if step.args and _runs_per_batch(file, step):
                message = (
                    f"patience={value:.0f} counts batches here: that many without a better loss cut the rate"
                )
                yield about.at(file.path, file.span(step), message)
