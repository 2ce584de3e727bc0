"""Decoding that checks itself: what was decoded is turned back into a latent and compared with the one that was given.

Candidates: of several texts for a latent, the one whose own latent is nearest (cosine of raw latents) is kept, or their
consensus. Rounds then improve it: what hurts is masked and decoded anew (`remasking`), or tokens are replaced by others
that bring the text nearer (`replacing`).
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import CONSENSUS, NEAREST, REMASK, REPLACE
from mmldlm.sampling.consensus import consensus
from mmldlm.sampling.decode import Progress, decode_latents
from mmldlm.sampling.judge import Checked, Encode, Judge
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.remasking import remask_rounds
from mmldlm.sampling.replacing import replace_rounds

CANDIDATE = 2**40
"""Word of the keys of further candidates; no step has such a number."""
ROUNDS = {REMASK: remask_rounds, REPLACE: replace_rounds}


@dataclass(frozen=True)
class Stage:
    """The texts after so many candidates and rounds."""

    num_candidates: int
    num_rounds: int
    keep: str
    """What became of the candidates: the nearest or their consensus; of one, the nearest."""
    refine_by: str | None
    """How the rounds improve; None where there were none."""
    found: Checked
    seconds: float
    """Of everything that led here, and of nothing else."""


def decode_checked(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    lengths: np.ndarray | None = None,
    num_candidates: int = 1,
    keep: str = NEAREST,
    num_rounds: int = 0,
    refine_by: str = REMASK,
    drawn: SamplingOptions | None = None,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Checked:
    """The best of some texts for each of the normalised latents (n, S, C), improved in some rounds.

    The first candidate is what `decode_latents` gives; `drawn` are the options of the others and of rounds, None: the
    same. Without `encode` the model's own t2l side turns texts back.
    """
    stages = checked_stages(
        model, latents, options, keys=keys, lengths=lengths, counts=[num_candidates], keeps=[keep],
        num_rounds=num_rounds, refine_by=[refine_by], drawn=drawn, encode=encode, against=against,
        progress=progress,
    )  # fmt: skip
    return list(stages)[-1].found


def checked_stages(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    lengths: np.ndarray | None = None,
    counts: Sequence[int],
    keeps: Sequence[str] = (NEAREST,),
    num_rounds: int = 0,
    refine_by: Sequence[str] = (REMASK,),
    drawn: SamplingOptions | None = None,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Iterator[Stage]:
    """The same for several numbers of candidates, few to many: for each what is kept, then that after the rounds.

    More candidates hold those of fewer, so all numbers together cost what the largest does, and the rounds of each.
    `drawn` are the options of all candidates but the first, and of rounds; None: the same. A consensus needs candidates
    of one length: where lengths are drawn, all candidates then have that of the first.
    """
    judge = Judge(model, latents, options, drawn or options, keys, encode, against)
    wanted, kept = sorted(set(counts)), {count: keeps if count > 1 else [NEAREST] for count in counts}
    num_calls = wanted[-1] + num_rounds * len(refine_by) * sum(map(len, kept.values()))
    bar = _Bar(progress, num_calls)
    candidates = Candidates(judge, CONSENSUS in keeps)
    decoded_s = 0.0
    for number in range(1, wanted[-1] + 1):
        start = time.perf_counter()
        candidates.add(number - 1, lengths, bar.part())
        decoded_s += time.perf_counter() - start
        bar.step()
        for keep in kept.get(number, ()):
            start = time.perf_counter()
            best = candidates.consensus() if keep == CONSENSUS else candidates.nearest()
            seconds = decoded_s + time.perf_counter() - start
            yield Stage(number, 0, keep, None, best, seconds)
            for way in refine_by if num_rounds else ():
                start = time.perf_counter()
                better = ROUNDS[way](judge, best, num_rounds, bar.step)
                yield Stage(number, num_rounds, keep, way, better, seconds + time.perf_counter() - start)


class Candidates:
    """Texts for each latent, one more of each at a time, and what they amount to."""

    def __init__(self, judge: Judge, keeps_all: bool) -> None:
        self.judge, self.keeps_all = judge, keeps_all
        self.best: Checked | None = None
        self.tokens: list[np.ndarray] = []
        self.cosines: list[np.ndarray] = []

    def add(self, number: int, lengths: np.ndarray | None, progress: Progress | None) -> None:
        """One more candidate for each latent."""
        if self.keeps_all and self.best is not None:
            lengths = self.lengths
        found = self._decode(number, lengths, progress)
        self.best = found if self.best is None else _better(self.best, found)
        if self.keeps_all:
            self.tokens.append(np.concatenate(found.tokens).astype(np.int32))
            self.cosines.append(found.cosine)

    @property
    def lengths(self) -> np.ndarray:
        """(n,) of the best so far."""
        return np.array([len(text) for text in self.nearest().tokens], np.int64)

    def nearest(self) -> Checked:
        """The candidate that is nearest."""
        assert self.best is not None
        return self.best

    def consensus(self) -> Checked:
        """What the candidates agree on, which is judged too; it may be farther than the nearest of them."""
        found = self.nearest().copy()
        found.tokens = consensus(np.stack(self.tokens), self.lengths, np.stack(self.cosines))
        everyone = np.arange(len(found.tokens))
        found.cosine = self.judge.cosine(found.tokens, everyone, found.passes, found.num_encoded)
        return found

    def _decode(self, number: int, lengths: np.ndarray | None, progress: Progress | None) -> Checked:
        judge, num = self.judge, len(self.judge.keys)
        keys = judge.keys if number == 0 else randomness.make_key(judge.keys, CANDIDATE, number)
        options = judge.options if number == 0 else judge.drawn
        passes, encoded = np.zeros(num, np.int64), np.zeros(num, np.int64)
        tokens = decode_latents(
            judge.model, judge.latents, options, lengths=lengths, keys=keys, progress=progress,
            against=judge.against, passes=passes,
        )  # fmt: skip
        found = judge.cosine(tokens, np.arange(num), passes, encoded)
        return Checked(tokens, found, found.copy(), passes, encoded, np.zeros(num, np.int64))


def _better(best: Checked, other: Checked) -> Checked:
    """The nearer of two candidates; the costs of both are added up."""
    risen = other.cosine > best.cosine
    pairs = zip(other.tokens, best.tokens, risen, strict=True)
    return Checked(
        [new if is_better else old for new, old, is_better in pairs],
        np.maximum(other.cosine, best.cosine),
        best.first_cosine,
        best.passes + other.passes,
        best.num_encoded + other.num_encoded,
        best.num_accepted,
    )


class _Bar:
    """Progress of several calls and rounds as one."""

    def __init__(self, progress: Progress | None, num_calls: int) -> None:
        self.progress, self.num_calls, self.num_done = progress, num_calls, 0

    def step(self) -> None:
        """One call or round is done."""
        self.num_done += 1
        if self.progress is not None:
            self.progress(self.num_done, self.num_calls)

    def part(self) -> Progress | None:
        """Progress inside the present call."""
        progress, number, num_calls = self.progress, self.num_done, self.num_calls
        if progress is None:
            return None
        return lambda done, total: progress(number * total + done, num_calls * total)
