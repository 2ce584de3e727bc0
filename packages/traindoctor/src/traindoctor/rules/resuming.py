"""Loading checkpoints and going on: pickles, missing weights, random state, the log."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_method, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.checkpoints import SAVE_DOCS, file_name
from traindoctor.rules.edits import set_keyword
from traindoctor.types import Finding, Kind, Severity


@rule(
    Kind.PYTHON,
    code="CKP001",
    name="load-without-weights-only",
    severity=Severity.WARNING,
    summary="torch.load without weights_only",
    why="Before PyTorch 2.6 the default runs any code that a pickle contains. Since 2.6 the default is True, so only "
    "projects whose requirements pin an older version are reported.",
    effect="Arbitrary code execution from a checkpoint of a stranger (documented warning).",
    source=f"{SAVE_DOCS} (warning); PyTorch 2.6 release notes",
    fix="unsafe",
    remedy="Unsafe because a checkpoint that holds pickled objects then fails to load on older PyTorch too.",
    bad="torch.load(path, map_location='cpu')",
    good="torch.load(path, map_location='cpu', weights_only=True)",
)
def without_weights_only(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in _default_loads(file):
        fix = set_keyword(file, call, "weights_only", "True", safe=False)
        message = "torch.load without weights_only runs any code in the file, in the pinned PyTorch"
        yield about.at(file.path, file.span(call), message, fix)


def _default_loads(file: PythonFile) -> Iterator[ast.Call]:
    """Calls of torch.load that leave open what may be in the file."""
    for call in file.calls_of("torch.load"):
        chosen = argument(call, "weights_only") or argument(call, "pickle_module", 2)
        if chosen is None and not has_spread(call) and not _is_fallback(file, call):
            yield call


def _is_fallback(file: PythonFile, call: ast.Call) -> bool:
    """Whether the call stands in for one with weights_only that an old PyTorch refused."""
    handler = next((outer for outer in file.ancestors(call) if isinstance(outer, ast.ExceptHandler)), None)
    if handler is None:
        return False
    tried = file.parents[handler]
    loads = [n for n in ast.walk(tried) if isinstance(n, ast.Call) and file.resolve(n.func) == "torch.load"]
    return any(argument(load, "weights_only") is not None for load in loads)


_OF_MODULES = ("eval", "train", "parameters", "state_dict", "load_state_dict", "named_parameters", "modules")


@rule(
    Kind.PYTHON,
    code="CKP013",
    name="pickled-module-rejected",
    severity=Severity.ERROR,
    summary="torch.load of a whole module, which PyTorch 2.6 and newer reject",
    why="Since PyTorch 2.6 torch.load accepts tensors and plain containers only, unless weights_only=False is given. A "
    "file written by torch.save(model, path) raises UnpicklingError.",
    effect="Checked with torch 2.13: torch.load of a pickled module raises UnpicklingError.",
    source=f"{SAVE_DOCS}; PyTorch 2.6 release notes",
    remedy="Save model.state_dict() and load it into a new model. For your own old files pass weights_only=False.",
    bad="model = torch.load('model.pt')\nmodel.eval()",
    good="model.load_state_dict(torch.load('model.pt'))\nmodel.eval()",
)
def pickled_module(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in _default_loads(file):
        if _is_module(file, call):
            message = "loads a whole module, which PyTorch 2.6 and newer reject (UnpicklingError)"
            yield about.at(file.path, file.span(call), message)


def _is_module(file: PythonFile, load: ast.Call) -> bool:
    """Whether a method of modules is called on what was loaded, or on an entry of it."""
    for call in file.of(ast.Call):
        if is_method(call, *_OF_MODULES):
            held: ast.expr = call.func
            while isinstance(held, ast.Attribute | ast.Subscript | ast.Call) and held is not load:
                held = held.func if isinstance(held, ast.Call) else held.value
            if held is load or file.value_of(held) is load:
                return True
    return False


@rule(
    Kind.PYTHON,
    code="CKP005",
    name="random-state-not-saved",
    severity=Severity.INFO,
    summary="A training checkpoint without the random state, in a project that saves it nowhere",
    why="After a resume, dropout, noise and shuffling start over: the resumed run is not the run that was "
    "interrupted.",
    effect="No number was measured: results are not reproducible across a resume.",
    source="PyTorch notes, reproducibility",
    remedy="Save torch.get_rng_state(), torch.cuda.get_rng_state_all(), numpy's and random's state.",
    bad="torch.save({'model': m, 'optimizer': o, 'step': step}, path)",
    good="torch.save({'model': m, 'optimizer': o, 'step': step, 'rng': torch.get_rng_state()}, path)",
)
def no_random_state(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(
        "torch.save"
    ):  # one remark for a file: the same state is often saved under several names
        saved = file.value_of(call.args[0]) if call.args else None
        if not isinstance(saved, ast.Dict) or any(key is None for key in saved.keys):
            continue
        keys = {str(key.value).lower() for key in saved.keys if isinstance(key, ast.Constant)}
        loads = file.calls_of("torch.load")
        converts = "convert" in file.path.rsplit("/", 1)[-1] or any(
            isinstance(v, ast.Subscript) and file.value_of(v.value) in loads for v in saved.values
        )
        resumable = (
            not converts
            and any("optim" in key for key in keys)
            and any(re.search(r"step|epoch|iter", key) for key in keys)
        )
        if resumable and not any("rng" in key or "random" in key for key in keys):
            message = "the checkpoint holds no random state; a resumed run is another run"
            yield about.at(file.path, file.span(call), message, unless=["rng_saved"])
            return


@rule(
    Kind.PYTHON,
    code="CKP006",
    name="missing-weights-ignored",
    severity=Severity.WARNING,
    summary="load_state_dict(strict=False) and its result is ignored",
    why="strict=False accepts a file in which nothing matches: training silently starts from random weights.",
    effect="Checked with torch 2.13: loading an empty dict with strict=False raises nothing.",
    source="PyTorch docs, torch.nn.Module.load_state_dict",
    remedy="Look at missing_keys and unexpected_keys, and fail on what was not expected.",
    bad="model.load_state_dict(state, strict=False)",
    good="missing, unexpected = model.load_state_dict(state, strict=False)\nassert not unexpected",
)
def missing_ignored(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, _ in file.calls:
        if (
            is_method(call, "load_state_dict")
            and is_constant(argument(call, "strict", 1), False)
            and (
                isinstance(file.parents[call], ast.Expr)
                and call.args
                and _is_loaded_state(file, call.args[0])
                and not _is_selected(file, call.args[0])
            )
        ):
            yield about.at(file.path, file.span(call), "strict=False, and the missing keys are never checked")


def _is_selected(file: PythonFile, node: ast.expr) -> bool:
    """Whether the entries were chosen beforehand: `{k: v for k, v in state.items() if k in own}`, intersect_dicts()."""
    value = file.value_of(node)
    if isinstance(value, ast.DictComp):
        return any(part.ifs for part in value.generators)
    called = (dotted(value.func) or "") if isinstance(value, ast.Call) else ""
    return bool(re.search(r"intersect|filter|match|select", called.lower()))


def _is_loaded_state(file: PythonFile, node: ast.expr) -> bool:
    """Whether a state comes from a file; a copy from another module in memory is partial on purpose."""
    if file.loop_of(node) is not None:
        return False  # one shard after another, each of them partial
    if any(re.search(r"missing|unexpected", word) for word in words_of(file.function_of(node))):
        return False  # somebody does look
    return _comes_from_file(file, node, 0)


def _comes_from_file(file: PythonFile, node: ast.expr, depth: int) -> bool:
    """Follow a name to the call that read it; what cannot be followed is judged by its name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            called = (dotted(part.func) or "").rsplit(".", 1)[-1].lower()
            if called == "state_dict":
                return False
            if "load" in called:
                return True
    for part in ast.walk(node):
        name = dotted(part) if isinstance(part, ast.Name | ast.Attribute) else None
        if name is None:
            continue
        values = [value for value in file.values_of(part) if not _mentions_itself(value, name)]
        if values and depth < 4:
            if any(_comes_from_file(file, value, depth + 1) for value in values):
                return True
        elif not values and _names_a_file_state(file, part, name):
            return True
    return False


