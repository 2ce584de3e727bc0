"""Joint generation: pairs from nothing, and what they are worth beside as many real ones.

Shapes: n generated documents, S latent slots, C latent channels, d = S * C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmldlm import randomness
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import Split
from mmldlm.evaluation import diversity
from mmldlm.evaluation.context import GENERATED, Context
from mmldlm.evaluation.distances import frechet_distance, main_directions, wasserstein
from mmldlm.evaluation.memorisation import find_verbatim
from mmldlm.evaluation.quantities import LESS, MORE, Quantity
from mmldlm.evaluation.reference_lm import ReferenceLM
from mmldlm.evaluation.statistics import GENERATE, SPLITS, strangers
from mmldlm.evaluation.text_scores import bleu_signature
from mmldlm.latents import cosine
from mmldlm.sampling.decode import document_keys, generate
from mmldlm.sampling.options import SamplingOptions

NUM_EXAMPLES = 8
NUM_SPLITS = 20
"""How often real latents are compared with other real ones, to know what chance alone gives."""
_ORDERS, _REPEAT_ORDERS = (1, 2, 3), (1, 2, 4)
_SETTINGS = ("text_sampler", "num_sampling_steps", "num_latent_steps", "temperature", "top_p", "guidance")


@dataclass(frozen=True)
class Pairs:
    """Some documents, generated or real."""

    tokens: list[np.ndarray]
    latents: np.ndarray
    """(n, S, C) raw."""
    texts: list[str] | None

    @property
    def lengths(self) -> np.ndarray:
        """(n,)"""
        return np.array([len(tokens) for tokens in self.tokens])


def measure_generation(
    context: Context, train: Split | None, reference: ReferenceLM | None
) -> dict[str, Any] | None:
    """Everything about generated pairs; None where nothing is to be generated."""
    count = context.config.num_generated
    if not count or not (context.active.text and context.active.latent):
        return None
    if modes_of_run(context.model.config.corruption).joint == 0:
        context.notes.append("joint generation is left out: this run was not trained in the joint mode")
        return None
    options = SamplingOptions.from_config(
        context.model.config.sampling, batch_tokens=context.config.batch_tokens
    )
    made, real = _generate(context, count, options), _real(context, count)
    context.ids[GENERATED] = list(range(count))
    return {
        "num_documents": count,
        "num_real": len(real.tokens),
        "sampling": {key: value for key, value in asdict(options).items() if key in _SETTINGS},
        "length": "modelled" if context.active.length else "drawn from held-out texts",
        "diversity": _diversity(context, made, real),
        "reference_lm": None if reference is None else _reference(context, reference, made, real),
        "agreement": _agreement(context, made),
        "distance": _distance(context, made),
        "memorised": None if train is None else _memorised(context, made, real, train),
        "bleu_signature": bleu_signature() if made.texts else None,
        "examples": _examples(made),
    }


def _generate(context: Context, count: int, options: SamplingOptions) -> Pairs:
    keys = document_keys(int(randomness.make_key(context.seed, GENERATE) >> np.uint64(2)), count)
    lengths = None
    if not context.active.length:
        lengths = np.resize(context.selection.documents.lengths, count)
    watch = context.watch("joint generation")
    tokens, latents = generate(context.model, count, options, lengths=lengths, keys=keys, progress=watch)
    texts = context.decode_text(tokens) if context.decode_text else None
    return Pairs(tokens, context.model.normalizer.denormalize(latents), texts)


def _real(context: Context, count: int) -> Pairs:
    """As many held-out documents, or as many as were chosen."""
    documents = context.selection.documents
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])[:count]
    texts = context.decode_text(tokens) if context.decode_text else None
    return Pairs(tokens, documents.latents[:count], texts)


def _both(
    context: Context, name: str, title: str, better: str, of: Callable[[Pairs], Any], made: Pairs, real: Pairs
) -> dict[str, Any]:
    """The same quantity of generated and of real documents; `of` gives values, or values and weights."""

    def quantity(pairs: Pairs) -> Quantity:
        found = of(pairs)
        values, weights = found if isinstance(found, tuple) else (found, None)
        return Quantity(title, better, values, weights)

    return {
        "generated": context.record(f"generated/{name}", quantity(made), GENERATED),
        "real": quantity(real).estimate(context.seed).to_json(),
    }


def _diversity(context: Context, made: Pairs, real: Pairs) -> dict[str, Any]:
    found: dict[str, Any] = {}
    size = min(len(made.tokens), len(real.tokens))  # different n-grams become rarer the more texts there are
    for order in _ORDERS:
        found[f"distinct_{order}"] = {
            "generated": diversity.distinct(made.tokens[:size], order).to_json(),
            "real": diversity.distinct(real.tokens[:size], order).to_json(),
        }
    for order in _REPEAT_ORDERS:
        found[f"repeated_{order}"] = _both(
            context,
            f"repeated_{order}",
            f"share of {order}-grams that repeat one of the same text",
            LESS,
            lambda pairs, order=order: diversity.repeats(pairs.tokens, order),  # type: ignore[misc]
            made,
            real,
        )
    found["self_bleu"] = None
    if made.texts is not None and real.texts is not None:
        cut = [Pairs(p.tokens[:size], p.latents[:size], (p.texts or [])[:size]) for p in (made, real)]
        found["self_bleu"] = _both(
            context,
            "self_bleu",
            "self-BLEU of generated texts",
            LESS,
            lambda pairs: diversity.self_bleu(pairs.texts or []),
            *cut,
        )
    return found


def _reference(context: Context, reference: ReferenceLM, made: Pairs, real: Pairs) -> dict[str, Any] | None:
    if made.texts is None or real.texts is None:
        context.notes.append("--reference-lm is not used: the pair store was made without a tokenizer")
        return None
    num_cut = 0

    def costs(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        nonlocal num_cut
        found = reference.score(pairs.texts or [])
        num_cut += found.num_cut
        return found.nats, found.num_tokens

    title = f"nats / token of generated texts under {reference.name}"
    nats = _both(context, "reference_nats", title, LESS, costs, made, real)
    if num_cut:
        context.notes.append(f"{num_cut} texts are cut to the {reference.longest} tokens of {reference.name}")
    return {
        "name": reference.name,
        "first_token_scored": reference.start is not None,
        "nats_per_token": nats,
        "perplexity": {
            whose: {key: _exp(value[key]) for key in ("value", "low", "high")}
            for whose, value in nats.items()
        },
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


def _agreement(context: Context, made: Pairs) -> dict[str, Any]:
    """Cosine between a generated latent and what becomes of the text that was generated with it."""
    other = (
        made.latents[strangers(len(made.latents), context.seed)] if len(made.latents) > 1 else made.latents
    )
    ids = np.arange(len(made.tokens))
    own = context.own_latents(made.tokens, ids, context.watch("generated texts to latents"))
    sources = {"own": own}
    if context.encode is not None and made.texts is not None:
        sources["encoder"] = context.encode(made.texts)
    found: dict[str, Any] = {"own": None, "encoder": None}
    for who, latents in sources.items():
        by = "the model itself" if who == "own" else "the encoder"
        title = f"generated latent and its text by {by}, cosine"
        quantity = Quantity(title, MORE, cosine(latents, made.latents))
        found[who] = context.record(f"generated/agreement/{who}", quantity, GENERATED)
        found[f"{who}_strangers"] = float(cosine(latents, other).mean())
    return found


def _distance(context: Context, made: Pairs) -> dict[str, Any] | None:
    """Distances of latents and of lengths from those of real documents, beside those of real from real ones.

    A Fréchet distance in more directions than documents measures their number; so latents, normalised, are compared in
    the directions in which held-out ones vary most, one for every four documents.
    """
    lengths = context.selection.documents.lengths
    size = min(len(made.tokens), len(lengths) // 2)
    if size < 4:
        return None
    real = context.model.normalizer.normalize(context.selection.documents.latents).reshape(len(lengths), -1)
    directions = main_directions(real, size // 4)
    real, found = (
        real @ directions,
        context.model.normalizer.normalize(made.latents[:size]).reshape(size, -1) @ directions,
    )
    chance = []
    for split in range(NUM_SPLITS):
        key = randomness.make_key(context.seed, SPLITS, split)
        chosen = randomness.permute(np.arange(2 * size), len(real), key)
        left, right = chosen[:size], chosen[size:]
        chance.append(_distances(real[left], real[right], lengths[left], lengths[right]))
    values = _distances(found, real[:size], made.lengths[:size], lengths[:size])
    return {
        name: {
            "generated": values[name],
            "real": float(np.mean([one[name] for one in chance])),
            "real_low": min(one[name] for one in chance),
            "real_high": max(one[name] for one in chance),
        }
        for name in values
    } | {
        "num_documents": size,
        "num_directions": directions.shape[1],
        "num_splits": NUM_SPLITS,
        "mean_length": {"generated": float(made.lengths.mean()), "real": float(lengths.mean())},
    }


def _distances(
    left: np.ndarray, right: np.ndarray, left_lengths: np.ndarray, right_lengths: np.ndarray
) -> dict[str, float]:
    return {
        "latent_frechet": frechet_distance(left, right),
        "length_frechet": frechet_distance(left_lengths[:, None], right_lengths[:, None]),
        "length_wasserstein": wasserstein(left_lengths, right_lengths),
    }


def _memorised(context: Context, made: Pairs, real: Pairs, train: Split) -> dict[str, Any]:
    """Share of texts that are a training document, or stand inside one; beside it that of held-out texts."""
    count = len(made.tokens)
    whole, inside = find_verbatim([*made.tokens, *real.tokens], train, context.watch("memorisation"))
    found: dict[str, Any] = {"num_searched": len(train)}
    for name, title, hits in (
        ("whole", "generated texts that are a training document", whole),
        ("inside", "generated texts that stand inside a training document", inside),
    ):
        quantity = Quantity(title, LESS, hits[:count])
        found[name] = {
            "generated": context.record(f"generated/memorised_{name}", quantity, GENERATED),
            "real": Quantity(title, LESS, hits[count:]).estimate(context.seed).to_json(),
        }
    return found


def _examples(made: Pairs) -> list[str]:
    if made.texts is not None:
        return made.texts[:NUM_EXAMPLES]
    return [" ".join(str(int(token)) for token in tokens) for tokens in made.tokens[:NUM_EXAMPLES]]
