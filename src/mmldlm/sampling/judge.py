"""How good a decoded text is: it is turned back into a latent, which is compared with the one that was decoded.

Rounds try other tokens in the place of single ones, and keep those that make the text better. For each token the
network predicts, with this one masked and everything else in sight, the most probable others; special tokens, which
nobody reads, are not among them. All texts with one such replacement are turned back into latents. Then the best
replacements of a text, one for each place, are made together: the best one, two, three, a quarter, a half and all that
help; the best of these texts is kept. The encoder judges by the cosine alone. The model's own t2l side can be led
astray by a text that it alone reads so, so there a replacement that is less probable than what stands there must gain
more. Nothing is drawn, so a text of which no replacement helps is as good as this way can make it.

Thousands of variants of texts are compared at a time, so they are kept in one array (`Ragged`).
Shapes: n documents, m texts to compare, S latent slots, C latent channels, N texts, T tokens of all of them, P places
that are tried, K replacements of each, M replacements that help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.shard import ranges
from mmldlm.data.tokenizer import Tokenizer, split_texts
from mmldlm.errors import UserError
from mmldlm.latents import cosine
from mmldlm.sampling.decode import encode_tokens, read_errors
from mmldlm.sampling.moves import time_of_share
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, Tally, group_documents
from mmldlm.sampling.predictor import ModelPredictor, guided_logits, require_finite

ROUND = 2**41
"""Word of the keys of rounds; no step has such a number."""
TOKEN_PRIOR = 0.01
"""What one nat less of a replacement's log-probability costs of the cosine where the model checks itself; as much as
one of the length's (`self_check`). Without it rounds spoil texts (docs/sampling.md)."""
MAX_PROBED = 32
"""Tokens of a text that are tried in turn in a round; of longer texts, so many drawn ones."""
NUM_REPLACEMENTS = 8
"""Most probable other tokens that are tried in each place."""
SMALLEST_GAIN = 1e-5
"""Of the cosine; less may be rounding, which changes with the batch."""
CHUNK_TOKENS = 2**19
"""Tokens of variants that are held in memory at a time; enough to fill the batches of any encoder."""
Encode = Callable[[list[np.ndarray]], np.ndarray]
"""Texts (token ids) to raw latents (n, S, C), such as the encoder that made the training data."""


@dataclass
class Checked:
    """Texts with what is known about them."""

    tokens: list[np.ndarray]
    cosine: np.ndarray
    """(n,) float64, of the text's own latent to the one that was decoded."""
    first_cosine: np.ndarray
    """(n,) that of the first candidate before any round."""
    passes: np.ndarray
    """(n,) int64, passes of the model's network, for all candidates and rounds."""
    num_encoded: np.ndarray
    """(n,) int64, texts that were turned back into latents."""
    num_accepted: np.ndarray
    """(n,) int64, rounds that made the text better."""

    def rows(self) -> list[tuple[float, float, int, int, int]]:
        """For each text: cosine, first_cosine, passes, num_encoded, num_accepted."""
        counts = (self.passes, self.num_encoded, self.num_accepted)
        values = (self.cosine, self.first_cosine, *counts)
        return list(zip(*(value.tolist() for value in values), strict=True))

    def copy(self) -> Checked:
        """One that may be changed."""
        arrays = (self.cosine, self.first_cosine, self.passes, self.num_encoded, self.num_accepted)
        return Checked(list(self.tokens), *(values.copy() for values in arrays))


