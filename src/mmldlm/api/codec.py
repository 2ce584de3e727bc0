"""Texts, tokens and the encoder's latents of one model: what turns the one into the other.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import numpy as np

from mmldlm.api.values import latents_array
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import AnyEncoder, open_encoder

logger = logging.getLogger(__name__)


class Codec:
    """The tokenizer and the encoder of a model; both are loaded when they are first needed."""

    def __init__(self, loaded: LoadedModel, own_encoder: AnyEncoder | None = None) -> None:
        self.loaded, self.shape, self.own_encoder = loaded, loaded.denoiser.shape, own_encoder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the model."""
        if self.loaded.tokenizer_path is None:
            raise UserError("this model has no tokenizer, so it takes no texts; pass latents")
        return Tokenizer.load(self.loaded.tokenizer_path)

    @cached_property
    def encoder(self) -> Any:
        """The encoder that made the training latents, or an object with `encode` that was assigned."""
        return open_encoder(self.loaded.encoder, device=self.loaded.device.type, encoder=self.own_encoder)

    def tokenize(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text."""
        tokens = [np.array(ids, dtype=np.int64) for ids in self.tokenizer.encode_batch(texts)]
        for index, ids in enumerate(tokens):
            if not len(ids):
                raise UserError(f"texts[{index}]={texts[index]!r}: holds no token")
        return self.note_long(tokens)

    def note_long(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """The tokens; texts longer than any in training are accepted, with a warning."""
        num_long = sum(len(ids) > self.shape.max_length for ids in tokens)
        if num_long:
            logger.warning(
                f"{num_long} of {len(tokens)} texts have more than {self.shape.max_length} tokens, the most in "
                "training; expect less of them"
            )
        return tokens

    def texts_of(self, tokens: list[np.ndarray]) -> list[str]:
        """Texts of token ids; the ids themselves as words, where the model has no tokenizer."""
        if self.loaded.tokenizer_path is None:
            return [" ".join(str(token) for token in ids) for ids in tokens]
        return self.tokenizer.decode_batch([ids.tolist() for ids in tokens])

    def embed(self, texts: list[str]) -> np.ndarray:
        """(n, S, C) by the encoder."""
        latents = self.encoder.encode(texts) if texts else []
        return latents_array(
            latents, (self.shape.num_slots, self.shape.num_channels), "output of the encoder"
        )

    def embed_tokens(self, tokens: list[np.ndarray]) -> np.ndarray:
        """(n, S, C) of token ids by the encoder, which reads their texts."""
        return self.embed(self.texts_of(tokens))
