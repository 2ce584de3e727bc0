"""The text sampler of models whose noise is masks and random tokens: the exact reverse process.

From one time to an earlier one each token, masked or not, is kept or drawn anew. The chance of the latter follows from
the probability that the network gives to the token that is there: an unlikely one is renewed soon, so a wrong token is
mended later. What is drawn anew is clean, random or masked in the shares of the earlier time; at time 0, all clean.

The network is asked about all tokens at every step, for every token may change.
Shapes: N documents, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.text import TextProcess
from mmldlm.errors import UserError
from mmldlm.sampling.draw import CHUNK_ROWS, draw, keep_top_p, require_finite
from mmldlm.sampling.guidance import guided_logits
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step
from mmldlm.sampling.unmask import time_told


def hybrid_step(
    predictor: Predictor, pack: Pack, process: TextProcess, step: Step, options: SamplingOptions
) -> Pack:
    """Move every token to the step's next time. Where some were given, the network is told of less noise."""
    at, after = (torch.full_like(pack.text_time, value) for value in (step.time, step.next_time))
    pack = replace(pack, text_time=time_told(pack, process, at))
    time, next_time = torch.tensor(step.time), torch.tensor(step.next_time)
    logits = guided_logits(predictor, pack, torch.arange(len(pack.noisy_tokens)), options.guidance)
    numbers = _Numbers(pack, step)
    there = probability_of(logits, pack.noisy_tokens, options.temperature, options.top_p)
    renewal = process.renewal_probability(pack.noisy_tokens, there, time, next_time)
    renewed = numbers.uniform(randomness.UNMASK) < renewal
    clean = torch.zeros_like(pack.noisy_tokens)
    chosen = renewed.to(logits.device)
    uniform = numbers.uniform(randomness.TOKEN_CHOICE)[renewed].to(logits.device)
    clean[renewed] = draw(logits[chosen], uniform, options.temperature, options.top_p).cpu()
    # what would be drawn for each token is the clean prediction, corrupted as far as the next time
    fresh, _ = process.corrupt(
        clean,
        next_time.expand(len(clean)),
        numbers.uniform(randomness.TEXT_MASK),
        numbers.below(randomness.TEXT_REPLACEMENT, process.mask_id),
    )
    return replace(
        pack,
        noisy_tokens=torch.where(renewed, fresh, pack.noisy_tokens),
        text_time=time_told(pack, process, after),
    )


def probability_of(logits: Tensor, tokens: Tensor, temperature: float, top_p: float) -> Tensor:
    """(T,) float32 on the host: the probability with which `draw` would give each token; 0 for a mask."""
    values = tokens.clamp(max=logits.shape[1] - 1).to(logits.device)
    parts = [
        _probability_of(rows, some, temperature, top_p)
        for rows, some in zip(logits.split(CHUNK_ROWS), values.split(CHUNK_ROWS), strict=True)
    ]
    found = torch.cat(parts).float().cpu() if parts else torch.zeros(0)
    require_finite(found)
    return found.masked_fill(tokens >= logits.shape[1], 0.0)


def _probability_of(logits: Tensor, tokens: Tensor, temperature: float, top_p: float) -> Tensor:
    if temperature == 0:
        best = logits.max(-1)
        return torch.where(best.values.isfinite(), (best.indices == tokens).float(), torch.nan)
    probability = keep_top_p(torch.softmax(logits / temperature, dim=-1), top_p)
    return probability.gather(1, tokens[:, None]).squeeze(1) / probability.sum(-1)


def require_fitting_sampler(text_sampler: str, process: TextProcess) -> None:
    """Refuse a sampler whose reverse process is not that of the model's noise."""
    if process.hybrid and text_sampler != "hybrid":
        raise UserError(
            f"text_sampler={text_sampler}: assumes that all noise is masks, but this model was trained with "
            f"corruption.text_noise=hybrid; use text_sampler=hybrid"
        )
    if text_sampler == "hybrid" and not process.hybrid:
        raise UserError(
            "text_sampler=hybrid: is for models with corruption.text_noise=hybrid, but this one was trained with "
            "masks only; use text_sampler=ancestral or confidence"
        )


class _Numbers:
    """Random numbers for each token of a pack at a step."""

    def __init__(self, pack: Pack, step: Step) -> None:
        self.keys: np.ndarray = randomness.make_key(pack.keys, step.step_idx)[pack.document]
        self.position = pack.position

    def uniform(self, tag: int) -> Tensor:
        return torch.from_numpy(randomness.uniform(self.keys, tag, self.position))

    def below(self, tag: int, limit: int) -> Tensor:
        return torch.from_numpy(randomness.below(self.keys, tag, self.position, limit))
