"""The denoiser on a CPU with weights that no longer change: the function of `Denoiser.forward` in fewer operations.

- Matrices are in the type of the products, laid out once as oneDNN reads them; GELU is part of its product.
- Modulation is computed once for neighbouring documents of the same times, of all blocks together.
- Neighbouring documents of one length attend together: no padding, no mask.
- Channels of queries and keys are ordered so that a rotation is one product of complex numbers.
- The last block ends with those rows whose result is asked for.

Shapes: N documents, T tokens, S slots, C channels, M rows of a stream, R runs of documents with the same times,
D width, H heads, K head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.layout import Layout
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.layers import Block, Modulation, Stream
from mmldlm.model.ops import rotary_angles

COLUMNS = 1024
"""Values of the vocabulary whose logits are computed at a time: what does not leave the cache is fast."""


class Product:
    """A linear layer, perhaps with GELU after it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gelu: bool = False
    ) -> None:
        self.weight = weight.detach().to(dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.gelu = gelu
        # the operators by which PyTorch's compiler calls oneDNN: F.linear would order the matrix at every call and
        # write what GELU reads, which takes a third of the time more
        self.ordered = torch.backends.mkldnn.is_available() and _is_x86()
        if self.ordered:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    @classmethod
    def of(cls, linear: nn.Linear, dtype: torch.dtype, *, gelu: bool = False) -> Product:
        return cls(linear.weight, linear.bias, dtype, gelu=gelu)

    def __call__(self, x: Tensor) -> Tensor:
        if self.ordered:
            after, how = ("gelu", "tanh") if self.gelu else ("none", "")
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, after, [], how)
            return result
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y, approximate="tanh") if self.gelu else y


def _is_x86() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class _Pass(NamedTuple):
    """What all blocks of a pass share."""

    text_run: Tensor
    """(T,) run of each token."""
    latent_run: Tensor
    """(N*S,) run of each slot."""
    turn: Tensor
    """(T, 1, 1, K/2) complex, the rotation of each token."""
    groups: list[tuple[int, slice, slice]]
    """Neighbouring documents of one length: their number, their tokens and their slots."""
    num_slots: int


class _Half:
    """One modality's half of a block."""

    def __init__(self, stream: Stream, dtype: torch.dtype) -> None:
        self.dtype, self.heads = dtype, (3, stream.num_heads, stream.head_width)
        pairs = torch.arange(stream.head_width).view(2, -1).t().flatten()  # 0, K/2, 1, K/2 + 1, ...
        weight = stream.qkv.weight.detach().unflatten(0, self.heads).clone()
        # a product of queries and keys does not depend on their common order
        weight[:2] = weight[:2, :, pairs]
        self.qkv = Product(weight.flatten(0, 2), None, dtype)
        self.norm: Tensor | None = None
        if isinstance(stream.q_norm, nn.RMSNorm):
            self.norm, self.eps = stream.norm_weights()[:, None, pairs], float(stream.q_norm.eps or 0.0)
        self.out = Product.of(stream.attention_out, dtype)
        self.mlp_in = Product.of(stream.mlp_in, dtype, gelu=True)
        self.mlp_out = Product.of(stream.mlp_out, dtype)

    def project(self, x: Tensor, mod: Modulation, run: Tensor) -> Tensor:
        """(M, D) -> queries, keys and values (M, 3, H, K) in fp32; queries and keys are normalised."""
        y = modulated_norm(x, mod.attention_shift, mod.attention_scale, run).to(self.dtype)
        qkv = self.qkv(y).float().unflatten(1, self.heads)
        if self.norm is not None:
            both = qkv[:, :2]
            both.mul_(both.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(self.norm)
        return qkv

    def end(self, x: Tensor, attended: Tensor, mod: Modulation, run: Tensor) -> Tensor:
        """What follows attention, for some rows."""
        x = torch.addcmul(x, self.out(attended).float(), spread(mod.attention_gate, run))
        y = modulated_norm(x, mod.mlp_shift, mod.mlp_scale, run).to(self.dtype)
        return torch.addcmul(x, self.mlp_out(self.mlp_in(y)).float(), spread(mod.mlp_gate, run))


def spread(values: Tensor, run: Tensor) -> Tensor:
    """(R, D) values of the runs -> (M, D) those of rows; (1, D) where there is one run."""
    return values if len(values) == 1 else values.index_select(0, run)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, run: Tensor) -> Tensor:
    """(M, D) normalised, then scaled and shifted by the row's run."""
    if len(scale) == 1:
        return F.layer_norm(x, x.shape[1:], 1.0 + scale[0], shift[0])
    normed = F.layer_norm(x, x.shape[1:])
    return torch.addcmul(spread(shift, run), normed, spread(1.0 + scale, run))


