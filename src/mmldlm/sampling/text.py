"""Text samplers: each step unmasks some tokens of each document.

ancestral      the exact reverse process in steps of time: every masked token has the same chance to be unmasked
first_hitting  the exact reverse process token by token, each at the time at which it is unmasked
confidence     the tokens whose most probable value is most probable come first
margin         the tokens whose best value is farthest ahead of the second come first
block          from left to right in blocks, by confidence inside a block

The network is asked only about the documents in which something is unmasked at this step; that is exact, since
nothing else of it would be used. Which tokens are unmasked never depends on the values drawn for them.
Shapes: N documents, T tokens, R rows of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.corruption.text import TextProcess
from mmldlm.sampling.guidance import guided_logits
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step
from mmldlm.sampling.text_order import block_step, confidence_step, margin_step
from mmldlm.sampling.unmask import (
    ROUNDING,
    draw_tokens,
    filled,
    largest_of_each,
    masked_tokens,
    rows_in,
    time_of_share,
    time_told,
)

TextStep = Callable[[Predictor, Pack, TextProcess, Step, SamplingOptions], Pack]


def ancestral_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask each masked token with the probability that the reverse process gives it; at last, all."""
    time, next_time = torch.tensor(step.time), torch.tensor(step.next_time)
    chosen = masked_tokens(pack, process)
    if step.next_time > 0:
        step_keys = randomness.make_key(pack.keys, step.step_idx)
        chance = randomness.uniform(step_keys[pack.document], randomness.UNMASK, pack.position)
        chosen &= chance < float(process.unmask_probability(time, next_time))
    pack = replace(pack, text_time=time_told(pack, process, torch.full_like(pack.text_time, step.time)))
    pack = _unmasked(predictor, pack, chosen, options)
    after = torch.full_like(pack.text_time, step.next_time)
    return replace(pack, text_time=time_told(pack, process, after))


def first_hitting_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the tokens that come next, at the time of the first of them.

    Going back in time, a token is unmasked where the masking probability falls below a number that is uniform
    in (0, 1) and its own. So all times are drawn at once, and their order is the order of the tokens. With a step for
    each token nothing is approximate; with fewer, neighbours in time are drawn together, in groups of equal size.
    """
    masked = masked_tokens(pack, process)
    num_left = np.ceil(pack.num_free * step.next_time - ROUNDING).astype(np.int64)
    num_chosen = np.maximum(pack.count(masked) - num_left, 0)
    rows = np.flatnonzero(masked)
    level = randomness.uniform(pack.keys[pack.document[rows]], randomness.UNMASK, pack.position[rows])
    chosen = masked.copy()
    chosen[rows] = largest_of_each(level, pack.document[rows], num_chosen)
    first = np.zeros(len(pack.lengths), np.float32)
    np.maximum.at(first, pack.document[rows], level)
    time = process.schedule.time_of(torch.from_numpy(first)).clamp(0.0, 1.0)
    pack = replace(pack, text_time=time_told(pack, process, time))
    pack = _unmasked(predictor, pack, chosen, options)
    return replace(pack, text_time=time_of_share(pack, masked_tokens(pack, process), process))


TEXT_STEPS: dict[str, TextStep] = {
    "ancestral": ancestral_step,
    "first_hitting": first_hitting_step,
    "confidence": confidence_step,
    "margin": margin_step,
    "block": block_step,
}


def _unmasked(predictor: Predictor, pack: Pack, chosen: np.ndarray, options: SamplingOptions) -> Pack:
    """The pack with values drawn for the chosen tokens; nothing is asked where none is chosen."""
    part = pack.select(pack.count(chosen) > 0)
    rows = rows_in(pack, part, chosen)
    if not len(rows):
        return pack
    logits = guided_logits(predictor, part, rows, options.guidance)
    return replace(pack, noisy_tokens=filled(pack, chosen, draw_tokens(logits, part, rows, options)))
