"""Sizes of a run that follow from the machines: batch, accumulation, learning rate, warm-up, steps.

A rank's batch is counted in documents of the longest length, as the launch script of the research code does. Here the
documents of a step are fixed, and the batch of a rank only says how many of them a micro-batch may hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TARGET_DOCUMENTS = 128
"""Documents of a step on all ranks together."""
BASE_DOCUMENTS = 32
"""The documents of a step for which a preset's learning rate is meant."""
FIXED_GIB, GIB_PER_TOKEN = 20.0, 1.9 / 2048
"""Memory of the shape `reference` with 151,936 tokens: weights, optimizer, logits; and what a token adds.

Rounded up from 17.3 GiB with 4 and 68.8 GiB with 32 documents of 2,048 tokens (30,522 tokens, docs/benchmarks.md)."""
WARMUP_SHARE, FEWEST_WARMUP, MOST_WARMUP = 0.02, 1000, 5000


@dataclass(frozen=True)
class Preset:
    """How much is dared."""

    memory_share: float
    """Of the GPU's memory that a micro-batch may fill."""
    lr: float
    clip_norm: float


PRESETS = {
    "conservative": Preset(0.6, 2.5e-5, 0.3),
    "balanced": Preset(0.8, 5e-5, 0.5),
    "aggressive": Preset(0.9, 1e-4, 1.0),
}


def batch_from_memory(gib: float, longest: int, world_size: int, share: float = 0.8) -> int:
    """Documents of the longest length that a rank takes at once, at least 1 and no more than its part of a step."""
    fitting = int((gib * share - FIXED_GIB) / (GIB_PER_TOKEN * longest))
    return max(1, min(fitting, math.ceil(TARGET_DOCUMENTS / world_size)))


def accumulation_for(batch: int, world_size: int, target: int = TARGET_DOCUMENTS) -> int:
    """Micro-batches of a rank in a step of the target size; at least 1."""
    return max(1, target // (batch * world_size))


def scaled_lr(lr: float, documents: int, base: int = BASE_DOCUMENTS) -> float:
    """The learning rate for larger steps: with the square root of their size; smaller steps keep it."""
    return float(f"{lr * math.sqrt(max(documents, base) / base):.6g}")


def warmup_for(steps: int) -> int:
    """2 % of the steps within 1,000 to 5,000, but no more than a tenth of a short run."""
    warmup = min(max(int(steps * WARMUP_SHARE), FEWEST_WARMUP), MOST_WARMUP)
    return min(warmup, max(1, steps // 10))


def scaled_steps(base: int, base_documents: int, documents: int) -> int:
    """As many steps of `documents` as hold the documents of `base` steps of `base_documents`, rounded up."""
    return max(1, -(-base * base_documents // documents))
