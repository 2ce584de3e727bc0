"""Joint generation: pairs from nothing, compared with as many held-out ones.

Measures of sets of documents come first: variety of texts, distances, copies of the training data.
Shapes: n and m documents, S latent slots, C latent channels, d = S * C.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from mmldlm import randomness
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import Split
from mmldlm.evaluation.context import (
    GENERATE,
    SPLITS,
    Context,
    Pairs,
    ReferenceLM,
    strangers,
)
from mmldlm.evaluation.results import (
    GENERATED,
    Agreement,
    Beside,
    Distance,
    Distances,
    Diversity,
    Generation,
    Memorised,
    ReferenceScore,
)
from mmldlm.evaluation.text_bound import perplexity
from mmldlm.latents import cosine
from mmldlm.sampling.decode import generate
from mmldlm.sampling.options import SamplingOptions, for_joint
from mmldlm.sampling.pack import document_keys
from mmldlm.statistics import LESS, MORE, Estimate, Quantity, jackknife_estimate

MOST_SELF_BLEU = 200
"""Texts that self-BLEU compares with each other; its cost grows with their square."""
_DOCUMENTS_AT_ONCE = 65536
_END = "\U0010ffff"
"""Between documents; no vocabulary is that large."""


def ngrams(tokens: Sequence[int] | np.ndarray, order: int) -> list[tuple[int, ...]]:
    """All sequences of `order` tokens."""
    row = [int(token) for token in tokens]
    return list(zip(*(row[start:] for start in range(order)), strict=False))


def distinct(texts: Sequence[np.ndarray], order: int) -> Estimate:
    """Different n-grams over all n-grams of all texts together.

    Its interval is by jackknife: in a bootstrap sample texts occur twice, which alone would make it smaller.
    """
    counts = [Counter(ngrams(text, order)) for text in texts]
    whole: Counter[tuple[int, ...]] = Counter()
    owners: Counter[tuple[int, ...]] = Counter()
    for count in counts:
        whole.update(count)
        owners.update(count.keys())
    totals = np.array([count.total() for count in counts], dtype=np.float64)
    # what leaves with a text are the n-grams that no other text has
    alone = np.array([sum(owners[gram] == 1 for gram in count) for count in counts], dtype=np.float64)
    if totals.sum() == 0:
        return jackknife_estimate(float("nan"), np.empty(0))
    rest = totals.sum() - totals
    left_out = (len(whole) - alone)[rest > 0] / rest[rest > 0]
    share = jackknife_estimate(float(len(whole) / totals.sum()), left_out)
    return replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0))  # nan stays nan


def repeats(texts: Sequence[np.ndarray], order: int) -> tuple[np.ndarray, np.ndarray]:
    """(n,) n-grams that occurred in the same text before, and (n,) all n-grams of the text."""
    grams = [ngrams(text, order) for text in texts]
    totals = np.array([len(one) for one in grams], dtype=np.float64)
    return totals - np.array([len(set(one)) for one in grams]), totals


def self_bleu(texts: Sequence[str]) -> np.ndarray:
    """(n,) BLEU of each text against all others as references; 100: it is made of pieces of them."""
    from sacrebleu.metrics.bleu import BLEU

    bleu, chosen = BLEU(effective_order=True), list(texts[:MOST_SELF_BLEU])
    return np.array(
        [bleu.sentence_score(text, chosen[:idx] + chosen[idx + 1 :]).score for idx, text in enumerate(chosen)]
    )


def frechet_distance(left: np.ndarray, right: np.ndarray) -> float:
    """|mean - mean|^2 + tr(A + B - 2 (AB)^(1/2)) of the covariances A, B of (n, d) and (m, d).

    With A = aa' and B = bb', the trace of the root of AB is the sum of the singular values of a'b; so nothing is
    squared, and few documents cost little in many dimensions.
    """
    first, second = _root(left), _root(right)
    shared = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    apart = ((left.mean(0, dtype=np.float64) - right.mean(0, dtype=np.float64)) ** 2).sum()
    return float(apart + (first**2).sum() + (second**2).sum() - 2.0 * shared)


def _root(values: np.ndarray) -> np.ndarray:
    """(d, min(n, d)) a factor of the covariance."""
    centred = (values - values.mean(0, dtype=np.float64)).T / np.sqrt(len(values) - 1)
    if centred.shape[1] <= centred.shape[0]:
        return centred
    triangle: np.ndarray = np.linalg.qr(centred.T)[1]
    return triangle.T


def main_directions(values: np.ndarray, count: int) -> np.ndarray:
    """(d, count) the directions in which (n, d) varies most; all, where there are no more."""
    _, _, axes = np.linalg.svd(values - values.mean(0, dtype=np.float64), full_matrices=False)
    return axes[:count].T


def find_verbatim(
    texts: Sequence[np.ndarray], split: Split, progress: Callable[[int, int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) whether each text (token ids) is a whole document of the split, and whether it is part of one.

    Tokens become characters and the search that of one string in another.
    """
    needles = [_characters(text) for text in texts]
    whole, inside = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
    for start in range(0, len(split) if texts else 0, _DOCUMENTS_AT_ONCE):
        stop = min(start + _DOCUMENTS_AT_ONCE, len(split))
        documents = [_characters(tokens) for tokens in split.read(np.arange(start, stop)).split_tokens()]
        known, hay = set(documents), _END.join(documents)
        for idx, needle in enumerate(needles):
            whole[idx] = whole[idx] or needle in known
            inside[idx] = inside[idx] or whole[idx] or needle in hay
        if progress is not None:
            progress(stop, len(split))
    return whole, inside


