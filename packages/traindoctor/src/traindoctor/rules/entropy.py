"""Losses on tokens: cross entropy of probabilities, log of softmax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import is_method
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.edits import replace_node
from traindoctor.types import Finding, Kind, Severity

_CROSS_ENTROPY = ("torch.nn.functional.cross_entropy",)
_SOFTMAX = ("torch.softmax", "torch.nn.functional.softmax")


def _is_softmax(file: PythonFile, node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return file.resolve(node.func) in _SOFTMAX or is_method(node, "softmax")


@rule(
    Kind.PYTHON,
    code="LOS006",
    name="cross-entropy-of-probabilities",
    severity=Severity.ERROR,
    summary="cross_entropy is given the output of softmax",
    why="cross_entropy applies log_softmax itself; a softmax before it squashes all logits into [0, 1], so "
    "the loss cannot "
    "fall below log(1 + (V-1)/e).",
    effect="Arithmetic: for V = 30,522 classes the loss stays above 9.3.",
    source="PyTorch docs, torch.nn.functional.cross_entropy (expects unnormalised logits)",
    remedy="Pass the logits.",
    bad="F.cross_entropy(F.softmax(logits, dim=-1), target)",
    good="F.cross_entropy(logits, target)",
)
def entropy_of_probabilities(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, name in file.calls:
        is_module = False
        if name not in _CROSS_ENTROPY:
            made = file.value_of(call.func)
            is_module = (
                isinstance(made, ast.Call)
                and file.resolve(made.func) == "torch.nn.CrossEntropyLoss"
                and made is not call
            )
        if not (name in _CROSS_ENTROPY or is_module) or not call.args:
            continue
        given = _unshaped(call.args[0])
        if _is_softmax(file, given) or _is_softmax(file, _unshaped(file.value_of(given))):
            yield about.at(
                file.path, file.span(call), "cross_entropy takes logits; softmax is applied twice here"
            )


_SHAPES = (
    "transpose",
    "permute",
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "float",
)


def _unshaped(node: ast.expr) -> ast.expr:
    """What a chain such as `p.transpose(1, 2).contiguous()` starts from; the numbers in it stay the same."""
    while isinstance(node, ast.Call) and is_method(node, *_SHAPES) and isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            return node
        node = node.func.value
    return node


@rule(
    Kind.PYTHON,
    code="LOS007",
    name="log-of-softmax",
    severity=Severity.WARNING,
    summary="log(softmax(x)) instead of log_softmax(x)",
    why="softmax underflows to 0 for improbable classes, whose log is -inf; log_softmax never leaves the log domain.",
    effect="Checked on the CPU: log(softmax([0, 200])) has -inf, log_softmax has -200.",
    source="PyTorch docs, torch.nn.functional.log_softmax",
    fix="unsafe",
    bad="torch.log(F.softmax(x, dim=-1))",
    good="F.log_softmax(x, dim=-1)",
)
def log_of_softmax(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, name in file.calls:
        inner: ast.expr | None = None
        if name == "torch.log" and len(call.args) == 1 and not call.keywords:
            inner = call.args[0]
        elif (
            is_method(call, "log") and name is None and not call.args and isinstance(call.func, ast.Attribute)
        ):
            inner = call.func.value
        if not isinstance(inner, ast.Call) or not _is_softmax(file, inner):
            continue
        fix = None
        if isinstance(inner.func, ast.Attribute):
            text, start = file.text(inner), len(file.text(inner.func)) - len("softmax")
            fix = replace_node(
                file,
                call,
                text[:start] + "log_softmax" + text[start + len("softmax") :],
                "use log_softmax",
                safe=False,
            )
        yield about.at(
            file.path,
            file.span(call),
            "log(softmax(x)) is -inf where softmax underflows; use log_softmax",
            fix,
        )
