"""What the steps of the text do, as far as it is known before the first one.

How many tokens of a document each step unmasks follows from their number alone. Orders that do not look at the network
fix even the tokens. So the host knows beforehand which documents take part in a step and how many rows need logits, and
never has to ask the device. A step at which a document does nothing is left out where only text is sampled: a chain has
as many moves as its longest document needs, however many steps are requested.
Shapes: K moves, N documents, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.corruption.joint import TextProcess
from mmldlm.sampling.pack import Pack, Step

ROUNDING = 1e-4
"""A share times a length that is this close above a whole number is that number."""


@dataclass(frozen=True, eq=False)
class Moves:
    """All moves of the documents of a pack."""

    num_masked: np.ndarray
    """(K, N) masked tokens before each move."""
    num_chosen: np.ndarray
    """(K, N) tokens that are unmasked."""
    time: np.ndarray
    """(K, N) float32, what the network is told."""
    next_time: np.ndarray
    """(K, N) float32, afterwards."""
    move_of: np.ndarray | None = None
    """(T,) which move unmasks each token, K for none; None: the surest first."""

    def __len__(self) -> int:
        return len(self.num_chosen)

    def without_pauses(self, document: np.ndarray) -> Moves:
        """The same moves without those in which a document does nothing, so that all documents move together.

        `document` (T,) is that of each token.
        """
        active = self.num_chosen > 0
        order = np.argsort(~active, axis=0, kind="stable")
        moves = int(active.sum(0).max(initial=0))

        def moved(values: np.ndarray) -> np.ndarray:
            return np.take_along_axis(values, order, 0)[:moves]

        move_of = self.move_of
        if move_of is not None:
            rank = np.append(np.cumsum(active, 0) - 1, np.full((1, active.shape[1]), moves), 0)
            move_of = rank[move_of, document]
        return Moves(
            moved(self.num_masked),
            moved(self.num_chosen),
            moved(self.time),
            moved(self.next_time),
            move_of,
        )


PlanMoves = Callable[[Pack, TextProcess, Sequence[Step]], Moves]


def plan_by_share(pack: Pack, process: TextProcess, steps: Sequence[Step]) -> Moves:
    """As many tokens as keep the masked share on the schedule; which ones is left to the network."""
    shares = process.schedule.mask_probability(torch.tensor([step.next_time for step in steps]))
    num_masked, num_left = _counts(pack, shares.double().numpy())
    time, after = (_time_of_share(pack, process, counts) for counts in (num_masked, num_left))
    return Moves(num_masked, num_masked - num_left, time, after)


def plan_ancestral(pack: Pack, process: TextProcess, steps: Sequence[Step]) -> Moves:
    """Each masked token with the probability that the reverse process gives it; in the last step, all."""
    left = np.ones(len(pack.document), bool) if pack.free is None else pack.free.copy()
    move_of, num_masked, num_chosen = np.full(len(left), len(steps)), [], []
    for number, step in enumerate(steps):
        chosen = left.copy()
        if step.next_time > 0:
            keys = randomness.make_key(pack.keys, step.step_idx)[pack.document]
            chance = randomness.uniform(keys, randomness.UNMASK, pack.position)
            ends = torch.tensor(step.time), torch.tensor(step.next_time)
            chosen &= chance < float(process.unmask_probability(*ends))
        move_of[chosen] = number
        num_masked.append(pack.places.count(left))
        num_chosen.append(pack.places.count(chosen))
        left &= ~chosen
    both = np.array([[step.time, step.next_time] for step in steps], np.float32).T[:, :, None]
    time, after = (_training_time(pack, process, one.repeat(len(pack.lengths), 1)) for one in both)
    return Moves(np.stack(num_masked), np.stack(num_chosen), time, after, move_of)


def plan_first_hitting(pack: Pack, process: TextProcess, steps: Sequence[Step]) -> Moves:
    """The tokens that come next, at the time of the first of them.

    Going back in time, a token is unmasked where the masking probability falls below a number that is uniform
    in (0, 1) and its own. So all times are drawn at once, and their order is the order of the tokens. With a step for
    each token nothing is approximate; with fewer, neighbours in time are drawn together, in groups of equal size.
    """
    num_masked, num_left = _counts(pack, np.array([step.next_time for step in steps]))
    rows = np.arange(len(pack.document)) if pack.free is None else np.flatnonzero(pack.free)
    document = pack.document[rows]
    level = randomness.uniform(pack.keys[document], randomness.UNMASK, pack.position[rows])
    order = np.lexsort((-level, document))
    first_row = np.searchsorted(document, np.arange(len(pack.lengths)))
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - first_row[document]
    num_found = pack.num_free - num_left  # (K, N) after each move
    move_of = np.full(len(pack.document), len(steps))
    move_of[rows] = (rank[None] >= num_found[:, document]).sum(0)
    place = np.minimum(first_row + pack.num_free - num_masked, len(rows) - 1)
    first = np.where(num_masked > 0, level[order][place], np.float32(0))
    time = process.schedule.time_of(torch.from_numpy(first)).clamp(0.0, 1.0).numpy()
    return Moves(
        num_masked,
        num_masked - num_left,
        _training_time(pack, process, time),
        _time_of_share(pack, process, num_left),
        move_of,
    )


def _counts(pack: Pack, share_left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) masked tokens before and after each move; fixed tokens do not count."""
    left = np.ceil(pack.num_free * share_left[:, None] - ROUNDING).astype(np.int64)
    counts = np.minimum.accumulate(np.concatenate([pack.num_free[None], left]), 0)
    return counts[:-1], counts[1:]


