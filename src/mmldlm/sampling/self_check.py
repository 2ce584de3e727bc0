"""Decoding that checks itself: what was decoded is turned back into a latent and compared with the one it came from.

Candidates: of several texts for a latent, the one whose own latent is nearest (cosine of raw latents) is kept. Where
the length is not known, at temperature 0, candidates are the texts of the likeliest lengths, and the log-probability of
the length counts a little; elsewhere they are drawn. The former is how a latent is decoded by default; there the model
compares texts by how well each helps it to see the latent under noise. Rounds then improve the text: tokens are
replaced by others that bring it nearer (`judge`).
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.sampling.decode import Progress, decode_latents, likely_lengths
from mmldlm.sampling.judge import Checked, Encode, Judge, replace_rounds
from mmldlm.sampling.options import SamplingOptions, lengths_tried

CANDIDATE = 2**40
"""Word of the keys of further candidates; no step has such a number."""
LENGTH_PRIOR, READ_PRIOR = 0.01, 0.02
"""What one nat of the length's log-probability counts against the cosine, and against the logarithm of `read_errors`
(docs/results.md)."""


@dataclass(frozen=True)
class Stage:
    """The texts after so many candidates and rounds."""

    num_candidates: int
    num_rounds: int
    checked: Checked
    seconds: float
    """Of everything that led here, and of nothing else."""


def drawn_options(model: LoadedModel, options: SamplingOptions) -> SamplingOptions:
    """How further candidates and rounds are drawn: at temperature 0 each would be the first one again."""
    if options.temperature > 0:
        return options
    return replace(options, temperature=model.config.evaluation.candidate_temperature)


def decode_checked(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    lengths: np.ndarray | None = None,
    num_candidates: int = 1,
    num_rounds: int = 0,
    drawn: SamplingOptions | None = None,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Checked:
    """The best of some texts for each of the normalised latents (n, S, C), improved in some rounds.

    The first candidate is what `decode_latents` gives; `drawn` are the options of the others and of rounds, None: the
    same. Without `encode` the model's own t2l side turns texts back.
    """
    if lengths is None and options.temperature == 0 and num_candidates > 1:
        judge, bar = (
            Judge(model, latents, options, drawn or options, keys, encode, against),
            _Bar(progress, 1 + num_rounds),
        )
        best = _best_length(judge, num_candidates, bar.part())
        bar.step()
        return replace_rounds(judge, best, num_rounds, bar.step) if num_rounds else best
    stages = checked_stages(
        model, latents, options, keys=keys, lengths=lengths, counts=[num_candidates],
        num_rounds=num_rounds, drawn=drawn, encode=encode, against=against, progress=progress,
    )  # fmt: skip
    return list(stages)[-1].checked


def decode_unknown_length(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Texts (token ids) for normalised latents (n, S, C) of which nothing else is known: the best of likely lengths."""
    num = lengths_tried(model, options)
    if num == 1:
        return decode_latents(model, latents, options, keys=keys, progress=progress)
    checked = decode_checked(model, latents, options, keys=keys, num_candidates=num, progress=progress)
    return checked.tokens


