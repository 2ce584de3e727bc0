"""The documents that a sampler works on: some of them, one after the other, all on the host.

Shapes: N documents, T tokens, S latent slots, C latent channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.layout import Layout, packed_layout


@dataclass(frozen=True)
class Pack:
    """How far each document has come. A sampler's step turns a pack into the next one."""

    noisy_tokens: Tensor
    """(T,) int64"""
    noisy_latents: Tensor
    """(N, S, C) float32"""
    text_time: Tensor
    """(N,) float32"""
    latent_time: Tensor
    """(N,) float32"""
    lengths: np.ndarray
    """(N,) int64"""
    keys: np.ndarray
    """(N,) uint64"""

    @cached_property
    def document(self) -> np.ndarray:
        """(T,) document of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """(T,) place of each token in its document."""
        return np.arange(len(self.document)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @cached_property
    def layout(self) -> Layout:
        """Where the network finds each token and slot."""
        return packed_layout(self.lengths, self.noisy_latents.shape[1])

    def count(self, rows: np.ndarray) -> np.ndarray:
        """(N,) how many tokens of each document are true in a (T,) bool."""
        return np.bincount(self.document[rows], minlength=len(self.lengths))

    def select(self, documents: np.ndarray) -> Pack:
        """Some of the documents, (N,) bool."""
        if documents.all():
            return self
        kept = torch.from_numpy(documents)
        return Pack(
            noisy_tokens=self.noisy_tokens[torch.from_numpy(documents[self.document])],
            noisy_latents=self.noisy_latents[kept],
            text_time=self.text_time[kept],
            latent_time=self.latent_time[kept],
            lengths=self.lengths[documents],
            keys=self.keys[documents],
        )

    def split_tokens(self) -> list[np.ndarray]:
        """The tokens of each document."""
        return np.split(self.noisy_tokens.numpy(), np.cumsum(self.lengths)[:-1])


def latent_noise(keys: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """(N, S, C) the documents' own latent noise for slots and channels of this shape."""
    noise = randomness.normal(keys, randomness.LATENT_NOISE, math.prod(shape))
    return torch.from_numpy(noise).view(-1, *shape)


def group_documents(lengths: np.ndarray, num_slots: int, batch_tokens: int) -> list[np.ndarray]:
    """Indices of the documents of each pack: sorted by length, each pack as full as `batch_tokens` allows.

    A document that is larger than that gets a pack of its own.
    """
    order = np.argsort(lengths, kind="stable")
    groups: list[list[int]] = []
    room = -1
    for index in order:
        size = int(lengths[index]) + num_slots
        if size > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(int(index))
        room -= size
    return [np.array(group) for group in groups]
