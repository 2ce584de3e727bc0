"""The text sampler that corrects itself: at each step the tokens that fit least are masked again.

One pass a step tells of every token how probable it is in its place. Of those that were unmasked before,
`sampling.remask_share` are masked again, the least probable ones; as many more of the masked ones are unmasked,
the surest ones, so that after each step as many are masked as the schedule says. No more are masked again than the
schedule leaves masked, so the last step masks none.
Shapes: N documents, T tokens, R rows of tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.corruption.text import TextProcess
from mmldlm.sampling.draw import largest_probability, probability_of
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


def remask_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the surest tokens and mask the least probable ones again."""
    masked = masked_tokens(pack, process)
    num_left = num_masked_after(pack, process, step)
    num_masked = pack.count(masked)
    share = np.floor((pack.num_free - num_masked) * options.remask_share).astype(np.int64)
    num_again = np.minimum(share, num_left)
    num_chosen = num_masked - num_left + num_again
    wanted = num_chosen > 0
    if not wanted.any():
        return pack
    pack = replace(pack, text_time=time_of_share(pack, masked, process))
    free = np.ones_like(masked) if pack.fixed is None else ~pack.fixed
    asked = (masked | (free & (num_again > 0)[pack.document])) & wanted[pack.document]
    part, was_masked = pack.select(wanted), masked[asked]
    rows = rows_in(pack, part, asked)
    document = part.document[rows.numpy()]
    logits = guided_logits(predictor, part, rows, options.guidance)
    unmask, again = np.zeros_like(was_masked), np.zeros_like(was_masked)
    where = torch.from_numpy(was_masked)
    sure = largest_probability(logits[where.to(logits.device)]).cpu().numpy()
    unmask[was_masked] = largest_of_each(sure, document[was_masked], num_chosen[wanted])
    if not was_masked.all():
        standing = part.noisy_tokens[rows[~where]].to(logits.device)
        fit = probability_of(logits[~where.to(logits.device)], standing).cpu().numpy()
        again[~was_masked] = largest_of_each(-fit, document[~was_masked], num_again[wanted])
    kept = torch.from_numpy(unmask)
    step_keys = randomness.make_key(part.keys, step.step_idx)
    values = draw_tokens(logits[kept.to(logits.device)], part, rows[kept], options, step_keys)
    pack = replace(pack, noisy_tokens=filled(pack, _spread(asked, unmask), values))
    mask = torch.tensor(process.mask_id)
    pack = replace(pack, noisy_tokens=filled(pack, _spread(asked, again), mask))
    return replace(pack, text_time=time_of_share(pack, masked_tokens(pack, process), process))


def _spread(asked: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(T,) bool from (R,) bool over the tokens that were asked about."""
    result = asked.copy()
    result[asked] = chosen
    return result