def _names_a_file_state(file: PythonFile, node: ast.AST, name: str) -> bool:
    if re.search(r"ckpt|checkpoint|pretrained", name.rsplit(".", 1)[-1].lower()):
        return True
    function = file.function_of(node)
    passes_on = isinstance(function, ast.FunctionDef) and "state_dict" in function.name
    return name in ("state", "state_dict", "weights") and not passes_on


def _mentions_itself(value: ast.expr, name: str) -> bool:
    return any(
        isinstance(part, ast.Name | ast.Attribute) and dotted(part) == name for part in ast.walk(value)
    )


@rule(
    Kind.PYTHON,
    code="CKP007",
    name="resume-truncates-its-log",
    severity=Severity.WARNING,
    summary="A run that can resume opens its log for writing from the start",
    why="Mode 'w' and write_text empty the file: after a resume the history of the run is gone. The same holds for "
    "logging.FileHandler(mode='w') and logging.basicConfig(filemode='w').",
    effect="The curve before the resume is lost.",
    source="Python docs, open()",
    remedy="Open with 'a'.",
    bad="log = open(run / 'training_log.jsonl', 'w')",
    good="log = open(run / 'training_log.jsonl', 'a')",
)
def truncates_log(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not any("resume" in name.lower() for name in file.identifiers):
        return
    for call, name in file.calls:
        target = _truncated(file, call, name)
        if target is None or not _is_log(file, target):
            continue
        function = file.function_of(call)
        named = any("resume" in word for word in words_of(function) if len(word) < 40)
        # Anywhere in a script that restores a state: the log is one of the run that goes on.
        restores = "load_state_dict" in file.identifiers or "load_checkpoint" in file.identifiers
        guarded = any("resume" in " ".join(words_of(test)) for test in file.conditions(call, function))
        if (named or restores) and not guarded:
            yield about.at(
                file.path, file.span(call), "empties the log although this run can resume; append instead"
            )


def _truncated(file: PythonFile, call: ast.Call, name: str | None) -> ast.expr | None:
    """The file that a call empties."""
    modes = ("w", "wt", "w+")
    if isinstance(call.func, ast.Name) and call.func.id == "open" and call.args:
        return call.args[0] if is_constant(argument(call, "mode", 1), *modes) else None
    if name == "logging.FileHandler":
        return argument(call, "filename", 0) if is_constant(argument(call, "mode", 1), *modes) else None
    if name == "logging.basicConfig":
        return argument(call, "filename") if is_constant(argument(call, "filemode"), *modes) else None
    if name is not None or not isinstance(call.func, ast.Attribute):
        return None
    emptied = is_method(call, "write_text") and bool(call.args) and is_constant(call.args[0], "")
    if emptied or (is_method(call, "open") and is_constant(argument(call, "mode", 0), *modes)):
        return call.func.value
    return None


_LOG_NAME = re.compile(
    r"(^|_)(train|training|metrics?|loss)?_?logs?(_?(file|path|filename|fn|name))?$", re.IGNORECASE
)


def _is_log(file: PythonFile, node: ast.expr) -> bool:
    values = [node, *file.values_of(node)]
    name = next((found for value in values if (found := file_name(file, value))), "")
    if name:
        suffixes = (".jsonl", ".log", ".txt", ".csv", ".json")
        return bool(re.search(r"log", name, re.IGNORECASE)) and name.endswith(suffixes)
    if any(isinstance(part, ast.JoinedStr) for value in values for part in ast.walk(value)):
        return False  # a name of its own for every start
    held = (
        node.args[0]
        if isinstance(node, ast.Call) and dotted(node.func) in ("str", "Path") and node.args
        else node
    )
    return bool(_LOG_NAME.search((dotted(held) or "").rsplit(".", 1)[-1]))
