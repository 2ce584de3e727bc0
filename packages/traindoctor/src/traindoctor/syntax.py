"""One parsed Python file: nodes, places, names, scopes, loops and values.

Rules read the standard library's syntax tree (fast, exact positions); edits are made by LibCST at the same positions.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar

from traindoctor.expressions import (
    FUNCTIONS,
    holds_on_one_rank,
    is_given_loss_and_optimizer,
    is_measurement,
    is_method,
    parameter_names,
)
from traindoctor.names import Names, dotted
from traindoctor.source import Source
from traindoctor.types import Span

Loop = ast.For | ast.While | ast.AsyncFor
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_CONTEXTS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
Node = TypeVar("Node", bound=ast.AST)


class CannotParseError(Exception):
    """The text is not valid Python 3; carries the line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = max(line, 1)


class SyntaxTree:
    """Syntax tree, parents, resolved calls, scopes and loops of one file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = source.path
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(source.text)
        except SyntaxError as error:
            raise CannotParseError(error.msg, error.lineno or 1) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise CannotParseError(str(error) or type(error).__name__, 1) from error
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._by_type: dict[type, list[ast.AST]] = {}
        self._index()
        self.names = Names(self.tree, self.of(ast.Import, ast.ImportFrom))

    def _index(self) -> None:
        """Every node in source order, by type and with its parent, in one walk."""
        todo: list[ast.AST] = [self.tree]
        nodes, parents, by_type = self.nodes, self.parents, self._by_type
        while todo:
            node = todo.pop()
            nodes.append(node)
            by_type.setdefault(type(node), []).append(node)
            children: list[ast.AST] = []
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    children += [child for child in value if isinstance(child, ast.AST)]
                elif isinstance(value, ast.AST) and not isinstance(value, _CONTEXTS):
                    children.append(value)
            for child in children:
                parents[child] = node
            children.reverse()
            todo += children

    def of(self, *kinds: type[Node]) -> list[Node]:
        """Nodes of these exact types; within a type in source order."""
        return [node for kind in kinds for node in self._by_type.get(kind, [])]  # type: ignore[misc]

    # --- places -------------------------------------------------------------------------------------------------

    def _column(self, line: int, offset: int) -> int:
        text = self.source.line(line)
        return offset + 1 if text.isascii() else len(text.encode()[:offset].decode(errors="replace")) + 1

    def span(self, node: ast.AST) -> Span:
        """Where a node stands."""
        line, end_line = getattr(node, "lineno", 1), getattr(node, "end_lineno", None) or 1
        start = self._column(line, getattr(node, "col_offset", 0))
        return Span(line, start, end_line, self._column(end_line, getattr(node, "end_col_offset", None) or 0))

    def text(self, node: ast.AST) -> str:
        """The source text of a node, as written."""
        span = self.span(node)
        return self.source.text[
            self.source.offset(span.line, span.column) : self.source.offset(span.end_line, span.end_column)
        ]

    # --- names and calls ----------------------------------------------------------------------------------------

    def resolve(self, node: ast.expr) -> str | None:
        """Canonical dotted name of an expression, or None when it is not an imported thing."""
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name) or base.id not in self.names.aliases:
            return None
        return self.names.resolve(node, self.hidden(node))

    def hidden(self, node: ast.AST) -> frozenset[str]:
        """Parameters of the functions around a node: such a name stands for whatever is passed."""
        hidden: set[str] = set()
        for parent in self.ancestors(node):
            if isinstance(parent, FUNCTIONS):
                hidden |= self._parameters_of(parent)
        return frozenset(hidden)

    @cached_property
    def _parameters(self) -> dict[ast.AST, frozenset[str]]:
        return {}

    def _parameters_of(self, function: ast.AST) -> frozenset[str]:
        found = self._parameters.get(function)
        if found is None:
            found = self._parameters[function] = frozenset(parameter_names(function))
        return found

    @cached_property
    def dictionary_changes(self) -> dict[str, list[ast.AST]]:
        """Dotted name -> what changes the dictionary of this name in place."""
        return _find_changes(self)

    def uses(self, prefix: str) -> bool:
        """Whether the file imports this module or anything below it."""
        return prefix in self._imported

    @cached_property
    def _imported(self) -> set[str]:
        """Every imported dotted name and all its beginnings."""
        names = [*self.names.aliases.values(), *self.names.modules]
        parts = [name.split(".") for name in names]
        return {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}

    @cached_property
    def attributes(self) -> set[str]:
        """Every attribute name that occurs."""
        return {node.attr for node in self.of(ast.Attribute)}

    @cached_property
    def identifiers(self) -> set[str]:
        """Every plain name and attribute name that occurs."""
        return self.attributes | {node.id for node in self.of(ast.Name)}

    # --- structure ----------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Parents from the nearest to the module."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The innermost function around a node, or the module."""
        for parent in self.ancestors(node):
            if isinstance(parent, FUNCTIONS):
                return parent
        return self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around a node."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement that a node belongs to."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop of the same function whose body holds the node."""
        child: ast.AST = node
        for parent in self.ancestors(node):
            if isinstance(parent, (*FUNCTIONS, ast.ClassDef)):
                return None
            if isinstance(parent, _LOOPS) and (child in parent.body or child in parent.orelse):
                return parent
            child = parent
        return None

    def inside(self, scope: ast.AST) -> Iterator[ast.AST]:
        """Nodes below a scope that run when it runs: nested functions and classes are left out."""
        todo = list(ast.iter_child_nodes(scope))
        while todo:
            node = todo.pop()
            yield node
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                todo.extend(ast.iter_child_nodes(node))

    def conditions(self, node: ast.AST, stop: ast.AST) -> list[ast.expr]:
        """Tests of every `if`, conditional expression or `and`/`or` between a node and an outer scope."""
        tests: list[ast.expr] = []
        child: ast.AST = node
        for parent in self.ancestors(node):
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                tests.append(parent.test)
            elif isinstance(parent, ast.BoolOp) and child is not parent.values[0]:
                tests.append(parent.values[0])
            elif isinstance(parent, ast.ExceptHandler):
                tests.append(ast.Constant("except"))
            if parent is stop:
                break
            child = parent
        return tests

    @cached_property
    def training_loops(self) -> list[Loop]:
        """Loops that call `.backward()` in their own body, innermost first; not those inside nested functions.

        Loops of benchmarks and profilers are left out: they wait and repeat on purpose.
        """
        loops: list[Loop] = []
        if is_measurement(self.path.rsplit("/", 1)[-1]):
            return loops
        for function, calls in self.backward_calls.items():
            if isinstance(function, ast.FunctionDef) and is_measurement(function.name):
                continue
            for call in calls:
                loop = self.loop_of(call)
                if loop is not None and loop not in loops:
                    loops.append(loop)
        return loops

    @cached_property
    def backward_calls(self) -> dict[ast.AST, list[ast.Call]]:
        """Function or module -> the calls in its own body that run the backward pass."""
        found: dict[ast.AST, list[ast.Call]] = {}
        for call in self.of(ast.Call):
            if is_method(call, "backward") or is_given_loss_and_optimizer(call):
                found.setdefault(self.function_of(call), []).append(call)
        return found

    @cached_property
    def _step_loops(self) -> list[Loop]:
        """Training loops, and the loop around one of micro-batches, whose own body takes the step."""
        around = [(loop, self.loop_of(loop)) for loop in self.training_loops]
        outer = [out for loop, out in around if out and self._steps_in(out) and not self._steps_in(loop)]
        return [*self.training_loops, *outer]

    def _steps_in(self, loop: Loop) -> bool:
        """Whether the body of a loop itself calls step() of an optimizer or a scaler."""
        calls = (call for call in self.inside(loop) if is_method(call, "step") and self.loop_of(call) is loop)
        return any("opt" in ast.unparse(call).lower() or "scaler" in ast.unparse(call) for call in calls)

    def in_training_loop(self, node: ast.AST) -> Loop | None:
        """The training loop around a node, if it runs in every round: no `if` and no inner loop between."""
        loop = self.loop_of(node)
        if loop is None or loop not in self._step_loops:
            return None
        return None if any(not holds_on_one_rank(test) for test in self.conditions(node, loop)) else loop

    @cached_property
    def definitions(self) -> dict[tuple[ast.AST | None, str], ast.AST]:
        """(class or None, name) -> method, or function of the module or of another function."""
        found: dict[tuple[ast.AST | None, str], ast.AST] = {}
        for function in self.of(ast.FunctionDef):
            owner = self.parents.get(function)
            if owner is self.tree:
                found[None, function.name] = function
            elif isinstance(owner, ast.ClassDef):
                found[owner, function.name] = function
            else:  # inside another function or a condition
                found.setdefault((None, function.name), function)
        return found

    # --- values -------------------------------------------------------------------------------------------------

    @cached_property
    def _bindings(self) -> dict[tuple[ast.AST, str], list[ast.expr]]:
        found: dict[tuple[ast.AST, str], list[ast.expr]] = {}
        for node in self.of(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.withitem):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                pairs = [(node.optional_vars, node.context_expr)]
            for target, value in pairs:
                name = dotted(target)
                if name:
                    found.setdefault((self._scope_for(target, name), name), []).append(value)
                owner = self.parents.get(node)
                if name and isinstance(owner, ast.ClassDef):
                    found.setdefault((owner, f"self.{name}"), []).append(value)
        return found

    @cached_property
    def alias_names(self) -> set[str]:
        """Names that are given to an imported thing or to a partial, somewhere in the file."""
        return {
            name
            for (_, name), values in self._bindings.items()
            if len(values) == 1
            and (
                (isinstance(values[0], ast.Name | ast.Attribute) and self.resolve(values[0]) is not None)
                or (isinstance(values[0], ast.Call) and self.resolve(values[0].func) == "functools.partial")
            )
        }

    def _scope_for(self, node: ast.AST, name: str) -> ast.AST:
        if name.startswith("self."):
            return self.class_of(node) or self.tree
        return self.function_of(node)

    def values_of(self, node: ast.AST) -> list[ast.expr]:
        """What is assigned to a name or `self.x` in the scope of its use, else in the module."""
        name = dotted(node)
        if name is None:
            return []
        scope: ast.AST = self._scope_for(node, name)
        while True:
            values = self._bindings.get((scope, name))
            if values is not None or scope is self.tree:
                return values or []
            if name in self._parameters_of(scope):
                return []  # given by whoever calls the function
            scope = self.tree if name.startswith("self.") else self.function_of(scope)

    def value_of(self, node: ast.expr) -> ast.expr:
        """The one value that a name certainly has here, or the expression itself."""
        values = self.values_of(node)
        if not values or self._is_loop_target(node):
            return node
        if len(values) > 1:
            return self._last_value(node, values)
        # `x = x.float()`: on the right stands what was there before.
        return node if values[0] in self.ancestors(node) else values[0]

    def _last_value(self, node: ast.expr, values: list[ast.expr]) -> ast.expr:
        """The value of a name that is assigned several times: the last assignment before its use, if it certainly runs.

        It does where its statement stands in a block that also holds the use, or something around the use.
        """
        function, here = self.function_of(node), self.span(node)
        before = [
            value for value in values if self.function_of(value) is function and self.span(value) < here
        ]
        if not before:
            return node
        last = max(before, key=lambda value: self.span(value))
        statement = self.statement_of(last)
        block = self.parents.get(statement)
        own = self.statement_of(node)
        if statement is own or block is None:
            return node
        around = {own, *(outer for outer in self.ancestors(own) if isinstance(outer, ast.stmt))}
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(block, name, None)
            if isinstance(statements, list) and statement in statements:
                return last if any(other in around for other in statements) else node
        return node

    def _is_loop_target(self, node: ast.expr) -> bool:
        name = dotted(node)
        return any(
            dotted(part) == name
            for loop in self.ancestors(node)
            if isinstance(loop, ast.For | ast.AsyncFor)
            for part in ast.walk(loop.target)
        )


_MUTATORS = {"update", "pop", "setdefault", "clear", "popitem", "__setitem__"}


def _find_changes(file: SyntaxTree) -> dict[str, list[ast.AST]]:
    """Dotted name -> statements and calls that change the dictionary of this name in place."""
    found: dict[str, list[ast.AST]] = {}
    for item in file.of(ast.Subscript):
        name = dotted(item.value)
        if name and not isinstance(item.ctx, ast.Load):
            parent = file.parents[item]
            simple = isinstance(parent, ast.Assign) and len(parent.targets) == 1
            found.setdefault(name, []).append(parent if simple else item)
    for call in file.of(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _MUTATORS:
            name = dotted(call.func.value)
            if name:
                found.setdefault(name, []).append(call)
    for change in file.of(ast.AugAssign):
        name = dotted(change.target)
        if name:
            found.setdefault(name, []).append(change)
    return found
