"""Formats of other programs: SARIF 2.1.0 with fixes, GitHub annotations, GitLab code quality, JUnit."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from traindoctor import __version__
from traindoctor.engine import Report
from traindoctor.output import shown_path
from traindoctor.registry import all_rules
from traindoctor.source import UnreadableError, read_source
from traindoctor.types import Finding, Kind, Severity

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_GITLAB = {Severity.ERROR: "major", Severity.WARNING: "minor", Severity.INFO: "info"}


def github(report: Report) -> str:
    """Workflow commands that GitHub shows as annotations."""
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


def sarif(report: Report) -> str:
    """One run with its rules, results and the fixes that can be made at one place."""
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
    result = {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": [{"physicalLocation": location}],
    }
    fix = _sarif_fix(report, finding)
    return result | {"fixes": [fix]} if fix else result


def _sarif_fix(report: Report, finding: Finding) -> dict[str, Any] | None:
    """The fix as replacements of the file's lines; none for notebooks, whose lines are JSON."""
    from traindoctor.fixing import fixed_text

    fix = finding.fix
    if fix is None or finding.place is not None:
        return None
    found = next((file for file in report.files if file.relative == finding.path), None)
    if found is None or found.kind is Kind.NOTEBOOK:
        return None
    try:
        source = read_source(finding.path, found.kind, found.absolute.read_bytes())
    except (OSError, UnreadableError):
        return None
    after = fixed_text(source, finding)
    if after is None:
        return None
    start = _num_equal(source.text, after)
    end = _num_equal(source.text[start:][::-1], after[start:][::-1])
    line, column = source.place(start)
    last, behind = source.place(len(source.text) - end)
    region = {"startLine": line, "startColumn": column, "endLine": last, "endColumn": behind}
    replacement = {"deletedRegion": region, "insertedContent": {"text": after[start : len(after) - end]}}
    change = {
        "artifactLocation": {"uri": _uri(shown_path(report, finding.path))},
        "replacements": [replacement],
    }
    label = "safe" if fix.safe else "unsafe"
    return {"description": {"text": f"{fix.title} ({label})"}, "artifactChanges": [change]}


def _num_equal(first: str, second: str) -> int:
    """How many characters two texts have in common at their start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((count for count, (one, other) in pairs if one != other), min(len(first), len(second)))


def gitlab(report: Report) -> str:
    """GitLab's code quality report."""
    seen: Counter[str] = Counter()
    entries = []
    for finding in report.findings:
        path = shown_path(report, finding.path)
        text = f"{finding.code}|{path}|{finding.message}"
        seen[text] += 1
        entries.append(
            {
                "description": _message(finding),
                "check_name": finding.code,
                "fingerprint": hashlib.sha256(f"{text}|{seen[text]}".encode()).hexdigest(),
                "severity": _GITLAB[finding.severity],
                "location": {"path": path, "lines": {"begin": _in_file(finding)[0]}},
            }
        )
    return json.dumps(entries, indent=2, ensure_ascii=False)


def junit(report: Report) -> str:
    """JUnit XML: one suite for each file with findings, one failed test for each finding."""
    by_file: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_file.setdefault(shown_path(report, finding.path), []).append(finding)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites name="traindoctor" tests="{len(report.findings)}">',
    ]
    for path, findings in by_file.items():
        lines.append(
            f'  <testsuite name={quoteattr(path)} tests="{len(findings)}" failures="{len(findings)}">'
        )
        for finding in findings:
            name = quoteattr(f"{finding.code} {path}:{finding.where}")
            lines.append(f"    <testcase name={name} classname={quoteattr(path)}>")
            message = quoteattr(_message(finding))
            lines.append(
                f"      <failure message={message}>{escape(_message(finding))}</failure>\n    </testcase>"
            )
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>"])
