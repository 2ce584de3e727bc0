"""The denoiser: embeds noisy tokens and latents, runs the MMDiT blocks, and predicts both clean; and its operations.

It knows no tokenizer and no mode: two times per document tell it how noisy each modality is.
Shapes: N documents, T tokens, S slots, C channels, D width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.config import ModelConfig, ModelShape, resolve_model
from mmldlm.layout import Layout
from mmldlm.model.layers import (
    Block,
    Kernels,
    LengthHead,
    Places,
    Residual,
    Stream,
    TiedHead,
    TimeEmbedding,
    Times,
)
from mmldlm.model.ops import Chosen, RowsOf, add_and_norm, all_modulations, rotary_angles
from mmldlm.model.weights import allocate, init_weights
from mmldlm.types import DataShape, DenoiserOutput


class Denoiser(nn.Module):
    """`forward` gives hidden states and the latent prediction; `token_logits` turns rows of the former into logits.

    >>> import torch
    >>> from mmldlm import Denoiser, PackedBatch
    >>> from mmldlm.config import ModelConfig
    >>> shape = DataShape(vocab_size=97, num_slots=1, num_channels=5, max_length=8)
    >>> denoiser = Denoiser(ModelConfig(preset="tiny"), shape)
    >>> batch, time = PackedBatch.of([[3, 1, 4], [1, 5]], torch.zeros(2, 5)), torch.zeros(2)
    >>> output = denoiser(batch.tokens, batch.latents, time, time, batch.layout)
    >>> tuple(denoiser.token_logits(output.token_hidden).shape), tuple(output.latent_prediction.shape)
    ((5, 97), (2, 1, 5))
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: DataShape,
        *,
        seed: int | None = 0,
        token_counts: np.ndarray | None = None,
    ) -> None:
        """First weights are a function of the seed and of how often each token occurs in training (V,), if that is
        known; seed None leaves them uninitialised, for weights that are loaded."""
        super().__init__()
        self.config, self.shape = resolve_model(config), shape
        self.kernels = Kernels()
        self.recomputed: set[int] = set()
        """Blocks that are computed again in the backward pass instead of keeping what they need."""
        with torch.device("meta"):  # PyTorch's own first weights would be drawn for nothing
            self._build()
        allocate(self)
        if seed is not None:
            init_weights(self, seed, token_counts)

    def _build(self) -> None:
        c, shape = self.config, self.shape

        def stream(width: int) -> Stream:
            return Stream(width, c.time_width, c.num_heads, c.head_width, c.mlp_ratio, c.qk_norm)

        tied = c.tied_embedding
        rows = -(-(shape.vocab_size + tied) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        # the mask comes after the vocabulary
        matrix = torch.empty(rows if tied else shape.vocab_size + 1, c.width)
        # drawing it without memory, as nn.Embedding would, imports PyTorch's compiler, which takes 1.2 s
        self.token_embed = nn.Embedding.from_pretrained(matrix, freeze=False)
        self.latent_embed = nn.Linear(shape.num_channels, c.latent_width)
        self.slot_embed = nn.Parameter(torch.empty(shape.num_slots, c.latent_width))
        self.time_embed = TimeEmbedding(c.time_width)
        self.blocks = nn.ModuleList(Block(stream(c.width), stream(c.latent_width)) for _ in range(c.depth))
        self.text_final = nn.Linear(c.time_width, 2 * c.width)
        self.latent_final = nn.Linear(c.time_width, 2 * c.latent_width)
        self.token_head = TiedHead(self.token_embed) if tied else nn.Linear(c.width, rows)
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
        rows: Tensor | None = None,
    ) -> DenoiserOutput:
        """noisy_tokens (T,), noisy_latents (N, S, C), times (N,).

        `rows`: tokens (R,) whose hidden states are wanted alone, in rising order, filled up with the last one. The last
        block ends with them; its attention is that of all.
        """
        time_embedding = self.time_embed(text_time, latent_time)
        places = self._places(layout)
        token_rows = self.token_embed(noisy_tokens)
        latent_rows = (self.latent_embed(noisy_latents) + self.slot_embed).flatten(0, 1).float()
        times = self._times_of_blocks(time_embedding)
        text, latent = (self._begin(x, time_embedding, times[0]) for x in (token_rows, latent_rows))
        chosen = None if rows is None else Chosen.of(rows, places.text)
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            inputs = (text, latent, times[number], places, self.kernels, chosen if number == last else None)
            if number in self.recomputed and self.training and torch.is_grad_enabled():
                text, latent = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                text, latent = block(*inputs)
        condition = F.silu(time_embedding)
        where = places.text if chosen is None else chosen.where
        token_hidden = self._end(text, self.text_final(condition), where)
        latent_hidden = self._end(latent, self.latent_final(condition), places.latent)
        return DenoiserOutput(
            token_hidden=token_hidden,
            latent_prediction=self.latent_head(latent_hidden).float().view(noisy_latents.shape),
            length_logits=None
            if self.length_head is None
            else self.length_head(noisy_latents, latent_time).float(),
        )

    def _times_of_blocks(self, time_embedding: Tensor) -> list[Times]:
        """What each block is given. For few documents one product computes the modulations of all blocks: small
        products, two for each block, would not fill the device.

        Not where weights are divided among ranks: they are gathered only while their block computes.
        """
        sides = (side for block in self.blocks for side in block.children())
        layers = [side.modulation for side in sides if isinstance(side, Stream)]
        whole = all(type(layer.weight) is nn.Parameter for layer in layers)
        training = self.training and torch.is_grad_enabled()
        if not (self.kernels.fused and training and whole and len(time_embedding) <= FEW_DOCUMENTS):
            return [time_embedding] * len(self.blocks)
        parts = all_modulations(F.silu(time_embedding), layers)
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _places(self, layout: Layout) -> Places:
        cosine, sine = rotary_angles(layout.position, self.config.head_width, self.config.rope_base)
        slots = torch.arange(layout.num_documents + 1, device=layout.document.device) * self.shape.num_slots
        owner = torch.arange(layout.num_documents, device=layout.document.device)
        latent = RowsOf(owner.repeat_interleave(self.shape.num_slots), slots)
        return Places(layout, RowsOf(layout.document, layout.starts), latent, cosine[:, 0], sine[:, 0])

    def _begin(self, x: Tensor, time_embedding: Tensor, times: Times) -> Residual:
        """A stream to which nothing has been added yet: an empty branch, so that one graph serves all blocks."""
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        x = x.to(self.kernels.residual)
        columns = 6 * x.shape[1] if isinstance(times, Tensor) else times[0].stride(0)
        gates = (time_embedding[:, :1] * 0.0).to(kind).expand(-1, columns).contiguous()
        return Residual(x, (x * 0.0).to(kind), gates[:, -x.shape[1] :])

    def _end(self, stream: Residual, modulation: Tensor, where: RowsOf) -> Tensor:
        shift, scale = modulation.chunk(2, dim=-1)
        return add_and_norm(*stream, shift, scale, where, fused=self.kernels.fused)[1]

    def token_logits(self, hidden: Tensor) -> Tensor:
        """(rows, D) -> (rows, V) in fp32. The mask is no output: it cannot be predicted."""
        return self.token_head(hidden)[..., : self.shape.vocab_size].float()


