"""Text samplers: each move unmasks some tokens of each document. They differ in the order.

ancestral      the exact reverse process in steps of time: every masked token has the same chance to be unmasked
first_hitting  the exact reverse process token by token, each at the time at which it is unmasked
confidence     the tokens whose most probable value is most probable come first
margin         the tokens whose best value is farthest ahead of the second come first
block          from left to right in blocks, by confidence inside a block

A new order is one line in `ORDERS`: a plan of its moves (`moves`) and, where the surest tokens come first, a measure.
The network computes only the documents in which something is unmasked at a move; that is exact, since nothing else of
its output would be used. Which tokens are unmasked never depends on the values drawn for them.
Shapes: N documents, T tokens, R rows of tokens, V vocabulary, K moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.joint import TextProcess
from mmldlm.runtime import kernels_run_on
from mmldlm.sampling.moves import (
    PlanMoves,
    chosen_places,
    plan_ancestral,
    plan_by_share,
    plan_first_hitting,
    reach_of,
    rows_of_moves,
)
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, Part, Step, send
from mmldlm.sampling.predictor import Logits, LogitsOf, Predictor, guided_logits, require_finite

See = Callable[[Tensor], None]
CHUNK_ROWS = 512
"""Rows whose probabilities exist at a time on an accelerator; on a CPU a sixteenth, which its caches hold."""
LOGITS_AT_A_TIME = 2**28
"""On an accelerator; on a CPU a sixteenth."""
ROWS_AT_A_TIME = 256
"""Of logits that are computed in blocks of columns."""
WORTH_LEAVING = 0.75
"""On an accelerator, documents without a move are left out where less than this share of the tokens remains."""
_BELOW_ONE = 1.0 - 2.0**-25
_VALUE_BITS = 31


class Best(NamedTuple):
    """The most probable value of each row. (R,) each."""

    token: Tensor
    probability: Tensor
    margin: Tensor
    """How far its probability is ahead of that of the second."""


@dataclass(frozen=True)
class Order:
    """Which tokens are unmasked when."""

    plan: PlanMoves
    measure: Callable[[Best], Tensor] | None = None
    """How sure a row is, in [0, 1]; None: the plan fixes the tokens."""
    in_blocks: bool = False


ORDERS: dict[str, Order] = {
    "ancestral": Order(plan_ancestral),
    "first_hitting": Order(plan_first_hitting),
    "confidence": Order(plan_by_share, lambda best: best.probability),
    "margin": Order(plan_by_share, lambda best: best.margin),
    "block": Order(plan_by_share, lambda best: best.probability, in_blocks=True),
}


@dataclass(frozen=True)
class _Numbers:
    """What the device needs to know of all moves; it travels in one piece."""

    time: Tensor
    """(K, N)"""
    next_time: Tensor
    """(K, N)"""
    limit: Tensor
    """(K, N) tokens before this place are candidates."""
    index: Tensor
    """Of each move, one after the other: the tokens, or where they are when the rows are sorted."""
    uniform: Tensor
    """(T,) the number that draws each token: it is drawn once in its life. Empty at temperature 0."""


class TextMoves:
    """The moves of the text of a pack by one order, ready to be made one by one."""

    def __init__(
        self,
        pack: Pack,
        process: TextProcess,
        steps: Sequence[Step],
        options: SamplingOptions,
        *,
        text_only: bool,
    ) -> None:
        """`text_only`: nothing else happens between the steps, so pauses of a document are left out."""
        self.order, self.options, self.mask_id = ORDERS[options.text_sampler], options, process.mask_id
        moves = self.order.plan(pack, process, steps)
        self.moves = moves.without_pauses(pack.document) if text_only else moves
        self.num_blocks = -(-int(pack.lengths.max()) // options.block_length)
        self.reach = reach_of(self.moves, pack, options.block_length if self.order.in_blocks else None)
        fixed = self.moves.move_of is not None
        index = rows_of_moves(self.moves) if fixed else chosen_places(self.reach, self.moves)
        uniform = np.empty(0, np.float32)
        if options.temperature > 0:
            keys = pack.keys[pack.document]
            uniform = randomness.uniform(keys, randomness.TOKEN_CHOICE, pack.position)
        flat = np.concatenate([np.empty(0, np.int64), *index])
        arrays = (self.moves.time, self.moves.next_time, self.reach.limit, flat, uniform)
        self.numbers = send(_Numbers(*map(torch.from_numpy, arrays)), pack.noisy_tokens.device)
        self.index = self.numbers.index.split([len(part) for part in index])

    def __len__(self) -> int:
        return len(self.moves)

    def make(self, predictor: Predictor, pack: Pack, number: int) -> Pack:
        """The pack after this move."""
        active = self.moves.num_chosen[number] > 0
        if active.any():
            part = _computed(replace(pack, text_time=self.numbers.time[number]), active)
            logits = guided_logits(predictor, part.pack, self.options.guidance)
            choose = self._fixed if self.order.measure is None else self._surest
            tokens, values = choose(part, logits, number)
            pack = replace(pack, noisy_tokens=pack.noisy_tokens.index_copy(0, tokens, values))
        return replace(pack, text_time=self.numbers.next_time[number])

    def _fixed(self, part: Part, logits: LogitsOf, number: int) -> tuple[Tensor, Tensor]:
        """The tokens of the plan, and their values."""
        tokens = self.index[number]
        rows = tokens if part.tokens is None else torch.searchsorted(part.tokens, tokens)
        return tokens, self._draw(logits(rows), tokens, part)

    def _surest(self, part: Part, logits: LogitsOf, number: int) -> tuple[Tensor, Tensor]:
        """The tokens of which the network is surest, and their values.

        How sure it is, is read off its own distribution, before temperature and top-p, which would make many positions
        equally sure.
        """
        assert self.order.measure is not None
        places, limit = part.pack.places, part.of_documents(self.numbers.limit[number])
        masked = part.pack.noisy_tokens == self.mask_id
        masked &= places.device_position < limit[places.device_document]
        rows = first_true(masked, int(self.reach.num_rows[number].sum()))
        best, kept = best_of_rows(logits, rows, self.mask_id)
        sure = self.order.measure(best)
        part.pack.watch.see(sure)
        group = places.device_document[rows]
        if self.order.in_blocks:
            group = group * self.num_blocks + places.device_position[rows] // self.options.block_length
        chosen = surest_first(sure, group)[self.index[number]]
        tokens = part.of_pack(rows[chosen])
        if self.options.temperature == 0:
            return tokens, best.token[chosen]
        return tokens, self._draw(logits(rows[chosen]) if kept is None else kept[chosen], tokens, part)

    def _draw(self, logits: Tensor, tokens: Tensor, part: Part) -> Tensor:
        """A value for each row, from the key of its document and its position."""
        options = self.options
        uniform = self.numbers.uniform[tokens] if options.temperature > 0 else tokens
        return draw(logits, uniform, options.temperature, options.top_p, part.pack.watch.see)


def _computed(pack: Pack, active: np.ndarray) -> Part:
    """The documents that go through the network: those with a move, or all where leaving some out does not pay."""
    smallest = 1.0 if pack.noisy_tokens.device.type == "cpu" else WORTH_LEAVING
    stay = pack.lengths[active].sum() >= smallest * pack.lengths.sum()
    return Part(pack) if stay else pack.select(active)


def first_true(mask: Tensor, count: int) -> Tensor:
    """(count,) where a mask is true, in order. The host knows how often, so it need not wait for the device."""
    place = torch.where(mask, mask.cumsum(0) - 1, count).clamp(max=count)
    rows = torch.arange(len(mask), device=mask.device)
    return rows.new_zeros(count + 1).scatter_(0, place, rows)[:count]


def surest_first(sure: Tensor, group: Tensor) -> Tensor:
    """(R,) order of rows by group, the surest of each group first, the earlier one of equals.

    Positive floats are ordered as their bits are, so group and value make one key.
    """
    bits = sure.float().contiguous().view(torch.int32).long()
    key = (group << _VALUE_BITS) + (2**_VALUE_BITS - 1 - bits)
    return key.sort(stable=True).indices


def best_of_rows(logits: LogitsOf, rows: Tensor, vocab_size: int) -> tuple[Best, Tensor | None]:
    """The most probable value of each row; and the logits of all rows, where they exist at one time."""
    if isinstance(logits, Logits):
        parts = [best_of_blocks(logits.blocks(chunk)) for chunk in rows.split(ROWS_AT_A_TIME)]
        return _joined(parts), None
    most = LOGITS_AT_A_TIME // (16 if rows.device.type == "cpu" else 1)
    chunks = rows.split(max(1, most // vocab_size))
    if len(chunks) == 1:
        kept = logits(rows)
        return best_of(kept), kept
    return _joined([best_of(logits(chunk)) for chunk in chunks]), None


def _joined(parts: list[Best]) -> Best:
    return Best(*map(torch.cat, zip(*parts, strict=True)))


def best_of_blocks(blocks: Iterable[Tensor]) -> Best:
    """`best_of` of logits (R, V) in float32 that come some columns after the other, at least two at first."""
    peaks: list[Tensor] = []
    sums: list[Tensor] = []
    values = tokens = torch.empty(0)
    width = 0
    for block in blocks:
        peaks.append(block.amax(-1))
        sums.append(block.softmax(-1).amax(-1).reciprocal())  # the largest one is exp(0) / sum
        if not width:
            values, tokens = block.topk(min(2, block.shape[-1]), dim=-1)
        elif len(rows := (peaks[-1] > values[:, 1]).nonzero()[:, 0]):
            top = block[rows].topk(min(2, block.shape[-1]), dim=-1)
            candidates = torch.cat([values[rows], top.values], 1)
            best = candidates.topk(2, dim=-1)
            values[rows] = best.values
            tokens[rows] = torch.cat([tokens[rows], top.indices + width], 1).gather(1, best.indices)
        width += block.shape[-1]
    first, second = values[:, :1], values[:, 1:]
    total = (torch.stack(sums, 1) * (torch.stack(peaks, 1) - first).exp()).sum(-1)
    return Best(tokens[:, 0], total.reciprocal(), (1.0 - (second - first).exp().sum(-1)) / total)


def best_of(logits: Tensor) -> Best:
    """The most probable value of each row of logits (R, V)."""
    if logits.is_cuda and kernels_run_on(logits.device):
        from mmldlm.model.kernels.best import best_values

        return Best(*best_values(logits))
    top = logits.topk(min(2, logits.shape[-1]), dim=-1)
    first, second = top.values[:, :1], top.values[:, 1:]
    total = (logits - first).exp_().sum(-1)
    return Best(top.indices[:, 0], total.reciprocal(), (1.0 - (second - first).exp().sum(-1)) / total)


def draw(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float, see: See = require_finite
) -> Tensor:
    """(R,) values from softmax(logits / temperature), the least probable ones cut off, by inverting its sum.

    The same number gives the same value whatever else is drawn; temperature 0 gives the most probable value. `see` is
    shown numbers that are finite where the logits are.
    """
    if temperature == 0:
        best = logits.max(dim=-1)
        see(best.values)
        return best.indices
    rows = CHUNK_ROWS // (16 if logits.device.type == "cpu" else 1)
    parts = zip(logits.split(rows), uniform.split(rows), strict=True)
    values = [_draw_chunk(part, numbers, temperature, top_p, see) for part, numbers in parts]
    return torch.cat(values) if values else logits.new_zeros(0, dtype=torch.int64)


def _draw_chunk(logits: Tensor, uniform: Tensor, temperature: float, top_p: float, see: See) -> Tensor:
    probability = keep_top_p(torch.softmax(logits.float() / temperature, dim=-1), top_p)
    kind = torch.float32 if logits.device.type == "mps" else torch.float64  # which mps does not have
    reached = probability.to(kind).cumsum(dim=-1)
    see(reached[:, -1])
    wanted = uniform.to(kind).clamp(max=_BELOW_ONE)[:, None] * reached[:, -1:]
    # the first value whose sum is beyond the number; one of probability 0 adds nothing and is never the first
    return torch.searchsorted(reached, wanted, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def keep_top_p(probability: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of values that together have probability `top_p`; not normalised."""
    if top_p >= 1.0:
        return probability
    ordered, order = probability.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probability).scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