class _FrozenBlock:
    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        self.text, self.latent = _Half(block.text, dtype), _Half(block.latent, dtype)

    def attend(
        self, text: Tensor, latent: Tensor, mods: tuple[Modulation, Modulation], this: _Pass
    ) -> tuple[Tensor, Tensor]:
        """What the rows of both streams (M, D) gather from their documents, (M, H*K) each."""
        text_qkv = self.text.project(text, mods[0], this.text_run)
        latent_qkv = self.latent.project(latent, mods[1], this.latent_run)
        torch.view_as_complex(text_qkv[:, :2].unflatten(-1, (-1, 2))).mul_(this.turn)
        to_text = torch.empty(len(text), *text_qkv.shape[2:], dtype=self.text.dtype)
        to_latent = torch.empty(len(latent), *text_qkv.shape[2:], dtype=self.text.dtype)
        for num, tokens, slots in this.groups:
            parts = (part.unflatten(0, (num, -1)) for part in (latent_qkv[slots], text_qkv[tokens]))
            qkv = torch.cat(tuple(parts), 1).permute(2, 0, 3, 1, 4)
            result = F.scaled_dot_product_attention(*qkv).transpose(1, 2)
            to_latent[slots].unflatten(0, (num, -1)).copy_(result[:, : this.num_slots])
            to_text[tokens].unflatten(0, (num, -1)).copy_(result[:, this.num_slots :])
        return to_text.flatten(1), to_latent.flatten(1)


class FrozenDenoiser:
    """`forward` of a denoiser, without gradients, for documents without filler."""

    def __init__(self, denoiser: Denoiser, dtype: torch.dtype) -> None:
        self.dtype, self.config, self.shape = dtype, denoiser.config, denoiser.shape
        self.token_embed, self.latent_embed = denoiser.token_embed, denoiser.latent_embed
        self.slot_embed, self.time_embed = denoiser.slot_embed, denoiser.time_embed
        blocks: list[Block] = list(denoiser.blocks)  # type: ignore[arg-type]
        self.blocks = [_FrozenBlock(block, dtype) for block in blocks]
        sides = [side.modulation for block in blocks for side in (block.text, block.latent)]
        linears = [*sides, denoiser.text_final, denoiser.latent_final]
        self.sizes = [linear.out_features for linear in linears]
        weights, biases = zip(*((linear.weight, linear.bias) for linear in linears), strict=True)
        self.modulation = Product(torch.cat(weights), torch.cat(biases), dtype)
        wide, narrow = (layer for layer in denoiser.latent_head if isinstance(layer, nn.Linear))
        self.latent_head = Product.of(wide, dtype, gelu=True), Product.of(narrow, dtype)
        head = denoiser.token_head
        columns = zip(
            *(x[: self.shape.vocab_size].split(COLUMNS) for x in (head.weight, head.bias)), strict=True
        )
        self.token_head = [Product(weight, bias, dtype) for weight, bias in columns]

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor, layout: Layout
    ) -> Hidden:
        """One pass: tokens (T,), latents (N, S, C), times (N,)."""
        first, this = self._begin(text_time, latent_time, layout)
        condition = F.silu(self.time_embed(text_time[first], latent_time[first]))
        mods = self.modulation(condition.to(self.dtype)).float().split(self.sizes, dim=1)
        text = self.token_embed(tokens).float()
        latent = (self.latent_embed(latents) + self.slot_embed).flatten(0, 1).float()
        pairs = [
            (Modulation(*mods[i].chunk(6, 1)), Modulation(*mods[i + 1].chunk(6, 1)))
            for i in range(0, len(mods) - 2, 2)
        ]
        for block, both in zip(self.blocks[:-1], pairs[:-1], strict=True):
            to_text, to_latent = block.attend(text, latent, both, this)
            text = block.text.end(text, to_text, both[0], this.text_run)
            latent = block.latent.end(latent, to_latent, both[1], this.latent_run)
        attended = self.blocks[-1].attend(text, latent, pairs[-1], this)
        return Hidden(self, text, latent, attended, pairs[-1], (mods[-2], mods[-1]), this)

    def _begin(self, text_time: Tensor, latent_time: Tensor, layout: Layout) -> tuple[Tensor, _Pass]:
        """The first document of each run, and what the blocks need."""
        new = (text_time[1:] != text_time[:-1]) | (latent_time[1:] != latent_time[:-1])
        run = F.pad(new.long().cumsum(0), (1, 0))
        first = F.pad(new, (1, 0), value=True).nonzero()[:, 0]
        cosine, sine = rotary_angles(layout.position, self.config.head_width, self.config.rope_base)
        slots, turn = layout.num_slots, torch.complex(cosine, sine)[:, None]
        of_slots = run.repeat_interleave(slots)
        return first, _Pass(run[layout.document], of_slots, turn, _groups(layout), slots)

    def logit_blocks(self, hidden: Tensor) -> Iterator[Tensor]:
        """(R, D) -> logits in fp32, some columns after the other."""
        return (part(hidden).float() for part in self.token_head)


