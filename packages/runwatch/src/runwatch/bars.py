"""Progress bars of tqdm, rich and others in a line: what is done, of how much, how fast, and the rest of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TQDM = re.compile(
    r"(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<done>\d+)/(?P<total>\d+)\s*\[[\d:]+<[\d:?]+"
    r"(?:,\s*(?P<rate>[\d.]+|\?)\s*(?P<unit>[a-zA-Z]+/s|s/[a-zA-Z]+))?(?P<rest>.*)"
)
_BLOCKS = re.compile(
    r"(?P<percent>\d{1,3})%\s*[━─╸╺╾▏▎▍▌▋▊▉█░▒▓]{2,}\s*(?P<done>\d+)/(?P<total>\d+)"
    r"(?:\s+(?P<rate>[\d.]+)\s*(?P<unit>[a-zA-Z]+/s|s/[a-zA-Z]+))?(?P<rest>.*)"
)
_OPEN = re.compile(
    r"(?P<done>\d+)(?:it|batch|step)s? \[[\d:]+,\s*(?P<rate>[\d.]+)?\s*(?P<unit>\w+/s|s/\w+)?(?P<rest>.*)"
)
_OTHER = re.compile(
    r"\b(?:valid\w*|val|eval\w*|test\w*|sanity|map|generat\w*|sampl\w*|predict\w*|shards?"
    r"|encod\w*|extract\w*|filter\w*|packing|inference|computing|class)\b",
    re.I,
)
_READING = re.compile(
    r"\b(?:load(?:ing)?|download\w*|tokeniz\w*|fetch\w*|preprocess\w*|cach(?:ing|ed)|scan\w*|reading)\b", re.I
)
"""Of the data, also of those for training."""
_EPOCHS = re.compile(r"epochs?\D{0,3}$|^\s*epochs?\b\D*$", re.I)
_LAST_NUMBER = re.compile(r"[A-Za-z]\D{0,8}(?<![\d.])(\d{1,5})\s*:?\s*$")
_DIGITS = re.compile(r"[\d.]+")


@dataclass(slots=True)
class Bar:
    """A bar and the texts around it."""

    label: str
    done: float
    total: float | None
    steps_per_second: float | None
    rest: str
    """What stands behind it, without what a narrow window cut off."""

    @property
    def has_loss(self) -> bool:
        return "oss" in self.label.lower() or "oss" in self.rest.lower()

    @property
    def plain_label(self) -> str:
        """The label without its numbers: the same for every redrawing."""
        return _DIGITS.sub("", self.label).strip()

    @property
    def epoch(self) -> float | None:
        """The whole number at the end of a label, as in `Train 3:`; it counts the bars."""
        match = _LAST_NUMBER.search(self.label)
        return float(match[1]) if match else None

    @property
    def is_other(self) -> bool:
        """Whether it counts something else than steps of training, such as batches of validation."""
        label = self.label.lower()
        is_other = _READING.search(label) or ("train" not in label and _OTHER.search(label))
        return bool(is_other) and "oss" not in label

    @property
    def counts_epochs(self) -> bool:
        return _EPOCHS.search(self.label) is not None and not self.has_loss


def find_bar(line: str) -> Bar | None:
    """The bar in a line, if there is one."""
    match = None
    if "%|" in line:
        match = _TQDM.search(line)
    elif "% " in line:
        match = _BLOCKS.search(line)
    elif "it [" in line:
        match = _OPEN.search(line)
    if match is None:
        return None
    held = match.groupdict()
    rest = whole_part(held["rest"]) if match.re is not _BLOCKS else held["rest"]
    total = float(held["total"]) if held.get("total") else None
    return Bar(line[: match.start()], float(held["done"]), total, _rate(held["rate"], held["unit"]), rest)


def whole_part(rest: str) -> str:
    """The postfix of a bar, and what was printed behind its closing bracket if that holds a loss.

    Without that bracket the window was too narrow, and the last number may be cut: it is dropped.
    """
    depth = 0
    for idx, letter in enumerate(rest):
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            behind = rest[idx + 1 :]
            return f"{rest[:idx]}  {behind}" if "oss" in behind else rest[:idx]
    return rest[: max(rest.rfind(","), 0)]


def _rate(rate: str | None, unit: str | None) -> float | None:
    if not rate or not unit or rate == "?" or not float(rate) > 0:
        return None
    return 1 / float(rate) if unit.startswith("s/") else float(rate)
