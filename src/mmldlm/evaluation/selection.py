"""Which held-out documents an evaluation looks at: a function of the seed and the split, not of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.errors import UserError
from mmldlm.evaluation.statistics import choose


@dataclass(frozen=True)
class Selection:
    """The chosen documents of a split, in random order, so that the first few are a fair sample too."""

    split: Split
    positions: np.ndarray
    """(n,) where they are in the split."""
    documents: Documents
    num_too_long: int
    """Documents of the split with more tokens than the model was trained for; none of them is chosen."""

    @cached_property
    def texts(self) -> list[str | None]:
        """(n,) the texts as they were before the tokenizer; None where the store holds none."""
        return self.split.read_texts(self.positions)

    def describe(self) -> dict[str, Any]:
        """What the result says about the data."""
        store = self.split.store
        return {
            "store": str(store.path),
            "split": self.split.name,
            "fingerprint": store.fingerprint,
            "num_documents": len(self.positions),
            "num_tokens": int(self.documents.lengths.sum()),
            "num_held_out": len(self.split),
            "num_too_long": self.num_too_long,
            "encoder": store.manifest.encoder,
            "tokenizer": store.manifest.tokenizer,
        }


def select_documents(model: LoadedModel, store: PairStore, split: str, count: int, seed: int) -> Selection:
    """`count` documents of a split (0: all) that the model can take."""
    check_fingerprint(model, store)
    held_out = store.split(split)
    fitting = np.flatnonzero(held_out.lengths <= model.denoiser.shape.max_length)
    if len(fitting) < 2:
        raise UserError(
            f"{store.path}: split {split!r} has {len(fitting)} documents that this model can take; "
            "an evaluation needs at least 2; prepare more text, or choose another --split"
        )
    positions = fitting[choose(max(count, 2) if count else 0, len(fitting), seed)]
    return Selection(held_out, positions, held_out.read(positions), len(held_out) - len(fitting))


def take_first(documents: Documents, count: int) -> Documents:
    """The first `count` documents (0: all)."""
    count = min(count, len(documents.lengths)) or len(documents.lengths)
    lengths = documents.lengths[:count]
    tokens = documents.tokens[: int(lengths.sum())]
    return Documents(tokens, lengths, documents.latents[:count], documents.ids[:count])


def check_fingerprint(model: LoadedModel, store: PairStore) -> None:
    """Refuse a store whose tokenizer, encoder or shape is not that of the model."""
    if model.fingerprint != store.fingerprint:
        raise UserError(
            f"{store.path}: this pair store has the fingerprint {store.fingerprint[:12]}, but the model was "
            f"trained on {model.fingerprint[:12]} (another tokenizer or encoder); "
            "give the store it was trained on with --data, or train on this one"
        )
