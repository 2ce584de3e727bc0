"""Inline ignores: `# doctor: ignore[CODE] reason` on the line or the line above, `ignore-file` for a whole file."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from traindoctor.python_file import PythonFile
from traindoctor.registry import all_rules
from traindoctor.shell_file import ShellFile
from traindoctor.source import Source
from traindoctor.types import Finding, Span

_COMMENT = re.compile(r"#\s*(?:train)?doctor:\s*ignore(-file)?\s*\[([^\]]*)\]\s*(.*)")


@dataclass(frozen=True)
class Ignore:
    """One ignore comment."""

    line: int
    span: Span
    codes: tuple[str, ...]
    reason: str
    whole_file: bool
    alone: bool
    """Nothing else stands on the line, so it speaks for the next one."""

    def covers(self, finding: Finding) -> bool:
        """Whether this comment silences a finding."""
        if not any(finding.code.startswith(code) for code in self.codes):
            return False
        lines = {finding.span.line, finding.span.end_line}
        return self.whole_file or self.line in lines or (self.alone and self.line + 1 == finding.span.line)


def find_ignores(source: Source, file: Any) -> list[Ignore]:
    """The ignore comments of a file; text in strings and here-documents does not count."""
    if "doctor:" not in source.text:
        return []
    found = []
    for offset, comment in _comments(source, file):
        match = _COMMENT.match(comment)
        if match:
            line, column = source.place(offset)
            codes = tuple(code.strip().upper() for code in match[2].split(",") if code.strip())
            alone = not source.line(line)[: column - 1].strip()
            span = Span(line, column, line, column + len(comment))
            found.append(Ignore(line, span, codes, match[3].strip(" -:"), bool(match[1]), alone))
    return found


def _comments(source: Source, file: Any) -> Iterator[tuple[int, str]]:
    if isinstance(file, PythonFile):
        try:
            for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
                if token.type == tokenize.COMMENT:
                    yield source.offset(token.start[0], token.start[1] + 1), token.string
        except (tokenize.TokenError, SyntaxError, IndentationError):
            return
    elif isinstance(file, ShellFile):
        yield from file.tokens.comments
    else:
        for number in range(1, len(source.starts) + 1):
            match = re.search(r"(?:^|\s)(#\s*(?:train)?doctor:.*)", source.line(number))
            if match:
                yield source.offset(number, match.start(1) + 1), match[1]


def apply_ignores(
    findings: list[Finding], ignores: dict[str, list[Ignore]], active: frozenset[str]
) -> tuple[list[Finding], list[Finding]]:
    """The findings that stay, and remarks about the ignores themselves."""
    rules = all_rules()
    kept: list[Finding] = []
    used: set[tuple[str, int]] = set()
    for finding in findings:
        covering = [ignore for ignore in ignores.get(finding.path, []) if ignore.covers(finding)]
        used |= {(finding.path, ignore.line) for ignore in covering}
        if not covering:
            kept.append(finding)
    remarks: list[Finding] = []
    for path, entries in ignores.items():
        for ignore in entries:
            unknown = [
                code
                for code in ignore.codes
                if not any(known.startswith(code) for known in rules) and code[:2] != "SC"
            ]
            if unknown or not ignore.codes:
                message = f"ignore names no rule: {', '.join(unknown) or 'nothing between the brackets'}"
                remarks.append(rules["DOC002"].at(path, ignore.span, message))
            elif not ignore.reason:
                message = f"ignore of {', '.join(ignore.codes)} gives no reason; write one behind the bracket"
                remarks.append(rules["DOC002"].at(path, ignore.span, message))
            elif (path, ignore.line) not in used and any(
                known.startswith(code) for code in ignore.codes for known in active
            ):
                message = f"ignore of {', '.join(ignore.codes)} silences nothing; remove it"
                remarks.append(rules["DOC003"].at(path, ignore.span, message))
    return kept, [remark for remark in remarks if remark.code in active]
