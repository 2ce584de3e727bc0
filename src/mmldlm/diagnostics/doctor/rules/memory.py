"""Memory: activation checkpointing, graphs kept alive, evaluation with gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mmldlm.diagnostics.doctor.names import dotted
from mmldlm.diagnostics.doctor.python_file import PythonFile, argument, has_spread, is_method, words_of
from mmldlm.diagnostics.doctor.registry import Rule, rule
from mmldlm.diagnostics.doctor.rules.edits import replace_node, set_keyword
from mmldlm.diagnostics.doctor.types import Finding, Kind, Severity

CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")
CHECKPOINT_DOCS = "PyTorch docs, torch.utils.checkpoint"
_WHOLE = {
    "backbone",
    "model",
    "transformer",
    "encoder",
    "decoder",
    "net",
    "network",
    "unet",
    "dit",
    "mmdit",
    "trunk",
}


@rule(
    Kind.PYTHON,
    code="MEM001",
    name="checkpoint-without-use-reentrant",
    severity=Severity.WARNING,
    summary="Activation checkpointing without saying which variant",
    why="Without use_reentrant PyTorch warns, falls back to the old re-entrant variant, and announces an error. The "
    "re-entrant one gives no gradient at all when no input requires one, and does not support keyword arguments.",
    effect="Documented: use_reentrant=False is recommended; a later version raises.",
    source=f"{CHECKPOINT_DOCS} (note and warning)",
    fix="safe",
    bad="x = checkpoint(block, x)",
    good="x = checkpoint(block, x, use_reentrant=False)",
)
def without_reentrant(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(*CHECKPOINTS):
        sequential = file.resolve(call.func) == CHECKPOINTS[1]
        starred = any(keyword.arg is None for keyword in call.keywords)
        if argument(call, "use_reentrant", 3 if sequential else None) is None and not starred and call.args:
            fix = set_keyword(file, call, "use_reentrant", "False", safe=True)
            yield about.at(
                file.path,
                file.span(call),
                "checkpoint() without use_reentrant; pass use_reentrant=False",
                fix,
            )


@rule(
    Kind.PYTHON,
    code="MEM002",
    name="whole-backbone-checkpointed",
    severity=Severity.WARNING,
    summary="One checkpoint around the whole network",
    why="A checkpoint saves the activations between its start and its end. Around everything, the "
    "recomputation in backward "
    "brings all of them back at once: the peak stays, the time doubles.",
    effect="Measured on one H200 (this project): 4021 MiB without, 4094 MiB around the whole backbone, 925 "
    "MiB per block.",
    source=f"{CHECKPOINT_DOCS}; Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174)",
    remedy="Call checkpoint for each block inside the loop over blocks.",
    bad="x = checkpoint(self.backbone, x, use_reentrant=False)",
    good="for block in self.blocks:\n    x = checkpoint(block, x, use_reentrant=False)",
)
def whole_backbone(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(CHECKPOINTS[0]):
        target = dotted(call.args[0]) if call.args else None
        in_loop = file.loop_of(call) is not None or any(
            isinstance(parent, ast.ListComp | ast.GeneratorExp) for parent in file.ancestors(call)
        )
        if target and target.startswith("self.") and target.rsplit(".", 1)[-1] in _WHOLE and not in_loop:
            yield about.at(
                file.path,
                file.span(call),
                f"one checkpoint around {target} saves no peak memory; use one per block",
            )


@rule(
    Kind.PYTHON,
    code="MEM003",
    name="graph-kept-for-a-running-sum",
    severity=Severity.WARNING,
    summary="The loss is summed or stored with its graph",
    why="`total += loss` keeps the autograd graph of every step alive until the sum is dropped; memory grows "
    "each step.",
    effect="Documented in PyTorch's FAQ. Checked on the CPU: the sum's graph grows by one node each step.",
    source="PyTorch FAQ, 'My model reports out of memory', don't accumulate history across your training loop",
    fix="safe",
    bad="total_loss += loss",
    good="total_loss += loss.detach()",
)
def graph_kept(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for loop in file.training_loops:
        trained = {
            node.func.value.id
            for node in file.inside(loop)
            if is_method(node, "backward")
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        }
        for node in file.inside(loop):
            value: ast.expr | None = None
            if (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Add)
                and isinstance(node.value, ast.Name)
            ):
                value = node.value if (dotted(node.target) or "") not in trained else None
            elif is_method(node, "append") and isinstance(node, ast.Call) and len(node.args) == 1:
                value = node.args[0] if isinstance(node.args[0], ast.Name) else None
            if (
                isinstance(value, ast.Name)
                and value.id in trained
                and not _rebound_to_number(file, loop, value.id)
            ):
                fix = replace_node(file, value, f"{value.id}.detach()", "detach the loss", safe=True)
                yield about.at(
                    file.path, file.span(node), f"keeps the graph of every `{value.id}` alive; detach it", fix
                )


def _rebound_to_number(file: PythonFile, loop: ast.AST, name: str) -> bool:
    for node in file.inside(loop):
        if isinstance(node, ast.Assign) and any(dotted(target) == name for target in node.targets):
            if is_method(node.value, "item", "detach", "float"):
                return True
            if (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "float"
            ):
                return True
    return False


@rule(
    Kind.PYTHON,
    code="MEM004",
    name="cache-emptied-every-step",
    severity=Severity.WARNING,
    summary="torch.cuda.empty_cache() in every step",
    why="It synchronises, gives all cached blocks back to the driver and makes the next step ask for them "
    "again. It frees "
    "nothing that PyTorch could not use itself.",
    effect="Documented: it 'doesn't increase the amount of GPU memory available for PyTorch'.",
    source="PyTorch docs, torch.cuda.empty_cache and CUDA semantics, memory management",
    remedy="Remove it from the loop; PYTORCH_ALLOC_CONF=expandable_segments:True helps against fragmentation.",
    bad="for batch in loader:\n    loss.backward()\n    torch.cuda.empty_cache()",
    good="for batch in loader:\n    loss.backward()",
)
def empties_cache(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.cuda.empty_cache"):
        if file.runs_every_step(call):
            yield about.at(file.path, file.span(call), "empties the allocator's cache in every step")


@rule(
    Kind.PYTHON,
    code="MEM005",
    name="evaluation-with-gradients",
    severity=Severity.WARNING,
    summary="An evaluation loop builds autograd graphs",
    why="model.eval() only switches dropout and norms; without torch.no_grad() every forward still stores "
    "its activations.",
    effect="Memory of a training forward, for nothing. Silent where the file mentions no_grad or "
    "inference_mode at all.",
    source="PyTorch notes, autograd mechanics, evaluation mode",
    remedy="Decorate with @torch.inference_mode().",
    bad="def evaluate(model, loader):\n    model.eval()\n    for x in loader:\n        model(x)",
    good="@torch.inference_mode()\ndef evaluate(model, loader): ...",
)
def evaluates_with_gradients(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if {"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"} & file.identifiers or not file.uses(
        "torch"
    ):
        return
    for node in file.of(ast.FunctionDef):
        if not node.name.lower().startswith(("eval", "valid", "test_model")):
            continue
        inside = list(file.inside(node))
        evals = {
            dotted(n.func.value)
            for n in inside
            if is_method(n, "eval")
            and isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and not n.args
        }
        loops = [n for n in inside if isinstance(n, ast.For)]
        forwards = [
            n
            for loop in loops
            for n in file.inside(loop)
            if isinstance(n, ast.Call) and dotted(n.func) in evals
        ]
        if (
            forwards
            and not any(is_method(n, "backward") for n in inside)
            and not any("grad" in w for w in words_of(node))
        ):
            message = f"{node.name} runs the model without torch.no_grad(): graphs are built for nothing"
            yield about.at(file.path, file.span(forwards[0]), message)


@rule(
    Kind.PYTHON,
    code="MEM006",
    name="backward-keeps-its-graph",
    severity=Severity.WARNING,
    summary="backward(retain_graph=True) in every step of a training loop",
    why="The graph's saved tensors stay until the loss is dropped. It is needed only for a second backward "
    "through the "
    "same graph; usually it hides a state that should have been detached.",
    effect="Qualitative: activations of the step live longer; with carried state, memory grows.",
    source="PyTorch docs, torch.Tensor.backward",
    remedy="Detach what is carried to the next step and drop retain_graph.",
    bad="loss.backward(retain_graph=True)",
    good="loss.backward()",
)
def keeps_graph(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, _ in file.calls:
        if not is_method(call, "backward") or has_spread(call):
            continue
        given = argument(call, "retain_graph")
        if not (isinstance(given, ast.Constant) and given.value is True) or not file.runs_every_step(call):
            continue
        scope = file.in_training_loop(call) or file.function_of(call)
        backwards = [n for n in file.inside(scope) if is_method(n, "backward") or _is_grad(file, n)]
        if len(backwards) == 1:
            yield about.at(
                file.path, file.span(call), "retain_graph=True, but this step has no second backward"
            )


def _is_grad(file: PythonFile, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and file.resolve(node.func) == "torch.autograd.grad"
