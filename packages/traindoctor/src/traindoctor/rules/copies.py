"""Loaders and ranks: copies to the GPU, workers of each rank, batches in advance."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_method, number
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import LOADER
from traindoctor.rules.edits import set_keyword
from traindoctor.rules.loading import feeds_training
from traindoctor.steps import function_called
from traindoctor.types import Finding, Kind, Severity


@rule(
    Kind.PYTHON,
    code="DAT010",
    name="blocking-copy-from-pinned-memory",
    severity=Severity.INFO,
    summary="A batch from a pinning loader is copied with .cuda() or .to(device) without non_blocking",
    why="Pinning pays only when the copy is asynchronous; without non_blocking=True the host waits for each tensor.",
    effect="No number was measured here (needs a GPU): one host wait per tensor and step.",
    source="PyTorch tutorial, A guide on good usage of non_blocking and pin_memory",
    fix="safe or unsafe",
    bad="x = x.cuda()",
    good="x = x.cuda(non_blocking=True)",
)
def blocking_copy(file: PythonFile, about: Rule) -> Iterator[Finding]:
    pinning = any(is_constant(argument(call, "pin_memory", 7), True) for call in file.calls_of(LOADER))
    if not pinning:
        return
    for loop in [*file.training_loops, *_loops_around_steps(file)]:
        names = (
            {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
            if isinstance(loop, ast.For)
            else set()
        )
        for node in file.inside(loop):
            if not is_method(node, "cuda", "to") or not isinstance(node, ast.Call) or has_spread(node):
                continue
            assert isinstance(node.func, ast.Attribute)
            if not isinstance(node.func.value, ast.Name) or node.func.value.id not in names:
                continue
            device = node.args[0] if node.args else None
            copies = node.func.attr == "cuda" or (
                isinstance(device, ast.Name) and "device" in device.id.lower()
            )
            if copies and argument(node, "non_blocking") is None and len(node.args) < 2:
                fix = set_keyword(file, node, "non_blocking", "True", safe=_replaces_its_source(file, node))
                yield about.at(
                    file.path,
                    file.span(node),
                    f"{file.text(node)} waits although the loader pins memory",
                    fix,
                )


def _replaces_its_source(file: PythonFile, call: ast.Call) -> bool:
    """`x = x.cuda()`: nobody can change the host's copy while it is on its way to a CUDA device."""
    assert isinstance(call.func, ast.Attribute)
    parent = file.parents.get(call)
    if not isinstance(parent, ast.Assign) or [dotted(target) for target in parent.targets] != [
        dotted(call.func.value)
    ]:
        return False
    if call.func.attr == "cuda":
        return True
    device = file.value_of(call.args[0])
    if isinstance(device, ast.Call) and file.resolve(device.func) == "torch.device" and device.args:
        device = device.args[0]
    places = [device.body, device.orelse] if isinstance(device, ast.IfExp) else [device]
    names = [place.value if isinstance(place, ast.Constant) else None for place in places]
    return all(isinstance(name, str) and name.split(":")[0] in ("cuda", "cpu") for name in names)


def _loops_around_steps(file: PythonFile) -> list[ast.For]:
    """Loops that give each batch to a step in a function of its own."""
    found: dict[ast.For, None] = {}
    for call, _ in file.calls:
        if function_called(file, call) in file.step_functions:
            loop = file.loop_of(call)
            if isinstance(loop, ast.For):
                found[loop] = None
    training = set(file.training_loops)
    return [loop for loop in found if loop not in training]


@rule(
    Kind.PYTHON,
    code="DAT011",
    name="all-cpus-for-every-rank",
    severity=Severity.WARNING,
    summary="Every rank starts as many loader workers as the machine has CPUs",
    why="num_workers counts per process. With 8 ranks on one machine os.cpu_count() starts 8 workers for "
    "each CPU; they only "
    "interrupt each other and each holds its own copy of the dataset.",
    effect="Measured on two CPU cores: two epochs with 34 workers take 7.5 times as long as with 2.",
    source="PyTorch, torch/utils/data/dataloader.py, _check_worker_number_rationality",
    remedy="min(8, os.cpu_count() // ranks_on_this_machine).",
    bad="DataLoader(data, num_workers=os.cpu_count())",
    good="DataLoader(data, num_workers=min(8, os.cpu_count() // local_world_size))",
)
def all_cpus(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(LOADER):
        workers = argument(call, "num_workers", 5)
        value = file.value_of(workers) if workers is not None else None
        counted = isinstance(value, ast.Call) and (
            file.resolve(value.func) in ("os.cpu_count", "multiprocessing.cpu_count")
            or dotted(value.func) == "cpu_count"
        )
        if counted:
            message = "every rank starts a worker for each CPU of the machine; divide by the ranks on it"
            yield about.at(file.path, file.span(call), message, needs=["distributed"])


@rule(
    Kind.PYTHON,
    code="DAT012",
    name="one-batch-in-advance",
    severity=Severity.INFO,
    summary="prefetch_factor=1: a worker prepares a single batch in advance",
    why="A batch that takes longer than the others to load makes the GPU wait, because nothing is in store. "
    "The default is 2.",
    effect="Measured on two CPU cores, every tenth sample 20 times slower: an epoch takes 1.08 s with 1, "
    "0.85 s with 2, 0.83 s "
    "with 4 (the last two: no measurable difference).",
    source="PyTorch docs, torch.utils.data.DataLoader(prefetch_factor=...)",
    fix="unsafe",
    remedy="Unsafe because batches in store take memory.",
    bad="DataLoader(train_set, num_workers=4, prefetch_factor=1)",
    good="DataLoader(train_set, num_workers=4, prefetch_factor=4)",
)
def little_in_advance(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(LOADER):
        if (
            number(argument(call, "prefetch_factor")) == 1
            and not has_spread(call)
            and feeds_training(file, call)
        ):
            fix = set_keyword(file, call, "prefetch_factor", "4", safe=False)
            yield about.at(file.path, file.span(call), "each worker has one batch in store at most", fix)
