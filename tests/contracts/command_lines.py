"""Commands that the pages show: where they stand, and whether their options and settings exist."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "packages").glob("*/docs/*.md")),
]
PROGRAMS = ("mmldlm", "runwatch", "traindoctor")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|checked: [^>]+) -->\n)?^```(?P<language>bash|python)\n(?P<text>.*?)^```",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is what the comment above it says: run, checked: reason, or nothing."""

    page: Path
    language: str
    mark: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a page in one language."""
    matches = BLOCK.finditer(page.read_text())
    return [Block(page, language, m["mark"] or "", m["text"]) for m in matches if m["language"] == language]


def command_lines(text: str) -> Iterator[list[str]]:
    """Words of each call of our programs in shell text; what follows a pipe or redirection is left out."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a here-document or half a quotation
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["torchrun"] and "-m" in words:
            words = words[words.index("-m") + 1 :]
        if words and words[0] in PROGRAMS:
            ends = [
                at for at, word in enumerate(words) if word in ("|", "&&", ";", "&", ">", ">>", "2>&1", "...")
            ]
            yield words[: ends[0]] if ends else words


def shown_commands(page: Path) -> list[list[str]]:
    """Every command of a page: in fenced and indented blocks, and in code spans that begin with one."""
    text = page.read_text()
    spans = re.findall(r"`((?:mmldlm|runwatch|traindoctor) [^`]+)`", text)
    indented = re.findall(r"^    .*(?:\\\n.*)*", text, flags=re.MULTILINE)
    fenced = [block.text for block in blocks(page, "bash")]
    return [words for piece in (*fenced, *indented, *spans) for words in command_lines(piece)]


@cache
def _program(name: str) -> Any:
    from traindoctor.cli import app as doctor

    from mmldlm.cli.main import app

    program = typer.main.get_command(doctor if name == "traindoctor" else app)
    return program.commands["monitor"] if name == "runwatch" else program


@cache
def setting_names() -> set[str]:
    """section.key of every setting."""
    from mmldlm.config import settings

    names = set()
    for section in fields(settings.Config):
        kind = getattr(settings, str(section.type), None)
        names |= (
            {f"{section.name}.{item.name}" for item in fields(kind)} if is_dataclass(kind) else {section.name}
        )
    return names


def mistakes(words: list[str]) -> list[str]:
    """What is wrong with a command line: an unknown command, option or setting."""
    if "--" in words:  # a command that starts another one of ours
        at = words.index("--")
        return mistakes(words[:at]) + mistakes([words[0], *words[at + 1 :]])
    command, rest = _program(words[0]), words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0].isupper() or rest[0].endswith(
            ":"
        ):  # COMMAND stands for any; `mmldlm launch: ...` is a message
            return []
        if rest[0] not in command.commands:
            return [f"no command {rest[0]!r}"]
        command, rest = command.commands[rest[0]], rest[1:]
    known = {word for param in command.params for word in (*param.opts, *param.secondary_opts)} | {"--help"}
    problems = []
    for word in rest:
        if word.startswith("-") and not re.match(r"-\d|-$", word) and word.split("=")[0] not in known:
            problems.append(f"no option {word!r}")
        if (match := re.match(r"([a-z_]+\.[a-z_0-9.]+)=", word)) and not _is_setting(match[1]):
            problems.append(f"no setting {match[1]!r}")
    return problems


def _is_setting(name: str) -> bool:
    return any(name == known or name.startswith(f"{known}.") for known in setting_names())
