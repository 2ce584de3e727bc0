"""Findings of shellcheck and torchfix, where they are installed, under their own codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from traindoctor.discovery import Found
from traindoctor.types import Finding, Kind, Severity, Span

_SECONDS = 120
_BATCH = 200
_SAME = {"TOR102": "CKP001", "TOR003": "MEM001"}
"""Foreign code -> ours for the same fault; ours is kept, because it has a fix."""


def run_external(root: Path, files: Sequence[Found], ours: Sequence[Finding]) -> list[Finding]:
    """What the other tools say; a tool that is missing, fails or takes too long says nothing."""
    known = {(finding.path, finding.span.line, finding.code) for finding in ours}
    found = [*_shellcheck(root, files), *_torchfix(root, files)]
    return [f for f in found if (f.path, f.span.line, _SAME.get(f.code, "")) not in known]


def _run(command: list[str], root: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _batches(files: Sequence[Found], kind: Kind) -> Iterator[list[str]]:
    names = [f"./{found.relative}" for found in files if found.kind is kind]
    for start in range(0, len(names), _BATCH):
        yield names[start : start + _BATCH]


def _shellcheck(root: Path, files: Sequence[Found]) -> Iterator[Finding]:
    tool = shutil.which("shellcheck")
    if not tool:
        return
    levels = {"error": Severity.ERROR, "warning": Severity.WARNING}
    for names in _batches(files, Kind.SHELL):
        try:
            comments = json.loads(_run([tool, "--format=json", "--severity=warning", *names], root) or "[]")
        except json.JSONDecodeError:
            continue
        for item in comments:
            span = Span(item["line"], item["column"], item["endLine"], item["endColumn"])
            path = item["file"].removeprefix("./")
            level = levels.get(item["level"], Severity.INFO)
            yield Finding(f"SC{item['code']}", level, path, span, item["message"], origin="shellcheck")


def _torchfix(root: Path, files: Sequence[Found]) -> Iterator[Finding]:
    tool = shutil.which("torchfix")
    if not tool:
        return
    line = re.compile(
        r"(?P<path>.+?):(?P<line>\d+):(?P<column>\d+): (?P<code>TOR\d+) (?:\[\*\] )?(?P<text>.*)"
    )
    for names in _batches(files, Kind.PYTHON):
        for match in map(line.match, _run([tool, *names], root).splitlines()):
            if match:
                place = int(match["line"]), int(match["column"])
                path = match["path"].removeprefix("./")
                yield Finding(
                    match["code"],
                    Severity.WARNING,
                    path,
                    Span(*place, *place),
                    match["text"],
                    origin="torchfix",
                )
