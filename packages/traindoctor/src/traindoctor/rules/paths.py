"""Paths of one person's machine in code and scripts; in settings files a path is where it belongs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.shell_file import ShellFile
from traindoctor.types import Finding, Kind, Severity, Span

_HOME = re.compile(
    r"^/(?:private/)?(?:home|Users)/(?!runner\b|user\b|username\b|your|<|\$|\{|ubuntu/?$)[\w.@-]+/"
)
_CLUSTER = re.compile(
    r"^/(?:inspire|gpfs|lustre|nfs|scratch|netscratch|fsx|raid|ceph|mnt|data\d*|storage|cluster|work|project[s]?|share[d]?|vol\d*)"
    r"/[\w.@+-]+/[\w.@+-]+/"
)
_IN_IMAGE = re.compile(r"(?:^|/)(?:docker/|[\w.-]*entrypoint[\w.-]*$)", re.IGNORECASE)
"""Scripts that run inside an image, whose folders its Dockerfile makes."""
_PLACEHOLDER = re.compile(r"path/to|your|example|<|>|\*|xxx|foo|/\.\.\.", re.IGNORECASE)


def is_personal(text: str) -> bool:
    """Whether a text is an absolute path below somebody's home or a cluster's storage."""
    if len(text) > 400 or "\n" in text or " " in text.strip():
        return False
    return bool(_HOME.match(text) or _CLUSTER.match(text)) and not _PLACEHOLDER.search(text)


@rule(
    Kind.PYTHON,
    Kind.SHELL,
    code="PTH001",
    name="path-of-one-machine",
    severity=Severity.WARNING,
    summary="A path of one person's machine is written into the code",
    why="Nobody else can run it, and on another cluster it silently falls back or creates folders in strange places.",
    effect="No number was measured: the first run of every new user fails.",
    source="The Twelve-Factor App, config",
    remedy='An argument or a variable with a relative default: ROOT="${ROOT:-$(dirname "$0")/..}".',
    bad="cd /home/alice/projects/model",
    good='cd "$(dirname "${BASH_SOURCE[0]}")/.."',
)
def personal_path(file: Any, about: Rule) -> Iterator[Finding]:
    seen: set[str] = set()
    for text, span in _texts(file):
        if is_personal(text) and text not in seen:
            seen.add(text)
            yield about.at(file.path, span, f"{text[:80]} exists on one machine only; make it a setting")


def _texts(file: Any) -> Iterator[tuple[str, Span]]:
    if isinstance(file, PythonFile):
        for node in file.of(ast.Constant):
            in_text = isinstance(file.parents.get(node), ast.Expr | ast.JoinedStr)
            if isinstance(node.value, str) and node.value.startswith("/") and not in_text:
                yield node.value, file.span(node)
        for joined in file.of(ast.JoinedStr):
            if joined.values and isinstance(joined.values[0], ast.Constant):
                yield str(joined.values[0].value) + "/x", file.span(joined)
    elif isinstance(file, ShellFile) and not _IN_IMAGE.search(file.path):
        for _, value, start, end in [*file.sbatch, *file.late_sbatch]:
            yield value.strip("\"'"), file.span(start, end)
        for command in file.commands:
            for word in [
                *command.words,
                *(a.value for a in command.assignments),
                *(w for _, w in command.redirections),
            ]:
                # A default such as ${DATA:-/mnt/me/data} can be overridden from outside.
                if ":-" not in word.raw and ":=" not in word.raw:
                    text = word.plain.split("=", 1)[-1] if "=" in word.plain else word.plain
                    for part in text.split(":"):
                        yield part + ("/" if part.count("/") == 2 else ""), file.word_span(word)
