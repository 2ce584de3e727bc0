"""A decode that can be watched: the text after every step, as masks are filled."""

from __future__ import annotations

import re
from itertools import groupby

import numpy as np
import torch

from mmldlm.api.model import Model
from mmldlm.api.values import Latents, one_latent
from mmldlm.sampling.chain import finished, start_pack, text_steps
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.orders import TextMoves
from mmldlm.sampling.pack import content_ids, document_keys
from mmldlm.sampling.predictor import ModelPredictor

BLANK = "____"


@torch.no_grad()
def trace_decode(model: Model, latent: Latents, *, steps: int | None = None, seed: int = 0) -> list[str]:
    """The texts of all steps from all-masked to the one that `model.decode` returns; a masked token is ____.

    >>> states = trace_decode(model, model.encode(["w3 w1 w7"]), steps=2)
    >>> set(states[0].split()), len(states), "____" in states[-1]
    ({'____'}, 3, False)
    """
    loaded, array = model.loaded, one_latent(latent, (model.num_slots, model.num_channels), "latent")
    (text,) = model.decode(array, steps=steps, seed=seed)
    options = SamplingOptions.from_arguments(loaded.config.sampling, seed=seed, steps=steps)
    predictor = ModelPredictor.of(loaded)
    pack = start_pack(
        loaded.corruption, np.array([len(text.tokens)]), document_keys(seed, content_ids(array)),
        torch.from_numpy(loaded.normalizer.normalize(array)), array.shape[1:],
        with_noise=options.guidance != 1.0, device=loaded.device, arrange=predictor.arrange,
    )  # fmt: skip
    moves = TextMoves(pack, loaded.corruption.text, text_steps(options), options, text_only=True)
    states = [pack.split_tokens()[0]]
    for number in range(len(moves)):
        pack = moves.make(predictor, pack, number)
        states.append(pack.split_tokens()[0].copy())
    finished(pack)
    return [_shown(model, tokens) for tokens in states]


def _shown(model: Model, tokens: np.ndarray) -> str:
    """The text with blanks where tokens are masked."""
    mask_id = model.loaded.corruption.text.mask_id
    parts: list[str] = []
    for masked, group in groupby(tokens.tolist(), key=lambda token: token == mask_id):
        run = np.array(list(group), np.int64)
        parts += [BLANK] * len(run) if masked else model.codec.texts_of([run])
    return re.sub(r" +", " ", " ".join(parts)).strip()
