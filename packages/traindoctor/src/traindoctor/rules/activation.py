"""Activation checkpointing: which variant, around what, and where it is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.edits import set_keyword
from traindoctor.types import Finding, Kind, Severity

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
    fix="unsafe",
    remedy="Unsafe because parameters that got no gradient so far, where no input of the block needs one, "
    "are then trained.",
    bad="x = checkpoint(block, x)",
    good="x = checkpoint(block, x, use_reentrant=False)",
)
def without_reentrant(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(*CHECKPOINTS):
        sequential = file.resolve(call.func) == CHECKPOINTS[1]
        starred = any(keyword.arg is None for keyword in call.keywords)
        if argument(call, "use_reentrant", 3 if sequential else None) is None and not starred and call.args:
            fix = set_keyword(file, call, "use_reentrant", "False", safe=False)
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


_BLOCKS = {"blocks", "layers", "h", "transformer_blocks", "double_blocks", "single_blocks", "resblocks"}


@rule(
    Kind.PYTHON,
    code="MEM007",
    name="blocks-without-checkpointing",
    severity=Severity.INFO,
    summary="A stack of transformer blocks is trained without activation checkpointing anywhere in the program",
    why="Each block keeps its activations until the backward pass. With one checkpoint per block only the "
    "inputs of the blocks "
    "are kept and the rest is computed again: less memory for about a third more compute. Worth it where "
    "memory limits the batch.",
    effect="Measured on one H200 (this project), 24 blocks: 4021 MiB without, 925 MiB with one checkpoint per block.",
    source="PyTorch docs, torch.utils.checkpoint; Chen et al. (arXiv 1604.06174)",
    remedy="In the loop: x = checkpoint(block, x, use_reentrant=False) if self.training and "
    "self.checkpointing else block(x).",
    bad="for block in self.blocks:\n    x = block(x)",
    good="for block in self.blocks:\n    x = checkpoint(block, x, use_reentrant=False)",
)
def without_checkpointing(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not re.search(r"attn|attention|transformer", file.source.text.lower()):
        return  # layers of a graph network or of a small MLP keep little
    for loop in file.of(ast.For):
        function = file.function_of(loop)
        stack = _stack_of(loop.iter)
        in_forward = isinstance(function, ast.FunctionDef) and function.name.startswith("forward")
        if not in_forward or not stack.startswith("self.") or stack.rsplit(".", 1)[-1] not in _BLOCKS:
            continue
        names = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
        if any(_runs_block(statement, names, stack) for statement in file.inside(loop)):
            message = f"the blocks of {stack} keep all activations; one checkpoint per block keeps only their inputs"
            yield about.at(
                file.path,
                file.span(loop.iter),
                message,
                needs=["training"],
                unless=["activation_checkpointing"],
            )


def _stack_of(node: ast.expr) -> str:
    """`self.blocks` in `self.blocks`, `enumerate(self.blocks)` and `range(len(self.blocks))`."""
    while isinstance(node, ast.Call) and dotted(node.func) in ("enumerate", "range", "len") and node.args:
        node = node.args[0]
    return dotted(node) or ""


def _runs_block(statement: ast.AST, names: set[str], stack: str) -> bool:
    """`x = block(x, ...)`, `x, y = block(x, y)` or `x = self.blocks[i](x)`: the block's own call, nothing around it."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call):
        return False
    indexed = isinstance(call.func, ast.Subscript) and dotted(call.func.value) == stack
    return indexed or dotted(call.func) in names
