"""Living with findings: a baseline file of those that are known, and ignore comments written in bulk."""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from traindoctor.engine import Report, judge
from traindoctor.errors import UserError
from traindoctor.examination import examine, parse
from traindoctor.fixing import FileChange
from traindoctor.options import Options
from traindoctor.shell_file import ShellError, ShellFile
from traindoctor.source import Source, UnreadableError, read_source
from traindoctor.types import Finding, Kind
from traindoctor.yaml_file import YamlSyntaxError

_VERSION = 1


def _print_of(finding: Finding) -> str:
    """What a finding keeps when lines move: its rule, file and sentence."""
    return json.dumps([finding.code, finding.path, finding.message])


def write_baseline(report: Report, file: Path) -> None:
    """Remember all findings of a report as known."""
    counts = Counter(map(_print_of, report.findings))
    content = {"version": _VERSION, "findings": [[*json.loads(key), n] for key, n in sorted(counts.items())]}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def without_baseline(report: Report, file: Path) -> Report:
    """The report without the findings that a baseline knows; of several equal ones the known number is left out."""
    known = _read_baseline(file)
    fresh = []
    for finding in report.findings:
        name = _print_of(finding)
        if known[name] > 0:
            known[name] -= 1
        else:
            fresh.append(finding)
    return replace(report, findings=fresh)


def _read_baseline(file: Path) -> Counter[str]:
    try:
        content: Any = json.loads(file.read_text("utf-8"))
        if content["version"] != _VERSION:
            raise ValueError("another version")
        return Counter({json.dumps(entry[:3]): int(entry[3]) for entry in content["findings"]})
    except OSError as error:
        raise UserError(f"--baseline {file}: {error.strerror}; write one with --write-baseline") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"--baseline {file}: not a baseline of this version; write it again with --write-baseline"
        ) from error


def ignore_changes(report: Report, options: Options, reason: str) -> tuple[list[FileChange], list[Finding]]:
    """Changes that add an ignore comment for every finding, and the findings for which none could be written."""
    by_path: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.origin == "doctor" and not finding.code.startswith("DOC"):
            by_path.setdefault(finding.path, []).append(finding)
    changes, left = [], []
    for found in report.files:
        if found.relative not in by_path:
            continue
        data = found.absolute.read_bytes()
        change = FileChange(found.relative, found.kind, data, data)
        left += _ignore_in_file(change, by_path[found.relative], report, options, reason)
        if change.after != change.before:
            changes.append(change)
    return changes, left


def _ignore_in_file(
    change: FileChange, findings: list[Finding], report: Report, options: Options, reason: str
) -> list[Finding]:
    """Add comments from the last line to the first, so that positions above stay; returns what could not be covered."""
    if change.kind is Kind.NOTEBOOK:
        return findings
    lines: dict[int, set[str]] = {}
    for finding in findings:
        lines.setdefault(finding.span.line, set()).add(finding.code)
    for line in sorted(lines, reverse=True):
        for candidate in _candidates(change, line, sorted(lines[line]), reason):
            if _covers(change, candidate, lines[line], report, options):
                change.after = candidate
                change.fixed += [f for f in findings if f.span.line == line]
                break
    return [finding for finding in findings if finding not in change.fixed]


def _candidates(change: FileChange, line: int, codes: list[str], reason: str) -> list[bytes]:
    """The file with the comment behind the line, and with the comment on a line of its own above."""
    source = read_source(change.path, change.kind, change.after)
    text, comment = source.line(line), f"# doctor: ignore[{','.join(codes)}] {reason}"
    indent = text[: len(text) - len(text.lstrip())]
    start = source.offset(line, 1)
    behind = source.text[: start + len(text)] + f"  {comment}" + source.text[start + len(text) :]
    above = source.text[:start] + f"{indent}{comment}{source.newline}" + source.text[start:]
    return [source.encode(behind), source.encode(above)]


def _covers(change: FileChange, data: bytes, codes: set[str], report: Report, options: Options) -> bool:
    """Whether the file means the same as before and fewer findings of these codes stand."""
    try:
        before = read_source(change.path, change.kind, change.after)
        after = read_source(change.path, change.kind, data)
        if _meaning(before) != _meaning(after):
            return False
    except (UnreadableError, SyntaxError, ValueError, ShellError, YamlSyntaxError):
        return False
    counts = [_count(change, text, codes, report, options) for text in (change.after, data)]
    return counts[1] < counts[0]


def _count(change: FileChange, data: bytes, codes: set[str], report: Report, options: Options) -> int:
    result = examine(change.path, change.kind, data, options.codes)
    features = report.project.features_of
    standing = judge(result.findings, {change.path: result.ignores}, features, report.pins, options)
    return sum(finding.code in codes for finding in standing)


def _meaning(source: Source) -> Any:
    """The content without comments: syntax tree, words of all commands, or YAML values."""
    if source.kind is Kind.PYTHON:
        return ast.dump(ast.parse(source.text))
    file = parse(source)
    if isinstance(file, ShellFile):
        documents = [source.text[d.start : d.end] for c in file.commands for d in c.documents]
        return [[word.raw for word in command.words] for command in file.commands], documents
    if source.kind is Kind.YAML:
        return [(entry.key, entry.scalar) for entry in file.entries]
    return [line for line in source.text.splitlines() if not line.lstrip().startswith("#")]
