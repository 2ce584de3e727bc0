"""What a model says about documents that exist already: what a text costs, which documents are near a latent.

Shapes: n documents, S latent slots, C latent channels, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmldlm.api.values import Neighbour
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.errors import UserError
from mmldlm.evaluation.context import require_same_fingerprint
from mmldlm.evaluation.text_bound import text_costs as bound_costs
from mmldlm.latents import nearest
from mmldlm.sampling.options import SamplingOptions, require_conditional, require_unconditional

SEARCHED_AT_ONCE = 8192
"""Documents of a split that are in memory at a time."""


def text_costs(
    model: LoadedModel,
    tokens: list[np.ndarray],
    latents: np.ndarray | None,
    ids: np.ndarray,
    draws: int,
    seed: int,
) -> np.ndarray:
    """(n,) bounds in nats of texts, given raw latents (n, S, C) or none."""
    if not model.trained.text:
        raise UserError("this model was not trained to produce text, so it cannot score one")
    (require_unconditional if latents is None else require_conditional)(model)
    if not tokens:
        return np.empty(0)
    shape = (len(tokens), model.denoiser.shape.num_slots, model.denoiser.shape.num_channels)
    documents = Documents(
        tokens=np.concatenate(tokens),
        lengths=np.array([len(text) for text in tokens], np.int64),
        latents=np.zeros(shape, np.float32) if latents is None else latents,
        ids=ids.astype(np.int64),
    )
    costs = bound_costs(
        model, documents, latent="none" if latents is None else "right", num_draws=draws,
        batch_tokens=SamplingOptions().places(model.device), seed=seed, positions=ids,
    )  # fmt: skip
    return costs.nats


def split_neighbours(queries: np.ndarray, split: Split, k: int) -> list[list[Neighbour]]:
    """The nearest documents of a split, which is read part by part."""
    starts = range(0, len(split), SEARCHED_AT_ONCE)
    parts = (split.read(np.arange(i, min(i + SEARCHED_AT_ONCE, len(split)))).latents for i in starts)
    index, cosines = nearest(queries, parts, k)
    return _named(index, cosines, split.read_texts(index.reshape(-1)))


def array_neighbours(
    queries: np.ndarray, latents: np.ndarray, texts: list[str] | None, k: int
) -> list[list[Neighbour]]:
    """The nearest of some latents (m, S, C), with their texts where there are any."""
    index, cosines = nearest(queries, [latents], k)
    return _named(index, cosines, [None if texts is None else texts[i] for i in index.reshape(-1)])


def _named(index: np.ndarray, cosines: np.ndarray, texts: Sequence[str | None]) -> list[list[Neighbour]]:
    text = iter(texts)
    return [
        [Neighbour(int(place), float(near), next(text)) for place, near in zip(*row, strict=True)]
        for row in zip(index, cosines, strict=True)
    ]


def store_like(model: LoadedModel, path: Path | None) -> PairStore:
    """The pair store that the model was trained on, or one elsewhere that was made in the same way."""
    store = PairStore.open_of_run(model.config.data.store, path)
    require_same_fingerprint(model, store)
    return store
