"""Blocks of the two-stream MMDiT. Each stream has its own width; they meet only in attention.

Shapes: N documents, T tokens, S slots, M rows of a stream (T or N*S), H heads, K head width, D width, E time width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.layout import Layout
from mmldlm.model.ops import attend, modulate, permute_rows, rotate


class Modulation(NamedTuple):
    """Per row: shift, scale and gate of the attention and of the feed-forward half."""

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor


class TimeEmbedding(nn.Module):
    """Both times of a document -> (N, E): sines and cosines, then a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rate: Tensor
        rate = torch.exp(torch.linspace(0.0, 1.0, width // 4) * torch.log(torch.tensor(1000.0)))
        self.register_buffer("rate", rate, persistent=False)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, text_time: Tensor, latent_time: Tensor) -> Tensor:
        angle = torch.stack([text_time, latent_time], dim=1)[:, :, None] * self.rate
        features = torch.cat([angle.cos(), angle.sin()], dim=-1).flatten(1)
        return self.output(F.silu(self.hidden(features)))


class Stream(nn.Module):
    """One modality's half of a block."""

    def __init__(
        self, width: int, time_width: int, num_heads: int, head_width: int, mlp_ratio: float, qk_norm: bool
    ) -> None:
        super().__init__()
        inner, hidden = num_heads * head_width, int(width * mlp_ratio)
        self.num_heads, self.head_width = num_heads, head_width
        self.modulation = nn.Linear(time_width, 6 * width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.q_norm = nn.RMSNorm(head_width, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_width, eps=1e-6) if qk_norm else nn.Identity()
        self.attention_out = nn.Linear(inner, width, bias=False)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)

    def modulation_of(self, time_embedding: Tensor, document: Tensor) -> Modulation:
        """Computed once per document, then read by its rows."""
        per_document = self.modulation(F.silu(time_embedding)).float()
        return Modulation(*per_document.index_select(0, document).chunk(6, dim=-1))

    def project(self, x: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (M, H, K)."""
        y = modulate(x, modulation.attention_shift, modulation.attention_scale)
        q, k, v = self.qkv(y).view(-1, 3, self.num_heads, self.head_width).unbind(1)
        return self.q_norm(q.float()).to(v.dtype), self.k_norm(k.float()).to(v.dtype), v

    def finish(self, x: Tensor, attended: Tensor, modulation: Modulation) -> Tensor:
        """Add what attention found, then the feed-forward half."""
        x = x + modulation.attention_gate * self.attention_out(attended)
        y = modulate(x, modulation.mlp_shift, modulation.mlp_scale)
        return x + modulation.mlp_gate * self.mlp_out(F.gelu(self.mlp_in(y), approximate="tanh"))


class Block(nn.Module):
    """Two streams, one attention over the tokens and slots of each document."""

    def __init__(self, text: Stream, latent: Stream) -> None:
        super().__init__()
        self.text, self.latent = text, latent

    def forward(
        self,
        text: Tensor,
        latent: Tensor,
        time_embedding: Tensor,
        slot_document: Tensor,
        cosine: Tensor,
        sine: Tensor,
        layout: Layout,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        text_modulation = self.text.modulation_of(time_embedding, layout.document)
        latent_modulation = self.latent.modulation_of(time_embedding, slot_document)
        text_q, text_k, text_v = self.text.project(text, text_modulation)
        latent_q, latent_k, latent_v = self.latent.project(latent, latent_modulation)
        text_q, text_k = rotate(text_q, cosine, sine), rotate(text_k, cosine, sine)

        qkv = torch.cat(
            [torch.stack([text_q, text_k, text_v], 1), torch.stack([latent_q, latent_k, latent_v], 1)], 0
        )
        stream = permute_rows(qkv.flatten(1), layout.to_stream, layout.from_stream).view(qkv.shape)
        q, k, v = stream.unbind(1)
        attended = attend(q, k, v, layout, backend).flatten(1)
        attended = permute_rows(attended, layout.from_stream, layout.to_stream)
        num_tokens = text.shape[0]
        return (
            self.text.finish(text, attended[:num_tokens], text_modulation),
            self.latent.finish(latent, attended[num_tokens:], latent_modulation),
        )


class LengthHead(nn.Module):
    """Distribution of the document length given the noisy latent alone; it must not see the text stream,
    whose very size would give the answer away."""

    def __init__(self, num_channels: int, num_slots: int, width: int, max_length: int) -> None:
        super().__init__()
        self.latent = nn.Linear(num_slots * num_channels, width)
        self.time = nn.Linear(1, width)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, max_length)

    def forward(self, noisy_latents: Tensor, latent_time: Tensor) -> Tensor:
        x = F.gelu(self.latent(noisy_latents.flatten(1)) + self.time(latent_time[:, None]))
        return self.output(F.gelu(self.hidden(x)))
