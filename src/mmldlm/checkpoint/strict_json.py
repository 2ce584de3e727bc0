"""JSON that any tool can read and that gives back exactly what was put in.

Python writes NaN and Infinity as bare words, which other readers refuse, and turns whole-number keys into
text in silence. Here non-finite numbers become `{"$float": "nan"}`, arrays become their bytes, and anything
else that JSON cannot hold is refused with its place.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import torch

_MARKS = ("$float", "$array")


def dump(value: Any, *, indent: int | None = None) -> bytes:
    """Value -> UTF-8 JSON. Tuples come back as lists, tensors and arrays as arrays."""
    text = json.dumps(_encode(value, "value"), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def load(content: bytes | str) -> Any:
    """The inverse of `dump`; ValueError when the text is not what `dump` writes."""
    if isinstance(content, bytes):
        content = content.decode("utf-8", "surrogatepass")
    try:
        return _decode(json.loads(content, parse_constant=_refuse))
    except (RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"not readable: {error}") from error


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _encode(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{place}[{idx}]") for idx, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, place): _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, np.generic):
        return _encode(value.item(), place)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _encode_array(value)}
    raise TypeError(f"{place} is a {type(value).__name__}, which JSON cannot hold")


def _key(key: Any, place: str) -> str:
    if not isinstance(key, str) or key in _MARKS:
        raise TypeError(f"{place} has the key {key!r}; keys must be text other than {', '.join(_MARKS)}")
    return key


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": data}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$float"}:
        return float(value["$float"])
    if set(value) == {"$array"}:
        return _decode_array(value["$array"])
    return {key: _decode(item) for key, item in value.items()}


def _decode_array(coded: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(coded["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of type {dtype} is not allowed")
    data = base64.b64decode(coded["base64"], validate=True)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(coded["shape"])
