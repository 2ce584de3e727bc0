"""The denoiser: embeds noisy tokens and latents, runs the MMDiT blocks, and predicts both clean.

It knows no tokenizer and no mode: two times per document tell it how noisy each modality is.
Shapes: N documents, T tokens, S slots, C channels, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.config import ModelConfig, resolve_model
from mmldlm.layout import Layout
from mmldlm.model.layers import Block, LengthHead, Stream, TimeEmbedding
from mmldlm.model.ops import modulate, rotary_angles
from mmldlm.types import DenoiserOutput

VOCABULARY_MULTIPLE = 64
"""The output matrix has a row count that matrix units like; the rows past the vocabulary are never used."""


@dataclass(frozen=True)
class DataShape:
    """What the data says about the network's ends."""

    vocab_size: int
    num_slots: int
    num_channels: int
    max_length: int


class Denoiser(nn.Module):
    """`forward` gives hidden states and the latent prediction; `token_logits` turns rows of the former into logits."""

    def __init__(self, config: ModelConfig, shape: DataShape) -> None:
        super().__init__()
        self.config, self.shape = resolve_model(config), shape
        self.attention, self.recompute_blocks = "rows", False
        c = self.config

        def stream(width: int) -> Stream:
            return Stream(width, c.time_width, c.num_heads, c.head_width, c.mlp_ratio, c.qk_norm)

        self.token_embed = nn.Embedding(shape.vocab_size + 1, c.width)  # the mask comes after the vocabulary
        self.latent_embed = nn.Linear(shape.num_channels, c.latent_width)
        self.slot_embed = nn.Parameter(torch.empty(shape.num_slots, c.latent_width))
        self.time_embed = TimeEmbedding(c.time_width)
        self.blocks = nn.ModuleList(Block(stream(c.width), stream(c.latent_width)) for _ in range(c.depth))
        self.text_final = nn.Linear(c.time_width, 2 * c.width)
        self.latent_final = nn.Linear(c.time_width, 2 * c.latent_width)
        rows = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.token_head = nn.Linear(c.width, rows)
        self.latent_head = nn.Sequential(
            nn.Linear(c.latent_width, 4 * c.latent_width), nn.GELU(approximate="tanh"),
            nn.Linear(4 * c.latent_width, shape.num_channels),
        )  # fmt: skip
        self.length_head = (
            LengthHead(shape.num_channels, shape.num_slots, c.time_width, shape.max_length)
            if c.length == "modelled"
            else None
        )

    def forward(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        """noisy_tokens (T,), noisy_latents (N, S, C), times (N,)."""
        time_embedding = self.time_embed(text_time, latent_time)
        text = self.token_embed(noisy_tokens)
        latent = (self.latent_embed(noisy_latents) + self.slot_embed).flatten(0, 1)
        slot_document = torch.arange(len(text_time), device=text.device).repeat_interleave(
            self.shape.num_slots
        )
        cosine, sine = rotary_angles(layout.position, self.config.head_width, self.config.rope_base)
        for block in self.blocks:
            inputs = (text, latent, time_embedding, slot_document, cosine, sine, layout, self.attention)
            if self.recompute_blocks and self.training:
                text, latent = checkpoint(block, *inputs, use_reentrant=False)
            else:
                text, latent = block(*inputs)
        text = _final(text, self.text_final(F.silu(time_embedding)), layout.document)
        latent = _final(latent, self.latent_final(F.silu(time_embedding)), slot_document)
        return DenoiserOutput(
            token_hidden=text,
            latent_prediction=self.latent_head(latent).float().view(noisy_latents.shape),
            length_logits=None
            if self.length_head is None
            else self.length_head(noisy_latents, latent_time).float(),
        )

    def token_logits(self, hidden: Tensor) -> Tensor:
        """(rows, D) -> (rows, V) in fp32. The mask is no output: it cannot be predicted."""
        return self.token_head(hidden)[..., : self.shape.vocab_size].float()


def _final(x: Tensor, modulation: Tensor, document: Tensor) -> Tensor:
    shift, scale = modulation.float().index_select(0, document).chunk(2, dim=-1)
    return modulate(x, shift, scale)
