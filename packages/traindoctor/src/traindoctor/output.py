"""Findings as text, JSON, SARIF 2.1.0 or GitHub annotations."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from traindoctor import __version__
from traindoctor.engine import Report
from traindoctor.registry import all_rules
from traindoctor.types import Finding, Severity

FORMATS = ("text", "json", "sarif", "github")
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render(report: Report, form: str) -> str:
    """The report in one of `FORMATS`."""
    return {"text": _text, "json": _json, "sarif": _sarif, "github": _github}[form](report)


def shown_path(report: Report, path: str) -> str:
    """A finding's file as the user would type it."""
    return os.path.normpath(os.path.join(str(report.root), path)).replace(os.sep, "/")


def summary(report: Report) -> str:
    """One line: how many findings, how many can be fixed."""
    if not report.findings:
        return f"{len(report.files)} files, no findings."
    counts = Counter(finding.severity for finding in report.findings)
    parts = ", ".join(f"{counts[severity]} {severity.value}" for severity in Severity if counts[severity])
    safe = sum(1 for f in report.findings if f.fix is not None and f.fix.safe)
    unsafe = sum(1 for f in report.findings if f.fix is not None and not f.fix.safe)
    fixable = (
        f" [*] {safe} fixable" + (f", {unsafe} more with --unsafe" if unsafe else "")
        if safe or unsafe
        else ""
    )
    return f"{len(report.files)} files, {len(report.findings)} findings ({parts}).{fixable}"


def _text(report: Report) -> str:
    lines = []
    for finding in report.findings:
        mark = (
            "[*] "
            if finding.fix is not None and finding.fix.safe
            else "[!] "
            if finding.fix is not None
            else ""
        )
        place = f"{shown_path(report, finding.path)}:{finding.where}"
        lines.append(f"{place}: {finding.code} {finding.severity.value}: {mark}{finding.message}")
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


def _github(report: Report) -> str:
    lines = []
    for f in report.findings:
        where = f"file={_property(shown_path(report, f.path))}"
        names = ("line", "col", "endLine", "endColumn")
        where += "".join(f",{n}={value}" for n, value in zip(names, _in_file(f), strict=True) if value)
        text = _data(f"{f.code} {_message(f)}")
        lines.append(f"::{_GITHUB[f.severity]} {where},title={f.code}::{text}")
    return "\n".join(lines)


def _in_file(finding: Finding) -> tuple[int, int, int, int]:
    """Line, column, last line, last column in the file itself; 0 for the columns of a notebook, where JSON's quotes
    and escapes stand between."""
    if finding.place is None:
        span = finding.span
        return span.line, span.column, span.end_line, span.end_column
    return finding.place.file_line, 0, finding.place.file_end_line, 0


def _message(finding: Finding) -> str:
    """The sentence; in a notebook it begins with the cell, which no line of the file tells."""
    if finding.place is None:
        return finding.message
    return f"cell {finding.place.cell}, line {finding.place.span.line}: {finding.message}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(report: Report) -> str:
    used = sorted({finding.code for finding in report.findings})
    index = {code: number for number, code in enumerate(used)}
    descriptors = [_descriptor(code) for code in used]
    driver = {
        "name": "traindoctor",
        "version": __version__,
        "informationUri": "https://pypi.org/project/traindoctor/",
        "rules": descriptors,
    }
    results = [_sarif_result(report, finding, index) for finding in report.findings]
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _descriptor(code: str) -> dict[str, Any]:
    rule = all_rules().get(code)
    if rule is None:
        return {"id": code}
    return {
        "id": code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.remedy or rule.good}\nSource: {rule.source}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _uri(path: str) -> str:
    """A path as a URI reference: relative ones stay relative, so that they are found in any checkout."""
    if os.path.isabs(path):
        return Path(path).as_uri()
    first, slash, rest = path.partition("/")
    # A colon in the first part of a relative reference would make it a scheme.
    return f"{quote(first, safe='')}{slash}{quote(rest, safe='/')}"


def _sarif_result(report: Report, finding: Finding, index: dict[str, int]) -> dict[str, Any]:
    names = ("startLine", "startColumn", "endLine", "endColumn")
    region = {name: value for name, value in zip(names, _in_file(finding), strict=True) if value}
    location = {"artifactLocation": {"uri": _uri(shown_path(report, finding.path))}, "region": region}
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": [{"physicalLocation": location}],
    }


def changed_codes(findings: Sequence[Finding]) -> str:
    """`DDP001 (2), OPT001` for a list of fixed findings."""
    counts = Counter(finding.code for finding in findings)
    return ", ".join(f"{code} ({count})" if count > 1 else code for code, count in sorted(counts.items()))
