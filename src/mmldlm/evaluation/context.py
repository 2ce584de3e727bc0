"""What the parts of an evaluation share: the model, the documents, what outside tools there are, what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import EvaluationConfig
from mmldlm.corruption.times import sees_latents
from mmldlm.evaluation.quantities import Quantity
from mmldlm.evaluation.selection import Selection
from mmldlm.evaluation.statistics import ENCODE, Progress
from mmldlm.randomness import make_key
from mmldlm.sampling.checks import trained_parts
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import document_keys, encode_tokens
from mmldlm.sampling.options import SamplingOptions

DecodeText = Callable[[Sequence[Any]], list[str]]
EncodeText = Callable[[list[str]], np.ndarray]
Tokenize = Callable[[Sequence[str]], list[list[int]]]
HELD_OUT, GENERATED, SIMILARITY = "held_out", "generated", "similarity"
"""Sets of documents that quantities are about; quantities of one set can be compared between runs."""


@dataclass
class Context:
    """One evaluation under way."""

    model: LoadedModel
    config: EvaluationConfig
    selection: Selection
    seed: int
    progress: Progress
    decode_text: DecodeText | None
    """Token ids to text; None without a tokenizer."""
    encode: EncodeText | None
    """The encoder that made the latents; None where it is not used."""
    notes: list[str] = field(default_factory=list)
    ids: dict[str, list[int]] = field(default_factory=dict)
    """Documents of each set."""
    quantities: dict[str, dict[str, Quantity]] = field(default_factory=dict)
    """Quantities of each set by name."""

    def __post_init__(self) -> None:
        self.active = trained_parts(self.model)
        self.decodes = self.active.text and sees_latents(self.model.config.corruption)
        self.ids[HELD_OUT] = self.selection.documents.ids.tolist()

    def record(self, name: str, quantity: Quantity, about: str = HELD_OUT) -> dict[str, float]:
        """Keep a quantity for comparisons and return its estimate as plain values.

        It is about the first documents of its set, as many as it has values.
        """
        self.quantities.setdefault(about, {})[name] = quantity
        return quantity.estimate(self.seed).to_json()

    def own_latents(
        self, tokens: list[np.ndarray], ids: np.ndarray, progress: SamplingProgress | None = None
    ) -> np.ndarray:
        """Raw latents (n, S, C) that the model itself makes of texts."""
        keys = document_keys(int(make_key(self.seed, ENCODE) >> np.uint64(2)), ids)
        options = SamplingOptions.from_config(
            self.model.config.sampling, batch_tokens=self.config.batch_tokens
        )
        latents = encode_tokens(self.model, tokens, options, keys=keys, progress=progress)
        return self.model.normalizer.denormalize(latents)

    def watch(self, part: str) -> SamplingProgress:
        """The progress of one part."""
        return lambda done, total: self.progress(part, done, total)

    def documents_json(self) -> dict[str, Any]:
        """Values of single documents, for comparisons."""
        return {
            about: {
                "id": self.ids[about],
                "quantities": {name: quantity.to_json() for name, quantity in found.items()},
            }
            for about, found in self.quantities.items()
        }
