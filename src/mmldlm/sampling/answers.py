"""What a self-conditioning network said last about each document of a chain, to be told of it in the next pass.

It travels with the documents: whichever of them a step asks about, they are told their own last answer, so the packs
leave no trace. A document that has not been asked about yet is told nothing, which is zeros.
Shapes: N documents, T tokens of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.types import Previous


@dataclass(frozen=True, eq=False)
class LastAnswers:
    """The part of a chain's memory that belongs to some of its documents; all parts write into one memory."""

    num_documents: int
    """Of the whole chain."""
    num_tokens: int
    """Of the whole chain."""
    documents: np.ndarray
    """(N,) which documents of the chain these are."""
    tokens: np.ndarray
    """(T,) which tokens of the chain these are."""
    view: str = ""
    """What the network sees of them: guidance also looks at documents without their condition, and what was said then
    is remembered apart; as in training, an answer without the condition follows one without it."""
    said: dict[str, Previous] = field(default_factory=dict)
    """View -> the last answer about all documents of the chain."""

    @classmethod
    def of(cls, num_documents: int, num_tokens: int) -> LastAnswers:
        """At the start of a chain nothing has been said."""
        return cls(num_documents, num_tokens, np.arange(num_documents), np.arange(num_tokens))

    def select(self, documents: np.ndarray, tokens: np.ndarray) -> LastAnswers:
        """That of some documents (N,) bool with their tokens (T,) bool."""
        return replace(self, documents=self.documents[documents], tokens=self.tokens[tokens])

    def seen_as(self, view: str) -> LastAnswers:
        """That of the same documents in another view."""
        return replace(self, view=view)

    def last(self) -> Previous | None:
        """What was said last about these documents; None: nothing about any of the chain."""
        said = self.said.get(self.view)
        if said is None or self._whole:
            return said
        tokens, documents = self._places(said.token_hidden.device)
        return Previous(said.token_hidden[tokens], said.clean_latents[documents])

    def keep(self, said: Previous) -> None:
        """Remember what was said about these documents."""
        if self._whole:
            self.said[self.view] = said
            return
        if self.view not in self.said:
            rows = {"token_hidden": self.num_tokens, "clean_latents": self.num_documents}
            nothing = {
                key: getattr(said, key).new_zeros(n, *getattr(said, key).shape[1:]) for key, n in rows.items()
            }
            self.said[self.view] = Previous(**nothing)
        tokens, documents = self._places(said.token_hidden.device)
        self.said[self.view].token_hidden[tokens] = said.token_hidden
        self.said[self.view].clean_latents[documents] = said.clean_latents

    @property
    def _whole(self) -> bool:
        return len(self.documents) == self.num_documents

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.tokens).to(device), torch.from_numpy(self.documents).to(device)
