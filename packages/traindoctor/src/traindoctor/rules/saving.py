"""What a checkpoint lacks and what grows: pruning, step, schedule and scaler state, logs that are rewritten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, is_method, parameter_names, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.checkpoints import SAVE_DOCS
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity

_COUNTED = re.compile(r"(^|_)(step|steps|epoch|iter|iteration|it|milestone)(_|$|s$)", re.IGNORECASE)


def _saved_keys(file: PythonFile, call: ast.Call) -> set[str] | None:
    """The keys of the dictionary that torch.save writes, in lower case; None where they are not all known."""
    saved = file.value_of(call.args[0]) if call.args else None
    if isinstance(saved, ast.Call) and dotted(saved.func) == "dict" and not saved.args:
        keys = [keyword.arg for keyword in saved.keywords]
        return None if None in keys else {str(key).lower() for key in keys}
    if not isinstance(saved, ast.Dict) or not all(isinstance(key, ast.Constant) for key in saved.keys):
        return None
    keys_ = {str(key.value).lower() for key in saved.keys if isinstance(key, ast.Constant)}
    name = dotted(call.args[0])
    for change in file.dictionary_changes.get(name or "", []):
        target = change.targets[0] if isinstance(change, ast.Assign) else None
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            return None
        keys_.add(str(target.slice.value).lower())
    return keys_


def _resumable(file: PythonFile) -> Iterator[tuple[ast.Call, set[str]]]:
    """Saves of a training state: a dictionary with an optimizer in it."""
    seen: set[ast.expr] = set()
    for call in file.calls_of("torch.save"):
        keys = _saved_keys(file, call)
        saved = file.value_of(call.args[0]) if call.args else call
        if saved in seen:
            continue  # the same state under another name
        seen.add(saved)
        if keys and any(re.search(r"optim|(^|_)opt($|_)", key) for key in keys):
            yield call, keys


@rule(
    Kind.PYTHON,
    code="CKP010",
    name="checkpoints-never-pruned",
    severity=Severity.WARNING,
    summary="A new checkpoint for every step or epoch, and nothing deletes old ones",
    why="The disk fills up in the middle of the run, and the save that does not fit any more is the one that "
    "is needed.",
    effect="Arithmetic: an AdamW state in fp32 has 12 bytes a parameter; 1 B parameters saved 100 times are 1.2 TB.",
    source=SAVE_DOCS,
    remedy="Keep the last three: sorted(folder.glob('step_*.pt'))[:-3], unlinked after the new one is complete.",
    bad="torch.save(state, f'ckpt_{step}.pt')",
    good="save(state, folder / f'step_{step}.pt')\nfor old in sorted(folder.glob('step_*.pt'))[:-3]:\n    old.unlink()",
)
def never_pruned(file: PythonFile, about: Rule) -> Iterator[Finding]:
    loops = _loops_of_training(file)
    for call, target in _written_files(file):
        counted = None if any("sample" in word for word in words_of(call)) else _counted_name(file, target)
        if counted and (_is_followed_by_the_end(file, call) or _is_listed(file, call, counted)):
            continue
        if counted and (file.loop_of(call) in loops or _called_in(file, call, counted, loops)):
            message = f"a new file for every {counted}, and this program never deletes one"
            yield about.at(file.path, file.span(call), message, needs=["training"], unless=["deletes_files"])


def _is_followed_by_the_end(file: PythonFile, call: ast.Call) -> bool:
    """Whether the branch around a save leaves the loop: one file for a run that gives up, not one for every step."""
    branch = file.parents.get(file.statement_of(call))
    blocks = [branch.body, branch.orelse] if isinstance(branch, ast.If) else []
    return any(
        file.statement_of(call) in block and isinstance(block[-1], ast.Return | ast.Raise | ast.Break)
        for block in blocks
    )


def _is_listed(file: PythonFile, call: ast.Call, counted: str) -> bool:
    """Whether somebody listed the steps that are saved: `if iteration in save_iterations`."""
    return any(
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and dotted(test.left) == counted
        for test in file.conditions(call, file.function_of(call))
    )


def _written_files(file: PythonFile) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Calls that save, with the file they name: torch.save itself, or a function of this file that passes a name on."""
    for call in file.calls_of("torch.save"):
        if len(call.args) < 2:
            continue
        yield call, call.args[1]
        function = file.function_of(call)
        names = parameter_names(function)
        given = dotted(call.args[1])
        if given not in names:
            continue
        for caller, _ in file.calls:
            if function_called(file, caller) is function:
                value = argument(caller, given, names.index(given) - ("self" in names[:1]))
                if value is not None:
                    yield caller, value


def _called_in(file: PythonFile, call: ast.Call, counted: str, loops: set[ast.AST]) -> bool:
    """Whether the counter is a parameter of the function around, which a training loop of this file calls."""
    function = file.function_of(call)
    if counted not in parameter_names(function):
        return False
    return any(
        function_called(file, caller) is function and file.loop_of(caller) in loops
        for caller, _ in file.calls
    )


def _loops_of_training(file: PythonFile) -> set[ast.AST]:
    """Training loops and the loops around them."""
    found: set[ast.AST] = set(file.training_loops)
    for loop in file.training_loops:
        found |= {outer for outer in file.ancestors(loop) if isinstance(outer, ast.For | ast.While)}
    # A loop over epochs that calls a function with the training loop in it.
    for loop in file.of(ast.For):
        if any(_COUNTED.search(name.id) for name in ast.walk(loop.target) if isinstance(name, ast.Name)):
            found.add(loop)
    return found


