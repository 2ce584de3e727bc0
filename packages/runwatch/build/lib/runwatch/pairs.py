"""Numbers with a name before them in a line of text: `loss: 2.5`, `lr=5e-05`, `time 120ms`, `'grad_norm': nan`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runwatch.records import CANONICAL, NAMES

_PAIR = re.compile(
    r"([A-Za-z_][\w/\-]*)['\"]?(\s*[:=]\s*|\s+)['\"]?(?:tensor\()?"
    r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|[nN][aA][nN]\b|[iI][nN][fF](?:inity)?\b|\.\d+))"
    r"\s*(%|ms\b|s(?![\w/])|GiB|GB|MiB|MB)?"
)
_TWO_WORDS = {alias.split(" ")[1] for aliases in NAMES.values() for alias in aliases if " " in alias}
_NEED_COLON = {
    "text",
    "latent",
    "memory",
    "mem",
    "update",
    "grad",
    "throughput",
    "accuracy",
    "acc",
    "time",
    "dt",
}
_UNITS = {"%": 0.01, "ms": 1e-3, "s": 1.0, "gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}


def contains_any(text: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words is in the text; a plain loop is several times faster here than any other way."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the number of one of our names stands in a line, and what its unit makes of it."""

    name: str
    start: int
    end: int
    factor: float


def find_pairs(text: str) -> list[Pair]:
    """Numbers under our own names, each name once; a name that is none of ours is passed over."""
    pairs: dict[str, Pair] = {}
    for found in _PAIR.finditer(text):
        name, between, _, unit = found.groups()
        key = name.lower()
        if key in _TWO_WORDS:
            before = text[: found.start()].rstrip().rsplit(None, 1)
            key = (
                f"{before[-1]} {key}".lower()
                if before and f"{before[-1]} {key}".lower() in CANONICAL
                else key
            )
        canonical = CANONICAL.get(key)
        if canonical is None or canonical in pairs or (key in _NEED_COLON and between.isspace() and not unit):
            continue
        factor = _UNITS[unit.lower()] if unit and canonical not in ("lr", "step") else 1.0
        pairs[canonical] = Pair(canonical, *found.span(3), factor)
    return list(pairs.values())


def values_of(text: str, pairs: list[Pair]) -> dict[str, float]:
    """The numbers themselves."""
    return {pair.name: float(text[pair.start : pair.end].replace(",", "")) * pair.factor for pair in pairs}


def read_pairs(text: str) -> dict[str, float]:
    """Numbers under our own names."""
    return values_of(text, find_pairs(text))
