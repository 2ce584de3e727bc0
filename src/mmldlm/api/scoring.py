"""Documents that exist already: estimates of what a text costs, and the documents nearest to a latent.

Shapes: n documents, S latent slots, C latent channels, k neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.api.values import (
    Codec,
    Latents,
    Neighbour,
    Texts,
    is_texts,
    latents_array,
    like,
    one_each,
    require_at_least,
    text_list,
)
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.format import MANIFEST
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.errors import UserError
from mmldlm.evaluation.context import require_same_fingerprint
from mmldlm.evaluation.text_bound import drawn_costs, standard_errors
from mmldlm.latents import nearest
from mmldlm.sampling.options import SamplingOptions, require_conditional, require_unconditional
from mmldlm.sampling.pack import content_ids

SEARCHED_AT_ONCE = 8192
"""Documents of a split that are in memory at a time."""


class Scoring:
    """The methods of a `Model` that score texts and search documents."""

    loaded: LoadedModel
    codec: Codec

    def score(
        self,
        texts: Texts,
        latents: Latents | None = None,
        *,
        draws: int = 16,
        errors: bool = False,
        seed: int = 0,
    ) -> Any:
        """(n,) what each text costs in nats, given its length and its latent: estimates of upper bounds.

        Without latents it is the cost of the text alone. `draws`: noisy versions of each text that are averaged; each
        gives an unbiased estimate of the bound, and four times as many halve the error. With `errors=True` the result
        is `(costs, standard errors)`, both (n,); the errors are nan for `draws=1`.

        >>> model.score(["w3 w1", "w4"], model.embed(["w3 w1", "w4"]), draws=2).shape
        (2,)
        >>> costs, spread = model.score("w3 w1", errors=True)
        >>> bool(spread < costs)
        True
        """
        listed = text_list(texts)
        require_at_least("draws", draws, 1)
        require_at_least("seed", seed, 0)
        array = None if latents is None else one_each(latents, listed, self.codec.latent_shape)
        if array is not None:
            self.codec.normalized(array)  # of another size than in training they are rejected
        tokens, model = self.codec.tokenize(listed), self.loaded
        if not model.trained.text:
            raise UserError("this model was not trained to produce text, so it cannot score one")
        (require_unconditional if array is None else require_conditional)(model)
        if not tokens:
            return (like(np.empty(0), latents),) * 2 if errors else like(np.empty(0), latents)
        lengths, ids = np.array([len(text) for text in tokens], np.int64), content_ids(listed)
        given = np.zeros((len(tokens), *self.codec.latent_shape), np.float32) if array is None else array
        documents = Documents(np.concatenate(tokens), lengths, given, ids.astype(np.int64))
        nats = drawn_costs(
            model, documents, latent="none" if array is None else "right", num_draws=draws,
            batch_tokens=SamplingOptions().places(model.device), seed=seed,
        )  # fmt: skip
        costs = like(nats.mean(1), latents)
        return (costs, like(standard_errors(nats), latents)) if errors else costs

    def neighbours(
        self,
        queries: Texts | Latents,
        among: PairStore | Split | Texts | Latents | os.PathLike[str],
        k: int = 5,
    ) -> list[list[Neighbour]]:
        """The `k` documents nearest to each query by the cosine of their latents, nearest first.

        Texts become latents by the encoder. A pair store, or the folder of one, is searched in its training split.

        >>> near = model.neighbours(["w3 w1"], among=["w4", "w3 w1", "w7"], k=2)
        >>> near[0][0].text
        'w3 w1'
        """
        require_at_least("k", k, 1)
        if isinstance(among, os.PathLike) or (isinstance(among, str) and (Path(among) / MANIFEST).is_file()):
            among = self.open_store(among)
        if isinstance(among, PairStore):
            require_same_fingerprint(self.loaded, among)
            among = among.split(self.loaded.config.data.train_split)
        wanted = self.codec.latents_of(queries, "queries")
        if isinstance(among, Split):
            parts = (latents_array(part, self.codec.latent_shape, "among") for part in _latents_of(among))
            index, cosines = nearest(wanted, parts, k)
            texts = among.read_texts(index.reshape(-1))
        else:
            listed = text_list(among) if is_texts(among) else None  # type: ignore[arg-type]
            index, cosines = nearest(wanted, [self.codec.latents_of(among, "among")], k)
            texts = [None if listed is None else listed[i] for i in index.reshape(-1)]
        text = iter(texts)
        return [
            [Neighbour(int(place), float(near), next(text)) for place, near in zip(*row, strict=True)]
            for row in zip(index, cosines, strict=True)
        ]

    def open_store(self, path: str | os.PathLike[str] | None = None) -> PairStore:
        """The pair store that the model was trained on, or another one made with the same tokenizer and encoder."""
        store = PairStore.open_of_run(self.loaded.config.data.store, None if path is None else Path(path))
        require_same_fingerprint(self.loaded, store)
        return store


def _latents_of(split: Split) -> Iterator[np.ndarray]:
    """The latents of a split, which is read part by part."""
    for start in range(0, len(split), SEARCHED_AT_ONCE):
        yield split.read(np.arange(start, min(start + SEARCHED_AT_ONCE, len(split)))).latents
