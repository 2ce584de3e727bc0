"""Settings of the denoiser's shape, and the shapes that have a name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mmldlm.config.fields import choice, number


@dataclass
class ModelConfig:
    """Shape of the denoiser. The preset gives every value that is null."""

    preset: str = choice("small", "tiny", "small", "base", "large", "xlarge", "reference")
    depth: int | None = number(None, 1)
    width: int | None = number(None, 1)
    """Width of the text stream."""
    latent_width: int | None = number(None, 1)
    """Width of the latent stream."""
    num_heads: int | None = number(None, 1)
    head_width: int | None = number(None, 2)
    mlp_ratio: float | None = number(None, 0, above=True)
    time_width: int | None = number(None, 4)
    """Width of the time embedding that modulates both streams."""
    qk_norm: bool = True
    rope_base: float = number(10000.0, 1, above=True)
    length: str = choice("modelled", "modelled", "given")
    """modelled: a head predicts the document length from the noisy latent; given: the user states it."""
    unigram_init: bool = True
    """Start the output bias at the log frequency of each token in the training split."""


def _shape(
    depth: int, width: int, latent_width: int, num_heads: int, head_width: int, time_width: int
) -> dict[str, Any]:
    names = ("depth", "width", "latent_width", "num_heads", "head_width", "time_width")
    values = (depth, width, latent_width, num_heads, head_width, time_width)
    return dict(zip(names, values, strict=True)) | {"mlp_ratio": 4.0}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(4, 192, 192, 4, 48, 128),
    "small": _shape(8, 512, 384, 8, 64, 256),
    "base": _shape(12, 768, 384, 12, 64, 384),
    "large": _shape(24, 1024, 512, 16, 64, 512),
    "xlarge": _shape(24, 2048, 512, 16, 128, 512),
    "reference": _shape(24, 1024, 256, 8, 64, 512),
}
"""Shapes by name. `reference` has the text stream of the original research code."""


@dataclass(frozen=True)
class ModelShape:
    """The denoiser's shape with nothing left open."""

    depth: int
    width: int
    latent_width: int
    num_heads: int
    head_width: int
    mlp_ratio: float
    time_width: int
    qk_norm: bool
    rope_base: float
    length: str


def resolve_model(model: ModelConfig) -> ModelShape:
    """Fill the values that are null from the preset."""
    preset = PRESETS[model.preset]
    chosen = {item.name: getattr(model, item.name) for item in fields(ModelShape)}
    return ModelShape(**{name: preset[name] if value is None else value for name, value in chosen.items()})
