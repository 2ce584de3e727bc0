"""One cell as Python: what only IPython understands gets a stand-in, line for line, and can be put back.

`%magic`, `!shell`, `name?` and their like count only where a statement may begin; inside a string or a bracket the same
characters are ordinary text. A cell that Python reads as it is has none of them.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_TOKEN = re.compile(
    r"""(?P<skipped>\#[^\r\n]*
      | \"\"\"(?:\\.|[^\\])*?(?:\"\"\"|\Z) | '''(?:\\.|[^\\])*?(?:'''|\Z)
      | "(?:\\(?:\r\n|.)|[^"\\\r\n])*"?    | '(?:\\(?:\r\n|.)|[^'\\\r\n])*'?
      | \\(?:\r\n|\r|\n))
      | (?P<opening>[(\[{]) | (?P<closing>[)\]}]) | (?P<end>\r\n|\r|\n)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\s*[!%?,;/]")
"""Never the beginning of a Python statement."""
_VARIABLE = re.compile(r"(\s*)%(?:set_)?env\s+([A-Za-z_]\w*)(?:\s*=\s*|\s+)([^\s={$][^{$]*?)\s*$")
"""`%env NAME=value`, where nothing is put into the value."""
_ASSIGNED = re.compile(r"(\s*[\w.,*\[\] ]+=\s*)[!%]")
_HELP = re.compile(r"\s*[%\w.*\[\]]+\?{1,2}\s*(?:#.*)?$")
_BARE = re.compile(
    r"\s*(?:pip|conda|mamba|cd|ls|ll|mkdir|rmdir|cp|mv|rm|cat|less|env|time|timeit|matplotlib|load_ext|autoreload)"
    r"\s+(?!(?:in|is|if|and|or|not|for)\b)[-\w./~${'\"]"
)
"""Magics that IPython takes without the percent sign."""
_CELL_MAGIC = re.compile(r"\s*%%\s*(\w*)")
_PYTHON_CELLS = frozenset({"time", "timeit", "capture", "prun", "memit", "debug", "wandb"})
"""Cell magics that run the rest of the cell here, as Python; below all others stands something else."""
STAND_IN = "get_ipython()"
"""An expression whose value nobody can know."""


@dataclass(frozen=True)
class MaskedCell:
    """A cell that Python can parse."""

    lines: tuple[str, ...]
    """With their ends; the last one has an end in any case."""
    hidden: dict[int, str]
    """Index of a line -> what really stands there, without its end."""
    shifts: dict[int, int]
    """Index of a line -> how far its text was moved to the right."""
    problem: tuple[int, str] | None
    """Line and message where Python cannot parse the cell even so; then all of it is hidden."""

    @property
    def text(self) -> str:
        """The stand-in for the cell."""
        return "".join(self.lines)


def mask_cell(text: str, tag: str) -> MaskedCell:
    """The cell with stand-ins that name the hidden line, such as `get_ipython()  # <tag> 3: !pip install torch`.

    The tag is a word that does not occur in the notebook, so that every stand-in is found again.
    """
    lines = split_lines(text)
    if not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if _problem(lines) is None:
        return MaskedCell(tuple(lines), {}, {}, None)
    magics = _cell_magics(lines)
    masked = _masked(lines, magics, tag)
    problem = _problem(masked.lines)
    if problem is None:
        return masked
    everything = _masked(lines, dict.fromkeys(range(len(lines)), ""), tag)
    return MaskedCell(everything.lines, everything.hidden, everything.shifts, problem)


def split_lines(text: str) -> list[str]:
    """The lines of a cell with their ends, as Python counts them."""
    return [part for part in _LINE.findall(text) if part]


def _problem(lines: list[str] | tuple[str, ...]) -> tuple[int, str] | None:
    """Line and reason why Python cannot parse this; `await` outside of functions is allowed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("".join(lines))
    except SyntaxError as error:
        return max(error.lineno or 1, 1), error.msg
    except (ValueError, RecursionError, MemoryError) as error:
        return 1, str(error) or type(error).__name__
    return None


def _masked(lines: list[str], magics: dict[int, str], tag: str) -> MaskedCell:
    """Put the beginning that a line keeps, and a comment with its text, in place of each magic line."""
    masked, hidden, shifts = list(lines), {}, {}
    for index, kept in magics.items():
        content = lines[index].rstrip("\r\n")
        stand_in = f"{kept}# {tag} {index}: "
        # The parser refuses some characters even in a comment; one stands for one, so that columns stay.
        shown = content.encode("ascii", "replace").decode().replace("\0", "?").replace("\f", " ")
        masked[index] = stand_in + shown + lines[index][len(content) :]
        hidden[index], shifts[index] = content, len(stand_in)
    return MaskedCell(tuple(masked), hidden, shifts, None)


def _cell_magics(lines: list[str]) -> dict[int, str]:
    """Index of each line that is not Python -> the Python that must stand before the comment in its place."""
    first = next((index for index, line in enumerate(lines) if line.strip()), 0)
    named = _CELL_MAGIC.match(lines[first])
    if named and named[1] not in _PYTHON_CELLS:
        return dict.fromkeys(range(len(lines)), "")
    text, starts = "".join(lines), [0, *accumulate(map(len, lines))]
    magics: dict[int, str] = {}
    index = 0
    while index < len(lines):
        kept = _kept(lines[index])
        if kept is None:
            index = bisect_left(starts, _statement_end(text, starts[index]))
            continue
        magics[index] = kept
        while lines[index].rstrip("\r\n").endswith("\\") and index + 1 < len(lines):
            index += 1
            magics[index] = ""
        index += 1
    return magics


def _kept(line: str) -> str | None:
    """What a magic line leaves to Python; None for a line that is Python."""
    variable = _VARIABLE.match(line)
    if variable:
        return f'{variable[1]}import os; os.environ["{variable[2]}"] = {variable[3]!r}  '
    assigned = _ASSIGNED.match(line)
    if assigned:
        return f"{assigned[1]}{STAND_IN}  "
    if _ESCAPE.match(line) or _HELP.match(line) or _BARE.match(line):
        return f"{line[: len(line) - len(line.lstrip())]}{STAND_IN}  "
    return None


def _statement_end(text: str, start: int) -> int:
    """Where the statement that begins here ends with its line; brackets and strings are followed."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.lastgroup == "opening") - (token.lastgroup == "closing")
        if token.lastgroup == "end" and depth <= 0:
            return token.end()
    return len(text)
