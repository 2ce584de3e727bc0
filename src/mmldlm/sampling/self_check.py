"""Decoding that checks itself: what was decoded is turned back into a latent and compared with the one that was given.

Candidates: of several texts for a latent, the one whose own latent is nearest (cosine of raw latents) is kept.
Rounds: each token is left out in turn, all of them in one packed batch, which shows how the cosine would change without
it. The tokens whose absence helps most (or costs least) are masked, decoded anew, and kept if the cosine has risen.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.sampling.decode import Progress, decode_latents, encode_tokens, infill_tokens
from mmldlm.sampling.options import SamplingOptions

CANDIDATE, ROUND = 2**40, 2**41
"""Words of the keys of further candidates and of rounds; no step has such a number."""
MAX_PROBED = 32
"""Tokens of a text that are left out in turn in a round; of longer texts, so many drawn ones."""
ROUND_SHARE = 0.15
"""Share of the tokens that a round masks, at least one."""

Encode = Callable[[list[np.ndarray]], np.ndarray]
"""Texts (token ids) to raw latents (n, S, C), such as the encoder that made the training data."""


@dataclass
class Checked:
    """Texts with what is known about them."""

    tokens: list[np.ndarray]
    cosine: np.ndarray
    """(n,) float64, of the text's own latent to the given one."""
    first_cosine: np.ndarray
    """(n,) that of the first candidate before any round."""
    passes: np.ndarray
    """(n,) int64, passes of the model's network, for all candidates and rounds."""
    num_encoded: np.ndarray
    """(n,) int64, texts that were turned back into latents."""
    num_accepted: np.ndarray
    """(n,) int64, rounds that made the text better."""


@dataclass(frozen=True)
class Stage:
    """The best texts after so many candidates and rounds."""

    num_candidates: int
    num_rounds: int
    found: Checked


