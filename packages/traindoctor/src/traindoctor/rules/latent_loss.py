"""Losses on latents: targets whose length is thrown away, predictions whose gradient is cut off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_method
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Kind, Severity

_NOISE = re.compile(r"(^|_)(noise|eps|epsilon|velocity|v_target)(_|$)")
_PREDICTED = re.compile(r"(^|_)(pred|prediction|logits|output|hat)(_|$)")
_COSINE = ("torch.nn.functional.cosine_similarity", "torch.cosine_similarity")
_NORMALIZE = ("torch.nn.functional.normalize",)
_COMPARES = (
    "torch.nn.functional.mse_loss",
    "torch.nn.functional.l1_loss",
    "torch.nn.functional.smooth_l1_loss",
    "torch.nn.functional.huber_loss",
)


def _last(node: ast.AST | None) -> str:
    """The last part of a name, without a chain of detach() and float() behind it."""
    while (
        isinstance(node, ast.Call)
        and is_method(node, "detach", "float", "squeeze")
        and isinstance(node.func, ast.Attribute)
    ):
        node = node.func.value
    return (dotted(node) or "").rsplit(".", 1)[-1].lower() if node is not None else ""


@rule(
    Kind.PYTHON,
    code="LOS009",
    name="noise-target-normalised",
    severity=Severity.ERROR,
    summary="A noise or velocity target is normalised, or compared by its direction only",
    why="A sampler subtracts the predicted noise with its length. A loss that normalises the target, or "
    "takes the cosine, leaves "
    "that length untrained, so no sampling formula holds. Only a prediction of the clean latent may be "
    "compared by direction.",
    effect="Checked on the CPU: the cosine loss is the same for a prediction and for ten times that prediction.",
    source="Ho et al., DDPM (arXiv 2006.11239), the simple loss; this project's docs/objectives.md",
    remedy="F.mse_loss(predicted_noise, noise), or predict the clean latent and take the cosine of that.",
    bad="loss = F.mse_loss(F.normalize(pred, dim=-1), F.normalize(noise, dim=-1))",
    good="loss = F.mse_loss(pred, noise)",
)
def noise_normalised(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(*_NORMALIZE):
        name = _last(call.args[0]) if call.args else ""
        if _NOISE.search(name) and _is_compared(file, call):
            yield about.at(
                file.path, file.span(call), f"{name} loses its length here, which the sampler needs"
            )
    for call in file.calls_of(*_COSINE):
        names = [_last(value) for value in call.args[:2]]
        noisy = next((name for name in names if _NOISE.search(name)), None)
        if noisy and any(_PREDICTED.search(name) for name in names) and not _only_logged(file, call):
            message = f"the cosine with {noisy} leaves the length of the prediction untrained, which the sampler needs"
            yield about.at(file.path, file.span(call), message)


def _is_compared(file: PythonFile, call: ast.Call) -> bool:
    """Whether the normalised target reaches a loss, in place or through one name."""
    outer = file.parents.get(call)
    if isinstance(outer, ast.Call) and file.resolve(outer.func) in _COMPARES:
        return True
    if not isinstance(outer, ast.Assign) or len(outer.targets) != 1:
        return isinstance(outer, ast.BinOp)
    name = dotted(outer.targets[0])
    return any(
        dotted(value) == name for compare in file.calls_of(*_COMPARES, *_COSINE) for value in compare.args[:2]
    )


def _only_logged(file: PythonFile, call: ast.Call) -> bool:
    """Whether the number is only shown: under no_grad, or with .item() behind it."""
    for outer in file.ancestors(call):
        if isinstance(outer, ast.With) and "no_grad" in ast.unparse(outer.items[0].context_expr):
            return True
        if isinstance(outer, ast.Attribute) and outer.attr in ("item", "detach"):
            return True
        if isinstance(outer, ast.FunctionDef):
            return any("no_grad" in ast.unparse(mark) for mark in outer.decorator_list)
    return False


@rule(
    Kind.PYTHON,
    code="LOS010",
    name="clamped-prediction",
    severity=Severity.WARNING,
    summary="A prediction is clamped before its loss is taken",
    why="Outside of the bounds the gradient of a clamp is 0: a prediction that has gone astray never comes back.",
    effect="Checked on the CPU: the gradient through clamp(-10, 10) of 11 is exactly 0.",
    source="PyTorch docs, torch.clamp; derivative of a constant",
    remedy="Leave the prediction alone and clip the gradient norm; bound it by tanh where a bound is needed.",
    bad="latent_pred = torch.clamp(latent_pred, -10, 10)\nloss = F.mse_loss(latent_pred, target)",
    good="loss = F.mse_loss(latent_pred, target)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
def clamped_prediction(file: PythonFile, about: Rule) -> Iterator[Finding]:
    compared = {dotted(value) for call in file.calls_of(*_COMPARES) for value in call.args[:1]}
    for call, name in file.calls:
        if name in ("torch.clamp", "torch.clip"):
            value, upper = (call.args[0] if call.args else None), argument(call, "max", 2)
        elif is_method(call, "clamp", "clip") and name is None and isinstance(call.func, ast.Attribute):
            value, upper = call.func.value, argument(call, "max", 1)
        else:
            continue
        if (
            upper is None
            or is_constant(upper, None)
            or has_spread(call)
            or not _PREDICTED.search(_last(value))
        ):
            continue
        parent = file.parents.get(call)
        direct = (
            isinstance(parent, ast.Call) and file.resolve(parent.func) in _COMPARES and parent.args[0] is call
        )
        kept = isinstance(parent, ast.Assign) and dotted(parent.targets[0]) in compared
        if direct or kept:
            message = f"outside of the bounds the gradient of {file.text(call)[:50]} is 0"
            yield about.at(file.path, file.span(call), message, needs=["training"])
