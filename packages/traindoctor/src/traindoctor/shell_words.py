"""Position-exact tokens of a shell script: words, operators, here-documents; comments are dropped.

Only what rules need is understood, but nothing is misread: quotes, `$(...)`, backticks, `${...}`, `$((...))`, line
continuations and here-documents are skipped as units, so their inside is never taken for code of the outer script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPERATORS = (
    "&&",
    "||",
    ";;&",
    ";&",
    ";;",
    "|&",
    "&>>",
    "&>",
    "<<<",
    "<<-",
    "<<",
    ">>",
    "<>",
    ">|",
    "<&",
    ">&",
)
_SINGLE = "|&;()<>\n"


class ShellError(Exception):
    """The script cannot be followed (an open quote, for example)."""


@dataclass(frozen=True)
class Word:
    """One word as written, between two positions of the script."""

    start: int
    end: int
    raw: str

    @property
    def literal(self) -> str | None:
        """The value where it holds no expansion, without its quotes; None otherwise."""
        return literal(self.raw)

    @property
    def plain(self) -> str:
        """The value with quotes removed and expansions left as written."""
        return re.sub(r"['\"]", "", self.raw)


@dataclass(frozen=True)
class Operator:
    """`|`, `&&`, `;`, a newline, a redirection and so on."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class HereDocument:
    """The body of `<< WORD`; quoted: nothing in it is expanded."""

    start: int
    end: int
    quoted: bool
    operator_start: int


@dataclass
class Tokens:
    """The tokens of a script in order, and its here-documents and comments."""

    items: list[Word | Operator] = field(default_factory=list)
    documents: list[HereDocument] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)


def literal(raw: str) -> str | None:
    """The value of a word without expansions, or None."""
    out: list[str] = []
    position = 0
    while position < len(raw):
        char = raw[position]
        if char == "'":
            end = raw.find("'", position + 1)
            if end < 0:
                return None
            out.append(raw[position + 1 : end])
            position = end + 1
        elif char == '"':
            end = skip_double(raw, position)
            inner = raw[position + 1 : end - 1]
            if "$" in inner or "`" in inner:
                return None
            out.append(inner.replace('\\"', '"'))
            position = end
        elif char in "$`":
            return None
        elif char == "\\":
            out.append(raw[position + 1 : position + 2].replace("\n", ""))
            position += 2
        else:
            out.append(char)
            position += 1
    return "".join(out)


def skip_single(text: str, start: int) -> int:
    """Position after a single-quoted string."""
    end = text.find("'", start + 1)
    if end < 0:
        raise ShellError("a single quote is never closed")
    return end + 1


def skip_double(text: str, start: int) -> int:
    """Position after a double-quoted string."""
    position = start + 1
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
        elif char == '"':
            return position + 1
        elif char in "$`":
            position = skip_expansion(text, position)
        else:
            position += 1
    raise ShellError("a double quote is never closed")


def skip_expansion(text: str, start: int) -> int:
    """Position after `$...` or a backtick substitution that begins at `start`."""
    if text[start] == "`":
        position = start + 1
        while position < len(text) and text[position] != "`":
            position += 2 if text[position] == "\\" else 1
        if position >= len(text):
            raise ShellError("a backtick is never closed")
        return position + 1
    if text.startswith("$((", start):
        end = _skip_arithmetic(text, start)
        if end is not None:
            return end
    if text.startswith("$(", start):
        return _skip_command(text, start + 2)
    if text.startswith("${", start):
        return _skip_brace(text, start + 2)
    if text.startswith("$'", start):
        position = start + 2
        while position < len(text) and text[position] != "'":
            position += 2 if text[position] == "\\" else 1
        return position + 1
    match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])?").match(text, start)
    return match.end() if match else start + 1


def _skip_arithmetic(text: str, start: int) -> int | None:
    depth, position = 2, start + 3
    while position < len(text):
        char = text[position]
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return position + 1
        elif char in "$`":
            position = skip_expansion(text, position)
            continue
        elif char == "\n" and depth == 0:
            return None
        position += 1
    return None


def _skip_brace(text: str, position: int) -> int:
    while position < len(text):
        char = text[position]
        if char == "}":
            return position + 1
        if char == "\\":
            position += 2
        elif char == "'":
            position = skip_single(text, position)
        elif char == '"':
            position = skip_double(text, position)
        elif char in "$`":
            position = skip_expansion(text, position)
        else:
            position += 1
    raise ShellError("${ is never closed")


def _skip_command(text: str, position: int) -> int:
    """Position after the `)` that closes a command substitution; its inside is tokenized to find it."""
    tokens = Tokens()
    return _scan(text, position, tokens, closing=True)