def decode_checked(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    lengths: np.ndarray | None = None,
    num_candidates: int = 1,
    num_rounds: int = 0,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Checked:
    """The best of some texts for each of the normalised latents (n, S, C), improved in some rounds.

    The first candidate is what `decode_latents` gives. Without `encode` the model's own t2l side turns texts back.
    """
    stages = checked_stages(
        model, latents, options, keys=keys, lengths=lengths, counts=[num_candidates], num_rounds=num_rounds,
        encode=encode, against=against, progress=progress,
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
    num_rounds: int = 0,
    drawn: SamplingOptions | None = None,
    encode: Encode | None = None,
    against: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Iterator[Stage]:
    """The same for several numbers of candidates, few to many: for each the best so far, then that after the rounds.

    More candidates hold those of fewer, so all numbers together cost what the largest does, and the rounds of each.
    `drawn` are the options of all candidates but the first, and of rounds; None: the same.
    """
    work = _Check(model, latents, options, drawn or options, keys, encode, against)
    wanted = sorted(set(counts))
    num_calls = wanted[-1] + num_rounds * len(wanted)
    num_done = 0
    best: Checked | None = None
    for number in range(wanted[-1]):
        found = work.decode(number, lengths, _part_of(progress, num_done, num_calls))
        best = found if best is None else _better(best, found)
        num_done += 1
        if number + 1 not in wanted:
            continue
        yield Stage(number + 1, 0, best)
        improved = best
        for number_of_round in range(num_rounds):
            improved = work.improve(improved, number_of_round)
            num_done += 1
            if progress is not None:
                progress(num_done, num_calls)
        if num_rounds:
            yield Stage(number + 1, num_rounds, improved)


class _Check:
    """The given latents and how texts are compared with them."""

    def __init__(
        self,
        model: LoadedModel,
        latents: np.ndarray,
        options: SamplingOptions,
        drawn: SamplingOptions,
        keys: np.ndarray,
        encode: Encode | None,
        against: np.ndarray | None,
    ) -> None:
        self.model, self.latents, self.options, self.drawn, self.keys = model, latents, options, drawn, keys
        self.encode, self.against = encode, against
        self.raw = model.denormalize(latents)
        self.judge = replace(options, guidance=1.0)  # a text is read as it stands, however it was decoded

    def decode(self, number: int, lengths: np.ndarray | None, progress: Progress | None) -> Checked:
        """One candidate for each latent."""
        num = len(self.keys)
        keys = self.keys if number == 0 else randomness.make_key(self.keys, CANDIDATE, number)
        options = self.options if number == 0 else self.drawn
        passes, encoded = np.zeros(num, np.int64), np.zeros(num, np.int64)
        tokens = decode_latents(
            self.model, self.latents, options, lengths=lengths, keys=keys, progress=progress,
            against=self.against, passes=passes,
        )  # fmt: skip
        found = self.cosine(tokens, np.arange(num), passes, encoded)
        return Checked(tokens, found, found.copy(), passes, encoded, np.zeros(num, np.int64))

    def cosine(
        self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray, encoded: np.ndarray
    ) -> np.ndarray:
        """(m,) cosine of each text's latent to the given one of its owner; the cost is added to the owner's."""
        np.add.at(encoded, owner, 1)
        if self.encode is not None:
            return cosine(self.encode(texts), self.raw[owner])
        spent = np.zeros(len(texts), np.int64)
        made = encode_tokens(self.model, texts, self.judge, keys=self.keys[owner], passes=spent)
        np.add.at(passes, owner, spent)
        return cosine(self.model.denormalize(made), self.raw[owner])

    def improve(self, best: Checked, number: int) -> Checked:
        """One round: what hurts most is decoded anew, and kept where it is better."""
        passes, encoded = best.passes.copy(), best.num_encoded.copy()
        round_keys = randomness.make_key(self.keys, ROUND, number)
        harm = self.harm(best.tokens, round_keys, passes, encoded)
        blank = self.model.corruption.text.mask_id
        asked = [with_blanks(text, each, blank) for text, each in zip(best.tokens, harm, strict=True)]
        tokens = infill_tokens(
            self.model, asked, self.drawn, latents=self.latents, keys=round_keys, against=self.against,
            passes=passes,
        )  # fmt: skip
        found = self.cosine(tokens, np.arange(len(tokens)), passes, encoded)
        risen = found > best.cosine
        return Checked(
            [
                new if is_better else old
                for new, old, is_better in zip(tokens, best.tokens, risen, strict=True)
            ],
            np.where(risen, found, best.cosine),
            best.first_cosine,
            passes,
            encoded,
            best.num_accepted + risen,
        )

    def harm(
        self, tokens: list[np.ndarray], keys: np.ndarray, passes: np.ndarray, encoded: np.ndarray
    ) -> list[np.ndarray]:
        """For each token, the cosine of its text without it; minus infinity where that was not tried."""
        owner, place = probed_places(tokens, keys)
        harm = [np.full(len(text), -np.inf) for text in tokens]
        if len(owner):
            shorter = [np.delete(tokens[i], at) for i, at in zip(owner, place, strict=True)]
            found = self.cosine(shorter, owner, passes, encoded)
            for i, at, value in zip(owner, place, found, strict=True):
                harm[i][at] = value
        return harm


def probed_places(tokens: list[np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are left out in turn: text and place of each; a text of one token has none to spare."""
    owner: list[int] = []
    place: list[int] = []
    for i, text in enumerate(tokens):
        if len(text) < 2:
            continue
        chance = randomness.uniform(keys[i], randomness.SHUFFLE, np.arange(len(text)))
        chosen = np.sort(np.argsort(chance, kind="stable")[:MAX_PROBED])
        owner += [i] * len(chosen)
        place += chosen.tolist()
    return np.array(owner, np.int64), np.array(place, np.int64)


def with_blanks(text: np.ndarray, harm: np.ndarray, blank: int) -> np.ndarray:
    """The text with blanks where its tokens do most harm."""
    num_blanks = max(1, int(np.ceil(ROUND_SHARE * len(text))))
    result = text.copy()
    result[np.argsort(-harm, kind="stable")[:num_blanks]] = blank
    return result


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) cosine between latents (n, S, C), all slots together."""
    product = (first * second).sum((1, 2), dtype=np.float64)
    size = np.sqrt((first**2).sum((1, 2), dtype=np.float64) * (second**2).sum((1, 2), dtype=np.float64))
    return product / np.maximum(size, 1e-30)


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


def _part_of(progress: Progress | None, number: int, num_calls: int) -> Progress | None:
    """Progress of one of several calls as a part of all."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, num_calls * total)
