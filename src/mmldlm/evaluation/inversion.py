"""l2t: decode held-out latents into text, always from fully masked text, and compare with the true text.

Also round trips: latent to text to latent, and text to latent to text. Shapes: n documents, S latent slots, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.evaluation.context import DECODE, Context, DecodeText, EncodeText, Pairs, strangers
from mmldlm.evaluation.results import (
    CosineReference,
    DecodedExample,
    Example,
    Inversion,
    LatentTrip,
    LengthGroup,
    RoundTrip,
    TextScores,
)
from mmldlm.latents import cosine
from mmldlm.randomness import make_key
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys
from mmldlm.sampling.self_check import decode_unknown_length
from mmldlm.statistics import (
    MORE,
    Estimate,
    Quantity,
    aligned_tokens,
    bleu_counts,
    bleu_signature,
    exact_match,
    token_accuracy,
    token_f1,
)

NUM_EXAMPLES = 12
_DECODE_SETTINGS = ("text_sampler", "num_lengths", "temperature", "top_p", "guidance")


@dataclass(frozen=True)
class Decoded:
    """Texts that one number of sampling steps gave, with their scores per document."""

    num_sampling_steps: int
    tokens: list[np.ndarray]
    texts: list[str] | None
    accuracy: np.ndarray
    aligned: np.ndarray
    """(n,) tokens that are right after alignment."""
    f1: np.ndarray
    exact: np.ndarray
    cosine: np.ndarray | None
    """(n,) between the true latent and that of the decoded text."""
    bleu: np.ndarray | None
    """(n, 10) what BLEU adds up."""

    def quantities(self, truth: Pairs) -> dict[str, Quantity]:
        """Every score that could be computed; token accuracy counts every token once."""
        lengths = np.array([[len(a), len(b)] for a, b in zip(truth.tokens, self.tokens, strict=True)])
        sizes = lengths.max(1)
        scores = {
            "token_accuracy": Quantity("tokens right", MORE, self.accuracy * sizes, sizes),
            "tokens_aligned": Quantity("tokens right after alignment", MORE, self.aligned, sizes),
            "token_f1": Quantity("token F1", MORE, self.f1),
            "exact_match": Quantity("exact", MORE, self.exact),
            "right_length": Quantity("length right", MORE, (lengths[:, 0] == lengths[:, 1]).astype(float)),
        }
        if self.bleu is not None:
            scores["bleu"] = Quantity("BLEU", MORE, self.bleu, kind="bleu")
        if self.cosine is not None:
            scores["reencoded_cosine"] = Quantity("re-encoded cosine", MORE, self.cosine)
        return scores


@dataclass(frozen=True)
class AllDecoded:
    """Everything decoded, for each number of sampling steps from few to many."""

    truth: Pairs
    length_given: list[Decoded]
    """With the true length."""
    length_modelled: list[Decoded]
    """With the model's own length; empty where it has none."""


def text_scores(num_sampling_steps: int, estimates: dict[str, Estimate]) -> TextScores:
    """The scores of one way to decode; what could not be measured is None."""
    missing: dict[str, Any] = {"bleu": None, "reencoded_cosine": None}
    return TextScores(num_sampling_steps=num_sampling_steps, **(missing | estimates))


def invert(
    context: Context,
    truth: Pairs,
    latents: np.ndarray,
    num_sampling_steps: int,
    *,
    length_given: bool = True,
    progress: SamplingProgress | None = None,
) -> Decoded:
    """Decode raw latents (n, S, C) of these documents; the length is given, or the best of the most probable ones."""
    model = context.model
    normalised, keys = model.normalizer.normalize(latents), decode_keys(context.seed, truth.ids)
    options = inversion_options(model, num_sampling_steps, context.config.batch_tokens)
    tokens = (
        decode_latents(model, normalised, options, lengths=truth.lengths, keys=keys, progress=progress)
        if length_given
        else decode_unknown_length(model, normalised, options, keys=keys, progress=progress)
    )
    return score_texts(truth, tokens, num_sampling_steps, context.decode_text, context.encode)


def decode_keys(seed: int, ids: np.ndarray) -> np.ndarray:
    """(n,) the documents' sources of randomness in decoding."""
    return document_keys(int(make_key(seed, DECODE) >> np.uint64(2)), ids)