def tokenize(text: str, start: int = 0, end: int | None = None) -> Tokens:
    """Tokens of `text[start:end]` with positions in `text`."""
    tokens = Tokens()
    _scan(text if end is None else text[:end], start, tokens, closing=False)
    return tokens


def _scan(text: str, position: int, tokens: Tokens, closing: bool) -> int:
    depth, pending, case_depth = 0, [], 0
    while position < len(text):
        char = text[position]
        if char in " \t\r":
            position += 1
        elif text.startswith(("\\\n", "\\\r\n"), position):
            position += 2 if text[position + 1] == "\n" else 3
        elif char == "#":
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            tokens.comments.append((position, text[position:end].rstrip("\r")))
            position = end
        elif char in _SINGLE:
            operator = next((op for op in _OPERATORS if text.startswith(op, position)), char)
            if text.startswith("((", position) and _command_position(tokens):
                after = _skip_arithmetic("$" + text[position:], 0)
                if after is not None:
                    end = position + after - 1
                    tokens.items.append(Word(position, end, text[position:end]))
                    position = end
                    continue
            if operator in ("<", ">") and text.startswith("(", position + 1):
                end = _skip_command(text, position + 2)
                tokens.items.append(Word(position, end, text[position:end]))
                position = end
                continue
            if closing and operator == ")" and depth == 0 and case_depth == 0:
                return position + 1
            if operator[0] in "<>" and tokens.items:
                last = tokens.items[-1]
                # The 2 of `2>&1` is a file descriptor, not an argument.
                if isinstance(last, Word) and last.end == position and last.raw.isdigit():
                    tokens.items.pop()
            depth += {"(": 1, ")": -1 if depth > 0 else 0}.get(operator, 0)
            tokens.items.append(Operator(position, position + len(operator), operator))
            position += len(operator)
            if operator in ("<<", "<<-"):
                word, position = _here_word(text, position, tokens)
                pending.append((word, operator == "<<-", tokens.items[-2].start))
            elif operator == "\n" and pending:
                position = _read_documents(text, position, pending, tokens)
                pending = []
        else:
            word = _word(text, position)
            if word.raw == "case" and _command_position(tokens):
                case_depth += 1
            elif word.raw == "esac" and case_depth and _command_position(tokens):
                case_depth -= 1
            tokens.items.append(word)
            position = word.end
    if closing:
        raise ShellError("$( is never closed")
    return position


def _command_position(tokens: Tokens) -> bool:
    if not tokens.items:
        return True
    last = tokens.items[-1]
    if isinstance(last, Operator):
        return last.text in ("\n", ";", "&&", "||", "|", "&", "(", ")", ";;", ";&", ";;&")
    return last.raw in ("if", "then", "do", "else", "elif", "while", "until", "{", "!", "in")


def _word(text: str, start: int) -> Word:
    position = start
    while position < len(text):
        char = text[position]
        if char in " \t\r\n|&;()<>":
            # `name=(a b)` and `name+=(a b)` are one word: an array.
            if char == "(" and text[start:position].endswith("=") and position > start:
                position = _skip_command(text, position + 1)
                continue
            # Extended patterns such as @(a|b).
            if char == "(" and position > start and text[position - 1] in "@?*+!":
                position = _skip_command(text, position + 1)
                continue
            break
        if char == "\\":
            position += 2
        elif char == "'":
            position = skip_single(text, position)
        elif char == '"':
            position = skip_double(text, position)
        elif char in "$`":
            position = skip_expansion(text, position)
        else:
            position += 1
    return Word(start, min(position, len(text)), text[start:position])


def _here_word(text: str, position: int, tokens: Tokens) -> tuple[Word, int]:
    while position < len(text) and text[position] in " \t":
        position += 1
    word = _word(text, position)
    if not word.raw:
        raise ShellError("<< without a word")
    tokens.items.append(word)
    return word, word.end


def _read_documents(text: str, position: int, pending: list[tuple[Word, bool, int]], tokens: Tokens) -> int:
    for word, dashed, operator_start in pending:
        ending = re.sub(r"['\"\\]", "", word.raw)
        start = position
        while True:
            if position >= len(text):
                tokens.documents.append(HereDocument(start, position, ending != word.raw, operator_start))
                break
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            line = text[position:end].rstrip("\r")
            if (line.lstrip("\t") if dashed else line) == ending:
                tokens.documents.append(HereDocument(start, position, ending != word.raw, operator_start))
                position = min(end + 1, len(text))
                break
            position = end + 1
    return position
