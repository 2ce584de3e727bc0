"""A mode is only a distribution over two times. This is the one module that knows the modes.

l2t pins the latent to time 0 and produces the text; t2l pins the text and produces the latent; joint draws both
times and produces both. With some probability the condition is dropped: its time becomes 1, and it is not scored.
"""

from __future__ import annotations

import numpy as np

from mmldlm import randomness
from mmldlm.config import MODES, CorruptionConfig
from mmldlm.types import Times

_MODE_AXIS, _TEXT_AXIS, _LATENT_AXIS = range(randomness.LOW_DISCREPANCY_DIMENSIONS)


def draw_times(positions: np.ndarray, keys: np.ndarray, config: CorruptionConfig, seed: int) -> Times:
    """Times of the documents at these positions of the order, evenly spread over any run of positions."""
    modes = _draw_modes(positions, config, seed)
    dropped = randomness.uniform(keys, randomness.CONDITION, np.zeros_like(keys)) < config.condition_dropout
    return times_of_modes(
        modes,
        randomness.low_discrepancy(positions, _TEXT_AXIS, seed),
        randomness.low_discrepancy(positions, _LATENT_AXIS, seed) ** np.float32(config.latent_time_power),
        dropped,
    )


def times_of_modes(
    modes: np.ndarray, text_time: np.ndarray, latent_time: np.ndarray, dropped: np.ndarray
) -> Times:
    """Pin the conditions of each mode (index into MODES) to their times."""
    l2t, t2l = modes == MODES.index("l2t"), modes == MODES.index("t2l")
    condition_time = np.where(dropped, np.float32(1.0), np.float32(0.0))
    return Times(
        text_time=np.where(t2l, condition_time, text_time).astype(np.float32),
        latent_time=np.where(l2t, condition_time, latent_time).astype(np.float32),
        text_is_target=~t2l,
        latent_is_target=~l2t,
    )


def _draw_modes(positions: np.ndarray, config: CorruptionConfig, seed: int) -> np.ndarray:
    weights = np.array([getattr(config.mode_weights, mode) for mode in MODES], dtype=np.float64)
    edges = np.cumsum(weights / weights.sum())
    edges[-1] = np.inf if weights[-1] > 0 else edges[-1]
    draw = randomness.low_discrepancy(positions, _MODE_AXIS, seed)
    # the last mode with a weight takes what rounding leaves over
    return np.minimum(np.searchsorted(edges, draw, side="right"), int(np.flatnonzero(weights)[-1]))