def inversion_options(model: LoadedModel, num_sampling_steps: int, batch_tokens: int) -> SamplingOptions:
    """The run's own sampling settings, but always the most probable token: inversion has one right answer."""
    return SamplingOptions.from_config(
        model.config.sampling,
        num_sampling_steps=num_sampling_steps,
        temperature=0.0,
        batch_tokens=batch_tokens,
    )


def score_texts(
    truth: Pairs,
    tokens: list[np.ndarray],
    num_sampling_steps: int,
    decode_text: DecodeText | None,
    encode: EncodeText | None,
) -> Decoded:
    """Decoded texts compared with the truth."""
    texts = decode_text(tokens) if decode_text else None
    pairs = list(zip(truth.tokens, tokens, strict=True))
    return Decoded(
        num_sampling_steps=num_sampling_steps,
        tokens=tokens,
        texts=texts,
        accuracy=np.array([token_accuracy(*pair) for pair in pairs]),
        aligned=aligned_tokens(truth.tokens, tokens),
        f1=np.array([token_f1(*pair) for pair in pairs]),
        exact=np.array([exact_match(*pair) for pair in pairs]),
        cosine=cosine(encode(texts), truth.latents) if encode and texts else None,
        bleu=bleu_counts(truth.texts, texts) if texts and truth.texts else None,
    )


def measure_inversion(context: Context, truth: Pairs) -> tuple[Inversion, AllDecoded]:
    """Decode at every number of steps, with the length given and modelled; overall and by length of the text."""
    _note_what_is_missing(context)
    decoded = AllDecoded(
        truth,
        _decode_all(context, truth, length_given=True),
        _decode_all(context, truth, length_given=False) if context.active.length else [],
    )
    options = inversion_options(context.model, max(context.config.step_counts), context.config.batch_tokens)
    groups = length_groups(context.config.length_groups, int(truth.lengths.max()))
    result = Inversion(
        num_documents=len(truth.tokens),
        num_tokens=int(truth.lengths.sum()),
        length_given=_scores(context, truth, decoded.length_given, "given"),
        length_modelled=_scores(context, truth, decoded.length_modelled, "modelled"),
        by_length=[_length_group(context, decoded, low, high) for low, high in groups],
        cosine_reference=_cosine_reference(context, truth),
        sampling={key: value for key, value in asdict(options).items() if key in _DECODE_SETTINGS},
        bleu_signature=bleu_signature() if context.decode_text else None,
    )
    return result, decoded


def _note_what_is_missing(context: Context) -> None:
    if not context.active.length:
        context.notes.append("texts are decoded with their true length: this run does not model the length")
    if context.decode_text is None:
        context.notes.append("no BLEU and no re-encoded cosine: the pair store was made without a tokenizer")
    elif context.encode is None:
        context.notes.append("no re-encoded cosine: the encoder was not used")


