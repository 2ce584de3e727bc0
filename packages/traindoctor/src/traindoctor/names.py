"""What a name in a Python file stands for: import aliases, followed to one canonical dotted name.

`from torch.utils.data import DataLoader as DL` makes `DL(...)` a call of `torch.utils.data.DataLoader`. A name that the
file also defines itself, or that a function takes as a parameter, stands for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_CANONICAL = {
    "torch.utils.data.dataloader": "torch.utils.data",
    "torch.utils.data.dataset": "torch.utils.data",
    "torch.utils.data.distributed": "torch.utils.data",
    "torch.utils.data.sampler": "torch.utils.data",
    "torch.nn.parallel.distributed": "torch.nn.parallel",
    "torch.nn.parallel.data_parallel": "torch.nn.parallel",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.optim.adamw": "torch.optim",
    "torch.optim.adam": "torch.optim",
    "torch.optim.sgd": "torch.optim",
    "torch.amp.autocast_mode": "torch.amp",
    "torch.amp.grad_scaler": "torch.amp",
    "torch.cuda.amp.autocast_mode": "torch.cuda.amp",
    "torch.cuda.amp.grad_scaler": "torch.cuda.amp",
    "torch.utils.checkpoint.checkpoint.": "torch.utils.checkpoint.",
    "torch.nn.modules.activation": "torch.nn",
    "torch.nn.DataParallel": "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel": "torch.nn.DataParallel",
    "torch.nn.utils.clip_grad": "torch.nn.utils",
}


def canonical(name: str) -> str:
    """One spelling for objects that can be imported from several places."""
    for old, new in _CANONICAL.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


class Names:
    """The imports of one module and the names that hide them."""

    def __init__(self, tree: ast.Module, imports: Sequence[ast.Import | ast.ImportFrom]) -> None:
        self.aliases: dict[str, str] = {}
        self.modules: set[str] = set()
        for node in imports:
            if isinstance(node, ast.Import):
                self._add_import(node)
            else:
                self._add_import_from(node)
        # A method named like an import hides nothing; a module-level definition does.
        for definition in tree.body:
            if isinstance(definition, ast.FunctionDef | ast.ClassDef):
                self.aliases.pop(definition.name, None)

    def _add_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.modules.add(alias.name)
            if alias.asname:
                self.aliases[alias.asname] = alias.name
            else:
                first = alias.name.split(".", 1)[0]
                self.aliases[first] = first

    def _add_import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            for alias in node.names:
                self.aliases.pop(alias.asname or alias.name, None)
            return
        self.modules.add(node.module)
        for alias in node.names:
            if alias.name != "*":
                self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def resolve(self, node: ast.expr, hidden: frozenset[str] = frozenset()) -> str | None:
        """The canonical dotted name of an expression such as `nn.parallel.DDP`, or None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in hidden or node.id not in self.aliases:
            return None
        return canonical(".".join([self.aliases[node.id], *reversed(parts)]))


def dotted(node: ast.AST) -> str | None:
    """The text of a plain name or attribute chain (`self.model.head`), or None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