def _groups(layout: Layout) -> list[tuple[int, slice, slice]]:
    lengths, slots = layout.lengths.numpy(), layout.num_slots
    first = np.flatnonzero(np.diff(lengths, prepend=-1, append=-1)).tolist()
    starts = layout.starts.tolist()
    return [
        (end - begin, slice(starts[begin], starts[end]), slice(begin * slots, end * slots))
        for begin, end in itertools.pairwise(first)
    ]


@dataclass(frozen=True)
class Hidden:
    """Both streams at the attention of the last block; what follows is computed for the rows that are asked for."""

    network: FrozenDenoiser
    text: Tensor
    latent: Tensor
    attended: tuple[Tensor, Tensor]
    mods: tuple[Modulation, Modulation]
    final: tuple[Tensor, Tensor]
    """Of both streams: shift and scale at the end, (R, 2*D)."""
    this: _Pass

    @torch.no_grad()
    def tokens(self, rows: Tensor) -> Tensor:
        """Hidden states of some tokens, (rows, D)."""
        last, run = self.network.blocks[-1], self.this.text_run[rows]
        x = last.text.end(self.text[rows], self.attended[0][rows], self.mods[0], run)
        shift, scale = self.final[0].chunk(2, 1)
        return modulated_norm(x, shift, scale, run).to(self.network.dtype)

    @torch.no_grad()
    def latents(self) -> Tensor:
        """The latent prediction, (N*S, C) in fp32."""
        last, run = self.network.blocks[-1], self.this.latent_run
        x = last.latent.end(self.latent, self.attended[1], self.mods[1], run)
        shift, scale = self.final[1].chunk(2, 1)
        y = modulated_norm(x, shift, scale, run).to(self.network.dtype)
        for product in self.network.latent_head:
            y = product(y)
        return y.float()


_FROZEN: WeakKeyDictionary[Denoiser, tuple[tuple[object, ...], FrozenDenoiser]] = WeakKeyDictionary()


def frozen(denoiser: Denoiser, dtype: torch.dtype) -> FrozenDenoiser | None:
    """The denoiser for passes in this type, prepared once; None where somebody trains it, watches it, or has changed
    what it computes."""
    if type(denoiser) is not Denoiser or any(map(_is_hooked, denoiser.modules())):
        return None
    weights = list(denoiser.parameters())
    if any(type(weight) is not nn.Parameter or weight.requires_grad for weight in weights):
        return None
    # a weight may have been changed or replaced since
    versions = (0 if weight.is_inference() else weight._version for weight in weights)
    key = (dtype, *versions, *(weight.data_ptr() for weight in weights))
    known = _FROZEN.get(denoiser)
    if known is None or known[0] != key:
        known = _FROZEN[denoiser] = (key, FrozenDenoiser(denoiser, dtype))
    return known[1]


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