def recomputed_blocks(depth: int, share_kept: float) -> set[int]:
    """Which blocks are computed again when only this share of them may keep their activations; spread evenly."""
    count = round(depth * (1.0 - share_kept))
    return {int((i + 0.5) * depth / count) for i in range(count)} if count else set()


_FORWARD_AND_BACKWARD = 6


def step_flops(
    model: ModelShape,
    data: DataShape,
    *,
    tokens: float,
    documents: float,
    squares: float,
    scored: float,
    text: bool = True,
    latent: bool = True,
    length: bool = True,
) -> float:
    """Operations that the losses need, forward and backward; `squares` is the sum over documents of
    (tokens + slots)^2. After the last attention only scored tokens matter.

    `text`, `latent` and `length` say which losses there are.
    """
    slots = documents * data.num_slots
    inner = model.num_heads * model.head_width
    per_token = model.depth * _block_weights(model.width, inner, model.mlp_ratio)
    per_slot = model.depth * _block_weights(model.latent_width, inner, model.mlp_ratio)
    per_slot += data.num_channels * model.latent_width
    per_slot += 4 * model.latent_width * (model.latent_width + data.num_channels) if latent else 0
    ending = _ending_weights(model.width, inner, model.mlp_ratio)
    per_token -= ending if text else _last_weights(model.width, inner, model.mlp_ratio)
    per_slot -= 0 if latent else _last_weights(model.latent_width, inner, model.mlp_ratio)
    weights = tokens * per_token + slots * per_slot
    weights += documents * _document_weights(model, data, text=text, latent=latent, length=length)
    weights += scored * (model.width * data.vocab_size + (ending if text else 0))
    return float(_FORWARD_AND_BACKWARD * weights + 12 * model.depth * inner * squares)


def _block_weights(width: int, inner: int, mlp_ratio: float) -> int:
    """Weights that a row meets in its half of a block."""
    return 4 * width * inner + 2 * width * int(width * mlp_ratio)


def _ending_weights(width: int, inner: int, mlp_ratio: float) -> int:
    """Those that a row meets after attention."""
    return width * inner + 2 * width * int(width * mlp_ratio)


def _last_weights(width: int, inner: int, mlp_ratio: float) -> int:
    """Those that a row of a stream without a loss need not meet in the last block: all but keys and values."""
    return _block_weights(width, inner, mlp_ratio) - 2 * width * inner


def _document_weights(model: ModelShape, data: DataShape, *, text: bool, latent: bool, length: bool) -> int:
    """Weights that are applied once a document: times, modulation and length."""
    both = model.width + model.latent_width
    total = 2 * model.time_width**2 + model.time_width * both * (6 * model.depth + 2)
    # without a loss, four of the last six modulations and the two at the end go
    total -= model.time_width * 6 * (model.width * (not text) + model.latent_width * (not latent))
    if model.length == "modelled" and length:
        total += model.time_width * (
            data.num_slots * data.num_channels + 1 + model.time_width + data.max_length
        )
    return total


VOCABULARY_MULTIPLE = 64
"""The output matrix has a row count that matrix units like; the rows past the vocabulary are never used."""
FEW_DOCUMENTS = 128
"""Up to here the modulations of all blocks take little memory, and computing them one by one takes long."""
