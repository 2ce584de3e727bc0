"""Blocks of the two-stream MMDiT. Each stream has its own width; they meet only in attention.

Shapes: N documents, T tokens, S slots, M rows of a stream (T or N*S), H heads, K head width, D width, E time width.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mmldlm.layout import Layout
from mmldlm.model import products
from mmldlm.model.attention import Projections, attend, attend_streams, serving, to_streams
from mmldlm.model.fp8 import Rounded, fits, linear8, mlp8, round_rows
from mmldlm.model.ops import Chosen, RowsOf, add_and_norm, add_and_norm_rounded, permute_rows, rotate

# nothing in a block works in place, which is what this warning is about
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)

_KEPT = (
    "mm", "addmm", "product", "feed_forward", "multiply8", "attend_tiles", "attend_split", "_flash_attention_forward",
)  # fmt: skip
"""Matrix products and attention, by the name of the operator; what starts with _scaled_dot_product too."""


Times = Tensor | tuple[Tensor, Tensor]
"""The time embedding (N, E), or the modulation of both streams (N, 6*D) that was computed from it before."""


class Modulation(NamedTuple):
    """Per document: shift, scale and gate of the attention and of the feed-forward half, (N, D) each."""

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor


class Residual(NamedTuple):
    """A residual stream, and the gated branch that is still to be added to it: the next norm does both in one pass."""

    x: Tensor
    """(M, D)"""
    branch: Tensor
    """(M, D)"""
    gate: Tensor
    """(N, D)"""


class Places(NamedTuple):
    """What every block of a micro-batch shares: where rows sit, and their rotary angles."""

    layout: Layout
    text: RowsOf
    latent: RowsOf
    cosine: Tensor
    """(T, K/2)"""
    sine: Tensor
    """(T, K/2)"""


class Kernels(NamedTuple):
    """Which of several equal ways to compute are used."""

    attention: str = "rows"
    """One of the backends of `attention`."""
    fused: bool = False
    """Triton kernels for norms, modulation, GELU and the way into attention; in training products by our operators."""
    residual: torch.dtype = torch.float32
    """Type of the residual streams."""
    keep: str = "all"
    """What the backward pass finds ready: all, or products (the rest of a block is computed again)."""
    fp8: bool = False
    """In training, products of the text stream in fp8, where the sides of its matrices allow it."""


class TimeEmbedding(nn.Module):
    """Both times of a document -> (N, E): sines and cosines, then a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rate: Tensor
        rate = torch.exp(torch.linspace(0.0, 1.0, width // 4, device="cpu") * math.log(1000.0))
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

    def products(self) -> list[nn.Linear]:
        """What every row is multiplied with."""
        return [self.qkv, self.attention_out, self.mlp_in, self.mlp_out]

    def modulation_of(self, time_embedding: Tensor) -> Tensor:
        """(N, 6*D), computed once per document."""
        result: Tensor = self.modulation(F.silu(time_embedding))
        return result

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(M, 3*H*K) -> q, k, v (M, H, K), the first two normalised."""
        q, k, v = projected.view(-1, 3, self.num_heads, self.head_width).unbind(1)
        return self._norm(self.q_norm, q).to(v.dtype), self._norm(self.k_norm, k).to(v.dtype), v

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """In fp32, also where ranks share the weights in half precision."""
        if not isinstance(norm, nn.RMSNorm):
            return x.float()
        return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)

    def norm_weights(self) -> Tensor:
        """(2, K) weights of the norms of q and k; of no use where there are none."""
        if isinstance(self.q_norm, nn.Identity) or isinstance(self.k_norm, nn.Identity):
            return self.qkv.weight.new_ones(2, self.head_width)
        return torch.stack([self.q_norm.weight, self.k_norm.weight]).float()

    def mlp(self, y: Tensor | Rounded, *, own: bool, keep: bool) -> Tensor:
        """The feed-forward half. `own`: by our operators; `keep`: with the result of GELU for the backward pass."""
        if isinstance(y, Rounded):
            return mlp8(self.mlp_in, self.mlp_out, y)
        if own:
            return products.mlp(self.mlp_in, self.mlp_out, y, keep=keep)
        return self.mlp_out(F.gelu(self.mlp_in(y), approximate="tanh"))


def _product(linear: nn.Linear, rows: Tensor | Rounded, own: bool) -> Tensor:
    if isinstance(rows, Rounded):
        return linear8(linear, rows)
    result: Tensor = products.linear(linear, rows) if own else linear(rows)
    return result


class Block(nn.Module):
    """Two streams, one attention over the tokens and slots of each document."""

    def __init__(self, text: Stream, latent: Stream) -> None:
        super().__init__()
        self.text, self.latent = text, latent

    def forward(
        self, text: Residual, latent: Residual, times: Times, places: Places, kernels: Kernels,
        chosen: Chosen | None = None,
    ) -> tuple[Residual, Residual]:  # fmt: skip
        """`chosen`: the only rows of the text that are wanted after attention."""
        inputs = (text, latent, times, places, kernels, chosen)
        if kernels.keep == "products" and self.training and torch.is_grad_enabled():
            result: tuple[Residual, Residual] = checkpoint(
                self._compute,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=keep_products,
            )
            return result
        return self._compute(*inputs)

    def _compute(
        self, text: Residual, latent: Residual, times: Times, places: Places, kernels: Kernels,
        chosen: Chosen | None,
    ) -> tuple[Residual, Residual]:  # fmt: skip
        fused, trained = kernels.fused, self.training and torch.is_grad_enabled()
        fp8 = kernels.fp8 and trained  # what is judged is judged in bf16
        own, keep = fused and trained, kernels.keep == "all"
        if isinstance(times, Tensor):
            times = (self.text.modulation_of(times), self.latent.modulation_of(times))
        text_mod, latent_mod = (Modulation(*part.chunk(6, dim=-1)) for part in times)

        add = add_and_norm_rounded if fp8 and fits(self.text.qkv) else add_and_norm
        text_x, text_y = add(
            *text, text_mod.attention_shift, text_mod.attention_scale, places.text, fused=fused
        )
        latent_x, latent_y = add_and_norm(
            *latent, latent_mod.attention_shift, latent_mod.attention_scale, places.latent, fused=fused
        )
        text_qkv, latent_qkv = _product(self.text.qkv, text_y, own), _product(self.latent.qkv, latent_y, own)
        of_text, of_latent = self._attend(text_qkv, latent_qkv, places, kernels)
        where = places.text
        if chosen is not None:
            text_x, of_text, where = chosen.take(text_x), chosen.take(of_text), chosen.where
        text_branch = _product(
            self.text.attention_out,
            round_rows(of_text) if fp8 and fits(self.text.attention_out) else of_text,
            own,
        )
        latent_branch = _product(self.latent.attention_out, of_latent, own)

        add = add_and_norm_rounded if fp8 and fits(self.text.mlp_in) else add_and_norm
        text_x, text_y = add(
            text_x, text_branch, text_mod.attention_gate, text_mod.mlp_shift, text_mod.mlp_scale,
            where, fused=fused,
        )  # fmt: skip
        latent_x, latent_y = add_and_norm(
            latent_x, latent_branch, latent_mod.attention_gate, latent_mod.mlp_shift, latent_mod.mlp_scale,
            places.latent, fused=fused,
        )  # fmt: skip
        return (
            Residual(text_x, self.text.mlp(text_y, own=own, keep=keep), text_mod.mlp_gate),
            Residual(latent_x, self.latent.mlp(latent_y, own=own, keep=keep), latent_mod.mlp_gate),
        )

    def _attend(
        self, text: Tensor, latent: Tensor, places: Places, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        """Projections of both streams (M, 3*H*K) -> what attention returns to each, (M, H*K)."""
        layout, trained = places.layout, self.training and torch.is_grad_enabled()
        backend = serving(kernels.attention, layout, trained=trained and kernels.fused)
        if kernels.fused:
            weights = self.text.norm_weights(), self.latent.norm_weights()
            return attend_streams(
                Projections(text, latent, *weights, places.cosine, places.sine), layout, backend,
                self.text.num_heads, norm=not isinstance(self.text.q_norm, nn.Identity),
                keep=kernels.keep == "all",
            )  # fmt: skip
        return to_streams(attend(self._qkv(text, latent, places), layout, backend), layout)

    def _qkv(self, text: Tensor, latent: Tensor, places: Places) -> Tensor:
        """Projections of both streams -> q, k and v in stream order, normalised, tokens turned by their position."""
        layout = places.layout
        cosine, sine = places.cosine[:, None], places.sine[:, None]
        text_q, text_k, text_v = self.text.heads(text)
        text_q, text_k = rotate(text_q, cosine, sine), rotate(text_k, cosine, sine)
        qkv = torch.cat(
            [torch.stack([text_q, text_k, text_v], 1), torch.stack(self.latent.heads(latent), 1)], 0
        )
        return permute_rows(qkv.flatten(1), layout.to_stream, layout.from_stream).view(qkv.shape)


class TiedHead(nn.Linear):
    """A linear layer with a bias of its own whose matrix is that of an embedding, which owns it."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.__dict__["embedding"] = (
            embedding  # past the module's registration: the matrix is no parameter of ours
        )
        self.bias = nn.Parameter(torch.empty(self.out_features))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(rows, D)"""
        matrix: Tensor = self.__dict__["embedding"].weight
        return matrix


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


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name() if callable(getattr(op, "name", None)) else str(op)
    word = name.split("::")[-1].split(".")[0]
    if word in _KEPT or word.startswith("_scaled_dot_product"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_products() -> Any:
    """For `checkpoint(context_fn=...)`: keep what is dear to compute; norms, modulation and activations are cheap."""
    return create_selective_checkpoint_contexts(_policy)