def _time_of_share(pack: Pack, process: TextProcess, num_masked: np.ndarray) -> np.ndarray:
    """(K, N) the time at which training masks the share that is masked now."""
    return time_of_share(num_masked / pack.lengths, process).numpy()


def time_of_share(share: np.ndarray, process: TextProcess) -> Tensor:
    """The time at which training masks this share, float32."""
    return process.schedule.time_of(torch.from_numpy(share.astype(np.float32))).clamp(0.0, 1.0)


def _training_time(pack: Pack, process: TextProcess, time: np.ndarray) -> np.ndarray:
    """(K, N) the time at which training has as much noise as there is at this time where some tokens are fixed."""
    if pack.free is None:
        return time
    share = process.schedule.mask_probability(torch.from_numpy(time)).numpy()
    return time_of_share(share * (pack.num_free / pack.lengths).astype(np.float32), process).numpy()


@dataclass(frozen=True)
class Reach:
    """How far into its documents each move looks for tokens to unmask."""

    limit: np.ndarray
    """(K, N) places before this one."""
    num_rows: np.ndarray
    """(K, N) masked tokens there, which need logits."""


def reach_of(moves: Moves, pack: Pack, block_length: int | None) -> Reach:
    """The whole document; with blocks, up to the end of the last block that the move touches."""
    active = moves.num_chosen > 0
    if block_length is None:
        return Reach(np.where(active, pack.lengths, 0), np.where(active, moves.num_masked, 0))
    num_blocks = -(-int(pack.lengths.max()) // block_length)
    free = np.ones(len(pack.document), bool) if pack.free is None else pack.free
    place = pack.document[free] * num_blocks + pack.position[free] // block_length
    until = np.bincount(place, minlength=len(pack.lengths) * num_blocks).reshape(-1, num_blocks).cumsum(1)
    before = pack.num_free - moves.num_masked
    after = before + moves.num_chosen
    last = np.minimum((until[None] < after[:, :, None]).sum(2), num_blocks - 1)
    rows = np.take_along_axis(until, last.T, 1).T - before
    return Reach(np.where(active, (last + 1) * block_length, 0), np.where(active, rows, 0))


def chosen_places(reach: Reach, moves: Moves) -> list[np.ndarray]:
    """For each move, where the chosen rows are once the rows of each document are sorted, the surest first."""
    result = []
    for rows, chosen in zip(reach.num_rows, moves.num_chosen, strict=True):
        start = np.repeat(np.cumsum(rows) - rows, chosen)
        result.append(start + np.arange(len(start)) - np.repeat(np.cumsum(chosen) - chosen, chosen))
    return result


def rows_of_moves(moves: Moves) -> list[np.ndarray]:
    """For each move, which tokens it unmasks, where that is fixed."""
    assert moves.move_of is not None
    order = np.argsort(moves.move_of, kind="stable")
    ends = np.cumsum(np.bincount(moves.move_of, minlength=len(moves) + 1))[:-1]
    return np.split(order, ends)[: len(moves)]
