"""The option --device, the same for every command that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmldlm.errors import UserError

if TYPE_CHECKING:
    import torch


def device_of(name: str) -> torch.device:
    """The device that --device names."""
    from mmldlm.runtime import choose_device

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: allowed are auto, cpu and cuda")
    try:
        return choose_device(name)
    except UserError as error:
        raise UserError(f"--device {name}: no usable GPU was found; use cpu, or check the driver") from error