def checked_stages(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    lengths: np.ndarray | None = None,
    counts: Sequence[int],
    num_rounds: int = 0,
    drawn: SamplingOptions | None = None,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Iterator[Stage]:
    """The same for several numbers of candidates, few to many: for each what is kept, then that after the rounds.

    More candidates hold those of fewer, so all numbers together cost what the largest does, and the rounds of each.
    `drawn` are the options of all candidates but the first, and of rounds; None: the same.
    """
    judge = Judge(model, latents, options, drawn or options, keys, encode, against)
    wanted = sorted(set(counts))
    bar = _Bar(progress, wanted[-1] + num_rounds * len(wanted))
    best: Checked | None = None
    seconds = 0.0
    start = time.perf_counter()
    best_score = np.zeros(0)
    for number in range(1, wanted[-1] + 1):
        start = time.perf_counter() if number > 1 else start
        candidate = _decode(judge, number - 1, lengths, bar.part())
        score = candidate.cosine
        best, best_score = (candidate, score) if best is None else _better(best, best_score, candidate, score)
        seconds += time.perf_counter() - start
        bar.step()
        if number not in wanted:
            continue
        yield Stage(number, 0, best, seconds)
        if num_rounds:
            start = time.perf_counter()
            better = replace_rounds(judge, best, num_rounds, bar.step)
            yield Stage(number, num_rounds, better, seconds + time.perf_counter() - start)


def _decode(judge: Judge, number: int, lengths: np.ndarray | None, progress: Progress | None) -> Checked:
    """One candidate for each latent."""
    num = len(judge.keys)
    keys = judge.keys if number == 0 else randomness.make_key(judge.keys, CANDIDATE, number)
    options = judge.options if number == 0 else judge.drawn
    passes, encoded = np.zeros(num, np.int64), np.zeros(num, np.int64)
    tokens = decode_latents(
        judge.model, judge.latents, options, lengths=lengths, keys=keys, progress=progress,
        against=judge.against, passes=passes,
    )  # fmt: skip
    cosine = judge.cosine(tokens, np.arange(num), passes, encoded)
    return Checked(tokens, cosine, cosine.copy(), passes, encoded, np.zeros(num, np.int64))


def _best_length(judge: Judge, count: int, progress: Progress | None) -> Checked:
    """The best text of the likeliest lengths of each latent, all decoded together."""
    lengths, log_probabilities = likely_lengths(judge.model, judge.latents, count)
    num, count = lengths.shape
    owner, spent = np.repeat(np.arange(num), count), np.zeros(num * count, np.int64)
    tokens = decode_latents(
        judge.model, judge.latents[owner], judge.options, lengths=lengths.reshape(-1),
        keys=judge.keys[owner], progress=progress, passes=spent,
        against=None if judge.against is None else judge.against[owner],
    )  # fmt: skip
    passes, encoded = spent.reshape(num, count).sum(1), np.zeros(num, np.int64)
    nearness = judge.cosine(tokens, owner, passes, encoded).reshape(num, count)
    if judge.encode is None:
        errors = judge.read_errors(tokens, owner, passes).reshape(num, count)
        score = READ_PRIOR * log_probabilities - np.log(np.maximum(errors, np.finfo(np.float32).tiny))
    else:
        score = nearness + LENGTH_PRIOR * log_probabilities
    best, rows = score.argmax(1), np.arange(num)
    kept = [tokens[place] for place in rows * count + best]
    return Checked(
        kept, nearness[rows, best], nearness[:, 0].copy(), passes, encoded, np.zeros(num, np.int64)
    )


def _better(
    best: Checked, best_score: np.ndarray, other: Checked, score: np.ndarray
) -> tuple[Checked, np.ndarray]:
    """The better of two candidates and its score; the costs of both are added up."""
    risen = score > best_score
    pairs = zip(other.tokens, best.tokens, risen, strict=True)
    kept = Checked(
        [new if is_better else old for new, old, is_better in pairs],
        np.where(risen, other.cosine, best.cosine),
        best.first_cosine,
        best.passes + other.passes,
        best.num_encoded + other.num_encoded,
        best.num_accepted,
    )
    return kept, np.maximum(score, best_score)


class _Bar:
    """Progress of several calls and rounds as one, in the unit of the calls: what is done never falls."""

    def __init__(self, progress: Progress | None, num_calls: int) -> None:
        self.progress, self.num_calls, self.num_done, self.unit = progress, num_calls, 0, 1

    def step(self) -> None:
        self.num_done += 1
        if self.progress is not None:
            self.progress(self.num_done * self.unit, self.num_calls * self.unit)

    def part(self) -> Progress | None:
        """Progress inside the present call."""
        progress = self.progress
        if progress is None:
            return None

        def report(done: int, total: int) -> None:
            self.unit = total
            progress(self.num_done * total + done, self.num_calls * total)

        return report
