"""The newest PyTorch that a project's own requirements allow, and what a remedy needs at least.

A fix that the pinned version cannot run would break the program, so it is not offered; a call that is not deprecated in
that version is not reported.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from traindoctor.discovery import PROJECT_MARKS, SKIPPED_FOLDERS
from traindoctor.types import Finding

Version = tuple[int, int]

_FILES = (
    "requirements*.txt",
    "requirements*.in",
    "requirements*.yml",
    "requirements*.yaml",
    "environment*.yml",
    "environment*.yaml",
    "constraints*.txt",
    "pyproject.toml",
    "Pipfile",
    "setup.py",
    "setup.cfg",
    "Dockerfile*",
)
_HOLDERS = frozenset(
    {"requirements", "reqs", "docker", "dockerfiles", "env", "envs", "environments", "conda", ".devcontainer"}
)
"""Folders that hold the requirements of the folder above; every text file in the first two counts."""
_REQUIREMENT = re.compile(
    r"(?:^|[\s\"':])(?:py)?torch\s*((?:(?:[<>!~]=?|==?)\s*[\w.*+!]+\s*,?\s*)+)", re.MULTILINE
)
_TABLE = re.compile(
    r"^(?:py)?torch\s*=\s*(?:\{[^}\n]*version\s*=\s*)?[\"']([\^~=<>]*)\s*(\d+)(?:\.(\d+))?[^\"']*[\"']",
    re.MULTILINE,
)
_IMAGE = re.compile(r"^FROM\s+(?:--\S+\s+)?\S*pytorch/pytorch:(\d+)\.(\d+)", re.MULTILINE)
_UPPER = re.compile(r"(?:^|[\s,])(==?|~=|<=|<)\s*(\d+)(?:\.(\d+))?")
_COMMENT = re.compile(r"(?:^|\s)#.*")

NOT_YET: dict[str, Version] = {
    "AMP001": (2, 4),
    "AMP007": (2, 3),
    "SHL007": (1, 10),
    "OPT001": (2, 0),
    "DDP002": (1, 7),
    "MEM001": (1, 11),
    "CKP001": (1, 13),
    "CKP013": (2, 6),
}
"""Deprecated, or better done otherwise, since this version: before it there is nothing to report."""
OVER: dict[str, Version] = {"CKP001": (2, 6)}
"""Not a fault any more from this version on: reported only where an older one is pinned."""
_NEWEST: Version = (99, 99)
REMEDY_NEEDS: dict[str, Version] = {"OPT001": (2, 4)}
"""The remedy exists since this version: before it the finding stands without a fix."""


def read_pins(root: Path, *, below: bool = True) -> dict[str, Version]:
    """Folder, relative to the root -> the newest PyTorch that the requirements there allow; '' is the root itself.

    Requirements hold for their folder and what is below. Where the root has none, those of the project around it hold.
    Without `below` no other folder is entered.
    """
    pins: dict[str, Version] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if below and name not in SKIPPED_FOLDERS]
        place = Path(folder)
        holder = place.name.lower() in _HOLDERS and place != root
        wanted = [*_FILES, "*.txt"] if holder and place.name.lower() in ("requirements", "reqs") else _FILES
        bound = _newest(place / name for name in names if any(fnmatch.fnmatch(name, p) for p in wanted))
        if bound is not None:
            where = (place.parent if holder else place).relative_to(root).as_posix()
            where = "" if where == "." else where
            pins[where] = max(bound, pins.get(where, bound))
    if "" not in pins and (bound := _newest_above(root)) is not None:
        pins[""] = bound
    return pins


def _newest_above(root: Path) -> Version | None:
    """What the folders above say, up to the first that is the top of a project."""
    folder = root.resolve()
    for _ in range(8):
        if any((folder / mark).exists() for mark in PROJECT_MARKS) or folder.parent == folder:
            return None
        folder = folder.parent
        if folder.name in SKIPPED_FOLDERS:
            return None
        bound = _newest(file for pattern in _FILES for file in sorted(folder.glob(pattern)))
        if bound is not None and any((folder / mark).exists() for mark in PROJECT_MARKS):
            return bound
    return None


def _newest(files: Iterator[Path]) -> Version | None:
    """The largest of the upper bounds in these files."""
    bounds: list[Version | None] = []
    for file in files:
        try:
            text = _COMMENT.sub("", file.read_text("utf-8", errors="replace"))
        except OSError:
            continue
        bounds += [bound for match in _REQUIREMENT.finditer(text) if (bound := _upper_bound(match[1]))]
        bounds += [_table_bound(*match.groups()) for match in _TABLE.finditer(text)]
        bounds += [(int(match[1]), int(match[2])) for match in _IMAGE.finditer(text)]
    return max((bound for bound in bounds if bound is not None), default=None)


def _table_bound(sign: str, major: str, minor: str | None) -> Version | None:
    """A version in a TOML table: `^` leaves the minor version free, no sign and `~` fix it."""
    if sign.startswith(">"):
        return None
    if sign.startswith("<") and sign != "<=":
        return _upper_bound(f"<{major}.{minor or 0}")
    return int(major), 99 if sign == "^" or minor is None else int(minor)


def _upper_bound(requirement: str) -> Version | None:
    found = []
    for sign, major, minor in _UPPER.findall(requirement):
        if sign == "<" and int(minor or 0) == 0:
            found.append((int(major) - 1, 99))
        elif sign == "<":
            found.append((int(major), int(minor) - 1))
        else:
            found.append((int(major), int(minor or 99)))
    return min(found, default=None)


def within(findings: list[Finding], pins: dict[str, Version]) -> list[Finding]:
    """The findings that make sense for the PyTorch pinned nearest to them, with the fixes that it can run."""
    kept = []
    for finding in findings:
        needed = REMEDY_NEEDS.get(finding.code)
        pin = _pin_of(finding.path, pins) or _NEWEST
        if pin < NOT_YET.get(finding.code, pin) or (finding.code in OVER and pin >= OVER[finding.code]):
            continue
        if needed is not None and pin < needed:
            version = f"{needed[0]}.{needed[1]}"
            message = (
                f"{finding.message} (the remedy needs PyTorch {version}; this project pins an older one)"
            )
            finding = replace(finding, message=message, fix=None)
        kept.append(finding)
    return kept


def _pin_of(path: str, pins: dict[str, Version]) -> Version | None:
    """The pin of the nearest folder around a file."""
    folder = path
    while folder:
        folder = folder.rpartition("/")[0]
        if folder in pins:
            return pins[folder]
    return pins.get("")
