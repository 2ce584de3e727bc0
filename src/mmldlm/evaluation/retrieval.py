"""t2l: turn held-out text into latents and compare them with those of the encoder.

Shapes: n documents, M candidates, S latent slots, C latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.data.store import Split
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context
from mmldlm.evaluation.quantities import LESS, MORE, Quantity
from mmldlm.evaluation.statistics import strangers
from mmldlm.latents import cosine, directions

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

    def to_json(self, context: Context) -> dict[str, Any]:
        """Plain values, with the level that guessing would reach."""
        found = {
            "cosine": Quantity("text to latent, cosine", MORE, self.cosine),
            "stranger_cosine": Quantity("text to latent, cosine to a stranger", LESS, self.stranger_cosine),
        } | {
            f"retrieval_at_{k}": Quantity(f"text to latent, retrieval@{k}", MORE, self.rank <= k)
            for k in DEPTHS
        }
        return {
            **{name: context.record(f"t2l/{name}", quantity) for name, quantity in found.items()},
            **{f"chance_at_{k}": min(k / self.num_candidates, 1.0) for k in DEPTHS},
            "median_rank": float(np.median(self.rank)),
            "num_queries": len(self.rank),
            "num_candidates": self.num_candidates,
            "histogram": _histogram(self.cosine, self.stranger_cosine),
        }


def measure_retrieval(context: Context) -> dict[str, Any] | None:
    """Turn the chosen documents into latents, and seek each one's own among all latents of the split."""
    if not context.active.latent:
        context.notes.append("t2l is left out: this run has no loss on latents")
        return None
    selection = context.selection
    documents = selection.documents
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    latents = context.own_latents(tokens, documents.ids, context.watch("text to latent"))
    if not np.isfinite(latents).all():
        raise UserError("the model gives latents that are not finite; look at the training log of its run")
    others = documents.latents[strangers(len(latents), context.seed)]
    found = Retrieval(
        cosine=cosine(latents, documents.latents),
        stranger_cosine=cosine(latents, others),
        rank=ranks(latents, documents.latents, selection.split, selection.positions),
        num_candidates=len(selection.split),
    )
    return found.to_json(context)


def ranks(queries: np.ndarray, truth: np.ndarray, split: Split, positions: np.ndarray) -> np.ndarray:
    """(n,) 1 + number of other candidates at least as near as the right latent: a tie is a miss."""
    unit_queries = directions(queries)
    own = np.einsum("nc,nc->n", unit_queries, directions(truth))
    ahead = np.zeros(len(queries), dtype=np.int64)
    for start in range(0, len(split), _CANDIDATES_AT_ONCE):
        where = np.arange(start, min(start + _CANDIDATES_AT_ONCE, len(split)))
        scores = unit_queries @ directions(split.read(where).latents).T
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
