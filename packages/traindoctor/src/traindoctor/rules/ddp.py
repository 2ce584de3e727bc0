"""Distributed training: DDP's arguments, accumulation, collectives, time-outs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, mentions_rank, words_of
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import (
    DDP,
    STRATEGY,
    VIEW_RAISES,
    bucket_view_missing,
    unused_parameters_searched,
)
from traindoctor.rules.edits import replace_node, set_keyword
from traindoctor.types import Finding, Kind, Severity
from traindoctor.yaml_file import YamlFile

DDP_DOCS = "PyTorch docs, torch.nn.parallel.DistributedDataParallel"
DAY = 86_400
COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "barrier",
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "gather",
        "gather_object",
        "scatter",
        "all_to_all",
        "monitored_barrier",
    )
)


# Other ways to the same argument: Lightning's strategy and Accelerate's handler pass it on to DDP.
PASSED_ON = (
    "accelerate.DistributedDataParallelKwargs",
    "accelerate.utils.DistributedDataParallelKwargs",
    "accelerate.utils.dataclasses.DistributedDataParallelKwargs",
    *(
        f"{root}strategies{module}.DDPStrategy"
        for root in ("lightning.pytorch.", "lightning.fabric.", "pytorch_lightning.", "lightning_fabric.")
        for module in ("", ".ddp")
    ),
)


def _wraps(file: PythonFile) -> list[ast.Call]:
    return [call for call in file.calls_of(DDP) if not has_spread(call) and (call.args or call.keywords)]


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DDP001",
    name="searches-unused-parameters",
    severity=Severity.WARNING,
    summary="DDP searches the graph for unused parameters in every step",
    why="find_unused_parameters=True walks the autograd graph after each forward. It is needed only when "
    "parameters really "
    "take no part in the loss; mostly it was set once to silence an error.",
    effect="Documented as adding overhead; DDP itself warns when no unused parameter was found.",
    source=f"{DDP_DOCS}; PyTorch DDP notes, find_unused_parameters",
    fix="unsafe",
    remedy="`traindoctor probe module:function` lists the parameters without gradient; freeze those instead.",
    bad="DDP(model, device_ids=[rank], find_unused_parameters=True)",
    good="DDP(model, device_ids=[rank], find_unused_parameters=False)",
)
def unused_parameters(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from unused_parameters_searched(file, about)
        return
    for call in file.calls_of(DDP, *PASSED_ON):
        static = is_constant(argument(call, "static_graph"), True)  # finds them in the first step alone
        searches = argument(call, "find_unused_parameters")
        if searches is not None and is_constant(file.value_of(searches), True) and not static:
            fix = set_keyword(file, call, "find_unused_parameters", "False", safe=False)
            message = (
                "find_unused_parameters=True walks the graph in every step; freeze unused parameters instead"
            )
            yield about.at(file.path, file.span(call), message, fix, unless=["inference_only"])
    for node in file.of(ast.Constant):
        if node.value == STRATEGY and isinstance(file.parents.get(node), ast.keyword):
            fix = replace_node(file, node, '"ddp"', "use the plain strategy", safe=False)
            yield about.at(file.path, file.span(node), f"{STRATEGY} walks the graph in every step", fix)


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="DDP002",
    name="gradients-copied-into-buckets",
    severity=Severity.INFO,
    summary="DDP keeps a second copy of all gradients",
    why="With gradient_as_bucket_view=True gradients are views into the communication buckets: no copy, and "
    "the memory of "
    "one gradient set less.",
    effect="Documented: peak memory falls by about the size of the gradients (4 bytes a parameter in fp32). "
    "Not measured here.",
    source=f"{DDP_DOCS}, gradient_as_bucket_view",
    fix="safe or unsafe",
    remedy="Unsafe where any file of the program touches `.grad`: a gradient that somebody keeps is "
    "overwritten by the next "
    "step. No fix is offered where any file calls detach_(), which raises on a view.",
    bad="DDP(model, device_ids=[rank])",
    good="DDP(model, device_ids=[rank], gradient_as_bucket_view=True)",
)
def no_bucket_view(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from bucket_view_missing(file, about)
        return
    for call in _wraps(file):
        if argument(call, "gradient_as_bucket_view") is None:
            message = "DDP copies gradients into buckets; views save one copy"
            fix = set_keyword(
                file,
                call,
                "gradient_as_bucket_view",
                "True",
                safe=True,
                unsafe_if=frozenset({"grad_read"}),
                dropped_if=VIEW_RAISES,
            )
            yield about.at(file.path, file.span(call), message, fix, unless=["inference_only"])


@rule(
    Kind.PYTHON,
    code="DDP003",
    name="buffers-broadcast-every-step",
    severity=Severity.INFO,
    summary="DDP broadcasts buffers in every forward although the project has no batch norm",
    why="broadcast_buffers (on by default) sends every buffer from rank 0 at each forward. Constant buffers "
    "(rotary tables, "
    "schedules) are equal on all ranks already.",
    effect="Not measured: one more collective per forward. Reported only where a file of the program "
    "registers a buffer and "
    "none mentions batch norm.",
    source=f"{DDP_DOCS}, broadcast_buffers",
    fix="unsafe",
    remedy="Unsafe because a buffer that is updated in training (a running mean) would drift apart between ranks.",
    bad="DDP(model, device_ids=[rank])",
    good="DDP(model, device_ids=[rank], broadcast_buffers=False)",
)
def broadcasts_buffers(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in _wraps(file):
        if argument(call, "broadcast_buffers", 4) is None:
            fix = set_keyword(file, call, "broadcast_buffers", "False", safe=False)
            message = "DDP sends all buffers at every forward, and nothing in this project has batch norm"
            yield about.at(
                file.path,
                file.span(call),
                message,
                fix,
                needs=["buffers"],
                unless=["batch_norm", "inference_only"],
            )


@rule(
    Kind.PYTHON,
    code="DDP005",
    name="data-parallel-in-one-process",
    severity=Severity.WARNING,
    summary="nn.DataParallel",
    why="DataParallel drives all GPUs from one Python process, replicates the model at every forward and gathers the "
    "outputs on one GPU.",
    effect="PyTorch's documentation recommends DistributedDataParallel even on a single machine.",
    source="PyTorch docs, torch.nn.DataParallel (warning)",
    remedy="Start one process per GPU with torchrun and wrap in DistributedDataParallel.",
    bad="model = nn.DataParallel(model)",
    good="model = DistributedDataParallel(model, device_ids=[local_rank])",
)
def data_parallel(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.nn.DataParallel"):
        demo = any("__name__" in words_of(test) for test in file.conditions(call, file.tree))
        if demo and not file.training_loops and not file.step_functions:
            continue
        message = "DataParallel replicates the model at every forward; one process per GPU with DDP is faster"
        yield about.at(file.path, file.span(call), message, unless=["inference_only"])


@rule(
    Kind.PYTHON,
    code="DDP007",
    name="collective-on-some-ranks",
    severity=Severity.ERROR,
    summary="A collective is called under a condition on the rank",
    why="A collective returns only when every rank of the group has called it. Behind `if rank == 0:` the "
    "others never "
    "come and the job hangs until the time-out.",
    effect="A hang.",
    source="PyTorch docs, torch.distributed, collective functions",
    remedy="Move the collective out of the branch; keep only the local work inside.",
    bad="if rank == 0:\n    save(model)\n    dist.barrier()",
    good="if rank == 0:\n    save(model)\ndist.barrier()",
)
def partial_collective(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch.distributed") and not file.uses("torch"):
        return
    for call in file.calls_of(*COLLECTIVES):
        if has_spread(call) or argument(call, "group") is not None:
            continue
        function = file.function_of(call)
        guard = _rank_branch(file, call, function)
        if guard is None:
            continue
        # The two-barrier idiom and if/else pairs call the collective on the other ranks elsewhere in the function.
        others = [c for c in file.calls_of(*COLLECTIVES) if c is not call and file.function_of(c) is function]
        outside = any(not _contains(guard, other) or other in _else_nodes(guard) for other in others)
        conditional = any(
            _rank_branch(file, other, function) is not guard
            for other in others
            if not _contains(guard, other)
        )
        if (
            (outside and conditional)
            or any(other in _else_nodes(guard) for other in others)
            or _has_yield(function)
        ):
            continue
        where = file.source.line_name(guard.lineno)
        message = f"{file.text(call.func)} is reached only by some ranks ({where}); the others never come"
        yield about.at(file.path, file.span(call), message)


def _rank_branch(file: PythonFile, node: ast.AST, function: ast.AST) -> ast.If | None:
    """The `if` on this process's own rank whose body holds the node."""
    child: ast.AST = node
    for parent in file.ancestors(node):
        if parent is function:
            return None
        if isinstance(parent, ast.If) and child in parent.body and _asks_own_rank(parent.test):
            return parent
        child = parent
    return None


_MAIN = re.compile(
    r"^(is_)?(main|master)(_process|_rank)?$|^is_rank_?(0|zero)$|^is_(global|local)_(zero|main)$"
)


def _asks_own_rank(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        alone = {"world_size", "num_processes", "n_gpu", "num_gpus"}
        return any(_asks_own_rank(part) for part in test.values) and not alone & words_of(test)
    if isinstance(test, ast.Name | ast.Attribute | ast.Call):
        target = test.func if isinstance(test, ast.Call) else test
        name = (
            target.attr
            if isinstance(target, ast.Attribute)
            else target.id
            if isinstance(target, ast.Name)
            else ""
        )
        return bool(_MAIN.match(name))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return (
            is_constant(test.comparators[0], 0)
            and mentions_rank(test.left)
            and "world_size" not in words_of(test)
        )
    return False


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(part is inner for part in ast.walk(outer))


def _else_nodes(guard: ast.If) -> set[ast.AST]:
    return {part for statement in guard.orelse for part in ast.walk(statement)}


def _has_yield(function: ast.AST) -> bool:
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(function))