def _decode_all(context: Context, truth: Pairs, *, length_given: bool) -> list[Decoded]:
    counts = sorted(set(context.config.step_counts))
    total = sum(counts) * len(truth.tokens)
    name = f"decoding, length {'given' if length_given else 'modelled'}"

    def decode(steps: int) -> Decoded:
        before = sum(count for count in counts if count < steps) * len(truth.tokens)

        def progress(done: int, whole: int) -> None:
            context.progress(name, before + steps * len(truth.tokens) * done // whole, total)

        return invert(context, truth, truth.latents, steps, length_given=length_given, progress=progress)

    return [decode(steps) for steps in counts]


def _scores(context: Context, truth: Pairs, all_decoded: list[Decoded], length: str) -> list[TextScores]:
    """One entry for each number of steps."""

    def scores(decoded: Decoded) -> TextScores:
        steps, shown = decoded.num_sampling_steps, _steps_and_length(decoded, length)
        estimates = {
            name: context.record(
                f"decode/{length}/{steps}/{name}", replace(quantity, title=f"{quantity.title}, {shown}")
            )
            for name, quantity in decoded.quantities(truth).items()
        }
        return text_scores(steps, estimates)

    return [scores(decoded) for decoded in all_decoded]


def length_groups(limits: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """(fewest, most) tokens of each group: up to the first limit, then up to the next, then all longer ones."""
    ends = sorted({limit for limit in limits if limit < longest})
    if not limits:
        return []
    ends.append(min([limit for limit in limits if limit >= longest], default=longest))
    return list(zip([1, *(end + 1 for end in ends[:-1])], ends, strict=True))


def _length_group(context: Context, decoded: AllDecoded, low: int, high: int) -> LengthGroup:
    lengths = decoded.truth.lengths
    rows = np.flatnonzero((lengths >= low) & (lengths <= high))

    def scores(one: Decoded) -> TextScores:
        quantities = one.quantities(decoded.truth).items()
        estimates = {name: quantity.take(rows).estimate(context.seed) for name, quantity in quantities}
        return text_scores(one.num_sampling_steps, estimates)

    both = (decoded.length_given, decoded.length_modelled) if len(rows) else ([], [])
    return LengthGroup(low, high, len(rows), *([scores(one) for one in some] for some in both))


def _cosine_reference(context: Context, truth: Pairs) -> CosineReference | None:
    if context.encode is None or truth.texts is None or len(truth.latents) < 2:
        return None
    best = cosine(context.encode(truth.texts), truth.latents)
    other = truth.latents[strangers(len(truth.latents), context.seed)]
    return CosineReference(float(best.mean()), float(cosine(other, truth.latents).mean()))


def measure_round_trip(context: Context, decoded: AllDecoded) -> RoundTrip:
    """Both ways, at the largest number of steps, with the true length; the documents are those decoded."""
    truth, there = decoded.truth, decoded.length_given[-1]
    own_of_decoded = context.own_latents(there.tokens, truth.ids, context.watch("round trip, to latents"))
    own_of_true = context.own_latents(truth.tokens, truth.ids)
    back = invert(
        context, truth, own_of_true, there.num_sampling_steps, progress=context.watch("round trip, to texts")
    )

    def trip(who: str, by: str, values: np.ndarray) -> Estimate:
        quantity = Quantity(f"latent to text to latent by {by}, cosine", MORE, values)
        return context.record(f"round_trip/latent/{who}", quantity)

    latent = LatentTrip(
        own=trip("own", "the model itself", cosine(own_of_decoded, truth.latents)),
        encoder=None if there.cosine is None else trip("encoder", "the encoder", there.cosine),
        own_of_true_text=Quantity("", MORE, cosine(own_of_true, truth.latents)).estimate(context.seed),
    )
    estimates = {
        name: context.record(
            f"round_trip/text/{name}",
            replace(quantity, title=f"text to own latent to text, {quantity.title}"),
        )
        for name, quantity in back.quantities(truth).items()
    }
    return RoundTrip(len(truth.tokens), latent, text_scores(there.num_sampling_steps, estimates))


def collect_examples(decoded: AllDecoded) -> list[Example]:
    """The first documents, not the best: decoded in fewest and most steps, and with the model's length."""
    truth, true_length = decoded.truth, decoded.length_given
    chosen = {_steps_and_length(one, "given"): one for one in (true_length[0], true_length[-1])}
    chosen |= {_steps_and_length(one, "modelled"): one for one in decoded.length_modelled[-1:]}
    return [
        Example(
            _text(truth.texts, truth.tokens, idx), {name: _example(one, idx) for name, one in chosen.items()}
        )
        for idx in range(min(NUM_EXAMPLES, len(truth.tokens)))
    ]


def _steps_and_length(decoded: Decoded, length: str) -> str:
    count = decoded.num_sampling_steps
    return f"{count} {'step' if count == 1 else 'steps'}, length {length}"


def _example(decoded: Decoded, idx: int) -> DecodedExample:
    text = _text(decoded.texts, decoded.tokens, idx)
    similarity = None if decoded.cosine is None else float(decoded.cosine[idx])
    return DecodedExample(text, float(decoded.accuracy[idx]), similarity)


def _text(texts: list[str] | None, tokens: Sequence[Any], idx: int) -> str:
    return texts[idx] if texts is not None else " ".join(str(int(token)) for token in tokens[idx])
