"""Text samplers that let the network say which tokens come next; how many do, the schedule says.

How sure the network is of a token is read off its own distribution, before temperature and top-p, which would make many
positions equally sure. Shapes: N documents, T tokens, R rows of tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.corruption.text import TextProcess
from mmldlm.sampling.draw import largest_probability, probability_margin
from mmldlm.sampling.guidance import guided_logits
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step
from mmldlm.sampling.unmask import (
    draw_tokens,
    filled,
    largest_of_each,
    masked_tokens,
    num_masked_after,
    rows_in,
    time_of_share,
)

Sureness = Callable[[Tensor], Tensor]
"""(R, V) logits to (R,) numbers; larger is surer."""


def confidence_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the tokens whose most probable value is most probable."""
    return _step(predictor, pack, process, step, options, largest_probability)


def margin_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the tokens whose most probable value is farthest ahead of the second."""
    return _step(predictor, pack, process, step, options, probability_margin)


def block_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the surest tokens of the first block in which some are masked; of the next too, if it has too few."""
    return _step(predictor, pack, process, step, options, largest_probability, options.block_length)


def _step(
    predictor: Predictor,
    pack: Pack,
    process: TextProcess,
    step: Step,
    options: SamplingOptions,
    sureness: Sureness,
    block_length: int | None = None,
) -> Pack:
    """Unmask the surest tokens, as many as keep the masked share on the schedule; earlier blocks come first."""
    masked = masked_tokens(pack, process)
    num_chosen = pack.count(masked) - num_masked_after(pack, process, step)
    wanted = num_chosen > 0
    if not wanted.any():
        return pack
    pack = replace(pack, text_time=time_of_share(pack, masked, process))
    part, candidates = pack.select(wanted), masked & wanted[pack.document]
    if block_length is not None:
        candidates &= _in_reach(pack, candidates, num_chosen, block_length)
    rows = rows_in(pack, part, candidates)
    logits = guided_logits(predictor, part, rows, options.guidance)
    sure = sureness(logits).cpu().numpy().astype(np.float64)
    if (
        block_length is not None
    ):  # all measures are in (-inf, 1]: the next block begins below the end of this one
        sure -= (2.0 + np.ptp(sure)) * (part.position[rows.numpy()] // block_length)
    surest = largest_of_each(sure, part.document[rows.numpy()], num_chosen[wanted])
    kept = torch.from_numpy(surest)
    values = draw_tokens(logits[kept.to(logits.device)], part, rows[kept], options)
    chosen = candidates.copy()
    chosen[candidates] = surest
    pack = replace(pack, noisy_tokens=filled(pack, chosen, values))
    return replace(pack, text_time=time_of_share(pack, masked_tokens(pack, process), process))


def _in_reach(pack: Pack, candidates: np.ndarray, num_chosen: np.ndarray, block_length: int) -> np.ndarray:
    """(T,) bool: tokens up to the end of the last block that this step touches; the others need no logits."""
    rows = np.flatnonzero(candidates)
    document, block = pack.document[rows], pack.position[rows] // block_length
    rank = np.arange(len(rows)) - np.searchsorted(document, document)
    last = np.full(len(pack.lengths), -1)
    np.maximum.at(last, document, np.where(rank < num_chosen[document], block, -1))
    return pack.position // block_length <= last[pack.document]
