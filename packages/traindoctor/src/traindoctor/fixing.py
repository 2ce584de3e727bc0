"""From findings to new file contents: choose fixes that do not overlap, make them, prove that the file still parses.

A file is read and fixed again until nothing more can be fixed, so a second run changes nothing.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import yaml

from traindoctor.discovery import Found
from traindoctor.engine import Features, Report, in_processes, judge
from traindoctor.examination import digest, examine, shell_problem
from traindoctor.notebook import NotebookSource, placed
from traindoctor.options import Options
from traindoctor.source import Source, UnreadableError, read_source
from traindoctor.torch_pin import Version
from traindoctor.types import Finding, Kind, TextEdit

_MAX_PASSES = 12


@dataclass
class FileChange:
    """One file before and after."""

    path: str
    kind: Kind
    before: bytes
    after: bytes
    fixed: list[Finding] = field(default_factory=list)
    refused: list[tuple[Finding, str]] = field(default_factory=list)

    def diff(self) -> str:
        """A unified diff, as `patch -p1` reads it."""
        source = read_source(self.path, self.kind, self.before)
        if isinstance(source, NotebookSource):
            return _notebook_diff(source, self.after)
        old = self.before[len(source.mark) :].decode(source.encoding)
        new = self.after[len(source.mark) :].decode(source.encoding)
        return _unified(old, new, self.path)


def _notebook_diff(before: NotebookSource, data: bytes) -> str:
    """The changed cells, each as a file of its own: for reading, not for patch."""
    after = read_source(before.path, before.kind, data)
    assert isinstance(after, NotebookSource)
    pairs = zip(before.cells, after.cells, strict=True)
    return "".join(
        _unified(old.text, new.text, f"{before.path}:cell {number}", end="")
        for number, (old, new) in enumerate(pairs, 1)
        if old.text != new.text
    )


def _unified(old: str, new: str, name: str, end: str = "\\ No newline at end of file\n") -> str:
    """A unified diff; `end` is said behind a last line without a newline."""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{end}" for line in lines)


def _lines(text: str) -> list[str]:
    return [part + "\n" for part in text.split("\n")[:-1]] + (
        [text.rsplit("\n", 1)[-1]] if not text.endswith("\n") else []
    )


@dataclass(frozen=True)
class _Job:
    """One file with something to fix, small enough to travel to another process."""

    found: Found
    digest: str
    findings: tuple[Finding, ...]
    features: Features
    data: bytes | None = None


def plan(report: Report, options: Options, *, unsafe: bool, stdin: bytes | None = None) -> list[FileChange]:
    """The changes that would remove the fixable findings of a report; nothing is written.

    `stdin` is the content of the one audited file, where it does not come from the disk.
    """
    by_path: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.fix is not None and (finding.fix.safe or unsafe):
            by_path.setdefault(finding.path, []).append(finding)
    jobs = [
        _Job(
            found,
            report.digests.get(found.relative, ""),
            tuple(by_path[found.relative]),
            report.project.features_of(found.relative),
            stdin,
        )
        for found in report.files
        if found.relative in by_path
    ]
    task = partial(_fix_file, pins=report.pins, options=options, unsafe=unsafe)
    changes = in_processes(task, jobs)
    return [change for change in changes if change.after != change.before or change.refused]


def _fix_file(job: _Job, pins: dict[str, Version], options: Options, unsafe: bool) -> FileChange:
    before = job.found.absolute.read_bytes() if job.data is None else job.data
    change = FileChange(job.found.relative, job.found.kind, before, before)
    given_up: set[tuple[str, str]] = set()
    for number in range(_MAX_PASSES):
        if number == 0 and digest(before) == job.digest:
            standing = list(job.findings)  # the file is as it was audited
        else:
            result = examine(change.path, change.kind, change.after, options.codes)
            ignores = {change.path: result.ignores}
            standing = judge(result.findings, ignores, lambda _: job.features, pins, options)
            standing = [placed(finding, result.cells) for finding in standing]
        wanted = [
            f
            for f in standing
            if f.fix is not None and (f.fix.safe or unsafe) and (f.code, f.message) not in given_up
        ]
        if not wanted:
            break
        source = read_source(change.path, change.kind, change.after)
        chosen = _without_overlap(wanted, source)
        text, problem = _attempt(source, chosen)
        if text is None and len(chosen) > 1:
            chosen, text = _one_by_one(source, chosen, given_up, change)
        elif text is None:
            given_up.add((chosen[0].code, chosen[0].message))
            change.refused.append((chosen[0], problem))
            continue
        if text is not None and text != source.text:
            change.after = source.encode(text)
            change.fixed += chosen
        else:
            given_up |= {(f.code, f.message) for f in chosen}
    return change


def fixed_text(source: Source, finding: Finding) -> str | None:
    """The text with this one fix made, or None where it cannot be made."""
    return _attempt(source, [finding])[0]


def _one_by_one(
    source: Source, chosen: list[Finding], given_up: set[tuple[str, str]], change: FileChange
) -> tuple[list[Finding], str | None]:
    """The first fix that works alone; those that do not are given up."""
    for finding in chosen:
        text, problem = _attempt(source, [finding])
        if text is not None:
            return [finding], text
        given_up.add((finding.code, finding.message))
        change.refused.append((finding, problem))
    return [], None


def _attempt(source: Source, findings: Sequence[Finding]) -> tuple[str | None, str]:
    """The text with these fixes made, or None and the reason."""
    text_edits = sorted(
        {edit for f in findings if f.fix for edit in f.fix.text_edits},
        key=lambda edit: (edit.start, edit.end),
    )
    node_edits = [edit for f in findings if f.fix for edit in f.fix.node_edits]
    text = _apply_text(source.text, text_edits)
    if node_edits:
        from traindoctor.python_edit import EditRefusedError, apply_node_edits

        try:
            text, missed = apply_node_edits(text, node_edits)
        except EditRefusedError as error:
            return None, str(error)
        if missed:
            return None, "the place was not found again in the syntax tree"
    problem = verify(source, text)
    return (None, problem) if problem else (text, "")


def _apply_text(text: str, edits: Sequence[TextEdit]) -> str:
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _without_overlap(findings: list[Finding], source: Source) -> list[Finding]:
    """Fixes that can be made together; the others have their turn in the next pass."""
    chosen: list[Finding] = []
    taken: list[tuple[int, int, bool]] = []
    for finding in findings:
        assert finding.fix is not None
        ranges = [(edit.start, edit.end, True) for edit in finding.fix.text_edits]
        for edit in finding.fix.node_edits:
            start = source.offset(edit.span.line, edit.span.column)
            end = source.offset(edit.span.end_line, edit.span.end_column)
            # Keyword edits of one call combine; a replacement swallows whatever is inside it.
            ranges.append((start, end, edit.action.startswith("replace")))
        if not any(_collide(mine, other) for mine in ranges for other in taken):
            chosen.append(finding)
            taken += ranges
    return chosen


def _collide(first: tuple[int, int, bool], second: tuple[int, int, bool]) -> bool:
    if not (first[2] or second[2]):
        return False
    if first[:2] == second[:2] and first[0] == first[1]:
        return False  # the same insertion, made once
    return (first[0] < second[1] and second[0] < first[1]) or first[:2] == second[:2]


def verify(source: Source, text: str) -> str:
    """'' if the changed text is still what it was: valid Python, shell or YAML in the same encoding."""
    try:
        written = read_source(source.path, source.kind, source.encode(text))
        if source.kind is Kind.NOTEBOOK and written.text != text:
            return "the result would not be read back as it was written"
    except (UnreadableError, UnicodeEncodeError) as error:
        return f"the result cannot be written as {source.encoding}: {error}"
    if source.kind in (Kind.PYTHON, Kind.NOTEBOOK):
        return _python_problem(source, text)
    if source.kind is Kind.YAML:
        try:
            list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            return f"the result would not parse: {str(error).splitlines()[0]}"
    elif (
        source.kind is Kind.SHELL and shell_problem(source.text) is None and (problem := shell_problem(text))
    ):
        return f"bash -n rejects the result: {problem[1]}"
    return ""


def _python_problem(source: Source, text: str) -> str:
    """Why a changed part does not compile; in a notebook each cell is one, and may await outside of functions."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if source.kind is Kind.NOTEBOOK else 0
    before = set(source.programs(source.text))
    for part in source.programs(text):
        if part in before:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(part, source.path, "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            return f"the result would not parse: {error}"
    return ""
