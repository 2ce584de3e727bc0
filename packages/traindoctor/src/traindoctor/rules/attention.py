"""Attention: hand-written products, dense masks, unused weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_method, number, parameter_names
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.edits import set_keyword
from traindoctor.types import Finding, Kind, Severity

SDPA = "torch.nn.functional.scaled_dot_product_attention"
SDPA_DOCS = "PyTorch docs, scaled_dot_product_attention"


@rule(
    Kind.PYTHON,
    code="ATT001",
    name="hand-written-attention",
    severity=Severity.INFO,
    summary="softmax(q k^T) v written out",
    why="The written-out form stores the whole score matrix (heads x length x length) twice for backward; "
    "scaled_dot_product_attention computes it in tiles and stores none of it on GPUs with a flash kernel.",
    effect="Memory quadratic in the length; measured on the CPU at length 1024: 33.5 MiB kept for backward, "
    "2.0 MiB with the fused one.",
    source=f"{SDPA_DOCS}; Dao et al., FlashAttention (arXiv 2205.14135)",
    remedy="F.scaled_dot_product_attention(q, k, v, dropout_p=...).",
    bad="scores = q @ k.transpose(-2, -1)\nout = scores.softmax(-1) @ v",
    good="out = F.scaled_dot_product_attention(q, k, v)",
)
def hand_written(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.uses("torch"):
        return
    for call, called in file.calls:
        softmax = called in ("torch.softmax", "torch.nn.functional.softmax") or is_method(call, "softmax")
        if not softmax:
            continue
        function = file.function_of(call)
        if not isinstance(function, ast.FunctionDef):
            continue
        if isinstance(call.func, ast.Attribute) and called is None:
            scores: ast.expr | None = call.func.value
        else:
            scores = call.args[0] if call.args else None
        if scores is None or not _is_scores(file, scores, function, 0):
            continue
        if any(_needs_scores(file, n) for n in file.inside(function)) or _stands_in(file, function):
            continue
        products = [n for n in file.inside(function) if _product(file, n) is not None]
        statement = file.statement_of(call)
        name = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else None
        after = [
            n
            for n in products
            if file.span(n).line >= file.span(call).line
            and not _has_transpose(n)
            and (not _einsum(file, n) or _takes(n, call, name))
        ]
        if after and not _weights_kept(file, call, function) and not _weights_mixed(file, call):
            message = (
                "attention written out keeps the whole score matrix; scaled_dot_product_attention does not"
            )
            yield about.at(file.path, file.span(call), message)


def _stands_in(file: PythonFile, function: ast.FunctionDef) -> bool:
    """Whether the written-out form is there on purpose: to count FLOPs, to emulate SDPA, as a compiler's pattern."""
    if re.search(r"flops?\b|fvcore|\bthop\b", file.text(function), re.IGNORECASE):
        return True
    around = [
        outer.name for outer in file.ancestors(function) if isinstance(outer, ast.FunctionDef | ast.ClassDef)
    ]
    names = [file.path.rsplit("/", 1)[-1], function.name, *around]
    return any(
        re.search(r"flops?|sdpa|scaled_dot_product|_pattern|_replacement", name.lower()) for name in names
    )


