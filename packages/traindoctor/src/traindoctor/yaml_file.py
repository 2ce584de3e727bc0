"""One YAML file as flat settings with exact positions (PyYAML's node marks); nothing is constructed or executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from traindoctor.source import Source
from traindoctor.types import Span

MAX_CHARACTERS = 200_000
"""Longer YAML is data, not settings."""


class YamlSyntaxError(Exception):
    """Not plain YAML (a template, for example); carries the line."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a mapping."""

    key: str
    """Dotted path from the top; list positions are numbers."""
    name: str
    """The last part of the key."""
    key_node: yaml.ScalarNode
    value: yaml.Node

    @property
    def scalar(self) -> str | None:
        """The value as written, where it is a scalar."""
        return self.value.value if isinstance(self.value, yaml.ScalarNode) else None

    @property
    def is_quoted(self) -> bool:
        """Whether the scalar is a quoted or block string."""
        return isinstance(self.value, yaml.ScalarNode) and self.value.style is not None


class YamlFile:
    """The entries of every document in a file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = source.path
        if len(source.text) > MAX_CHARACTERS:
            raise YamlSyntaxError(f"longer than {MAX_CHARACTERS:,} characters, which is data and no settings")
        try:
            self.documents = [
                node for node in yaml.compose_all(source.text, Loader=yaml.SafeLoader) if node is not None
            ]
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            text = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
            raise YamlSyntaxError(text, mark.line + 1 if mark else 1) from error
        self.entries: list[Entry] = []
        self.items: list[tuple[str, yaml.ScalarNode]] = []
        for node in self.documents:
            self._collect(node, "", set())

    def _collect(self, node: yaml.Node, prefix: str, seen: set[int]) -> None:
        if id(node) in seen:
            return  # an alias: reported where it is anchored
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    path = f"{prefix}.{key.value}" if prefix else key.value
                    self.entries.append(Entry(path, key.value, key, value))
                    self._collect(value, path, seen)
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                if isinstance(child, yaml.ScalarNode):
                    self.items.append((prefix, child))
                else:
                    self._collect(child, f"{prefix}.{index}", seen)

    def mappings(self) -> Iterator[tuple[yaml.MappingNode, str]]:
        """Every mapping with its dotted path."""
        todo = [(node, "") for node in self.documents]
        seen: set[int] = set()
        while todo:
            node, path = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                yield node, path
                for key, value in node.value:
                    name = key.value if isinstance(key, yaml.ScalarNode) else "?"
                    todo.append((value, f"{path}.{name}" if path else str(name)))
            elif isinstance(node, yaml.SequenceNode):
                todo += [(child, path) for child in node.value]

    def span(self, node: yaml.Node) -> Span:
        """Where a node stands."""
        return Span(
            node.start_mark.line + 1,
            node.start_mark.column + 1,
            node.end_mark.line + 1,
            node.end_mark.column + 1,
        )

    def range(self, node: yaml.Node) -> tuple[int, int]:
        """Positions of a scalar in the text."""
        start = self.source.offset(node.start_mark.line + 1, node.start_mark.column + 1)
        end = self.source.offset(node.end_mark.line + 1, node.end_mark.column + 1)
        return start, end

    def has(self, *names: str) -> bool:
        """Whether one of these keys stands at the top level."""
        return any(entry.key in names for entry in self.entries)
