"""Findings as text, JSON, SARIF 2.1.0 or GitHub annotations."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmldlm import __version__
from mmldlm.diagnostics.doctor.engine import Report
from mmldlm.diagnostics.doctor.registry import all_rules
from mmldlm.diagnostics.doctor.types import Finding, Severity

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
        place = f"{shown_path(report, finding.path)}:{finding.span.line}:{finding.span.column}"
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
    return {
        "code": finding.code,
        "name": rules[finding.code].name if finding.code in rules else None,
        "severity": finding.severity.value,
        "path": finding.path,
        "file": shown_path(report, finding.path),
        "line": finding.span.line,
        "column": finding.span.column,
        "end_line": finding.span.end_line,
        "end_column": finding.span.end_column,
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
    return "\n".join(
        f"::{_GITHUB[f.severity]} "
        f"file={_property(shown_path(report, f.path))},line={f.span.line},col={f.span.column},"
        f"endLine={f.span.end_line},endColumn={f.span.end_column},title={f.code}::{_data(f'{f.code} {f.message}')}"
        for f in report.findings
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(report: Report) -> str:
    used = sorted({finding.code for finding in report.findings})
    index = {code: number for number, code in enumerate(used)}
    descriptors = [_descriptor(code) for code in used]
    driver = {
        "name": "mmldlm doctor",
        "version": __version__,
        "informationUri": "https://pypi.org/project/mmldlm/",
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
    span = finding.span
    region = {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }
    location = {"artifactLocation": {"uri": _uri(shown_path(report, finding.path))}, "region": region}
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": location}],
    }


def changed_codes(findings: Sequence[Finding]) -> str:
    """`DDP001 (2), OPT001` for a list of fixed findings."""
    counts = Counter(finding.code for finding in findings)
    return ", ".join(f"{code} ({count})" if count > 1 else code for code, count in sorted(counts.items()))
