"""Reading a tree: every file is examined once, then findings are judged with what is known about their programs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from traindoctor.cache import Cache
from traindoctor.discovery import Found, discover, discover_all, named_file, project_around
from traindoctor.examination import FileResult, examine_found
from traindoctor.ignores import Ignore, apply_ignores
from traindoctor.notebook import placed
from traindoctor.options import Options
from traindoctor.programs import Project, build_project
from traindoctor.registry import project_checks
from traindoctor.torch_pin import Version, read_pins, within
from traindoctor.types import Facts, Finding, Kind

Item = TypeVar("Item")
Result = TypeVar("Result")
PARALLEL_FROM = 96
"""Trees of at least this many files are read by several processes; below, starting them costs more than it saves."""


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


def audit(
    path: Path | Sequence[Path],
    options: Options,
    *,
    overlay: dict[str, bytes] | None = None,
    cache: Cache | None = None,
) -> Report:
    """Read everything below one or several paths and return what stands after conditions, ignores and options.

    `overlay` gives the content of files by their path relative to the root, instead of what is on the disk. The files
    of the project around the paths are read too, for what they tell about the programs, but nothing is reported there.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    if overlay is None:
        root, files = discover_all(paths, options.exclude, respect_gitignore=options.respect_gitignore)
    else:
        root, files = paths[0].parent, [named_file(paths[0])]
    around = project_around(root, whole=len(paths) == 1 and paths[0].is_dir())
    prefix = "" if around is None else root.resolve().relative_to(around.resolve()).as_posix()
    prefix = "" if prefix in ("", ".") else f"{prefix}/"
    tasks = [
        _Task(file, options.codes, f"{prefix}{file.relative}", (overlay or {}).get(file.relative))
        for file in files
    ]
    results = _examine_all(tasks, cache)
    facts = {task.place: result.facts for task, result in zip(tasks, results, strict=True)}
    kinds = {task.place: task.found.kind for task in tasks}
    if around is not None:
        _add_context(facts, kinds, around, options, cache)
    pins = read_pins(root, below=all(given.is_dir() for given in paths))
    project = build_project(facts, kinds, prefix)
    standing = _standing(results, project, pins, options, root, files)
    digests = {result.path: result.digest for result in results}
    return Report(root, files, standing, project, pins, digests)


def _standing(
    results: list[FileResult],
    project: Project,
    pins: dict[str, Version],
    options: Options,
    root: Path,
    files: list[Found],
) -> list[Finding]:
    """The findings of all files and of the project that stand, with their places in notebooks."""
    findings = [finding for result in results for finding in result.findings]
    own = {result.path for result in results}
    for declared, check in project_checks():
        if declared.code in options.codes:
            findings += [finding for finding in check(project, declared) if finding.path in own]
    ignores = {result.path: result.ignores for result in results if result.ignores}
    if options.external:
        from traindoctor.external import run_external

        findings += run_external(root, files, findings)
    standing = judge(findings, ignores, project.features_of, pins, options)
    cells = {result.path: result.cells for result in results if result.cells}
    return [placed(finding, cells.get(finding.path, ())) for finding in standing]


@dataclass(frozen=True)
class _Task:
    """One file to examine."""

    found: Found
    codes: frozenset[str]
    place: str
    """Its path relative to the project around."""
    data: bytes | None = None
    """Its content, where it is not the one on the disk."""


def _examine(task: _Task) -> FileResult:
    return examine_found(task.found, task.codes, task.place, task.data)


def _examine_all(tasks: list[_Task], cache: Cache | None) -> list[FileResult]:
    if cache is None:
        return in_processes(_examine, tasks)
    known = [
        None if task.data is not None else cache.get(task.found, task.codes, task.place) for task in tasks
    ]
    missing = [task for task, result in zip(tasks, known, strict=True) if result is None]
    fresh = iter(in_processes(_examine, missing))
    results = [next(fresh) if result is None else result for result in known]
    for task, result, old in zip(tasks, results, known, strict=True):
        if old is None and task.data is None:
            cache.put(task.found, task.codes, task.place, result)
    return results


def _add_context(
    facts: dict[str, Facts], kinds: dict[str, Kind], around: Path, options: Options, cache: Cache | None
) -> None:
    """Facts of the other files of the project, without the settings that only their own audit would report."""
    _, files = discover(around, respect_gitignore=options.respect_gitignore)
    tasks = [_Task(file, frozenset(), file.relative) for file in files if file.relative not in facts]
    for task, result in zip(tasks, _examine_all(tasks, cache), strict=True):
        facts[task.place] = replace(result.facts, settings=[], options=[], overrides=[])
        kinds[task.place] = task.found.kind


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
        every = features_of(finding.path)
        programs = [features for features in every if finding.condition.holds(features)]
        if programs and not any(finding.condition.nowhere & features for features in every):
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
