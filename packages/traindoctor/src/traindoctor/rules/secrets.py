"""Secrets that are written down: tokens and keys in code, scripts, settings, images and .env files.

A value is a secret by its shape (`hf_...`, `AKIA...`) wherever it stands, or by the name it is given
(`WANDB_API_KEY`) where it looks drawn at random. No message repeats the value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from traindoctor.line_files import DockerFile, EnvFile
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.shell_file import ShellFile
from traindoctor.types import Finding, Kind, Severity, Span
from traindoctor.variables import variables_of
from traindoctor.yaml_file import YamlFile

_SHAPES = re.compile(
    r"(?<![\w-])(?:"
    r"hf_[A-Za-z0-9]{30,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|github_pat_\w{40,}"
    r"|glpat-[\w-]{20,}"
    r"|sk-(?:ant-|proj-)?[\w-]{32,}"
    r"|AIza[\w-]{35}"
    r"|xox[abpr]-[\w-]{20,}"
    r"|wandb_v1_\w{30,}"
    r")(?![\w-])"
    r"|-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"
)
"""Beginnings that the providers gave their tokens so that they can be found."""
_NAMED = re.compile(
    r"(?:^|_)(?:api_?key|(?:api|auth|access|hf|hub|huggingface|github|gh|git|wandb|bot|bearer|refresh|slack)_?token"
    r"|secret(?:_?(?:access|api))?(?:_?key)?|access_?key|private_?key|client_?secret|account_?key|passw(?:or)?d)$",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"your|x{4,}|example|change.?me|placeholder|dummy|fake|redacted|insert|replace|secret|password|token"
    r"|\.\.\.|\*{3}|[<>{}$`\s]|^(?:/|~|\./|file:|https?:)",
    re.IGNORECASE,
)
_MIN_RANDOM = 16
_TEMPLATES = re.compile(r"example|sample|template|dist$", re.IGNORECASE)


def _has_shape(value: str) -> bool:
    match = _SHAPES.search(value)
    return match is not None and not re.search(
        r"x{6,}|0{8,}|your|example|placeholder|dummy|fake", match[0], re.IGNORECASE
    )


def _is_secret(name: str, value: str) -> bool:
    """Whether a value given to this name is a real secret and no placeholder, path or reference."""
    if not _NAMED.search(name) or _PLACEHOLDER.search(value) or len(set(value)) < 6:
        return False
    if re.search(r"passw", name, re.IGNORECASE):
        return True
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return len(value) >= _MIN_RANDOM and mixed and re.fullmatch(r"[\w+/=.:-]+", value) is not None


@rule(
    *Kind,
    code="SEC001",
    name="secret-in-a-file",
    severity=Severity.ERROR,
    summary="A token, key or password is written into a file",
    why="Whoever gets the repository, the image or its build history gets the account. ENV and ARG stay readable in "
    "every layer (`docker history`), exported variables in every job script that is copied, and git keeps what was "
    "once committed after it is deleted.",
    effect="Qualitative: foreign jobs and downloads on your account, until the key is revoked. The value is never "
    "printed by the doctor. Silent about a .env file that git ignores, and about examples and templates.",
    source="Docker docs, build checks (SecretsUsedInArgOrEnv) and build secrets; GitHub docs, removing sensitive data",
    remedy="Revoke it first. Then read it from the environment of the job, from `huggingface-cli login` or "
    "`wandb login`, from RUN --mount=type=secret, or from a .env file that git ignores. There is no fix: the journal "
    "would keep a copy.",
    bad='ENV HF_TOKEN=hf_ + 34 letters\nos.environ["WANDB_API_KEY"] = "40 hex digits"',
    good='RUN --mount=type=secret,id=hf,env=HF_TOKEN python fetch.py\nkey = os.environ["WANDB_API_KEY"]',
)
def written_secret(file: Any, about: Rule) -> Iterator[Finding]:
    if _TEMPLATES.search(PurePosixPath(file.path).name):
        return
    seen: set[int] = set()
    for what, span in (*_named(file), *_shaped(file)):
        if span.line not in seen:
            seen.add(span.line)
            where = " and stays readable in the image" if isinstance(file, DockerFile) else ""
            message = f"{what} is written here{where}; revoke it and read it from the environment"
            kept = [f"gitignored:{file.path}"] if isinstance(file, EnvFile) else []
            yield about.at(file.path, span, message, unless=kept)


def _shaped(file: Any) -> Iterator[tuple[str, Span]]:
    for match in _SHAPES.finditer(file.source.text):
        if _has_shape(match[0]):
            yield "a secret", file.source.span(match.start(), match.end())


def _named(file: Any) -> Iterator[tuple[str, Span]]:
    for variable in variables_of(file):
        value = (variable.value or "").strip("\"'")
        if _is_secret(variable.name, value) or (_NAMED.search(variable.name) and _has_shape(value)):
            yield f"the secret {variable.name}", variable.span
    if isinstance(file, PythonFile):
        yield from _python(file)
    elif isinstance(file, YamlFile):
        yield from _yaml(file)
    elif isinstance(file, DockerFile):
        yield from _docker(file)
    elif isinstance(file, ShellFile):
        yield from _shell(file)


def _python(file: PythonFile) -> Iterator[tuple[str, Span]]:
    """`api_key = "..."`, `login(token="...")`, `{"password": "..."}`."""
    for node in file.of(ast.Constant):
        if not isinstance(node.value, str) or not 6 <= len(node.value) <= 200:
            continue
        name = _name_given(file, node)
        if name and _is_secret(name, node.value):
            yield f"the secret {name}", file.span(node)


def _name_given(file: PythonFile, node: ast.Constant) -> str:
    parent = file.parents.get(node)
    if isinstance(parent, ast.Assign | ast.AnnAssign):
        target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
        return (dotted(target) or "").rsplit(".", 1)[-1]
    if isinstance(parent, ast.keyword):
        called = dotted(getattr(file.parents[parent], "func", parent)) or ""
        if parent.arg == "key" and called.endswith("wandb.login"):
            return "api_key"
        return parent.arg or ""
    if isinstance(parent, ast.Dict):
        for key, value in zip(parent.keys, parent.values, strict=True):
            if value is node and isinstance(key, ast.Constant):
                return str(key.value)
    return ""


def _yaml(file: YamlFile) -> Iterator[tuple[str, Span]]:
    for entry in file.entries:
        if entry.scalar and not entry.name.isupper() and _is_secret(entry.name, entry.scalar):
            yield f"the secret {entry.name}", file.span(entry.key_node)


def _docker(file: DockerFile) -> Iterator[tuple[str, Span]]:
    for instruction in file.instructions:
        match = re.match(r"(\w+)=[\"']?([^\s\"']+)", file.body(instruction))
        if instruction.name == "ARG" and match and _is_secret(match[1], match[2]):
            yield f"the secret {match[1]}", file.span(instruction.start, instruction.end)


def _shell(file: ShellFile) -> Iterator[tuple[str, Span]]:
    """`wandb login KEY`, `huggingface-cli login --token KEY`, `program --api-key KEY`."""
    for command in file.commands:
        words = command.words
        for index, word in enumerate(words[1:], 1):
            flag, equals, given = word.plain.partition("=")
            if equals and flag.startswith("-"):
                name, value = flag, given
            else:
                name, value = words[index - 1].plain, word.plain
            logs_in = command.name == "wandb" and name == "login"
            option = name.startswith("--") and name.lstrip("-").replace("-", "_")
            if (logs_in and _is_secret("api_key", value)) or (option and _is_secret(option, value)):
                yield "a secret on the command line", file.word_span(word)
