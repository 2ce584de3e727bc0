"""Floating-point operations that one step needs, counted from its work: no padding, no recomputation.

A matrix product of a row with a weight costs 2 operations a weight forward and 4 backward. Attention costs
4 x inner width x length^2 forward and twice that backward, summed over documents. The output head runs on scored rows
only, modulation once a document. What no loss depends on is not needed, and not counted (see `unused_parameters`).
"""

from __future__ import annotations

from mmldlm.config import ModelShape
from mmldlm.model.denoiser import DataShape

_FORWARD_AND_BACKWARD = 6


def step_flops(
    model: ModelShape,
    data: DataShape,
    *,
    tokens: float,
    documents: float,
    squares: float,
    scored: float,
    text: bool = True,
    latent: bool = True,
    length: bool = True,
) -> float:
    """Operations, forward and backward; `squares` is the sum over documents of (tokens + slots)^2.

    `text`, `latent` and `length` say which losses there are.
    """
    slots = documents * data.num_slots
    inner = model.num_heads * model.head_width
    per_token = model.depth * _block_weights(model.width, inner, model.mlp_ratio)
    per_slot = model.depth * _block_weights(model.latent_width, inner, model.mlp_ratio)
    per_slot += data.num_channels * model.latent_width
    per_slot += 4 * model.latent_width * (model.latent_width + data.num_channels) if latent else 0
    per_token -= 0 if text else _last_weights(model.width, inner, model.mlp_ratio)
    per_slot -= 0 if latent else _last_weights(model.latent_width, inner, model.mlp_ratio)
    weights = tokens * per_token + slots * per_slot
    weights += documents * _document_weights(model, data, text=text, latent=latent, length=length)
    weights += scored * model.width * data.vocab_size
    return float(_FORWARD_AND_BACKWARD * weights + 12 * model.depth * inner * squares)


def _block_weights(width: int, inner: int, mlp_ratio: float) -> int:
    """Weights that a row meets in its half of a block."""
    return 4 * width * inner + 2 * width * int(width * mlp_ratio)


def _last_weights(width: int, inner: int, mlp_ratio: float) -> int:
    """Those that a row of a stream without a loss need not meet in the last block: all but keys and values."""
    return _block_weights(width, inner, mlp_ratio) - 2 * width * inner


def _document_weights(model: ModelShape, data: DataShape, *, text: bool, latent: bool, length: bool) -> int:
    """Weights that are applied once a document: times, modulation and length."""
    both = model.width + model.latent_width
    total = 2 * model.time_width**2 + model.time_width * both * (6 * model.depth + 2)
    # without a loss, four of the last six modulations and the two at the end go
    total -= model.time_width * 6 * (model.width * (not text) + model.latent_width * (not latent))
    if model.length == "modelled" and length:
        total += model.time_width * (
            data.num_slots * data.num_channels + 1 + model.time_width + data.max_length
        )
    return total
