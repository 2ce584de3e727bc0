"""Environment variables that a file sets, whatever its language, with the edit that would change them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from traindoctor.line_files import DockerFile, EnvFile
from traindoctor.python_file import PythonFile
from traindoctor.shell_file import ShellFile
from traindoctor.shell_words import Word
from traindoctor.types import Fix, NodeEdit, Span, TextEdit
from traindoctor.yaml_file import YamlFile

_DEFAULT = re.compile(r'"?\$\{\w+:?[-=]([^${}"]*)\}"?')


@dataclass(frozen=True)
class Variable:
    """One place where an environment variable is set."""

    name: str
    value: str | None
    """None where it is not a constant."""
    span: Span
    path: str
    name_range: tuple[int, int] | None = None
    value_range: tuple[int, int] | None = None
    statement_range: tuple[int, int] | None = None
    """The whole line, where the line does nothing else."""
    value_node: Span | None = None
    """The string constant in Python code."""
    quoted: bool = False
    quote: str = "'"
    """The quotes of the string in Python code."""

    deliberate: bool = False
    """Python code sets it under a condition, or in a function for debugging or determinism."""

    def change(self, value: str, title: str, *, safe: bool) -> Fix | None:
        """Set another value."""
        if self.value_node is not None:
            return Fix(
                title,
                safe,
                node_edits=(NodeEdit(self.value_node, "replace", (f"{self.quote}{value}{self.quote}",)),),
            )
        if self.value_range is None:
            return None
        text = f'"{value}"' if self.quoted else value
        return Fix(title, safe, text_edits=(TextEdit(*self.value_range, text),))

    def rename(self, name: str, title: str) -> Fix | None:
        """Set another variable to the same value; unsafe, for the environment may hold the other name already."""
        return Fix(title, False, text_edits=(TextEdit(*self.name_range, name),)) if self.name_range else None

    def remove(self, title: str) -> Fix | None:
        """Take the line out."""
        if self.statement_range is None:
            return None
        return Fix(title, False, text_edits=(TextEdit(*self.statement_range, ""),))


def variables_of(file: Any) -> list[Variable]:
    """Every environment variable that a parsed file sets."""
    readers: dict[type, Callable[[Any], Iterator[Variable]]] = {
        PythonFile: _from_python,
        ShellFile: _from_shell,
        YamlFile: _from_yaml,
        DockerFile: _from_lines,
        EnvFile: _from_lines,
    }
    return list(readers[type(file)](file))


def _from_shell(file: ShellFile) -> Iterator[Variable]:
    for assignment, command in file.assignments():
        word = assignment.value
        name_range = (assignment.start, assignment.start + len(assignment.name))
        statement = None
        line, _ = file.source.place(assignment.start)
        whole = file.source.line(line)
        only = len(command.assignments) == 1 and len(command.words) <= 1 and not command.redirections
        # A line may go only if nothing else stands on it and no block would be left empty.
        if (
            only
            and command.before == "\n"
            and command.after == "\n"
            and not command.guards
            and "#" not in whole
        ):
            start = file.source.offset(line, 1)
            end = file.source.starts[line] if line < len(file.source.starts) else len(file.source.text)
            if file.source.text[start : command.start].strip() == "" and command.end <= end:
                statement = (start, end)
        default = _DEFAULT.fullmatch(word.raw)
        if default:
            # `${NAME:-value}`: the default is what happens when nobody chooses.
            value: str | None = default[1]
            place, quoted = (word.start + default.start(1), word.start + default.end(1)), False
        else:
            value, place, quoted = word.literal, (word.start, word.end), word.raw.startswith(('"', "'"))
        span = file.span(assignment.start, word.end)
        yield Variable(assignment.name, value, span, file.path, name_range, place, statement, quoted=quoted)


def _from_lines(file: DockerFile | EnvFile) -> Iterator[Variable]:
    for name, word in file.environment():
        start = word.start - len(name) - 1
        yield Variable(
            name,
            Word(word.start, word.end, word.raw).literal,
            file.span(start, word.end),
            file.path,
            (start, start + len(name)) if file.source.text[start : start + len(name)] == name else None,
            (word.start, word.end),
            quoted=word.raw.startswith(('"', "'")),
        )


def _from_yaml(file: YamlFile) -> Iterator[Variable]:
    for entry in file.entries:
        if isinstance(entry.value, yaml.ScalarNode) and entry.name.isupper():
            yield Variable(
                entry.name,
                entry.scalar,
                file.span(entry.key_node),
                file.path,
                file.range(entry.key_node),
                file.range(entry.value) if entry.value.style in (None, '"', "'") else None,
                quoted=entry.is_quoted,
            )
        if entry.name == "name" and entry.scalar and entry.scalar.isupper():
            value = _sibling_value(file, entry.key)
            if value is not None:
                yield Variable(
                    entry.scalar,
                    value.value,
                    file.span(entry.value),
                    file.path,
                    file.range(entry.value),
                    file.range(value),
                    quoted=value.style is not None,
                )
    for _, item in file.items:
        name, equals, value = item.value.partition("=")
        if equals and name.isidentifier() and name.isupper():
            yield Variable(name, value, file.span(item), file.path)


def _sibling_value(file: YamlFile, key: str) -> yaml.ScalarNode | None:
    wanted = key.rsplit(".", 1)[0] + ".value"
    for entry in file.entries:
        if entry.key == wanted and isinstance(entry.value, yaml.ScalarNode):
            return entry.value
    return None


def _from_python(file: PythonFile) -> Iterator[Variable]:
    if "environ" not in file.identifiers and "putenv" not in file.identifiers:
        return
    for node in file.of(ast.Assign):
        target = node.targets[0]
        if (
            len(node.targets) == 1
            and isinstance(target, ast.Subscript)
            and file.resolve(target.value) == "os.environ"
        ):
            yield from _python_variable(file, target.slice, node.value, node)
    for merged in file.of(ast.AugAssign):
        if file.resolve(merged.target) == "os.environ" and isinstance(merged.value, ast.Dict):
            for key, value in zip(merged.value.keys, merged.value.values, strict=True):
                if key is not None:
                    yield from _python_variable(file, key, value, merged)
    for call in file.calls_of("os.environ.setdefault", "os.putenv"):
        if len(call.args) == 2:
            yield from _python_variable(file, call.args[0], call.args[1], call)
    for call in file.calls_of("os.environ.update"):
        if call.args and isinstance(call.args[0], ast.Dict):
            for key, value in zip(call.args[0].keys, call.args[0].values, strict=True):
                if key is not None:
                    yield from _python_variable(file, key, value, call)


def _python_variable(file: PythonFile, key: ast.expr, value: ast.expr, node: ast.AST) -> Iterator[Variable]:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return
    constant = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    place = file.span(value) if constant is not None else None
    quote = '"' if file.text(value).endswith('"') else "'"
    function = file.function_of(node)
    named = isinstance(function, ast.FunctionDef) and re.search(r"debug|determin", function.name) is not None
    deliberate = named or bool(file.conditions(node, file.tree))
    yield Variable(
        key.value, constant, file.span(node), file.path, value_node=place, quote=quote, deliberate=deliberate
    )
