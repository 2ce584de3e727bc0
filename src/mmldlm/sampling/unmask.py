"""What all text samplers do: find what is masked, ask about some of it, draw and fill in.

Shapes: N documents, T tokens, R rows of tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.text import TextProcess
from mmldlm.sampling.draw import draw
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.steps import Step

ROUNDING = 1e-4
"""A share times a length that is this close above a whole number is that number."""


def masked_tokens(pack: Pack, process: TextProcess) -> np.ndarray:
    """(T,) bool"""
    return (pack.noisy_tokens == process.mask_id).numpy()


def num_masked_after(pack: Pack, process: TextProcess, step: Step) -> np.ndarray:
    """(N,) how many tokens the schedule leaves masked after a step; those that were given do not count."""
    share_left = float(process.schedule.mask_probability(torch.tensor(step.next_time)))
    return np.ceil(pack.num_free * share_left - ROUNDING).astype(np.int64)


def time_of_share(pack: Pack, masked: np.ndarray, process: TextProcess) -> Tensor:
    """(N,) the time at which training masks the share that is masked now."""
    share = torch.from_numpy((pack.count(masked) / pack.lengths).astype(np.float32))
    return process.schedule.time_of(share).clamp(0.0, 1.0)


def time_told(pack: Pack, process: TextProcess, time: Tensor) -> Tensor:
    """(N,) the time at which training has as much noise as there is at this time where some tokens were given."""
    if pack.fixed is None:
        return time
    free = torch.from_numpy((pack.num_free / pack.lengths).astype(np.float32))
    return process.schedule.time_of(process.schedule.mask_probability(time) * free).clamp(0.0, 1.0)


def rows_in(pack: Pack, part: Pack, chosen: np.ndarray) -> Tensor:
    """(R,) rows of the part at which the chosen tokens of the pack are; all of them are in the part."""
    if part is pack:
        return torch.from_numpy(np.flatnonzero(chosen))
    inside = (pack.count(chosen) > 0)[pack.document]
    return torch.from_numpy(np.flatnonzero(chosen[inside]))


def draw_tokens(logits: Tensor, part: Pack, rows: Tensor, options: SamplingOptions) -> Tensor:
    """(R,) a value for each row, from the documents' keys and the tokens' positions: a token is drawn once."""
    document, position = part.document[rows.numpy()], part.position[rows.numpy()]
    uniform = randomness.uniform(part.keys[document], randomness.TOKEN_CHOICE, position)
    numbers = torch.from_numpy(uniform).to(logits.device)
    return draw(logits, numbers, options.temperature, options.top_p).cpu()


def filled(pack: Pack, chosen: np.ndarray, values: Tensor) -> Tensor:
    """(T,) the tokens with the values in the chosen places."""
    tokens = pack.noisy_tokens.clone()
    tokens[torch.from_numpy(chosen)] = values
    return tokens


def largest_of_each(values: np.ndarray, document: np.ndarray, num_chosen: np.ndarray) -> np.ndarray:
    """(R,) bool: the largest values of each document, as many as it is to have; the earlier one of equals.

    Rows are in the order of documents.
    """
    order = np.lexsort((-values, document))
    rank = np.arange(len(order)) - np.searchsorted(document, document)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order] = rank < num_chosen[document]
    return chosen
