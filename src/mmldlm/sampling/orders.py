"""Text samplers: each step unmasks some tokens of each document. They differ in the order.

ancestral      the exact reverse process in steps of time: every masked token has the same chance to be unmasked
first_hitting  the exact reverse process token by token, each at the time at which it is unmasked
confidence     the tokens whose most probable value is most probable come first
margin         the tokens whose best value is farthest ahead of the second come first
block          from left to right in blocks, by confidence inside a block

A new order is one function with the signature of `TextStep` and one line in `TEXT_STEPS`. The network computes only the
documents in which something is unmasked at this step; that is exact, since nothing else of its output would be used.
Which tokens are unmasked never depends on the values drawn for them.
Shapes: N documents, T tokens, R rows of tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.joint import TextProcess
from mmldlm.sampling.guidance import guided_logits
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, Step
from mmldlm.sampling.predictor import Predictor, require_finite

TextStep = Callable[[Predictor, Pack, TextProcess, Step, SamplingOptions], Pack]
Certainty = Callable[[Tensor], Tensor]
"""(R, V) logits to (R,) numbers; larger is more certain."""
ROUNDING = 1e-4
"""A share times a length that is this close above a whole number is that number."""
CHUNK_ROWS = 512
"""Rows whose probabilities exist at a time."""
_BELOW_ONE = 1.0 - 2.0**-25


def ancestral_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask each masked token with the probability that the reverse process gives it; in the last step, all."""
    time, next_time = torch.tensor(step.time), torch.tensor(step.next_time)
    chosen = masked_tokens(pack, process)
    if step.next_time > 0:
        step_keys = randomness.make_key(pack.keys, step.step_idx)
        chance = randomness.uniform(step_keys[pack.document], randomness.UNMASK, pack.position)
        chosen &= chance < float(process.unmask_probability(time, next_time))
    pack = replace(pack, text_time=_training_time(pack, process, torch.full_like(pack.text_time, step.time)))
    pack = _unmask(predictor, pack, chosen, options)
    after = torch.full_like(pack.text_time, step.next_time)
    return replace(pack, text_time=_training_time(pack, process, after))


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
    pack = replace(pack, text_time=_training_time(pack, process, time))
    pack = _unmask(predictor, pack, chosen, options)
    return replace(pack, text_time=time_of_share(pack, masked_tokens(pack, process), process))


def confidence_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the tokens whose most probable value is most probable."""
    return _ordered_step(predictor, pack, process, step, options, largest_probability)


def margin_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the tokens whose most probable value is farthest ahead of the second."""
    return _ordered_step(predictor, pack, process, step, options, probability_margin)


