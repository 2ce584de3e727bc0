"""DataLoaders and datasets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import yaml

from traindoctor.expressions import argument, has_spread, is_constant, number
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import (
    EVALUATES,
    LOADER,
    TRAINS,
    WORKER_KEYS,
    loader_not_persistent,
    loader_option_without_workers,
    loader_without_pinning,
    loader_without_workers,
    name_words,
)
from traindoctor.rules.edits import set_keyword
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity
from traindoctor.yaml_file import YamlFile

LOADER_DOCS = "PyTorch docs, torch.utils.data"
MAX_WORKERS = 32
_WORKERS = 5  # position of num_workers in DataLoader's signature


def _loaders(file: PythonFile) -> list[ast.Call]:
    return [call for call in file.calls_of(LOADER) if call.args or call.keywords]


def feeds_training(file: PythonFile, call: ast.Call) -> bool:
    """Evidence that a loader feeds training: its name or that of its data says so, or it shuffles."""
    parent = file.parents.get(call)
    targets: list[str | None] = []
    if isinstance(parent, ast.Assign):
        targets = [dotted(target) for target in parent.targets]
    elif isinstance(parent, ast.keyword):
        targets = [parent.arg]
    words = name_words(*targets, dotted(argument(call, "dataset", 0) or call))
    if words & TRAINS:
        return True
    if (words | name_words(file.path)) & EVALUATES:
        return False
    if is_constant(argument(call, "shuffle", 2), True) or _samples_at_random(file, call):
        return True
    function = file.function_of(call)
    named = name_words(function.name) if isinstance(function, ast.FunctionDef) else set()
    return bool(named & TRAINS) and bool(named & {"loader", "dataloader", "loaders", "dataloaders"})


def _samples_at_random(file: PythonFile, call: ast.Call) -> bool:
    """Whether the sampler shuffles: a random one, or a distributed one that is told to."""
    given = argument(call, "sampler", 3)
    made = file.value_of(given) if given is not None else None
    if not isinstance(made, ast.Call):
        return False
    name = (file.resolve(made.func) or "").rsplit(".", 1)[-1]
    told = name == "DistributedSampler" and is_constant(argument(made, "shuffle"), True)
    return told or name in ("RandomSampler", "WeightedRandomSampler")


def _is_single_pass(file: PythonFile) -> bool:
    """Whether this file trains in one pass over its data, so that workers are never started again."""
    loops = file.training_loops
    if not loops or any(file.loop_of(loop) is not None for loop in loops):
        return False
    called: dict[ast.AST | None, bool] = {}
    for call, _ in file.calls:
        function = function_called(file, call)
        called[function] = called.get(function, True) and file.loop_of(call) is None
    return all(_runs_once(file, function, called) for function in {file.function_of(loop) for loop in loops})


def _runs_once(file: PythonFile, function: ast.AST, called: dict[ast.AST | None, bool]) -> bool:
    """`called`: the functions that this file calls, and whether never in a loop."""
    if not isinstance(function, ast.FunctionDef):
        return function is file.tree
    known = function.name == "main" or (function in called and file.class_of(function) is None)
    return known and called.get(function, True)


def _workers(call: ast.Call) -> ast.expr | None:
    return argument(call, "num_workers", _WORKERS)


def _moves_to_gpu(file: PythonFile) -> bool:
    strings = {n.value for n in file.of(ast.Constant) if isinstance(n.value, str) and len(n.value) < 20}
    return "cuda" in file.attributes or any(value.startswith("cuda") for value in strings)


def _wants_no_workers(file: PythonFile, call: ast.Call) -> bool:
    """Whether one process may be on purpose: a stream, which every worker would give whole, or tensors in memory."""
    given = argument(call, "dataset", 0)
    values = [given, *file.values_of(given)] if given is not None else []
    called = [dotted(value.func) or "" for value in values if isinstance(value, ast.Call)]
    return any("iterable" in name.lower() or name.endswith("TensorDataset") for name in called)


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DAT001",
    name="loader-without-workers",
    severity=Severity.WARNING,
    summary="A training DataLoader loads in the main process",
    why="Without workers every batch is read, decoded and collated by the process that should be feeding the "
    "GPU; the GPU "
    "waits for each one.",
    effect="The step time becomes load time plus compute time instead of the larger of the two. "
    "Measured on two CPU cores: two epochs take 571 ms with 0 workers, 318 ms with 2 (1.79x).",
    source=f"{LOADER_DOCS}, single- and multi-process data loading; PyTorch performance tuning guide",
    fix="unsafe",
    remedy="min(8, CPUs per process) is a good start; an IterableDataset must split its work by get_worker_info().",
    bad="train_loader = DataLoader(train_set, batch_size=64, shuffle=True)",
    good="train_loader = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=4)",
)
def without_workers(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from loader_without_workers(file, about)
        return
    for call in _loaders(file):
        workers = _workers(call)
        if workers is None and has_spread(call):
            continue
        if (
            (workers is None or is_constant(workers, 0))
            and feeds_training(file, call)
            and not _wants_no_workers(file, call)
        ):
            if (
                argument(call, "prefetch_factor") is not None
                or argument(call, "persistent_workers") is not None
            ):
                continue  # DAT004 speaks of these
            what = "num_workers=0" if workers is not None else "no num_workers"
            fix = (
                set_keyword(file, call, "num_workers", "4", safe=False)
                if len(call.args) <= _WORKERS
                else None
            )
            message = f"training DataLoader with {what}: batches are loaded by the process that feeds the GPU"
            yield about.at(file.path, file.span(call), message, fix, unless=["inference_only"])


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DAT002",
    name="loader-without-pinned-memory",
    severity=Severity.INFO,
    summary="A DataLoader with workers does not pin its memory, in a file that copies to a GPU",
    why="Only copies from page-locked memory run asynchronously; from pageable memory `non_blocking=True` "
    "does nothing.",
    effect="No number was measured here (needs a GPU): the copy of a batch cannot overlap with compute.",
    source=f"{LOADER_DOCS}, memory pinning; PyTorch tutorial on pin_memory and non_blocking",
    fix="unsafe",
    remedy="Unsafe because a dataset that returns GPU tensors or objects of its own cannot be pinned, and "
    "locked memory is "
    "limited.",
    bad="DataLoader(dataset, batch_size=64, num_workers=4)",
    good="DataLoader(dataset, batch_size=64, num_workers=4, pin_memory=True)",
)
def without_pinning(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from loader_without_pinning(file, about)
        return
    if not _moves_to_gpu(file):
        return
    for call in _loaders(file):
        workers, pinned = _workers(call), argument(call, "pin_memory", 7)
        if workers is None or is_constant(workers, 0) or (pinned is None and has_spread(call)):
            continue
        if pinned is None or is_constant(pinned, False):
            fix = set_keyword(file, call, "pin_memory", "True", safe=False) if len(call.args) <= 7 else None
            message = "DataLoader does not pin memory: copies to the GPU block"
            yield about.at(file.path, file.span(call), message, fix, unless=["inference_only"])


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DAT003",
    name="workers-not-persistent",
    severity=Severity.INFO,
    summary="Workers are restarted in every epoch",
    why="Without persistent_workers the processes are stopped after each pass and the dataset is pickled and "
    "imported "
    "again for the next one; with short epochs that is most of the time.",
    effect="Measured on two CPU cores: two short epochs take 251 ms with new workers, 167 ms with persistent "
    "ones (1.51x).",
    source=f"{LOADER_DOCS}, DataLoader(persistent_workers=...)",
    fix="unsafe",
    remedy="Unsafe because a dataset that is changed between epochs (a curriculum) stays as it was inside "
    "living workers.",
    bad="DataLoader(dataset, num_workers=8, shuffle=True)",
    good="DataLoader(dataset, num_workers=8, shuffle=True, persistent_workers=True)",
)
def not_persistent(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from loader_not_persistent(file, about)
        return
    if _is_single_pass(file):
        return
    for call in _loaders(file):
        workers = _workers(call)
        if (
            argument(call, "persistent_workers") is not None
            or has_spread(call)
            or not feeds_training(file, call)
            or workers is None
        ):
            continue
        count = number(workers)
        if count == 0 or (count is None and dotted(workers) is None):
            continue
        value = "True" if count else f"{file.text(workers)} > 0"
        fix = set_keyword(file, call, "persistent_workers", value, safe=False)
        message = "DataLoader restarts its workers in every epoch"
        yield about.at(file.path, file.span(call), message, fix, unless=["inference_only"])


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DAT004",
    name="worker-option-without-workers",
    severity=Severity.ERROR,
    summary="prefetch_factor or persistent_workers with num_workers=0",
    why="DataLoader raises ValueError for both when there are no workers; the program stops here.",
    effect="ValueError at construction (checked with torch 2.13).",
    source=f"{LOADER_DOCS}, torch/utils/data/dataloader.py",
    bad="DataLoader(dataset, num_workers=0, prefetch_factor=2)",
    good="DataLoader(dataset, num_workers=4, prefetch_factor=2)",
)
def option_without_workers(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from loader_option_without_workers(file, about)
        return
    for call in _loaders(file):
        workers = _workers(call)
        if (workers is None and has_spread(call)) or (workers is not None and not is_constant(workers, 0)):
            continue
        prefetch, persistent = argument(call, "prefetch_factor"), argument(call, "persistent_workers")
        given = (
            "prefetch_factor"
            if number(prefetch)
            else "persistent_workers"
            if is_constant(persistent, True)
            else ""
        )
        if given:
            message = f"{given} without workers raises ValueError; set num_workers above 0"
            yield about.at(file.path, file.span(call), message)


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DAT005",
    name="too-many-workers",
    severity=Severity.WARNING,
    summary=f"More than {MAX_WORKERS} loader workers per process",
    why="num_workers counts per rank: 8 ranks with 128 workers start 1,024 processes, each with a copy of "
    "the dataset. "
    "They compete for the same cores and often exhaust memory or file handles.",
    effect="torch warns when workers exceed the CPUs it sees. "
    "Measured on two CPU cores: two epochs take 1227 ms with 34 workers, 164 ms with 2 (7.5x).",
    source="PyTorch, torch/utils/data/dataloader.py, _check_worker_number_rationality",
    remedy="min(8, CPUs // ranks on the machine).",
    bad="num_workers: 128",
    good="num_workers: 8",
)
def too_many_workers(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        for entry in file.entries:
            if (
                entry.name in WORKER_KEYS
                and isinstance(entry.value, yaml.ScalarNode)
                and entry.value.value.isdigit()
                and int(entry.value.value) > MAX_WORKERS
            ):
                message = (
                    f"{entry.key}: {entry.value.value} workers for each rank; min(8, CPUs // ranks) is enough"
                )
                yield about.at(file.path, file.span(entry.value), message)
        return
    for call in _loaders(file):
        count = number(_workers(call))
        if count is not None and count > MAX_WORKERS:
            message = f"{count:.0f} workers for each rank; min(8, CPUs // ranks) is enough"
            yield about.at(file.path, file.span(call), message)


@rule(
    Kind.PYTHON,
    code="DAT007",
    name="sampler-never-told-the-epoch",
    severity=Severity.WARNING,
    summary="A DistributedSampler is used but set_epoch is called nowhere in the project",
    why="The sampler seeds its shuffle with (seed + epoch); without set_epoch every epoch has the same order.",
    effect="Documented: 'the same ordering will be always used'.",
    source=f"{LOADER_DOCS}, DistributedSampler.set_epoch",
    remedy="Call sampler.set_epoch(epoch) at the start of every epoch.",
    bad="sampler = DistributedSampler(dataset)",
    good="sampler = DistributedSampler(dataset)\nfor epoch in range(epochs):\n    sampler.set_epoch(epoch)",
)
def epoch_unknown(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.utils.data.DistributedSampler"):
        if has_spread(call) or is_constant(argument(call, "shuffle", 3), False):
            continue
        if _looks_like_evaluation(file, call):
            continue
        message = "DistributedSampler shuffles, but no code calls set_epoch: every epoch has the same order"
        yield about.at(file.path, file.span(call), message, needs=["training"], nowhere=["set_epoch"])


def _looks_like_evaluation(file: PythonFile, call: ast.Call) -> bool:
    parent = file.parents.get(call)
    names = [dotted(t) or "" for t in parent.targets] if isinstance(parent, ast.Assign) else []
    names += [dotted(a) or "" for a in call.args]
    around = name_words(getattr(file.function_of(call), "name", ""))
    if around & EVALUATES and not around & TRAINS:
        return True
    return any(re.search(r"val|test|eval", name.lower()) for name in names)


@rule(
    Kind.PYTHON,
    code="DAT008",
    name="shuffle-with-sampler",
    severity=Severity.ERROR,
    summary="shuffle=True together with a sampler",
    why="DataLoader raises ValueError: the sampler decides the order.",
    effect="ValueError at construction (checked with torch 2.13).",
    source=f"{LOADER_DOCS}, DataLoader",
    bad="DataLoader(dataset, sampler=sampler, shuffle=True)",
    good="DataLoader(dataset, sampler=sampler)",
)
def shuffle_with_sampler(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in _loaders(file):
        sampler = argument(call, "sampler", 3) or argument(call, "batch_sampler", 4)
        certain = (
            sampler is not None and not is_constant(sampler, None) and not isinstance(sampler, ast.IfExp)
        )
        made = isinstance(file.value_of(sampler), ast.Call) if sampler is not None and certain else False
        if made and is_constant(argument(call, "shuffle", 2), True):
            yield about.at(
                file.path, file.span(call), "shuffle=True with a sampler raises ValueError; drop shuffle"
            )
