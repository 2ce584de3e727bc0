"""Reading one file: it is parsed once, all rules look at it, and what it tells about its program is kept."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from traindoctor.discovery import Found
from traindoctor.facts import gather
from traindoctor.ignores import Ignore, find_ignores
from traindoctor.line_files import DockerFile, EnvFile
from traindoctor.notebook import CellLines, NotebookSource
from traindoctor.python_file import PythonFile
from traindoctor.registry import all_rules, checks_for
from traindoctor.shell_file import ShellError, ShellFile
from traindoctor.source import MAX_BYTES, Source, UnreadableError, read_source
from traindoctor.syntax import CannotParseError
from traindoctor.types import Facts, Finding, Kind, Span
from traindoctor.yaml_file import YamlFile, YamlSyntaxError

_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
_PARSERS: dict[Kind, type] = {
    Kind.PYTHON: PythonFile,
    Kind.NOTEBOOK: PythonFile,
    Kind.SHELL: ShellFile,
    Kind.YAML: YamlFile,
    Kind.DOCKERFILE: DockerFile,
    Kind.ENV: EnvFile,
}
TRAINING_FAMILIES = frozenset(
    ["NCC", "DAT", "DDP", "OPT", "AMP", "CMP", "ATT", "MEM", "SYN", "LOS", "LRS", "CKP", "PTH", "MET"]
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


def digest(data: bytes) -> str:
    """A short name for these bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def parse(source: Source) -> Any:
    """The parsed file of a source; raises the parser's own error."""
    return _PARSERS[source.kind](source)


def examine_found(
    found: Found, codes: frozenset[str], place: str = "", data: bytes | None = None
) -> FileResult:
    """Read a file of the tree, unless its content is given, and run every rule over it."""
    if data is None:
        try:
            data = found.absolute.read_bytes()
        except OSError as error:
            remark = _unread(found.relative, 1, f"cannot be read: {error.strerror}")
            return FileResult(found.relative, [remark])
    return examine(found.relative, found.kind, data, codes, place)


def examine(path: str, kind: Kind, data: bytes, codes: frozenset[str], place: str = "") -> FileResult:
    """Parse one file once and run every rule over it; `place` is its path in the project around."""
    result = FileResult(path, digest=digest(data))
    if len(data) > MAX_BYTES and kind is not Kind.NOTEBOOK:
        message = f"{len(data):,} bytes; files over {MAX_BYTES:,} are not read"
        result.findings.append(_unread(path, 1, message))
        return result
    try:
        source = read_source(path, kind, data)
        if isinstance(source, NotebookSource):
            result.cells = source.lines
            result.findings += _unread_cells(source)
        file = parse(source)
    except UnreadableError as error:
        result.findings.append(_unread(path, 1, f"cannot be read: {error}"))
        return result
    except CannotParseError as error:
        message = f"{_PYTHON} cannot parse it ({error}); nothing was checked"
        result.findings.append(_unread(path, error.line, message))
        return result
    except ShellError as error:
        result.findings.append(_unread(path, 1, f"cannot be followed: {error}"))
        return result
    except YamlSyntaxError as error:
        template = " (it looks like a template)" if re.search(rb"\{\{|\{%", data) else ""
        result.findings.append(
            _unread(path, error.line, f"not valid YAML: {error}{template}; nothing was checked")
        )
        return result
    if kind is Kind.SHELL and (problem := shell_problem(source.text)):
        line, text = problem
        result.findings.append(_unread(path, line, f"bash -n rejects it: {text}"))
    result.facts = gather(file, place or path)
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


def _unread(path: str, line: int, message: str) -> Finding:
    return all_rules()["DOC001"].at(path, Span(line, 1, line, 1), message)


def _unread_cells(source: NotebookSource) -> list[Finding]:
    """One remark about all cells of a notebook that are no Python; the others are read without them."""
    if not source.problems:
        return []
    (line, problem), *others = source.problems
    message = f"{_PYTHON} cannot parse this cell ({problem}); it was not checked"
    if others:
        message += f", nor were {len(others)} more of {len(source.cells)} code cells"
    return [_unread(source.path, line, message)]


def shell_problem(text: str) -> tuple[int, str] | None:
    """Line and message of `bash -n`, or None where it accepts the text or there is no bash or no bash script."""
    first = text.split("\n", 1)[0]
    bash = shutil.which("bash")
    if bash is None or (first.startswith("#!") and not re.search(r"\b(ba)?sh\b", first)):
        return None
    data = text.encode("utf-8", "surrogateescape")
    done = subprocess.run([bash, "-n"], input=data, capture_output=True, timeout=30, check=False)
    if done.returncode == 0:
        return None
    message = done.stderr.decode(errors="replace").strip().split("\n")[0]
    match = re.search(r"line (\d+): (.*)", message)
    return (int(match[1]), match[2]) if match else (1, message)
