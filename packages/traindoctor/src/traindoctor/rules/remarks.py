"""Remarks about the audit itself; the engine raises them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Kind, Severity


@rule(
    *Kind,
    project=True,
    code="DOC001",
    name="file-not-checked",
    severity=Severity.INFO,
    summary="A file could not be parsed, so nothing in it was checked",
    why="Python 2, a template or a broken file. Silence about it would look like health.",
    effect="No rule ran over this file.",
    source="The doctor",
    remedy="Correct it, or exclude it in [tool.traindoctor].",
    bad="print 'hello'",
    good="print('hello')",
)
def file_not_checked(_: Any, __: Rule) -> Iterator[Finding]:
    """Raised while files are read."""
    return iter(())


@rule(
    *Kind,
    project=True,
    code="DOC002",
    name="ignore-without-reason",
    severity=Severity.WARNING,
    summary="An ignore comment gives no reason or names no rule",
    why="Somebody will want to know whether it still holds.",
    effect="None on the program.",
    source="The doctor",
    remedy="# doctor: ignore[CODE] why",
    bad="torch.load(path)  # doctor: ignore[CKP001]",
    good="torch.load(path)  # doctor: ignore[CKP001] our own file, written above",
)
def ignore_without_reason(_: Any, __: Rule) -> Iterator[Finding]:
    """Raised when ignores are applied."""
    return iter(())


@rule(
    *Kind,
    project=True,
    code="DOC003",
    name="ignore-without-effect",
    severity=Severity.INFO,
    summary="An ignore comment silences nothing",
    why="The fault was corrected, or the comment stands on the wrong line.",
    effect="None on the program.",
    source="The doctor",
    remedy="Remove it.",
    bad="x = 1  # doctor: ignore[OPT001] sparse gradients",
    good="x = 1",
)
def ignore_without_effect(_: Any, __: Rule) -> Iterator[Finding]:
    """Raised when ignores are applied."""
    return iter(())
