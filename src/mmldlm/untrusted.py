"""Content of files that strangers wrote: types of plain values are checked, terminal control sequences removed."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

if TYPE_CHECKING:
    import numpy as np

_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without terminal control sequences; line breaks and tabs stay."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def map_array(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped, so that a header that lies allocates nothing; ValueError if it is none."""
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # numpy reads the header as Python code, with all of its errors
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError("it holds several arrays")
    return array


def misfit(kind: Any, value: Any, place: str) -> str | None:
    """What is wrong with plain values that ought to fit an annotated type, as one clause; None if they fit.

    Dictionaries of a `TypedDict` need all required keys, and may have others.

    >>> misfit(dict[str, list[int]], {"a": [1, "2"]}, "files")
    "files.a[1] is '2', a whole number is needed"
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return None
    if origin in (Union, types.UnionType):
        return None if value is None and type(None) in args else misfit(args[0], value, place)
    if is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return _misfit_fields(kind, value, place)
    if origin in (list, dict):
        if not isinstance(value, origin):
            return f"{place} is {_shown(value)}, a {_WORDS[origin]} is needed"
        named = value.items() if origin is dict else enumerate(value)
        items = ((f"{place}.{key}" if origin is dict else f"{place}[{key}]", item) for key, item in named)
        return next((wrong for at, item in items if (wrong := misfit(args[-1], item, at))), None)
    accepted = (int, float) if kind is float else kind
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
        return None
    return f"{place} is {_shown(value)}, a {_WORDS[kind]} is needed"


def _misfit_fields(kind: Any, value: Any, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} is {_shown(value)}, a mapping is needed"
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if name not in value and get_origin(hint) is not NotRequired:
            return f"{place} has no {name}"
    hints, present = get_type_hints(kind), [name for name in hints if name in value]
    return next(
        (wrong for name in present if (wrong := misfit(hints[name], value[name], f"{place}.{name}"))), None
    )


_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "truth value",
    list: "list",
    dict: "mapping",
}


def _shown(value: Any) -> str:
    return repr(value)[:40]