def block_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Unmask the most certain tokens of the first block in which some are masked; then those of the next."""
    return _ordered_step(predictor, pack, process, step, options, largest_probability, options.block_length)


TEXT_STEPS: dict[str, TextStep] = {
    "ancestral": ancestral_step,
    "first_hitting": first_hitting_step,
    "confidence": confidence_step,
    "margin": margin_step,
    "block": block_step,
}


def _ordered_step(
    predictor: Predictor,
    pack: Pack,
    process: TextProcess,
    step: Step,
    options: SamplingOptions,
    certainty: Certainty,
    block_length: int | None = None,
) -> Pack:
    """Unmask the most certain tokens, as many as keep the masked share on the schedule; earlier blocks come first.

    Certainty is read off the network's own distribution, before temperature and top-p, which would make many positions
    equally certain.
    """
    masked = masked_tokens(pack, process)
    num_chosen = pack.count(masked) - _num_masked_after(pack, process, step)
    wanted = num_chosen > 0
    if not wanted.any():
        return pack
    pack = replace(pack, text_time=time_of_share(pack, masked, process))
    part, candidates = pack.select(wanted), masked & wanted[pack.document]
    if block_length is not None:
        candidates &= _in_reach(pack, candidates, num_chosen, block_length)
    rows = _rows_in(pack, part, candidates)
    logits = guided_logits(predictor, part, rows, options.guidance)
    certain = certainty(logits).cpu().numpy().astype(np.float64)
    if (
        block_length is not None
    ):  # all measures are at most 1: the next block begins below the end of this one
        certain -= (2.0 + np.ptp(certain)) * (part.position[rows.numpy()] // block_length)
    best = largest_of_each(certain, part.document[rows.numpy()], num_chosen[wanted])
    kept = torch.from_numpy(best)
    values = _draw_tokens(logits[kept.to(logits.device)], part, rows[kept], options)
    chosen = candidates.copy()
    chosen[candidates] = best
    pack = replace(pack, noisy_tokens=_filled(pack, chosen, values))
    return replace(pack, text_time=time_of_share(pack, masked_tokens(pack, process), process))


def _in_reach(pack: Pack, candidates: np.ndarray, num_chosen: np.ndarray, block_length: int) -> np.ndarray:
    """(T,) bool: tokens up to the end of the last block that this step touches; the others need no logits."""
    rows = np.flatnonzero(candidates)
    document, block = pack.document[rows], pack.position[rows] // block_length
    rank = np.arange(len(rows)) - np.searchsorted(document, document)
    last = np.full(len(pack.lengths), -1)
    np.maximum.at(last, document, np.where(rank < num_chosen[document], block, -1))
    return pack.position // block_length <= last[pack.document]


def _unmask(predictor: Predictor, pack: Pack, chosen: np.ndarray, options: SamplingOptions) -> Pack:
    """The pack with values drawn for the chosen tokens; documents without any are not computed."""
    part = pack.select(pack.count(chosen) > 0)
    rows = _rows_in(pack, part, chosen)
    if not len(rows):
        return pack
    logits = guided_logits(predictor, part, rows, options.guidance)
    return replace(pack, noisy_tokens=_filled(pack, chosen, _draw_tokens(logits, part, rows, options)))


def masked_tokens(pack: Pack, process: TextProcess) -> np.ndarray:
    """(T,) bool"""
    return (pack.noisy_tokens == process.mask_id).numpy()


def time_of_share(pack: Pack, masked: np.ndarray, process: TextProcess) -> Tensor:
    """(N,) the time at which training masks the share that is masked now."""
    share = torch.from_numpy((pack.count(masked) / pack.lengths).astype(np.float32))
    return process.schedule.time_of(share).clamp(0.0, 1.0)


def largest_of_each(values: np.ndarray, document: np.ndarray, num_chosen: np.ndarray) -> np.ndarray:
    """(R,) bool: the largest values of each document, as many as it is to have; the earlier one of equals.

    Rows are in the order of documents.
    """
    order = np.lexsort((-values, document))
    rank = np.arange(len(order)) - np.searchsorted(document, document)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order] = rank < num_chosen[document]
    return chosen


def _num_masked_after(pack: Pack, process: TextProcess, step: Step) -> np.ndarray:
    """(N,) how many tokens the schedule leaves masked after a step; fixed tokens do not count."""
    share_left = float(process.schedule.mask_probability(torch.tensor(step.next_time)))
    return np.ceil(pack.num_free * share_left - ROUNDING).astype(np.int64)


def _training_time(pack: Pack, process: TextProcess, time: Tensor) -> Tensor:
    """(N,) the time at which training has as much noise as there is at this time where some tokens are fixed."""
    if pack.fixed is None:
        return time
    free = torch.from_numpy((pack.num_free / pack.lengths).astype(np.float32))
    return process.schedule.time_of(process.schedule.mask_probability(time) * free).clamp(0.0, 1.0)


def _rows_in(pack: Pack, part: Pack, chosen: np.ndarray) -> Tensor:
    """(R,) rows of the part at which the chosen tokens of the pack are; all of them are in the part."""
    if part is pack:
        return torch.from_numpy(np.flatnonzero(chosen))
    inside = (pack.count(chosen) > 0)[pack.document]
    return torch.from_numpy(np.flatnonzero(chosen[inside]))


def _draw_tokens(logits: Tensor, part: Pack, rows: Tensor, options: SamplingOptions) -> Tensor:
    """(R,) a value for each row, from the key of its document and its position: a token is drawn once in its life."""
    document, position = part.document[rows.numpy()], part.position[rows.numpy()]
    uniform = randomness.uniform(part.keys[document], randomness.TOKEN_CHOICE, position)
    numbers = torch.from_numpy(uniform).to(logits.device)
    return draw(logits, numbers, options.temperature, options.top_p).cpu()


def _filled(pack: Pack, chosen: np.ndarray, values: Tensor) -> Tensor:
    """(T,) the tokens with the values in the chosen places."""
    tokens = pack.noisy_tokens.clone()
    tokens[torch.from_numpy(chosen)] = values
    return tokens


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """(R,) values from softmax(logits / temperature), the least probable ones cut off, by inverting its sum.

    The same number gives the same value whatever else is drawn; temperature 0 gives the most probable value.
    """
    if temperature == 0:
        best = logits.max(dim=-1)
        require_finite(best.values)
        return best.indices
    parts = zip(logits.split(CHUNK_ROWS), uniform.split(CHUNK_ROWS), strict=True)
    values = [_draw_chunk(rows, numbers, temperature, top_p) for rows, numbers in parts]
    return torch.cat(values) if values else logits.new_zeros(0, dtype=torch.int64)


def _draw_chunk(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    probability = keep_top_p(torch.softmax(logits / temperature, dim=-1), top_p)
    kind = torch.float32 if logits.device.type == "mps" else torch.float64  # which mps does not have
    reached = probability.to(kind).cumsum(dim=-1)
    require_finite(reached[:, -1])
    wanted = uniform.to(kind).clamp(max=_BELOW_ONE)[:, None] * reached[:, -1:]
    # the first value whose sum is beyond the number; one of probability 0 adds nothing and is never the first
    return torch.searchsorted(reached, wanted, right=True).squeeze(1)


def keep_top_p(probability: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of values that together have probability `top_p`; not normalised."""
    if top_p >= 1.0:
        return probability
    ordered, order = probability.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probability).scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))


def largest_probability(logits: Tensor) -> Tensor:
    """(R,) how sure each row is: the probability of its most probable value."""
    parts = [(rows.amax(-1) - rows.logsumexp(-1)).exp() for rows in logits.split(CHUNK_ROWS)]
    result = torch.cat(parts) if parts else logits.new_zeros(0)
    require_finite(result)
    return result


def probability_margin(logits: Tensor) -> Tensor:
    """(R,) how sure each row is: how far its most probable value is ahead of the second."""
    parts = [_margin(rows.softmax(-1)) for rows in logits.split(CHUNK_ROWS)]
    result = torch.cat(parts) if parts else logits.new_zeros(0)
    require_finite(result)
    return result


def _margin(probability: Tensor) -> Tensor:
    best = probability.topk(min(2, probability.shape[-1]), dim=-1).values
    return best[:, 0] - best[:, 1:].sum(-1)
