"""Numbers in shell scripts: fractions where only whole numbers work, exponents that bc cannot read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traindoctor.registry import Rule, rule
from traindoctor.shell_file import ShellFile
from traindoctor.types import Finding, Kind, Severity

BASH = "GNU Bash manual"
_FLOAT = re.compile(r"(?<![\w.$])(?:\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE]-\d+|\.\d+)(?![\w.])")


@rule(
    Kind.SHELL,
    code="SHL004",
    name="fraction-in-integer-arithmetic",
    severity=Severity.ERROR,
    summary="A fraction in shell arithmetic or an integer test",
    why="Shell arithmetic knows whole numbers only: `$((0.5 * n))` is a syntax error, `[ 0.5 -gt 0 ]` "
    "'integer expression "
    "expected', and both show only when that line runs.",
    effect="Checked with bash 5.2: exit code 1 for the first, 2 for the second.",
    source=f"{BASH}, Shell Arithmetic",
    remedy='$(python -c "print(0.5 * $n)") or awk.',
    bad="STEPS=$((EPOCHS * 0.5))",
    good='STEPS=$(awk "BEGIN {print int($EPOCHS * 0.5)}")',
)
def fraction(file: ShellFile, about: Rule) -> Iterator[Finding]:
    constants = {name: value for name, value in file.constants().items() if _FLOAT.fullmatch(value.strip())}
    text = file.source.text
    for start, end in _arithmetic(file):
        inner = re.sub(r"\$\([^()]*\)", "", text[start:end])
        literal = _FLOAT.search(inner)
        used = next((name for name in constants if re.search(rf"(?<![\w]){name}(?![\w])", inner)), None)
        if literal or used:
            what = literal[0] if literal else f"{used} ({constants[used or '']})"
            yield about.at(
                file.path,
                file.span(start, end),
                f"{what} in integer arithmetic: the shell knows no fractions",
            )
    for command in file.commands:
        if command.name not in ("[", "[[", "test"):
            continue
        words = command.words
        for index, word in enumerate(words):
            if word.raw in ("-gt", "-lt", "-ge", "-le", "-eq", "-ne") and 0 < index < len(words) - 1:
                for side in (words[index - 1], words[index + 1]):
                    name = re.fullmatch(r"\$\{?(\w+)\}?", side.plain)
                    value = constants.get(name[1], "") if name else side.plain
                    if _FLOAT.fullmatch(value):
                        message = f"{side.raw} ({value}) in {word.raw}: integer expression expected"
                        yield about.at(file.path, file.word_span(side), message)


def _arithmetic(file: ShellFile) -> Iterator[tuple[int, int]]:
    """Ranges of `$((...))` and `((...))` in code, not in comments, single quotes or quoted here-documents."""
    text = file.source.text
    for command in file.commands:
        words = [
            *command.words,
            *(a.value for a in command.assignments),
            *(w for _, w in command.redirections),
        ]
        for word in words:
            if word.raw.startswith("((") and word.raw.endswith("))"):
                yield word.start, word.end
            if word.raw.startswith("'"):
                continue
            for match in re.finditer(r"\$\(\((?:[^()]|\([^()]*\))*\)\)", word.raw):
                inside_quote = (
                    word.raw[: match.start()].count("'") % 2 and '"' not in word.raw[: match.start()]
                )
                if not inside_quote and text[word.start + match.start()] == "$":
                    yield word.start + match.start(), word.start + match.end()


@rule(
    Kind.SHELL,
    code="SHL005",
    name="exponent-given-to-bc",
    severity=Severity.ERROR,
    summary="bc is given a number such as 5e-5",
    why="bc does not know exponents: it reads `5e-5` as a name and prints a syntax error, and the variable "
    "stays empty.",
    effect="POSIX bc's grammar has no exponents; GNU bc prints '(standard_in) 1: syntax error'.",
    source="POSIX bc, lexical conventions",
    remedy='LR=$(python -c "print($BASE_LR * $SCALE)").',
    bad='LR=$(echo "5e-5 * 2" | bc -l)',
    good='LR=$(python -c "print(5e-5 * 2)")',
)
def exponent_for_bc(file: ShellFile, about: Rule) -> Iterator[Finding]:
    exponent = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d+(?![\w.])")
    constants = {name: value for name, value in file.constants().items() if exponent.fullmatch(value.strip())}
    for start, end, command_text in _bc_inputs(file):
        literal = exponent.search(command_text)
        used = next((n for n in constants if re.search(rf"\$\{{?{n}\b", command_text)), None)
        if literal or used:
            what = literal[0] if literal else f"${used} ({constants[used or '']})"
            yield about.at(file.path, file.span(start, end), f"bc cannot read {what}: it knows no exponents")


def _bc_inputs(file: ShellFile) -> Iterator[tuple[int, int, str]]:
    """Text that reaches bc: `echo ... | bc` and `bc <<< ...`, at the top or inside `$(...)`."""
    for pipeline in file.pipelines():
        last = pipeline[-1]
        if last.name == "bc":
            given = " ".join(w.raw for c in pipeline[:-1] for w in c.words[1:])
            given += " ".join(w.raw for operator, w in last.redirections if operator == "<<<")
            yield pipeline[0].start, last.end, given
    for command in file.commands:
        for word in [*command.words, *(a.value for a in command.assignments)]:
            for match in re.finditer(
                r"\$\(\s*(?:echo|printf)\s+((?:[^()|]|\$\(\([^)]*\)\))*)\|\s*bc\b[^)]*\)", word.raw
            ):
                if not word.raw.startswith("'"):
                    yield word.start + match.start(), word.start + match.end(), match[1]
            for match in re.finditer(r"\$\(\s*bc\b[^)]*<<<\s*([^)]*)\)", word.raw):
                if not word.raw.startswith("'"):
                    yield word.start + match.start(), word.start + match.end(), match[1]
