"""Reading a tree: every file is parsed once, all rules look at it, then the project as a whole is judged."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from traindoctor.discovery import Found, discover, ignored_by_git
from traindoctor.facts import gather
from traindoctor.ignores import Ignore, apply_ignores, find_ignores
from traindoctor.line_files import DockerFile, EnvFile
from traindoctor.notebook import CellLines, NotebookSource, placed
from traindoctor.options import Options
from traindoctor.programs import Project, build_project
from traindoctor.python_file import CannotParseError, PythonFile
from traindoctor.registry import Rule, all_rules, checks_for, project_checks
from traindoctor.shell_file import ShellError, ShellFile
from traindoctor.source import MAX_BYTES, Source, UnreadableError, read_source
from traindoctor.torch_pin import Version, read_pins, within
from traindoctor.types import Facts, Finding, Kind, Span
from traindoctor.yaml_file import YamlFile, YamlSyntaxError

_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
Item = TypeVar("Item")
Result = TypeVar("Result")
PARALLEL_FROM = 96
"""Trees of at least this many files are read by several processes; below, starting them costs more than it saves."""

_PARSERS: dict[Kind, type] = {
    Kind.PYTHON: PythonFile,
    Kind.NOTEBOOK: PythonFile,
    Kind.SHELL: ShellFile,
    Kind.YAML: YamlFile,
    Kind.DOCKERFILE: DockerFile,
    Kind.ENV: EnvFile,
}


TRAINING_FAMILIES = frozenset(
    ["NCC", "DAT", "DDP", "OPT", "AMP", "CMP", "ATT", "MEM", "SYN", "LOS", "CKP", "PTH", "SEC"]
)
"""Silent in tests, which are slow, odd and fixed on purpose."""


def is_test(path: str) -> bool:
    """Whether a relative path lies in a folder of tests or is named like one."""
    *folders, name = path.split("/")
    if {"tests", "test", "testing", "test_utils"} & set(folders):
        return True
    return name.startswith(("test_", "conftest")) or name.endswith("_test.py")


@dataclass
class FileResult:
    """Everything one file gave."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    ignores: list[Ignore] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    digest: str = ""
    """Of the bytes that were read."""
    cells: tuple[CellLines, ...] = ()
    """In a notebook, where its cells are."""


@dataclass
class Report:
    """The outcome of an audit."""

    root: Path
    files: list[Found]
    findings: list[Finding]
    """What stands, sorted by place."""
    project: Project
    pins: dict[str, Version] = field(default_factory=dict)
    """Folder -> the newest PyTorch that its requirements allow."""
    digests: dict[str, str] = field(default_factory=dict)
    """Path -> digest of the bytes that the findings speak of."""


def digest(data: bytes) -> str:
    """A short name for these bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def parse(source: Source) -> Any:
    """The parsed file of a source; raises the parser's own error."""
    return _PARSERS[source.kind](source)


def examine(path: str, kind: Kind, data: bytes, codes: frozenset[str]) -> FileResult:
    """Parse one file once and run every rule over it."""
    result = FileResult(path, digest=digest(data))
    if len(data) > MAX_BYTES and kind is not Kind.NOTEBOOK:
        return result
    unreadable = all_rules()["DOC001"]
    try:
        source = read_source(path, kind, data)
        if isinstance(source, NotebookSource):
            result.cells = source.lines
            result.findings += _unread_cells(source, unreadable)
        file = parse(source)
    except UnreadableError as error:
        result.findings.append(unreadable.at(path, Span(1, 1, 1, 1), f"cannot be read: {error}"))
        return result
    except CannotParseError as error:
        place = Span(error.line, 1, error.line, 1)
        result.findings.append(
            unreadable.at(path, place, f"{_PYTHON} cannot parse it ({error}); nothing was checked")
        )
        return result
    except ShellError as error:
        result.findings.append(unreadable.at(path, Span(1, 1, 1, 1), f"cannot be followed: {error}"))
        return result
    except YamlSyntaxError:
        return result  # templates and multi-megabyte data wear the same suffix
    result.facts = gather(file)
    result.ignores = find_ignores(source, file)
    in_test = is_test(path)
    for declared, check in checks_for(kind):
        if declared.code in codes and not (in_test and declared.family in TRAINING_FAMILIES):
            result.findings += check(file, declared)
    if isinstance(source, NotebookSource):
        result.findings = [
            replace(found, fix=None) if found.fix is not None and not source.allows(found.fix) else found
            for found in result.findings
        ]
    return result