def _characters(tokens: np.ndarray) -> str:
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


NUM_EXAMPLES = 8
NUM_SPLITS = 20
"""How often real latents are compared with other real ones, to know what chance alone gives."""
_SETTINGS = (
    "text_sampler",
    "joint_order",
    "num_sampling_steps",
    "num_latent_steps",
    "temperature",
    "top_p",
    "guidance",
)


Values = tuple[np.ndarray, np.ndarray | None]
"""Values per document, and what their sum is divided by (None: the number of documents)."""


def measure_generation(
    context: Context, train: Split | None, reference: ReferenceLM | None
) -> Generation | None:
    """Everything about generated pairs; None where nothing is to be generated."""
    count = context.config.num_generated
    if not count or not (context.active.text and context.active.latent):
        return None
    if modes_of_run(context.model.config.corruption).joint == 0:
        context.notes.append("joint generation is left out: this run was not trained in the joint mode")
        return None
    options = SamplingOptions.from_config(
        for_joint(context.model.config.sampling), batch_tokens=context.config.batch_tokens
    )
    generated = _generate(context, count, options)
    real = Pairs.of(context.selection.documents.first(count), context.decode_text)
    context.ids[GENERATED] = list(range(count))
    result = Generation(
        num_documents=count,
        num_real=len(real.tokens),
        sampling={key: value for key, value in asdict(options).items() if key in _SETTINGS},
        length="modelled" if context.active.length else "drawn from held-out texts",
        diversity=_diversity(context, generated, real),
        reference_lm=None if reference is None else _reference(context, reference, generated, real),
        agreement=measure_agreement(context, generated),
        distance=_distances(context, generated),
        memorised=None if train is None else _memorised(context, generated, real, train),
        examples=(generated.texts or [" ".join(map(str, tokens)) for tokens in generated.tokens])[
            :NUM_EXAMPLES
        ],
    )
    if result.collapsed:
        context.notes.append(f"joint generation has collapsed: {result.collapsed}")
    return result


def _generate(context: Context, count: int, options: SamplingOptions) -> Pairs:
    keys = document_keys(int(randomness.make_key(context.seed, GENERATE) >> np.uint64(2)), count)
    lengths = None if context.active.length else np.resize(context.selection.documents.lengths, count)
    watch = context.watch("joint generation")
    tokens, latents = generate(context.model, count, options, lengths=lengths, keys=keys, progress=watch)
    texts = context.decode_text(tokens) if context.decode_text else None
    return Pairs(tokens, context.model.normalizer.denormalize(latents), texts, np.arange(count))


def _beside(context: Context, name: str, title: str, ours: Values, real: Values) -> Beside:
    """One quantity of generated and of real documents."""
    mine, theirs = (Quantity(title, LESS, values, weights) for values, weights in (ours, real))
    return Beside(context.record(f"generated/{name}", mine, GENERATED), theirs.estimate(context.seed))


def _diversity(context: Context, generated: Pairs, real: Pairs) -> Diversity:
    # different n-grams become rarer the more texts there are, so both sides have as many
    size = min(len(generated.tokens), len(real.tokens))

    def different(order: int) -> Beside:
        return Beside(distinct(generated.tokens[:size], order), distinct(real.tokens[:size], order))

    def repeated(order: int) -> Beside:
        title = f"share of {order}-grams that repeat one of the same text"
        counted = repeats(generated.tokens, order), repeats(real.tokens, order)
        return _beside(context, f"repeated_{order}", title, *counted)

    likeness = None
    if generated.texts is not None and real.texts is not None and size > 1:
        both = (self_bleu(generated.texts[:size]), None), (self_bleu(real.texts[:size]), None)
        likeness = _beside(context, "self_bleu", "self-BLEU of generated texts", *both)
    return Diversity(
        different(1), different(2), different(3), repeated(1), repeated(2), repeated(4), likeness
    )


