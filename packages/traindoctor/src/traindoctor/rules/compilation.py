"""torch.compile: where it is called, what it wraps, what is saved from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import is_constant, is_method
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.edits import replace_node
from traindoctor.types import Finding, Kind, Severity

_PER_CALL = ("forward", "training_step", "train_step", "compute_loss", "__call__", "step")


@rule(
    Kind.PYTHON,
    code="CMP001",
    name="compile-inside-the-step",
    severity=Severity.ERROR,
    summary="torch.compile is called in a training loop or inside forward",
    why="Each call makes a new wrapper with its own cache, so the model is compiled again and again.",
    effect="No number was measured: compile time (seconds to minutes) in every round.",
    source="PyTorch docs, torch.compile",
    remedy="Compile once, where the model is built.",
    bad="for batch in loader:\n    loss = torch.compile(model)(batch)",
    good="model = torch.compile(model)\nfor batch in loader:\n    loss = model(batch)",
)
def compile_in_step(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.compile"):
        function = file.function_of(call)
        in_call = (
            isinstance(function, ast.FunctionDef) and function.name in _PER_CALL and file.class_of(function)
        )
        guarded = bool(file.conditions(call, function))
        if file.in_training_loop(call) is not None or (in_call and not guarded):
            yield about.at(
                file.path,
                file.span(call),
                "torch.compile in every round: the model is compiled again and again",
            )


@rule(
    Kind.PYTHON,
    code="CMP002",
    name="state-dict-of-compiled-module",
    severity=Severity.WARNING,
    summary="The state dict of a compiled module is saved",
    why="torch.compile(model) returns a wrapper whose keys all begin with `_orig_mod.`; a plain model cannot "
    "load them.",
    effect="Checked with torch 2.13: every key carries the prefix.",
    source="PyTorch, torch/_dynamo/eval_frame.py, OptimizedModule",
    remedy="Keep the uncompiled model and save its state dict, or use model.compile() in place.",
    bad="model = torch.compile(model)\ntorch.save(model.state_dict(), path)",
    good="compiled = torch.compile(model)\ntorch.save(model.state_dict(), path)",
)
def compiled_state(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if any("_orig_mod" in name for name in file.identifiers) or "_orig_mod" in file.source.text:
        return
    for call, _ in file.calls:
        if not is_method(call, "state_dict") or not isinstance(call.func, ast.Attribute):
            continue
        holder = call.func.value
        values = file.values_of(holder)
        certain = [v for v in values if isinstance(v, ast.Call) and file.resolve(v.func) == "torch.compile"]
        # Later rewrapping (DDP, prepare) changes the prefix story; only the plain case is certain.
        if certain and values[-1] in certain and file.span(certain[-1]).line < file.span(call).line:
            yield about.at(
                file.path,
                file.span(call),
                f"keys of {dotted(holder)} begin with `_orig_mod.`; save the plain module",
            )


@rule(
    Kind.PYTHON,
    code="CMP003",
    name="ddp-around-compiled-module",
    severity=Severity.INFO,
    summary="DDP wraps a module that was compiled before",
    why="When DDP is applied first and compile second, Dynamo splits the graph at DDP's buckets so that "
    "communication "
    "overlaps with backward. The other way round it sees one graph and reduces late.",
    effect="Qualitative here (needs several GPUs): less overlap.",
    source="PyTorch notes on DistributedDataParallel, TorchDynamo DDPOptimizer",
    remedy="Wrap in DDP first, then compile; or compile blocks inside the model.",
    bad="model = DDP(torch.compile(model))",
    good="model = torch.compile(DDP(model))",
)
def ddp_around_compiled(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.nn.parallel.DistributedDataParallel"):
        wrapped = (
            call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "module"), None)
        )
        if wrapped is None:
            continue
        direct = isinstance(wrapped, ast.Call) and file.resolve(wrapped.func) == "torch.compile"
        earlier = [
            value
            for value in file.values_of(wrapped)
            if isinstance(value, ast.Call)
            and file.resolve(value.func) == "torch.compile"
            and file.span(value).line < file.span(call).line
        ]
        if direct or earlier:
            yield about.at(
                file.path, file.span(call), "DDP around a compiled module loses the split at bucket borders"
            )


@rule(
    Kind.PYTHON,
    code="CMP004",
    name="compile-errors-hidden",
    severity=Severity.WARNING,
    summary="torch._dynamo.config.suppress_errors = True",
    why="A part that cannot be compiled silently runs in eager mode; the switch looks on while nothing is compiled.",
    effect="The speed-up may be missing, and nothing reports it.",
    source="PyTorch docs, torch.compile troubleshooting",
    fix="unsafe",
    remedy="Let it fail, or fall back once with a message.",
    bad="torch._dynamo.config.suppress_errors = True",
    good="torch._dynamo.config.suppress_errors = False",
)
def errors_hidden(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for node in file.of(ast.Assign):
        hidden = file.resolve(node.targets[0]) == "torch._dynamo.config.suppress_errors"
        if hidden and is_constant(node.value, True):
            fix = replace_node(file, node.value, "False", "let errors be seen", safe=False)
            message = "failed compilation silently falls back to eager mode"
            yield about.at(file.path, file.span(node), message, fix)


@rule(
    Kind.PYTHON,
    code="CMP005",
    name="graph-break-in-forward",
    severity=Severity.WARNING,
    summary="forward() of a module in a project that compiles calls .item(), .tolist() or print",
    why="Each of them needs a value on the host: the graph breaks there, and every part is launched separately.",
    effect="One graph break and one host wait per call; `traindoctor probe` counts them.",
    source="PyTorch docs, torch.compile, graph breaks",
    remedy="Keep the value a tensor, or move the call out of forward.",
    bad="def forward(self, x):\n    scale = x.abs().max().item()",
    good="def forward(self, x):\n    scale = x.abs().max()",
)
def break_in_forward(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if "_check" in file.identifiers or "export" in file.path:
        return  # written for torch.export, which handles these values
    for node in file.of(ast.FunctionDef):
        if node.name != "forward" or not _is_module(file, file.class_of(node)):
            continue
        for part in file.inside(node):
            is_print = (
                isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "print"
            )
            on_tensor = is_method(part, "item", "tolist") and isinstance(part, ast.Call) and not part.args
            if (on_tensor or is_print) and not file.conditions(part, node) and not _under_no_compile(node):
                what = "print()" if is_print else "a value on the host"
                message = f"{what} in forward breaks the compiled graph"
                yield about.at(file.path, file.span(part), message, needs=["compile"])


def _is_module(file: PythonFile, node: ast.ClassDef | None) -> bool:
    return node is not None and any(file.resolve(base) == "torch.nn.Module" for base in node.bases)


def _under_no_compile(function: ast.FunctionDef) -> bool:
    return any(
        "disable" in ast.dump(decorator) or "no_grad" in ast.dump(decorator)
        for decorator in function.decorator_list
    )
