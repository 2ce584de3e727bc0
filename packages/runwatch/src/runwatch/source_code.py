"""Programs print themselves into their logs: lines of Python and of settings are no numbers of a run."""

from __future__ import annotations

import re

_OPENS = re.compile(r"\s*(?:import \w|from [\w.]+ import |def \w+\(|class \w+|@\w+|if __name__|async def )")
_LOOKS = re.compile(
    r"""\s*(?:(?:import|from|def|class|return|if|elif|else|for|while|with|try|except|raise|assert|yield|lambda|print\(|@|\#|\"\"\"|''')
    |[\w.\[\], ]+\s*(?::\s*[\w\[\], .|]+)?\s*[-+*/]?=\s*(?![=])[^,]*$    # an assignment, with or without a type
    |[\w.]+\(.*\)?\s*$                                                     # a call
    |.*[({\[,:\\]\s*$                                                      # goes on in the next line
    |[)\]}]+,?\s*$)""",
    re.X,
)
_ALWAYS = re.compile(
    r"\s*(?:(?:def|class) \w+.*:\s*(?:#.*)?$|(?:import|from) [\w.]+|return\b|(?:if|elif|while|for) .+:\s*(?:\#.*)?$"
    r"|print\(|raise \w+\(|\w+ [-+*/]= )"
    r"|\s*[\w.\[\]']+(?:, [\w.\[\]']+)* [-+*/]?= (?!(?:nan|inf|NaN)\b)[A-Za-z_][\w.]*(?:[(\[]| [-+*/] |$)"
    r"|.*\bf[\"'].*\{.*\}"
)
_TYPED = re.compile(
    r"\s+[\w.]+\s*:\s*(?:int|float|str|bool|list|dict|tuple)\b.*=|\s+[\w.\[\]]+ = [-+\w.\[\]()]+\s*(?:#.*)?$"
)
_LEAVE = 3


class CodeGuard:
    """Notices where source code begins and where it is over."""

    def __init__(self) -> None:
        self._inside = False
        self._num_lines = 0
        self._confirmed = 0

    def is_code(self, line: str) -> bool:
        """Whether a line is a part of a program; inside one, everything that looks like it is."""
        if _OPENS.match(line):
            self._num_lines += 1
            self._inside, self._confirmed = True, 0
            return True
        if _ALWAYS.match(line) or _TYPED.match(line):
            return True
        return self._inside and _LOOKS.match(line) is not None

    def confirm(self) -> None:
        """A line of numbers was read; after some of them the program is over."""
        self._confirmed += 1
        if self._confirmed >= _LEAVE:
            self._inside, self._num_lines = False, 0
