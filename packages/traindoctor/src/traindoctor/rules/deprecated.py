"""Calls that PyTorch has replaced: autocast, gradient scaler, choice of attention kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import has_spread
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Fix, Kind, NodeEdit, Severity

_OLD = {
    f"torch.{device}.amp.{name}": (device, name)
    for device in ("cuda", "cpu")
    for name in ("autocast", "GradScaler")
}


@rule(
    Kind.PYTHON,
    code="AMP001",
    name="deprecated-amp-call",
    severity=Severity.WARNING,
    summary="torch.cuda.amp.autocast or GradScaler",
    why="Deprecated since PyTorch 2.4 in favour of torch.amp with the device named; every call prints a "
    "FutureWarning.",
    effect="A warning per call site; removal later.",
    source="PyTorch, torch/cuda/amp/autocast_mode.py and grad_scaler.py (deprecation messages)",
    fix="safe or unsafe",
    remedy="torch.amp.GradScaler needs PyTorch 2.3. Unsafe where the object is passed on: other code may "
    "check its class.",
    bad="with torch.cuda.amp.autocast(dtype=torch.bfloat16):",
    good='with torch.amp.autocast("cuda", dtype=torch.bfloat16):',
)
def deprecated_amp(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call, name in file.calls:
        if name in _OLD and not isinstance(call.func, ast.Name) and not _is_fallback(file, call):
            device, short = _OLD[name]
            yield about.at(
                file.path,
                file.span(call),
                _amp_message(device, short),
                _attribute_fix(file, call, device, short),
            )
    for node in file.of(ast.ImportFrom):
        if node.module in ("torch.cuda.amp", "torch.cpu.amp") and not node.level:
            device = node.module.split(".")[1]
            old = [alias for alias in node.names if alias.name in ("autocast", "GradScaler")]
            if old and not _is_fallback(file, node):
                names = " and ".join(alias.name for alias in old)
                yield about.at(
                    file.path, file.span(node), _amp_message(device, names), _import_fix(file, node, device)
                )


def _is_fallback(file: PythonFile, node: ast.AST) -> bool:
    """Whether this is the branch for old versions, beside one that uses torch.amp."""
    modern = any((name or "").startswith("torch.amp.") for _, name in file.calls) or any(
        node.module == "torch.amp" for node in file.of(ast.ImportFrom)
    )
    handles = any(isinstance(outer, ast.ExceptHandler) for outer in file.ancestors(node))
    return handles or (modern and bool(file.conditions(node, file.tree)))


def _amp_message(device: str, name: str) -> str:
    verb = "are" if " and " in name else "is"
    return f'torch.{device}.amp.{name} {verb} deprecated; use torch.amp with "{device}" named'


def _attribute_fix(file: PythonFile, call: ast.Call, device: str, name: str) -> Fix | None:
    """`torch.cuda.amp.autocast(x)` -> `torch.amp.autocast("cuda", x)`, where the text really starts with `torch.`."""
    text = file.text(call.func)
    if text != f"torch.{device}.amp.{name}" or call.args or has_spread(call):
        return None
    span = file.span(call)
    edits = (
        NodeEdit(span, "callee", (f"torch.amp.{name}",)),
        NodeEdit(span, "insert_first", (f'"{device}"',)),
    )
    safe = _is_plain_use(file, call, name)
    return Fix(f"call torch.amp.{name}", safe, node_edits=edits, unsafe_if=frozenset({"autocast_settings"}))


def _is_plain_use(file: PythonFile, call: ast.Call, name: str) -> bool:
    """Whether the object's class cannot matter: a `with`, a decorator, or a scaler of which only methods are called."""
    parent = file.parents.get(call)
    if name == "autocast":
        decorates = isinstance(parent, ast.FunctionDef) and call in parent.decorator_list
        return isinstance(parent, ast.withitem) or decorates
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return False
    held = dotted(parent.targets[0])
    uses = [node for node in file.of(ast.Name, ast.Attribute) if dotted(node) == held]
    loads = [
        node for node in uses if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    return held is not None and all(isinstance(file.parents[node], ast.Attribute) for node in loads)


def _import_fix(file: PythonFile, node: ast.ImportFrom, device: str) -> Fix | None:
    """Change the import and name the device in every call; only where each use is a plain call."""
    if any(alias.name not in ("autocast", "GradScaler") for alias in node.names):
        return None
    imports = [n for n in file.of(ast.ImportFrom) if n is not node]
    local = {alias.asname or alias.name for alias in node.names}
    if any((alias.asname or alias.name) in local for other in imports for alias in other.names):
        return None
    edits = [NodeEdit(file.span(node), "import_from", ("torch.amp",))]
    names = {alias.asname or alias.name: alias.name for alias in node.names}
    safe = True
    for part in file.nodes:
        if isinstance(part, ast.Name) and part.id in local:
            call = file.parents[part]
            if not isinstance(call, ast.Call) or call.func is not part or call.args or has_spread(call):
                return None
            edits.append(NodeEdit(file.span(call), "insert_first", (f'"{device}"',)))
            safe = safe and _is_plain_use(file, call, names[part.id])
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in local:
            return None  # named in __all__ or looked up by string
    title = "import from torch.amp and name the device"
    return Fix(title, safe, node_edits=tuple(edits), unsafe_if=frozenset({"autocast_settings"}))


@rule(
    Kind.PYTHON,
    code="AMP007",
    name="deprecated-sdp-kernel",
    severity=Severity.WARNING,
    summary="torch.backends.cuda.sdp_kernel",
    why="Deprecated in favour of torch.nn.attention.sdpa_kernel, which takes a list of backends.",
    effect="A FutureWarning; removal later.",
    source="PyTorch, torch/backends/cuda/__init__.py (deprecation message)",
    remedy="with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):",
    bad="with torch.backends.cuda.sdp_kernel(enable_math=False):",
    good="with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):",
)
def deprecated_sdp(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for call in file.calls_of("torch.backends.cuda.sdp_kernel"):
        yield about.at(
            file.path, file.span(call), "sdp_kernel is deprecated; use torch.nn.attention.sdpa_kernel"
        )