def _counted_name(file: PythonFile, node: ast.expr) -> str | None:
    """The counter in the name of a file: `f"ckpt_{step}.pt"`, `"model_%d.pth" % epoch`, `"{}.pt".format(epoch)`."""
    for source in (node, file.value_of(node)):
        for part in ast.walk(source):
            held: list[ast.expr] = []
            if isinstance(part, ast.FormattedValue):
                held = [part.value]
            elif (
                isinstance(part, ast.BinOp)
                and isinstance(part.op, ast.Mod)
                and isinstance(part.left, ast.Constant)
            ):
                held = list(part.right.elts) if isinstance(part.right, ast.Tuple) else [part.right]
            elif isinstance(part, ast.Call) and (is_method(part, "format") or dotted(part.func) == "str"):
                held = part.args
            for value in held:
                for name in ast.walk(value):
                    word = (
                        (dotted(name) or "").rsplit(".", 1)[-1]
                        if isinstance(name, ast.Name | ast.Attribute)
                        else ""
                    )
                    if _COUNTED.search(word):
                        return word
    return None


@rule(
    Kind.PYTHON,
    code="CKP011",
    name="checkpoint-without-step",
    severity=Severity.WARNING,
    summary="A training checkpoint holds the optimizer but neither step nor epoch",
    why="A resume cannot know where it is: schedule, data order and logs start again from 0.",
    effect="Not measured: the learning rate jumps back to warm-up and the first data are seen again.",
    source="PyTorch tutorial, saving and loading a general checkpoint",
    remedy="Add 'step': step (and 'epoch').",
    bad="torch.save({'model': m, 'optimizer': o}, path)",
    good="torch.save({'model': m, 'optimizer': o, 'step': step}, path)",
)
def without_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, keys in _resumable(file):
        known = any(
            re.search(
                r"step|epoch|iter|progress|trainer|train_state|(^|_)it($|_)|global|loop|meta|args|config|info|extra|state$",
                key,
            )
            for key in keys
        )
        if not known and "step" not in words_of(call):
            yield about.at(
                file.path,
                file.span(call),
                "the checkpoint holds an optimizer but no step: a resume starts from 0",
            )


@rule(
    Kind.PYTHON,
    code="CKP012",
    name="checkpoint-without-schedule-or-scaler",
    severity=Severity.WARNING,
    summary="A training checkpoint without the state of the scheduler or the gradient scaler that the program uses",
    why="After a resume the schedule counts from 0 again, and the loss scale starts with its first guess.",
    effect="Checked on the CPU: saved at step 9 of a cosine over 10 and resumed without its state, the next "
    "rate is 0.024 of the "
    "peak, where the schedule says 0.",
    source="PyTorch docs, torch.optim.lr_scheduler and torch.amp.GradScaler, state_dict",
    remedy="Save scheduler.state_dict() and scaler.state_dict(), and load both.",
    bad="torch.save({'model': m, 'optimizer': o, 'step': step}, path)",
    good="torch.save({'model': m, 'optimizer': o, 'scheduler': s.state_dict(), 'step': step}, path)",
)
def without_schedule(file: PythonFile, about: Rule) -> Iterator[Finding]:
    made = {name for _, name in file.calls if name}
    schedules = any(name.startswith("torch.optim.lr_scheduler.") for name in made)
    schedules = schedules and "last_epoch" not in file.identifiers  # set by hand on resume
    scales = bool(made & {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"})
    for call, keys in _resumable(file):
        for used, what, pattern in (
            (schedules, "scheduler", r"sched|(^|_)lr"),
            (scales, "gradient scaler", r"scaler|amp"),
        ):
            if used and not any(re.search(pattern, key) for key in keys):
                message = f"the checkpoint lacks the state of the {what} that this file uses"
                yield about.at(file.path, file.span(call), message)


@rule(
    Kind.PYTHON,
    code="MET001",
    name="history-rewritten-every-step",
    severity=Severity.WARNING,
    summary="The whole history of metrics is written again in every step or epoch",
    why="The file grows with the run and each write costs as much as all before: the total is quadratic. A "
    "kill in the middle "
    "leaves a torn file and no history.",
    effect="Measured on the CPU: a JSON list of 10,000 entries takes 92 ms, an appended line 0.014 ms.",
    source="Python docs, json; JSON Lines",
    remedy="Append one line: log.write(json.dumps(metrics) + '\\n').",
    bad="history.append(metrics)\njson.dump(history, open('log.json', 'w'))",
    good="with open('log.jsonl', 'a') as log:\n    log.write(json.dumps(metrics) + '\\n')",
)
def history_rewritten(file: PythonFile, about: Rule) -> Iterator[Finding]:
    grown = {
        dotted(call.func.value)
        for call in file.of(ast.Call)
        if is_method(call, "append")
        and isinstance(call.func, ast.Attribute)
        and file.loop_of(call) is not None
    }
    loops = _loops_of_training(file) if grown else set()
    for call in file.calls_of("json.dump", "pickle.dump", "torch.save", "numpy.save"):
        held = dotted(call.args[0]) if call.args else None
        held = (
            dotted(call.args[1]) if file.resolve(call.func) == "numpy.save" and len(call.args) > 1 else held
        )
        loop = file.loop_of(call)
        if held not in grown or loop not in loops or _is_reset(file, held, loop):
            continue
        yield about.at(
            file.path,
            file.span(call),
            f"writes all of {held} again each time; append one line",
            needs=["training"],
        )


def _is_reset(file: PythonFile, name: str | None, loop: ast.AST | None) -> bool:
    """Whether the list is emptied inside the loop, so that it does not grow."""
    if loop is None:
        return True
    for node in file.inside(loop):
        if isinstance(node, ast.Assign) and any(dotted(target) == name for target in node.targets):
            return True
        if is_method(node, "clear") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return dotted(node.func.value) == name
    return False
