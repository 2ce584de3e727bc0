"""Latents that exist already: an array with one row per document, or a .npy file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError, first_line
from mmldlm.untrusted import map_array

SAMPLED_ROWS = 64
"""Rows of an array that identify it."""


@dataclass(frozen=True)
class Vectors:
    """Latents that were given, one row per document: (N, C) or (N, S, C)."""

    array: np.ndarray
    name: str

    @classmethod
    def of(cls, latents: Any) -> Vectors:
        """From a .npy file, which is memory-mapped, or from an array."""
        if isinstance(latents, str | Path):
            name, array = str(latents), _map_vectors(Path(latents).expanduser())
        else:
            name, array = "an array", _as_array(latents)
        if array.dtype.kind not in "fiu" or array.ndim not in (2, 3) or not array.size:
            raise UserError(
                f"latents={name}: {array.dtype} values of shape {array.shape}; numbers of shape (documents, channels) "
                "or (documents, slots, channels) are needed"
            )
        return cls(array, name)

    def row(self, idx: int) -> np.ndarray:
        """The latent (S, C) of a document."""
        latent: np.ndarray = np.atleast_2d(self.array[idx])
        if not np.isfinite(latent).all():
            raise UserError(
                f"latents={self.name}: row {idx} holds NaN or infinite values; correct or remove it"
            )
        return latent

    def digest(self) -> str:
        """Changes when the array does, as far as some of its rows show."""
        rows = np.linspace(0, len(self.array) - 1, min(SAMPLED_ROWS, len(self.array))).astype(np.int64)
        values = hashlib.sha256(np.ascontiguousarray(self.array[rows]).tobytes()).hexdigest()
        return f"{self.array.dtype} {list(self.array.shape)}, {values[:16]}"


def _as_array(values: Any) -> np.ndarray:
    """An array of numpy from anything like one; numpy has no bfloat16."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            values = values.float() if str(values.dtype) == "torch.bfloat16" else values
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"latents: not an array of numbers ({first_line(error)})") from error


def _map_vectors(path: Path) -> np.ndarray:
    try:
        return map_array(path)
    except FileNotFoundError as error:
        raise UserError(f"latents={path}: no such file; check the spelling") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"latents={path}: not a .npy file of numbers ({first_line(error)}); save it with numpy.save"
        ) from error
