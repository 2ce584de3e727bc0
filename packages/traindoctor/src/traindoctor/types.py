"""The words of the doctor: where something is, what was found, how it would be fixed.

Everything here is a frozen dataclass of plain values, so that findings travel between processes and into JSON.
Lines and columns count from 1, columns in characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding costs when it is ignored."""

    ERROR = "error"
    """Crashes, hangs, loses work or trains something else than was asked for."""
    WARNING = "warning"
    """Costs speed, memory or safety."""
    INFO = "info"
    """Worth knowing; often a matter of taste or scale."""


class Kind(StrEnum):
    """The kinds of file that are read."""

    PYTHON = "python"
    SHELL = "shell"
    YAML = "yaml"
    DOCKERFILE = "dockerfile"
    ENV = "env"
    NOTEBOOK = "notebook"
    """Read by the rules for Python: its code cells are one module."""


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of a file; the end is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class TextEdit:
    """Replace the characters `[start, end)` of the decoded text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class NodeEdit:
    """Change the Python expression or import at exactly this span; carried out by LibCST.

    `action` is one of the names in `python_edit.ACTIONS`, `values` are its arguments.
    """

    span: Span
    action: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fix:
    """A change that removes the finding. Safe: no program behaves otherwise, except faster."""

    title: str
    safe: bool
    text_edits: tuple[TextEdit, ...] = ()
    node_edits: tuple[NodeEdit, ...] = ()
    unsafe_if: frozenset[str] = frozenset()
    """Features of the program that make it unsafe."""
    dropped_if: frozenset[str] = frozenset()
    """Features of the program in which this change would raise: then no fix is offered."""


@dataclass(frozen=True)
class Condition:
    """What the program around a file must hold for a finding to stand; decided when every file was read."""

    needs: frozenset[str] = frozenset()
    """All of these features occur somewhere in the program."""
    unless: frozenset[str] = frozenset()
    """None of these features occurs anywhere in the program."""

    nowhere: frozenset[str] = frozenset()
    """None of these features occurs in any program that the file belongs to."""

    def holds(self, features: frozenset[str] | set[str]) -> bool:
        """Whether a program with these features satisfies the condition."""
        return self.needs <= features and not (self.unless & features)


@dataclass(frozen=True)
class CellPlace:
    """Where in a notebook a finding stands, for people and for tools that know only the file."""

    cell: int
    """Code cells that hold something, counted from 1."""
    span: Span
    """Lines of the cell."""
    file_line: int
    file_end_line: int
    """Lines of the notebook file."""


@dataclass(frozen=True)
class Finding:
    """One rule, one place, one sentence."""

    code: str
    severity: Severity
    path: str
    """Relative to the audited root, with forward slashes."""
    span: Span
    message: str
    fix: Fix | None = None
    condition: Condition = field(default_factory=Condition)
    origin: str = "doctor"
    """The tool that found it: doctor, shellcheck or torchfix."""
    place: CellPlace | None = None
    """In a notebook, where the span counts lines of all cells together."""

    def sort_key(self) -> tuple[Any, ...]:
        """Order by place, then code."""
        return (self.path, self.span, self.code, self.message)

    @property
    def where(self) -> str:
        """`12:5`, or `cell 3:2:5` in a notebook: the line and column that people look for."""
        if self.place is None:
            return f"{self.span.line}:{self.span.column}"
        return f"cell {self.place.cell}:{self.place.span.line}:{self.place.span.column}"


@dataclass
class Facts:
    """What one file tells about the programs it belongs to."""

    features: set[str] = field(default_factory=set)
    """Named properties such as `distributed` or `no_sync`."""
    words: set[str] = field(default_factory=set)
    """Names, attributes, keywords and short strings that occur in Python code or shell text."""
    spread: set[str] = field(default_factory=set)
    """Last names of objects that are passed on whole (`**cfg.optim`, `instantiate(cfg.model)`)."""
    settings: list[Setting] = field(default_factory=list)
    """Keys of YAML settings."""
    options: list[Setting] = field(default_factory=list)
    """Command-line options declared with argparse."""
    overrides: list[Setting] = field(default_factory=list)
    """`a.b=c` words on command lines in shell scripts."""
    imports: set[str] = field(default_factory=set)
    """Imported names: dotted as written, or from the root of the tree with a dot in front where they are relative."""
    is_entry: bool = False
    """Whether the file is started as a program."""
    configs: set[str] = field(default_factory=set)
    """Names of settings files, and folders (relative to the root) that Hydra reads."""
    launches: set[str] = field(default_factory=set)
    """Python files that a script starts."""


@dataclass(frozen=True)
class Setting:
    """One declared or given setting and its place."""

    path: str
    key: str
    """Dotted."""
    value: str
    span: Span