def _weights_kept(file: PythonFile, softmax: ast.Call, function: ast.AST) -> bool:
    """Whether the attention weights themselves are returned or stored, which SDPA cannot give."""
    if any("output_attentions" in name or "need_weights" in name for name in parameter_names(function)):
        return True
    for node in file.inside(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
            return True
    statement = file.statement_of(softmax)
    names = {dotted(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
    holders = (ast.Tuple, ast.Return, ast.Dict, ast.List)
    return any(
        isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and dotted(node) in names
        and isinstance(file.parents.get(node), holders)
        for node in file.inside(function)
    )


def _weights_mixed(file: PythonFile, softmax: ast.Call) -> bool:
    """Whether the weights are changed between softmax and product other than by dropout or a cast."""
    statement = file.statement_of(softmax)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    name, line = dotted(statement.targets[0]), file.span(statement).line
    for value in file.values_of(statement.targets[0]):
        if file.span(value).line <= line or not any(dotted(part) == name for part in ast.walk(value)):
            continue
        called = (dotted(value.func) or "").lower() if isinstance(value, ast.Call) else ""
        kept = "drop" in called or is_method(value, "to", "type", "type_as", "float", "half", "contiguous")
        if not kept and _product(file, value) is None:
            return True
    return False


def _needs_scores(file: PythonFile, node: ast.AST) -> bool:
    """A second path through SDPA in the same function, or scores that are squashed, which SDPA cannot do."""
    if not isinstance(node, ast.Call):
        return False
    return file.resolve(node.func) in (SDPA, "torch.tanh") or is_method(node, "tanh", "tanh_")


def _product(file: PythonFile, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if (
        isinstance(node, ast.Call)
        and file.resolve(node.func) in ("torch.matmul", "torch.bmm")
        and len(node.args) == 2
    ):
        return node.args[0], node.args[1]
    if isinstance(node, ast.Call) and _einsum(file, node):
        return node.args[1], node.args[2]
    if is_method(node, "matmul", "bmm") and isinstance(node, ast.Call) and len(node.args) == 1:
        assert isinstance(node.func, ast.Attribute)
        return node.func.value, node.args[0]
    return None


def _einsum(file: PythonFile, node: ast.AST) -> bool:
    """Whether a node is an einsum of two operands that is a batched matrix product: `bhid,bhjd->bhij`."""
    if not isinstance(node, ast.Call) or len(node.args) != 3:
        return False
    called = file.resolve(node.func) == "torch.einsum" or dotted(node.func) == "einsum"
    formula = node.args[0]
    if not called or not isinstance(formula, ast.Constant) or not isinstance(formula.value, str):
        return False
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", "".join(formula.value.replace("...", "").split()))
    if match is None:
        return False
    first, second, result = (set(part) for part in match.groups())
    return len((first & second) - result) == len(first - second) == len(second - first) == 1


def _takes(node: ast.AST, softmax: ast.Call, name: str | None) -> bool:
    """Whether an operand of a product is the output of this softmax, by name or in place."""
    return any(part is softmax or (name is not None and dotted(part) == name) for part in ast.walk(node))


def _is_scores(file: PythonFile, node: ast.expr, function: ast.AST, depth: int) -> bool:
    """Whether an expression comes from a product with a transposed key, through scaling, masking or a name."""
    if depth > 6:
        return False
    product = _product(file, node)
    if product is not None:
        return _is_transposed(product[1]) or _einsum(file, node)
    if isinstance(node, ast.BinOp):
        return any(_is_scores(file, side, function, depth + 1) for side in (node.left, node.right))
    if isinstance(node, ast.Name):
        values = [v for v in file.values_of(node) if not _mentions(v, node.id)]
        return any(_is_scores(file, value, function, depth + 1) for value in values[:3])
    if is_method(node, "masked_fill", "float", "to", "mul", "div") and isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)
        return _is_scores(file, node.func.value, function, depth + 1)
    return False


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _is_transposed(node: ast.expr) -> bool:
    if is_method(node, "transpose") and isinstance(node, ast.Call) and len(node.args) == 2:
        return {number(argument_) for argument_ in node.args} in ({-1.0, -2.0}, {2.0, 3.0}, {1.0, 2.0})
    return isinstance(node, ast.Attribute) and node.attr == "mT"


def _has_transpose(node: ast.AST) -> bool:
    return any(_is_transposed(part) for part in ast.walk(node) if isinstance(part, ast.expr))


@rule(
    Kind.PYTHON,
    code="ATT002",
    name="dense-attention-mask",
    severity=Severity.INFO,
    summary="scaled_dot_product_attention gets a dense mask that is built here",
    why="Flash kernels take no arbitrary mask: with attn_mask PyTorch falls back to a slower kernel and the "
    "mask itself is "
    "quadratic in the length. A causal mask is is_causal=True; padding is avoided by packing or nested tensors.",
    effect="Documented limits of the flash backend; this project measures the kernels in docs/benchmarks.md.",
    source=f"{SDPA_DOCS}, attn_mask; PyTorch SDPA tutorial",
    remedy="is_causal=True for a causal mask, varlen or FlexAttention for documents.",
    bad="mask = torch.tril(torch.ones(n, n, dtype=torch.bool))\nF.scaled_dot_product_attention(q, k, v, "
    "attn_mask=mask)",
    good="F.scaled_dot_product_attention(q, k, v, is_causal=True)",
)
def dense_mask(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of(SDPA):
        mask = argument(call, "attn_mask", 3)
        if mask is None or is_constant(mask, None) or has_spread(call):
            continue
        if isinstance(mask, ast.Name) and mask.id in parameter_names(file.function_of(call)):
            continue  # the caller decides, and may give None
        values = [mask] if isinstance(mask, ast.Call) else file.values_of(mask)
        causal = any(_builds(file, value, ("torch.tril", "torch.triu")) for value in values)
        dense = causal or any(
            _builds(file, value, ("torch.ones", "torch.full", "torch.zeros")) for value in values
        )
        if dense:
            hint = "is_causal=True says the same" if causal else "flash kernels take no mask"
            yield about.at(
                file.path, file.span(call), f"dense attn_mask keeps attention off the flash kernel; {hint}"
            )


def _builds(file: PythonFile, value: ast.AST, names: tuple[str, ...]) -> bool:
    return any(isinstance(part, ast.Call) and file.resolve(part.func) in names for part in ast.walk(value))


@rule(
    Kind.PYTHON,
    code="ATT003",
    name="attention-weights-thrown-away",
    severity=Severity.WARNING,
    summary="nn.MultiheadAttention computes weights that nobody uses",
    why="need_weights defaults to True: the full matrix of weights is computed, averaged and returned, and "
    "the optimised "
    "kernel cannot be used.",
    effect="Documented: 'Set need_weights=False to use the optimized scaled_dot_product_attention'. "
    "Measured on the CPU: 55.6 ms with weights, 22.2 ms without (2.50x).",
    source="PyTorch docs, torch.nn.MultiheadAttention.forward",
    fix="unsafe",
    remedy="Unsafe because the optimised kernel rounds in another order.",
    bad="x, _ = self.attn(x, x, x)",
    good="x, _ = self.attn(x, x, x, need_weights=False)",
)
def weights_thrown_away(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, _ in file.calls:
        made = file.values_of(call.func)
        if len(made) != 1 or not isinstance(made[0], ast.Call) or has_spread(call):
            continue
        if (
            file.resolve(made[0].func) != "torch.nn.MultiheadAttention"
            or argument(call, "need_weights", 4) is not None
        ):
            continue
        if _weights_unused(file, call):
            fix = set_keyword(file, call, "need_weights", "False", safe=False)
            message = f"{dotted(call.func)} computes attention weights that are thrown away"
            yield about.at(file.path, file.span(call), message, fix)


def _weights_unused(file: PythonFile, call: ast.Call) -> bool:
    parent = file.parents[call]
    if isinstance(parent, ast.Subscript):
        return is_constant(parent.slice, 0)
    if (
        isinstance(parent, ast.Assign)
        and isinstance(parent.targets[0], ast.Tuple)
        and len(parent.targets[0].elts) == 2
    ):
        second = parent.targets[0].elts[1]
        if not isinstance(second, ast.Name):
            return False
        if second.id == "_":
            return True
        function = file.function_of(call)
        uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == second.id]
        return len(uses) == 1
    return False
