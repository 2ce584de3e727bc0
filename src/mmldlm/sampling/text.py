"""Text samplers: each step unmasks some tokens of each document.

ancestral   the exact reverse process: every masked token has the same chance to be unmasked
confidence  the tokens that the network is surest of come first
hybrid      for models whose noise is not masks alone, see `hybrid`

Which tokens are unmasked never depends on the values drawn for them. The network is asked only about the
documents in which something is unmasked at this step; that is exact, since nothing else of it would be used.
Shapes: N documents, T tokens, R rows of tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.text import TextProcess
from mmldlm.sampling.draw import draw, largest_probability
from mmldlm.sampling.guidance import guided_logits
from mmldlm.sampling.hybrid import hybrid_step
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step

ROUNDING = 1e-4
"""A share times a length that is this close above a whole number is that number."""
TextStep = Callable[[Predictor, Pack, TextProcess, Step, SamplingOptions], Pack]


def ancestral_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask each masked token with the probability that the reverse process gives it; at last, all."""
    time, next_time = torch.tensor(step.time), torch.tensor(step.next_time)
    pack = replace(pack, text_time=torch.full_like(pack.text_time, step.time))
    chosen = _masked(pack, process)
    if step.next_time > 0:
        step_keys = randomness.make_key(pack.keys, step.step_idx)
        chance = randomness.uniform(step_keys[pack.document], randomness.UNMASK, pack.position)
        chosen &= chance < float(process.unmask_probability(time, next_time))
    part = pack.select(pack.count(chosen) > 0)
    rows = _rows_in(pack, part, chosen)
    tokens = pack.noisy_tokens
    if len(rows):
        logits = guided_logits(predictor, part, rows, options.guidance)
        tokens = _filled(pack, chosen, _draw_tokens(logits, part, rows, options))
    return replace(pack, noisy_tokens=tokens, text_time=torch.full_like(pack.text_time, step.next_time))


def confidence_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the surest tokens, as many as keep the masked share on the schedule."""
    masked = _masked(pack, process)
    share_left = float(process.schedule.mask_probability(torch.tensor(step.next_time)))
    num_left = np.ceil(pack.lengths * share_left - ROUNDING).astype(np.int64)
    num_chosen = pack.count(masked) - num_left
    wanted = num_chosen > 0
    if not wanted.any():
        return pack
    pack = replace(pack, text_time=_time_of_share(pack, masked, process))
    part, candidates = pack.select(wanted), masked & wanted[pack.document]
    rows = _rows_in(pack, part, candidates)
    logits = guided_logits(predictor, part, rows, options.guidance)
    sureness = largest_probability(logits).cpu().numpy()
    surest = _largest_of_each(sureness, part.document[rows.numpy()], num_chosen[wanted])
    kept = torch.from_numpy(surest)
    values = _draw_tokens(logits[kept.to(logits.device)], part, rows[kept], options)
    chosen = candidates.copy()
    chosen[candidates] = surest
    pack = replace(pack, noisy_tokens=_filled(pack, chosen, values))
    return replace(pack, text_time=_time_of_share(pack, _masked(pack, process), process))


TEXT_STEPS: dict[str, TextStep] = {
    "ancestral": ancestral_step,
    "confidence": confidence_step,
    "hybrid": hybrid_step,
}


def _masked(pack: Pack, process: TextProcess) -> np.ndarray:
    return (pack.noisy_tokens == process.mask_id).numpy()


def _time_of_share(pack: Pack, masked: np.ndarray, process: TextProcess) -> Tensor:
    """(N,) the time at which training masks the share that is masked now."""
    share = torch.from_numpy((pack.count(masked) / pack.lengths).astype(np.float32))
    return process.schedule.time_of(share).clamp(0.0, 1.0)


def _rows_in(pack: Pack, part: Pack, chosen: np.ndarray) -> Tensor:
    """(R,) rows of the part at which the chosen tokens of the pack are; all of them are in the part."""
    if part is pack:
        return torch.from_numpy(np.flatnonzero(chosen))
    inside = (pack.count(chosen) > 0)[pack.document]
    return torch.from_numpy(np.flatnonzero(chosen[inside]))


def _draw_tokens(logits: Tensor, part: Pack, rows: Tensor, options: SamplingOptions) -> Tensor:
    """(R,) a value for each row; a token is drawn once in its life, so its position is index enough."""
    document, position = part.document[rows.numpy()], part.position[rows.numpy()]
    uniform = randomness.uniform(part.keys[document], randomness.TOKEN_CHOICE, position)
    numbers = torch.from_numpy(uniform).to(logits.device)
    return draw(logits, numbers, options.temperature, options.top_p).cpu()


def _filled(pack: Pack, chosen: np.ndarray, values: Tensor) -> Tensor:
    tokens = pack.noisy_tokens.clone()
    tokens[torch.from_numpy(chosen)] = values
    return tokens


def _largest_of_each(values: np.ndarray, document: np.ndarray, num_chosen: np.ndarray) -> np.ndarray:
    """(R,) bool: the largest values of each document, as many as it is to have; the earlier one of equals.

    Rows are in the order of documents.
    """
    order = np.lexsort((-values, document))
    rank = np.arange(len(order)) - np.searchsorted(document, document)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order] = rank < num_chosen[document]
    return chosen
