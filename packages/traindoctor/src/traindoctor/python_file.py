"""One parsed Python file with the questions that rules ask of it: calls as they take effect, and steps of training.

Rules read the standard library's syntax tree (fast, exact positions); edits are made by LibCST at the same positions.
"""

from __future__ import annotations

import ast
from functools import cached_property

from traindoctor.effective_calls import alias_of, find_calls
from traindoctor.steps import is_certain, step_functions
from traindoctor.syntax import SyntaxTree


class PythonFile(SyntaxTree):
    """Syntax tree, resolved calls and the functions that run in every training step."""

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str | None]]:
        """Every call with the canonical name of what is called, also through a name that was given to it."""
        return [(node, self.resolve(node.func) or alias_of(self, node.func)) for node in self.of(ast.Call)]

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        return find_calls(self, self.calls)

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Calls of these canonical names as they take effect: partials and known dictionaries spelled out."""
        return [call for name in names for call in self._calls_by_name.get(name, [])]

    @cached_property
    def step_functions(self) -> set[ast.AST]:
        """Functions of this file whose body runs in every training step."""
        return step_functions(self)

    def runs_every_step(self, node: ast.AST) -> bool:
        """Whether a node certainly runs in every training step, in a training loop or in a function of the step."""
        if self.in_training_loop(node) is not None:
            return True
        function = self.function_of(node)
        return function in self.step_functions and is_certain(self, node, function)