def _reference(
    context: Context, reference: ReferenceLM, generated: Pairs, real: Pairs
) -> ReferenceScore | None:
    if generated.texts is None or real.texts is None:
        context.notes.append("the reference model is not used: the pair store was made without a tokenizer")
        return None
    scored, expected = reference.score(generated.texts), reference.score(real.texts)
    title = f"nats / token of generated texts under {reference.name}"
    nats = _beside(
        context,
        "reference_nats",
        title,
        (scored.nats, scored.num_tokens),
        (expected.nats, expected.num_tokens),
    )
    if num_cut := scored.num_cut + expected.num_cut:
        context.notes.append(f"{num_cut} texts are cut to the {reference.longest} tokens of {reference.name}")
    perplexities = Beside(_perplexity(nats.generated), _perplexity(nats.real))
    return ReferenceScore(reference.name, reference.start is not None, nats, perplexities)


def _perplexity(nats: Estimate) -> Estimate:
    value, low, high = (perplexity(number) for number in (nats.value, nats.low, nats.high))
    return Estimate(value, value * nats.standard_error, low, high)


def measure_agreement(context: Context, generated: Pairs) -> Agreement:
    """Cosine between a generated latent and the latent of the text that was generated with it."""
    latents = generated.latents
    other = latents[strangers(len(latents), context.seed)] if len(latents) > 1 else None

    def agreement(who: str, by: str, of_text: np.ndarray) -> tuple[Estimate, float]:
        title = f"generated latent and its text by {by}, cosine"
        quantity = Quantity(title, MORE, cosine(of_text, latents))
        estimate = context.record(f"generated/agreement/{who}", quantity, GENERATED)
        return estimate, math.nan if other is None else float(cosine(of_text, other).mean())

    watch = context.watch("generated texts to latents")
    own = context.own_latents(generated.tokens, generated.ids, watch)
    result = agreement("own", "the model itself", own)
    if context.encode is None or generated.texts is None:
        return Agreement(*result)
    return Agreement(*result, *agreement("encoder", "the encoder", context.encode(generated.texts)))


def _distances(context: Context, generated: Pairs) -> Distances | None:
    """Distances of latents and of lengths from those of real documents, beside those of real from real ones.

    A Fréchet distance in more directions than documents measures their number. So normalised latents are compared in
    the directions in which held-out ones vary most, one for every four documents.
    """
    lengths = context.selection.documents.lengths
    size = min(len(generated.tokens), len(lengths) // 2)
    if size < 4:
        return None
    normalize = context.model.normalizer.normalize
    real = normalize(context.selection.documents.latents).reshape(len(lengths), -1)
    axes = main_directions(real, size // 4)
    real, ours = real @ axes, normalize(generated.latents[:size]).reshape(size, -1) @ axes
    chance = []
    for split in range(NUM_SPLITS):
        key = randomness.make_key(context.seed, SPLITS, split)
        chosen = randomness.permute(np.arange(2 * size), len(real), key)
        left, right = chosen[:size], chosen[size:]
        chance.append(_apart(real[left], real[right], lengths[left], lengths[right]))
    values = _apart(ours, real[:size], generated.lengths[:size], lengths[:size])

    def distance(name: str) -> Distance:
        by_chance = [one[name] for one in chance]
        return Distance(values[name], float(np.mean(by_chance)), min(by_chance), max(by_chance))

    return Distances(**{name: distance(name) for name in values}, num_documents=size,
                     num_directions=axes.shape[1], num_splits=NUM_SPLITS)  # fmt: skip


def _apart(
    left: np.ndarray, right: np.ndarray, left_lengths: np.ndarray, right_lengths: np.ndarray
) -> dict[str, float]:
    from scipy.stats import wasserstein_distance

    return {
        "latent_frechet": frechet_distance(left, right),
        "length_frechet": frechet_distance(left_lengths[:, None], right_lengths[:, None]),
        "length_wasserstein": float(wasserstein_distance(left_lengths, right_lengths)),
    }


def _memorised(context: Context, generated: Pairs, real: Pairs, train: Split) -> Memorised:
    """Share of texts that are a training document, or part of one; beside it that of held-out texts."""
    count = len(generated.tokens)
    whole, inside = find_verbatim([*generated.tokens, *real.tokens], train, context.watch("memorisation"))

    def share(name: str, title: str, hits: np.ndarray) -> Beside:
        return _beside(context, f"memorised_{name}", title, (hits[:count], None), (hits[count:], None))

    return Memorised(
        len(train),
        whole=share("whole", "generated texts that are a training document", whole),
        inside=share("inside", "generated texts that are part of a training document", inside),
    )
