"""Dataclasses from plain values, as JSON has them: the inverse of `dataclasses.asdict`."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints


def build(kind: Any, value: Any) -> Any:
    """Plain values as an instance of an annotated type: dataclasses, lists, dictionaries, optional values, numbers."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else build(args[0], value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {item.name: item for item in dataclasses.fields(kind)}
        return kind(**{name: build(hints[name], value[name]) for name in known if name in value})  # type: ignore[operator]
    if origin is list:
        return [build(args[0], item) for item in value]
    if origin is dict:
        return {key: build(args[1], item) for key, item in value.items()}
    if kind is float:
        return math.nan if value is None else float(value)
    return value