class Judge:
    """The latents that are decoded and how texts are compared with them."""

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
        self.raw = _raw(model, latents)
        self.reading = replace(options, guidance=1.0)  # a text is read as it stands, however it was decoded
        self.unwritten = unwritten_tokens(model)

    def cosine(
        self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray, encoded: np.ndarray
    ) -> np.ndarray:
        """(m,) cosine of each text's latent to that of its owner; the cost is added to the owner's."""
        np.add.at(encoded, owner, 1)
        sizes = np.array([len(text) for text in texts], np.int64)
        parts = [
            cosine(self._latents(texts[part], owner[part], passes), self.raw[owner[part]])
            for part in slices(sizes, CHUNK_TOKENS)
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    def read_errors(self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray) -> np.ndarray:
        """(m,) of each text and the latent of its owner, by the model; the cost is added to the owner's."""
        spent, errors = np.zeros(len(texts), np.int64), np.empty(len(texts))
        for part in slices(np.array([len(text) for text in texts], np.int64), CHUNK_TOKENS):
            documents = owner[part]
            errors[part] = read_errors(
                self.model, texts[part], self.latents[documents], self.reading, keys=self.keys[documents],
                passes=spent[part],
            )  # fmt: skip
        np.add.at(passes, owner, spent)
        return errors

    def _latents(self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray) -> np.ndarray:
        """(m, S, C) raw."""
        if self.encode is not None:
            return _require_finite(self.encode(texts), "encoder")
        spent = np.zeros(len(texts), np.int64)
        latents = encode_tokens(self.model, texts, self.reading, keys=self.keys[owner], passes=spent)
        np.add.at(passes, owner, spent)
        return _require_finite(self.model.normalizer.denormalize(latents), "model")


def _require_finite(latents: np.ndarray, who: str) -> np.ndarray:
    """The latents; one that is no number would win or lose every comparison."""
    num_bad = int((~np.isfinite(latents).all(axis=(1, 2))).sum())
    if num_bad:
        other = "encoder" if who == "model" else "model"
        raise UserError(
            f"check={who}: the {who} gives NaN or infinity for {num_bad} of {len(latents)} decoded texts, so they "
            f"cannot be compared; use {other}, or decode without candidates and rounds"
        )
    return latents


def _raw(model: LoadedModel, latents: np.ndarray) -> np.ndarray:
    """(n, S, C) raw latents; what is only rounding is zero, so that a latent of zeros has no direction."""
    raw = model.normalizer.denormalize(latents)
    return np.where(
        np.abs(raw) <= 4 * np.finfo(np.float32).eps * np.abs(model.normalizer.mean), np.float32(0), raw
    )


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def unwritten_tokens(model: LoadedModel) -> np.ndarray:
    """Ids, in order, of tokens that are left out where ids become text, such as [SEP]; none without a tokenizer."""
    if model.tokenizer_path is None:
        return np.empty(0, np.int64)
    unwritten, vocab_size = _tokenizer(model.tokenizer_path).unwritten_ids(), model.corruption.vocab_size
    return np.array(sorted(token for token in unwritten if token < vocab_size), np.int64)


def probed_places(tokens: list[np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are tried in turn: text and place of each."""
    owner: list[int] = []
    place: list[int] = []
    for i, text in enumerate(tokens):
        chosen = np.arange(len(text))
        if len(text) > MAX_PROBED:
            chance = randomness.uniform(keys[i], randomness.SHUFFLE, chosen)
            chosen = np.sort(np.argsort(chance, kind="stable")[:MAX_PROBED])
        owner += [i] * len(chosen)
        place += chosen.tolist()
    return np.array(owner, np.int64), np.array(place, np.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Token ids of texts, one after the other."""

    tokens: np.ndarray
    """(T,) int64, or something else that each token has."""
    lengths: np.ndarray
    """(N,) int64"""

    @classmethod
    def of(cls, texts: Sequence[np.ndarray]) -> Ragged:
        """These texts, of which there is at least one."""
        return cls(np.concatenate(texts).astype(np.int64), np.array([len(text) for text in texts], np.int64))

    @cached_property
    def starts(self) -> np.ndarray:
        """(N,) where each text begins."""
        return np.cumsum(self.lengths) - self.lengths

    def take(self, rows: np.ndarray) -> Ragged:
        """The texts at these rows, which may come again."""
        lengths = self.lengths[rows]
        return Ragged(self.tokens[ranges(self.starts[rows], lengths)], lengths)

    def put(self, rows: np.ndarray, places: np.ndarray, values: np.ndarray | int) -> Ragged:
        """The same texts with other tokens at these places of these rows."""
        tokens = self.tokens.copy()
        tokens[self.starts[rows] + places] = values
        return Ragged(tokens, self.lengths)

    def split(self) -> list[np.ndarray]:
        """The texts one by one."""
        return split_texts(self.tokens, self.lengths)


def slices(costs: np.ndarray, limit: int) -> Iterator[slice]:
    """Neighbours that together cost no more than the limit; what costs more comes alone."""
    ends, start = np.cumsum(costs), 0
    while start < len(costs):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True, eq=False)
class Swaps:
    """Replacements that help, by text, the best of each text first."""

    text: np.ndarray
    """(M,) which text."""
    place: np.ndarray
    token: np.ndarray
    cosine: np.ndarray
    """(M,) of the text with this replacement alone."""
    prior: np.ndarray
    """(M,) what it costs to be less probable than the token that was there; 0 or less."""

    def tries(self, num_texts: int) -> tuple[np.ndarray, np.ndarray]:
        """Which texts are tried with how many of their replacements; each number once."""
        num = np.bincount(self.text, minlength=num_texts)
        sizes = np.stack([np.full_like(num, count) for count in (1, 2, 3)] + [num // 4, num // 2, num], 1)
        sizes = np.sort(np.minimum(sizes, num[:, None]), 1)
        is_new = np.diff(sizes, axis=1, prepend=0) > 0
        return np.nonzero(is_new)[0], sizes[is_new]


def replace_rounds(judge: Judge, best: Checked, num_rounds: int, report: Callable[[], None]) -> Checked:
    """So many rounds, each reported; texts that can get no better this way are left out of later ones."""
    current, left = best.copy(), np.arange(len(best.tokens))
    proposals = Proposals(judge)
    for number in range(num_rounds):
        keys = randomness.make_key(judge.keys, ROUND, number)
        lengths = np.array([len(current.tokens[i]) for i in left], np.int64)
        costs = np.minimum(lengths, MAX_PROBED) * NUM_REPLACEMENTS * lengths
        parts = [left[part] for part in slices(costs, CHUNK_TOKENS)]
        left = np.concatenate(
            [_improve(judge, proposals, current, part, keys[part]) for part in parts] or [left]
        )
        report()
    return current


def _improve(
    judge: Judge, proposals: Proposals, current: Checked, documents: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """One round of some documents, in place; those are returned that may get better still."""
    texts = Ragged.of([current.tokens[i] for i in documents])
    owner, place = probed_places(texts.split(), keys)
    swaps = _swaps(judge, proposals, current, documents, texts, owner, place)
    text, size = swaps.tries(len(documents))
    first = np.searchsorted(swaps.text, text)
    row, swap = np.repeat(np.arange(len(text)), size), ranges(first, size)
    tried = texts.take(text).put(row, swaps.place[swap], swaps.token[swap])
    cosine = swaps.cosine[first]  # a single replacement was judged before
    prior = np.bincount(row, swaps.prior[swap], len(text))
    several = np.flatnonzero(size > 1)
    if len(several):
        cosine[several] = judge.cosine(
            tried.take(several).split(), documents[text[several]], current.passes, current.num_encoded
        )
    order = np.lexsort((size, -(cosine + prior), text))
    improved, nearest = np.unique(text[order], return_index=True)
    for index, document in zip(order[nearest], documents[improved], strict=True):
        start = tried.starts[index]
        current.tokens[document] = tried.tokens[start : start + tried.lengths[index]].copy()
        current.cosine[document] = cosine[index]
        current.num_accepted[document] += 1
    may_improve = np.bincount(owner, minlength=len(documents)) < texts.lengths  # other places next time
    may_improve[improved] = True
    return documents[may_improve]


def _swaps(
    judge: Judge,
    proposals: Proposals,
    current: Checked,
    documents: np.ndarray,
    texts: Ragged,
    owner: np.ndarray,
    place: np.ndarray,
) -> Swaps:
    """The best replacement in each of these places of these texts, where one helps."""
    tokens, prior = proposals.propose(texts, documents, owner, place, current.passes)
    num = tokens.shape[1]
    text = np.repeat(owner, num)
    variants = texts.take(text).put(np.arange(len(text)), np.repeat(place, num), tokens.reshape(-1))
    cosines = judge.cosine(variants.split(), documents[text], current.passes, current.num_encoded)
    cosines = cosines.reshape(tokens.shape)
    scores = cosines + prior
    rows, best = np.arange(len(owner)), scores.argmax(1)
    gain = scores[rows, best] - current.cosine[documents[owner]]
    order = np.lexsort((-gain, owner))
    order = order[gain[order] > SMALLEST_GAIN]
    best = best[order]
    return Swaps(owner[order], place[order], tokens[order, best], cosines[order, best], prior[order, best])


class Proposals:
    """What the network predicts instead of single tokens."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.predictor = judge, ModelPredictor.of(judge.model)
        self.latents = torch.from_numpy(judge.latents)
        self.against = None if judge.against is None else torch.tensor(judge.against)
        self.num = min(NUM_REPLACEMENTS, max(1, judge.model.denoiser.shape.vocab_size - 1))

    def propose(
        self, texts: Ragged, documents: np.ndarray, owner: np.ndarray, place: np.ndarray, passes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(P, K) the most probable other tokens in these places of these texts, most probable first; and their prior.

        Where there are fewer that may be written, the token that is there stands in for the rest.
        """
        tokens, prior = np.empty((len(owner), self.num), np.int64), np.empty((len(owner), self.num))
        num_slots, places = self.latents.shape[1], self.judge.drawn.places(self.judge.model.device)
        for rows in group_documents(texts.lengths[owner], num_slots, places):
            chosen = texts.take(owner[rows]), documents[owner[rows]], place[rows]
            tokens[rows], prior[rows] = self._propose(*chosen, passes)
        return tokens, prior

    def _propose(
        self, texts: Ragged, documents: np.ndarray, place: np.ndarray, passes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pack: a place of each of these texts."""
        process, chosen = self.judge.model.corruption.text, torch.from_numpy(documents)
        at = texts.starts + place
        pack = Pack(
            noisy_tokens=torch.from_numpy(texts.put(np.arange(len(place)), place, process.mask_id).tokens),
            noisy_latents=self.latents[chosen],
            text_time=time_of_share(1 / texts.lengths, process),
            latent_time=torch.zeros(len(documents)),
            lengths=texts.lengths,
            keys=self.judge.keys[documents],
            against=None if self.against is None else self.against[chosen],
            tally=Tally(passes, documents),
        )
        logits = guided_logits(self.predictor, pack, self.judge.drawn.guidance)(torch.from_numpy(at))
        require_finite(logits)
        present = torch.from_numpy(texts.tokens[at])[:, None].to(logits.device)
        others = logits.scatter(1, present, -torch.inf)
        others[:, torch.from_numpy(self.judge.unwritten).to(logits.device)] = -torch.inf
        best = others.topk(self.num, dim=-1)
        tokens = torch.where(best.values == -torch.inf, present, best.indices)
        weight = TOKEN_PRIOR if self.judge.encode is None else 0.0
        prior = weight * (logits.gather(1, tokens) - logits.gather(1, present)).clamp(max=0).double()
        return tokens.cpu().numpy(), prior.cpu().numpy()
