"""Saving checkpoints: overwriting, pruning, ranks, wrappers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_method, mentions_rank, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity

SAVE_DOCS = "PyTorch docs, torch.save / torch.load"
_CKPT = re.compile(r"ckpt|checkpoint|latest|last|model|weights|state|best|resume", re.IGNORECASE)


def file_name(file: PythonFile, node: ast.expr) -> str | None:
    """The last part of a path when it is a literal without placeholders."""
    node = file.value_of(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rsplit("/", 1)[-1]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
        return file_name(file, node.right)
    if isinstance(node, ast.Call) and file.resolve(node.func) == "os.path.join" and node.args:
        return file_name(file, node.args[-1])
    if isinstance(node, ast.Call) and dotted(node.func) in ("str", "Path") and len(node.args) >= 1:
        return file_name(file, node.args[-1])
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[-1], ast.Constant):
        tail = str(node.values[-1].value)
        return tail.rsplit("/", 1)[-1] if "/" in tail else None
    return None


_STEPPED = re.compile(r"step|epoch|iter|timestamp|stamp", re.IGNORECASE)


@rule(
    Kind.PYTHON,
    code="CKP003",
    name="checkpoint-overwritten-in-place",
    severity=Severity.WARNING,
    summary="A checkpoint is written under its final, fixed name",
    why="torch.save truncates the file first. A kill, a full disk or a time limit in the middle leaves a "
    "torn file where the "
    "only good checkpoint was.",
    effect="Measured for DCP (this project): SIGKILL while saving into an existing folder tore it 4 of 4 times.",
    source=f"{SAVE_DOCS}; POSIX rename(2) is atomic",
    remedy="Write to a temporary name in the same folder, then os.replace it over the old one.",
    bad="torch.save(state, out_dir / 'latest.pt')",
    good="torch.save(state, out_dir / 'latest.pt.tmp')\nos.replace(out_dir / 'latest.pt.tmp', out_dir / 'latest.pt')",
)
def overwritten(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.save"):
        target = argument(call, "f", 1)
        if target is None or has_spread(call):
            continue
        name = file_name(file, target)
        function = file.function_of(call)
        if name is None or not _CKPT.search(name) or re.search(r"tmp|temp|\.part", name) or "{" in name:
            continue
        if any(_STEPPED.search(word) for word in words_of(target) if len(word) < 80):
            continue
        whole = isinstance(function, ast.Module)
        recurring = file.loop_of(call) is not None or (
            not whole and re.search(r"save|checkpoint|ckpt", function.name.lower())
            if isinstance(function, ast.FunctionDef)
            else False
        )
        holds_state = "optimizer" in " ".join(words_of(file.value_of(call.args[0]))) if call.args else False
        renames = {"replace", "rename", "move", "renames"}
        moved = any(is_method(n, *renames) for n in ast.walk(function)) or _is_export(function)
        if (
            recurring
            and (holds_state or re.search(r"ckpt|checkpoint|latest|last", name, re.IGNORECASE))
            and not moved
        ):
            message = f"'{name}' is overwritten in place; a kill while saving destroys the only copy"
            yield about.at(file.path, file.span(call), message)


def _is_export(function: ast.AST) -> bool:
    return isinstance(function, ast.FunctionDef) and "export" in function.name.lower()


@rule(
    Kind.PYTHON,
    code="CKP004",
    name="pruned-before-saved",
    severity=Severity.ERROR,
    summary="Old checkpoints are deleted before the new one is written",
    why="If saving fails or the job is killed in between, neither the old nor the new one exists.",
    effect="The whole run is lost.",
    source="This project's rule: a checkpoint is removed only when a newer one is durable",
    remedy="Save and flush first, delete afterwards.",
    bad="shutil.rmtree(ckpt_dir)\ntorch.save(state, ckpt_dir / 'state.pt')",
    good="save_new(ckpt_dir)\nshutil.rmtree(old_dir)",
)
def pruned_first(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for save in file.calls_of("torch.save"):
        function = file.function_of(save)
        line = file.span(save).line
        target = words_of(save.args[1]) if len(save.args) > 1 else set()
        for node in file.inside(function):
            if not isinstance(node, ast.Call) or file.span(node).line >= line:
                continue
            gone = _removed_by(file, node)
            if (
                gone is None
                or not _same_block_before(file, node, save)
                or _saved_before(file, node, function)
                or is_method(file.value_of(gone), "pop")  # the oldest of several
            ):
                continue
            removed = dotted(gone)
            about_checkpoints = removed is not None and (
                removed.lower() in target or _is_old(removed) or _is_each_checkpoint(file, gone)
            )
            if about_checkpoints:
                yield about.at(
                    file.path,
                    file.span(node),
                    f"{file.text(node)[:60]} runs before the new checkpoint is written",
                )


def _saved_before(file: PythonFile, node: ast.Call, function: ast.AST) -> bool:
    """Whether another checkpoint is written in front of the deletion, which is then the one that stays."""
    return any(
        file.function_of(save) is function and file.span(save) < file.span(node)
        for save in file.calls_of("torch.save")
    )


def _removed_by(file: PythonFile, call: ast.Call) -> ast.expr | None:
    """What a call deletes: `shutil.rmtree(x)`, `os.remove(x)`, `x.unlink()`."""
    if file.resolve(call.func) in ("shutil.rmtree", "os.remove", "os.unlink") and call.args:
        return call.args[0]
    unlinks = is_method(call, "unlink") and isinstance(call.func, ast.Attribute)
    return call.func.value if unlinks and isinstance(call.func, ast.Attribute) else None


def _is_old(name: str) -> bool:
    lowered = name.lower()
    return bool(re.search(r"ckpt|checkpoint", lowered)) and bool(
        re.search(r"old|prev|last|oldest|stale", lowered)
    )


def _is_each_checkpoint(file: PythonFile, node: ast.expr) -> bool:
    """Whether a name runs over all checkpoints: `for old in glob.glob("ckpt/*.pt")`, without a slice or a condition."""
    name = dotted(node)
    for loop in file.ancestors(node):
        if isinstance(loop, ast.For) and dotted(loop.target) == name:
            listed = file.value_of(loop.iter)
            if not isinstance(listed, ast.Call) or file.conditions(node, loop):
                return False
            globs = file.resolve(listed.func) == "glob.glob" or is_method(listed, "glob")
            return globs and any(re.search(r"ckpt|checkpoint|\.pth?$", word) for word in words_of(listed))
    return False


def _same_block_before(file: PythonFile, first: ast.AST, second: ast.AST) -> bool:
    """Whether `first` always runs before `second` in one pass: some block holds both, in this order."""
    chain = {parent: child for child, parent in _steps(file, first)}
    for child, parent in _steps(file, second):
        if parent in chain:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and chain[parent] in block and child in block:
                    return block.index(chain[parent]) < block.index(child)
            return False
    return False


def _steps(file: PythonFile, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    while node in file.parents:
        yield node, file.parents[node]
        node = file.parents[node]


@rule(
    Kind.PYTHON,
    code="CKP008",
    name="every-rank-saves",
    severity=Severity.ERROR,
    summary="All ranks write the same checkpoint file",
    why="torch.save without a condition on the rank runs on every process; they write into one file at the "
    "same time.",
    effect="A torn checkpoint, or N times the I/O.",
    source="PyTorch DDP tutorial, save and load checkpoints",
    remedy="if dist.get_rank() == 0: torch.save(...), then a barrier.",
    bad="model = DDP(model)\ntorch.save(model.module.state_dict(), 'model.pt')",
    good="if dist.get_rank() == 0:\n    torch.save(model.module.state_dict(), 'model.pt')",
)
def every_rank_saves(file: PythonFile, about: Rule) -> Iterator[Finding]:
    wrapped = {file.function_of(call) for call in file.calls_of("torch.nn.parallel.DistributedDataParallel")}
    classes = {file.class_of(place) for place in wrapped}
    known = _callers(file) if wrapped else {}
    for call in file.calls_of("torch.save"):
        if len(call.args) < 2 or mentions_rank(call.args[1]):
            continue
        function = file.function_of(call)
        if function in wrapped:
            reached = _reached_by_all(file, call)
        else:
            # A function of its own: every call of it in this file must be one of all ranks.
            callers = known.get(function, [])
            owner = file.class_of(function)
            wraps = owner is not None and owner in classes
            reached = (
                bool(callers)
                and not mentions_rank(function)
                and _reached_by_all(file, call)
                and all(
                    (wraps or file.function_of(c) in wrapped) and _reached_by_all(file, c) for c in callers
                )
            )
        if reached:
            yield about.at(
                file.path, file.span(call), "every rank writes this file at the same time; save on one rank"
            )


def _callers(file: PythonFile) -> dict[ast.AST, list[ast.Call]]:
    """Function of this file -> its calls: `name()`, `self.name()`, and `x.name()` where `x = Owner(...)`."""
    classes = {node.name: node for node in file.of(ast.ClassDef)}
    found: dict[ast.AST, list[ast.Call]] = {}
    for call, _ in file.calls:
        function = function_called(file, call)
        if function is None and isinstance(call.func, ast.Attribute):
            made = file.value_of(call.func.value)
            owner = classes.get(dotted(made.func) or "") if isinstance(made, ast.Call) else None
            function = file.definitions.get((owner, call.func.attr)) if owner is not None else None
        if function is not None:
            found.setdefault(function, []).append(call)
    return found


def _reached_by_all(file: PythonFile, call: ast.Call) -> bool:
    """Whether a call stands behind no condition on the rank, and behind others only where they are periodic."""
    function = file.function_of(call)
    if any(mentions_rank(test) for test in file.conditions(call, file.tree)):
        return False
    returns = any(
        isinstance(n, ast.If)
        and mentions_rank(n.test)
        and any(isinstance(b, ast.Return | ast.Continue) for b in n.body)
        for n in file.inside(function)
    )
    tests = list(file.conditions(call, function))
    # `if step % 1000 == 0`, in a function that never asks for a rank in a condition.
    periodic = all(
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.BinOp)
        and isinstance(test.left.op, ast.Mod)
        for test in tests
    )
    asks = any(isinstance(n, ast.If) and mentions_rank(n.test) for n in file.inside(function))
    return not returns and (not tests or (periodic and not asks))


@rule(
    Kind.PYTHON,
    code="CKP009",
    name="state-dict-of-ddp-wrapper",
    severity=Severity.WARNING,
    summary="The state dict of the DDP wrapper is saved",
    why="All its keys begin with `module.`; the plain model cannot load them.",
    effect="No number was measured: the plain model rejects the file, or with strict=False loads nothing from it.",
    source="PyTorch DDP tutorial",
    remedy="model.module.state_dict().",
    bad="model = DDP(model)\ntorch.save(model.state_dict(), path)",
    good="model = DDP(model)\ntorch.save(model.module.state_dict(), path)",
)
def ddp_state(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for save in file.calls_of("torch.save"):
        held = file.value_of(save.args[0]) if save.args else save
        for call in ast.walk(held if isinstance(held, ast.Dict) else save):
            if (
                not is_method(call, "state_dict")
                or not isinstance(call, ast.Call)
                or not isinstance(call.func, ast.Attribute)
            ):
                continue
            values = file.values_of(call.func.value)
            last = values[-1] if values else None
            if (
                isinstance(last, ast.Call)
                and file.resolve(last.func) == "torch.nn.parallel.DistributedDataParallel"
            ):
                unconditional = not file.conditions(last, file.function_of(last))
                if unconditional and file.span(last).line < file.span(call).line:
                    name = dotted(call.func.value)
                    message = f"keys of {name} begin with `module.`; save {name}.module"
                    yield about.at(file.path, file.span(call), message)