def _unread_cells(source: NotebookSource, unreadable: Rule) -> list[Finding]:
    """One remark about all cells of a notebook that are no Python; the others are read without them."""
    if not source.problems:
        return []
    (line, problem), *others = source.problems
    message = f"{_PYTHON} cannot parse this cell ({problem}); it was not checked"
    if others:
        message += f", nor were {len(others)} more of {len(source.cells)} code cells"
    return [unreadable.at(source.path, Span(line, 1, line, 1), message)]


def _examine_found(found: Found, codes: frozenset[str]) -> FileResult:
    try:
        data = found.absolute.read_bytes()
    except OSError as error:
        remark = all_rules()["DOC001"].at(
            found.relative, Span(1, 1, 1, 1), f"cannot be read: {error.strerror}"
        )
        return FileResult(found.relative, [remark])
    return examine(found.relative, found.kind, data, codes)


def in_processes(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of a task for many items, in order; from `PARALLEL_FROM` items on, several processes work."""
    workers = min(os.cpu_count() or 1, 8)
    if len(items) < PARALLEL_FROM or workers == 1:
        return [task(item) for item in items]
    # Forking is fastest, but unsafe once other threads run.
    method = "fork" if os.name == "posix" and threading.active_count() == 1 else "spawn"
    context = multiprocessing.get_context(method)
    # Syntax trees hold no cycles: the collector would only walk them again and again.
    with ProcessPoolExecutor(workers, mp_context=context, initializer=gc.disable) as pool:
        return list(pool.map(task, items, chunksize=max(1, min(32, len(items) // (workers * 4)))))


def audit(path: Path, options: Options) -> Report:
    """Read everything below a path and return what stands after conditions, ignores and options."""
    root, files = discover(path, options.exclude)
    results = in_processes(partial(_examine_found, codes=options.codes), files)
    pins = read_pins(root, below=path.is_dir())
    environments = [file for file in files if file.kind is Kind.ENV]
    extra = {f"gitignored:{f.relative}" for f in environments if ignored_by_git(root, f.relative)}
    kinds = {file.relative: file.kind for file in files}
    project = build_project({result.path: result.facts for result in results}, kinds, extra)
    found = [finding for result in results for finding in result.findings]
    for declared, check in project_checks():
        if declared.code in options.codes:
            found += check(project, declared)
    ignores = {result.path: result.ignores for result in results if result.ignores}
    if options.external:
        from traindoctor.external import run_external

        found += run_external(root, files, found)
    standing = judge(found, ignores, project.features_of, pins, options)
    cells = {result.path: result.cells for result in results if result.cells}
    standing = [placed(finding, cells.get(finding.path, ())) for finding in standing]
    digests = {result.path: result.digest for result in results}
    return Report(root, files, standing, project, pins, digests)


Features = tuple[frozenset[str], ...]
"""Of each program that a file belongs to."""


def judge(
    found: list[Finding],
    ignores: dict[str, list[Ignore]],
    features_of: Callable[[str], Features],
    pins: dict[str, Version],
    options: Options,
) -> list[Finding]:
    """Drop what the programs contradict, what is ignored and what was not asked for; label the fixes."""
    standing = []
    for finding in found:
        programs = [features for features in features_of(finding.path) if finding.condition.holds(features)]
        if programs:
            standing.append(_labelled(finding, programs))
    standing = within(standing, pins)
    kept, remarks = apply_ignores(standing, ignores, options.codes)
    unique = {(f.code, f.path, f.span, f.message): f for f in [*kept, *remarks] if options.wants(f)}
    return sorted(unique.values(), key=Finding.sort_key)


def _labelled(finding: Finding, programs: list[frozenset[str]]) -> Finding:
    """The finding with its fix as it stands in these programs: safe, unsafe, or none where it would raise."""
    fix = finding.fix
    if fix is None:
        return finding
    present = frozenset().union(*programs)
    if fix.dropped_if & present:
        why = ", ".join(sorted(name.replace("_", " ") for name in fix.dropped_if & present))
        return replace(finding, fix=None, message=f"{finding.message} (no fix: this program has {why})")
    safe = fix.safe and not fix.unsafe_if & present
    return replace(finding, fix=replace(fix, safe=safe, unsafe_if=frozenset(), dropped_if=frozenset()))
