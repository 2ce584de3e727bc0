"""The newest PyTorch that a project's own requirements allow, and what a remedy needs at least.

A fix that the pinned version cannot run would break the program, so it is not offered; a call that is not deprecated in
that version is not reported.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mmldlm.diagnostics.doctor.types import Facts, Finding

Version = tuple[int, int]

_FILES = (
    "requirements*.txt",
    "requirements*.yml",
    "requirements*.yaml",
    "environment*.yml",
    "environment*.yaml",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
)
_REQUIREMENT = re.compile(
    r"(?:^|[\s\"':-])(?:py)?torch\s*((?:(?:[<>!~]=?|==?)\s*[\w.*+!]+\s*,?\s*)+)", re.MULTILINE
)
_UPPER = re.compile(r"(?:^|[\s,])(==?|~=|<=|<)\s*(\d+)(?:\.(\d+))?")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_MARK = "torch<="

NOT_YET: dict[str, Version] = {"AMP001": (2, 4), "AMP007": (2, 3), "SHL007": (1, 10)}
"""Deprecated since this version: before it there is nothing to report."""
REMEDY_NEEDS: dict[str, Version] = {"OPT001": (2, 4), "CKP001": (1, 13), "MEM001": (1, 11), "DDP002": (1, 7)}
"""The remedy exists since this version: before it the finding stands without a fix."""


def read_pin(root: Path) -> Version | None:
    """The newest PyTorch allowed by the requirements next to the code, or None where they set no upper bound."""
    bounds = []
    for pattern in _FILES:
        for file in sorted(root.glob(pattern)):
            try:
                text = file.read_text("utf-8", errors="replace")
            except OSError:
                continue
            for match in _REQUIREMENT.finditer(_COMMENT.sub("", text)):
                if (bound := _upper_bound(match[1])) is not None:
                    bounds.append(bound)
    return max(bounds, default=None)


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


def remember(facts: Facts, pin: Version | None) -> None:
    """Note the pin among the project's features."""
    if pin is not None:
        facts.features.add(f"{_MARK}{pin[0]}.{pin[1]}")


def within(findings: list[Finding], features: set[str]) -> list[Finding]:
    """The findings that make sense for the pinned PyTorch, with the fixes that it can run."""
    pin = next((_parse(word) for word in features if word.startswith(_MARK)), None)
    if pin is None:
        return findings
    kept = []
    for finding in findings:
        needed = REMEDY_NEEDS.get(finding.code)
        if finding.code in NOT_YET and pin < NOT_YET[finding.code]:
            continue
        if needed is not None and pin < needed:
            version = f"{needed[0]}.{needed[1]}"
            message = (
                f"{finding.message} (the remedy needs PyTorch {version}; this project pins an older one)"
            )
            finding = replace(finding, message=message, fix=None)
        kept.append(finding)
    return kept


def _parse(word: str) -> Version:
    major, minor = word.removeprefix(_MARK).split(".")
    return int(major), int(minor)
