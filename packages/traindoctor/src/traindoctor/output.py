"""Findings for people and as JSON; the formats of other programs are in `interchange`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from traindoctor import __version__
from traindoctor.engine import Report
from traindoctor.registry import all_rules
from traindoctor.types import Finding, Severity

if TYPE_CHECKING:
    from traindoctor.fixing import FileChange

FORMATS = ("text", "json", "sarif", "github", "gitlab", "junit")
_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.INFO: "36"}


def render(report: Report, form: str, *, colour: bool = False) -> str:
    """The report in one of `FORMATS`."""
    if form == "text":
        return _text(report, colour)
    if form == "json":
        return _json(report)
    from traindoctor import interchange

    return {
        "sarif": interchange.sarif,
        "github": interchange.github,
        "gitlab": interchange.gitlab,
        "junit": interchange.junit,
    }[form](report)


def shown_path(report: Report, path: str) -> str:
    """A finding's file as the user would type it."""
    return os.path.normpath(os.path.join(str(report.root), path)).replace(os.sep, "/")


def counted(number: int, word: str, ending: str = "s") -> str:
    """A number and what it counts: `1 file`, `2 files`."""
    return f"{number} {word if number == 1 else word + ending}"


def summary(report: Report) -> str:
    """One line: how many findings, how many can be fixed."""
    files = counted(len(report.files), "file")
    if not report.findings:
        return f"{files}, no findings."
    counts = Counter(finding.severity for finding in report.findings)
    parts = ", ".join(f"{counts[severity]} {severity.value}" for severity in Severity if counts[severity])
    safe = sum(1 for f in report.findings if f.fix is not None and f.fix.safe)
    unsafe = sum(1 for f in report.findings if f.fix is not None and not f.fix.safe)
    fixable = (
        f" [*] {safe} fixable" + (f", {unsafe} more with --unsafe" if unsafe else "")
        if safe or unsafe
        else ""
    )
    return f"{files}, {counted(len(report.findings), 'finding')} ({parts}).{fixable}"


def _text(report: Report, colour: bool) -> str:
    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour else text

    lines = []
    for finding in report.findings:
        mark = "" if finding.fix is None else "[*] " if finding.fix.safe else "[!] "
        place = paint(f"{shown_path(report, finding.path)}:{finding.where}", "1")
        severity = paint(finding.severity.value, _COLOURS[finding.severity])
        lines.append(
            f"{place}: {paint(finding.code, '1;35')} {severity}: {paint(mark, '36')}{finding.message}"
        )
    return "\n".join([*lines, summary(report)])


def statistics_table(report: Report) -> str:
    """Findings per rule, most frequent first."""
    counts = Counter(finding.code for finding in report.findings)
    rules = all_rules()
    lines = [
        f"{count:5d}  {code}  {rules[code].summary if code in rules else ''}".rstrip()
        for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join([*lines, summary(report)])


def as_dict(report: Report, finding: Finding) -> dict[str, Any]:
    """A finding for machines."""
    rules = all_rules()
    fix = finding.fix
    span = finding.place.span if finding.place else finding.span
    return {
        "code": finding.code,
        "name": rules[finding.code].name if finding.code in rules else None,
        "severity": finding.severity.value,
        "path": finding.path,
        "file": shown_path(report, finding.path),
        "cell": finding.place.cell if finding.place else None,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
        "message": finding.message,
        "fix": {"title": fix.title, "safe": fix.safe} if fix else None,
        "origin": finding.origin,
    }


def _json(report: Report) -> str:
    content = {
        "version": __version__,
        "root": str(report.root),
        "num_files": len(report.files),
        "findings": [as_dict(report, finding) for finding in report.findings],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def fixes_in(changes: Sequence[FileChange]) -> str:
    """How many fixes there are, in how many files."""
    return f"{counted(sum(len(c.fixed) for c in changes), 'fix', 'es')} in {counted(len(changes), 'file')}"


def changed_codes(findings: Sequence[Finding]) -> str:
    """`DDP001 (2), OPT001` for a list of fixed findings."""
    counts = Counter(finding.code for finding in findings)
    return ", ".join(f"{code} ({count})" if count > 1 else code for code, count in sorted(counts.items()))
