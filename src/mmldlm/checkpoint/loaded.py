"""A trained model with everything needed to use it, read from an export folder or a run folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoint.export import Export, read_export
from mmldlm.checkpoint.state import load_weights
from mmldlm.config import Config
from mmldlm.config.recipe import config_from_dict
from mmldlm.corruption.joint import Corruption
from mmldlm.errors import UserError
from mmldlm.latents import Normalizer
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.layers import Kernels
from mmldlm.runtime import autocast, best_precision, flash_runs, kernels_run_on


@dataclass
class LoadedModel:
    """Weights, settings and what the data was made with. Latents inside are normalised."""

    denoiser: Denoiser
    config: Config
    corruption: Corruption
    device: torch.device
    fingerprint: str
    normalizer: Normalizer
    encoder: dict[str, Any] | None
    tokenizer_path: Path | None
    step: int | None = None
    precision: str = "fp32"
    """Type of the matrix products."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around every pass of the denoiser."""
        return autocast(self.device, self.precision)


def build_model(export: Export, device: torch.device, *, source: str) -> LoadedModel:
    """A model in evaluation mode from exported weights and settings."""
    config, data = config_from_dict(export.config), export.data
    shape = DataShape(data["vocab_size"], data["num_slots"], data["num_channels"], data["max_length"])
    denoiser = Denoiser(config.model, shape)
    load_weights(denoiser, export.weights, source=source)
    precision = best_precision(device) if device.type == "cuda" else "fp32"
    attention = "varlen" if flash_runs(device, precision, denoiser.config.head_width) else "sdpa"
    denoiser.kernels = Kernels(attention, fused=device.type == "cuda" and kernels_run_on(device))
    denoiser.to(device).eval().requires_grad_(False)
    return LoadedModel(
        denoiser=denoiser,
        config=config,
        corruption=Corruption(
            config.corruption, config.train.seed, shape.vocab_size, config.objective.text_weighting
        ),
        device=device,
        fingerprint=data["fingerprint"],
        normalizer=Normalizer.from_json(data["normalizer"]),
        encoder=data.get("encoder"),
        tokenizer_path=export.tokenizer_path,
        step=data.get("step"),
        precision=precision,
    )


def load_model(path: str | Path, device: torch.device) -> LoadedModel:
    """From an export folder, or from a run folder, whose newest export is taken."""
    folder = Path(path)
    for candidate in (folder, folder / "export"):
        if (candidate / "model.safetensors").exists():
            return build_model(read_export(candidate), device, source=str(candidate))
    if not folder.exists():
        raise UserError(
            f"{folder}: there is no such run or export; give the folder that 'mmldlm train' wrote"
        )
    if not (folder / "checkpoints").is_dir():
        raise UserError(
            f"{folder}: is neither a run nor an export; give the folder that 'mmldlm train' wrote"
        )
    raise UserError(
        f"{folder}: holds no export yet; it is written when training ends or by 'mmldlm export {folder}'"
    )
