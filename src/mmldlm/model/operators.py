"""Registers operators of our own with PyTorch: compiled code and selective checkpointing treat them as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(function: Callable[..., Any]) -> Any:
    """A function of tensors that changes none of them, as the operator `mmldlm::<its name>`.

    `torch.library.custom_op` would do the same, but imports PyTorch's compiler at the first call, which takes seconds.
    """
    name = f"mmldlm::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", function)
    return getattr(torch.ops.mmldlm, function.__name__).default
