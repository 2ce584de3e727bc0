"""Weights in less space: half precision, or 8-bit whole numbers with a scale for each row.

A matrix of 8 bit is stored as `NAME` (int8, -127 to 127) and `NAME.scale` (fp16, one per row): NAME times scale.
Vectors and numbers keep their type: they are few, and their errors would not average out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmldlm.errors import UserError

PRECISIONS = ("fp32", "fp16", "int8")
_SCALE, _LEVELS = ".scale", 127


def pack(weights: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """The weights as they are stored; `unpack` is the way back."""
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: allowed are {', '.join(PRECISIONS)}")
    if precision == "fp32":
        return dict(weights)
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        packed |= _half(name, tensor) if precision == "fp16" else _rows(name, tensor)
    return packed


def _half(name: str, tensor: Tensor) -> dict[str, Tensor]:
    half = tensor.half() if tensor.is_floating_point() else tensor
    if not half.isfinite().all():
        raise UserError(f"precision='fp16': {name} has values that half precision cannot hold; use fp32")
    return {name: half}


def _rows(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return {name: tensor}
    rows = tensor.float().flatten(1)
    scale = rows.abs().amax(1).div(_LEVELS).clamp(min=torch.finfo(torch.float16).tiny).half()
    if not scale.isfinite().all():
        raise UserError(f"precision='int8': {name} has values that it cannot hold; use fp32")
    whole = (rows / scale.float()[:, None]).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {name: whole.view(tensor.shape), name + _SCALE: scale}


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights of what `pack` returned; fp32 stays as it is. KeyError where a scale is missing."""
    scales = {name + _SCALE for name, tensor in stored.items() if tensor.dtype == torch.int8}
    return {name: _plain(name, tensor, stored) for name, tensor in stored.items() if name not in scales}


def _plain(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    if tensor.dtype == torch.int8:
        scale = stored[name + _SCALE].float()
        return tensor.float() * scale.view(-1, *(1,) * (tensor.ndim - 1))
    return tensor.float() if tensor.dtype == torch.float16 else tensor
