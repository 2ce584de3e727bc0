"""t2l: turn held-out text into latents and compare them with those of the encoder.

Shapes: n documents, M candidates, S latent slots, C latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import Split
from mmldlm.errors import UserError
from mmldlm.evaluation.selection import Selection
from mmldlm.evaluation.statistics import ENCODE, cosine, mean_estimate, strangers, unit
from mmldlm.randomness import make_key
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import document_keys, encode_tokens
from mmldlm.sampling.options import SamplingOptions

DEPTHS = (1, 10)
_CANDIDATES_AT_ONCE = 8192
_NUM_BINS = 40


@dataclass(frozen=True)
class Retrieval:
    """How near the model's latents are to the encoder's, and whether they find it among all held-out ones."""

    cosine: np.ndarray
    """(n,) to the latent of the same document."""
    stranger_cosine: np.ndarray
    """(n,) to the latent of another document."""
    rank: np.ndarray
    """(n,) place of the right latent among the candidates, from 1."""
    num_candidates: int

    def to_json(self, seed: int) -> dict[str, Any]:
        """Plain values, with the level that guessing would reach."""
        at = {f"retrieval_at_{k}": mean_estimate(self.rank <= k, seed).to_json() for k in DEPTHS}
        chance = {f"chance_at_{k}": min(k / self.num_candidates, 1.0) for k in DEPTHS}
        return {
            "cosine": mean_estimate(self.cosine, seed).to_json(),
            "stranger_cosine": mean_estimate(self.stranger_cosine, seed).to_json(),
            **at,
            **chance,
            "median_rank": float(np.median(self.rank)),
            "num_queries": len(self.rank),
            "num_candidates": self.num_candidates,
            "histogram": _histogram(self.cosine, self.stranger_cosine),
        }


def retrieve(
    model: LoadedModel,
    selection: Selection,
    *,
    batch_tokens: int,
    seed: int,
    progress: SamplingProgress | None = None,
) -> Retrieval:
    """Turn the chosen documents into latents, and seek each one's own among all latents of the split."""
    documents = selection.documents
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    keys = document_keys(int(make_key(seed, ENCODE) >> np.uint64(2)), documents.ids)
    options = SamplingOptions.from_config(model.config.sampling, batch_tokens=batch_tokens)
    latents = model.denormalize(encode_tokens(model, tokens, options, keys=keys, progress=progress))
    if not np.isfinite(latents).all():
        raise UserError("the model gives latents that are not finite; look at the training log of its run")
    others = documents.latents[strangers(len(latents), seed)]
    return Retrieval(
        cosine=cosine(latents, documents.latents),
        stranger_cosine=cosine(latents, others),
        rank=ranks(latents, documents.latents, selection.split, selection.positions),
        num_candidates=len(selection.split),
    )


def ranks(queries: np.ndarray, truth: np.ndarray, split: Split, positions: np.ndarray) -> np.ndarray:
    """(n,) 1 + number of other candidates at least as near as the right latent: a tie is a miss."""
    unit_queries = unit(queries)
    own = np.einsum("nc,nc->n", unit_queries, unit(truth))
    ahead = np.zeros(len(queries), dtype=np.int64)
    for start in range(0, len(split), _CANDIDATES_AT_ONCE):
        where = np.arange(start, min(start + _CANDIDATES_AT_ONCE, len(split)))
        scores = unit_queries @ unit(split.read(where).latents).T
        mine = np.flatnonzero((positions >= start) & (positions < start + len(where)))
        scores[mine, positions[mine] - start] = -np.inf
        ahead += (scores >= own[:, None]).sum(axis=1)
    return ahead + 1


def _histogram(own: np.ndarray, strange: np.ndarray) -> dict[str, list[float]]:
    """Counts of both cosines in the same bins."""
    edges = np.linspace(min(own.min(), strange.min()), max(own.max(), strange.max()) + 1e-6, _NUM_BINS + 1)
    counts = {
        "own": np.histogram(own, edges)[0].tolist(),
        "strangers": np.histogram(strange, edges)[0].tolist(),
    }
    return {"edges": edges.tolist(), **counts}
