"""l2t: decode held-out latents into text, always from fully masked text, and compare with the true text.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import Documents
from mmldlm.evaluation.context import Context, DecodeText, EncodeText
from mmldlm.evaluation.quantities import MORE, Quantity
from mmldlm.evaluation.statistics import DECODE, strangers
from mmldlm.evaluation.text_scores import bleu_counts, bleu_signature, exact_match, token_accuracy, token_f1
from mmldlm.latents import cosine
from mmldlm.randomness import make_key
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import decode_latents, document_keys
from mmldlm.sampling.options import SamplingOptions

SCORES = ("token_accuracy", "token_f1", "exact_match", "bleu", "reencoded_cosine", "right_length")
_DECODE_SETTINGS = ("text_sampler", "temperature", "top_p", "guidance")


@dataclass(frozen=True)
class Truth:
    """What decoding should give back."""

    tokens: list[np.ndarray]
    latents: np.ndarray
    """(n, S, C) raw, as the encoder made them."""
    ids: np.ndarray
    texts: list[str] | None
    """The true tokens as text, so that both sides went through the tokenizer; None without one."""

    @classmethod
    def of(cls, documents: Documents, decode_text: DecodeText | None) -> Truth:
        """The documents of a store."""
        tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
        return cls(tokens, documents.latents, documents.ids, decode_text(tokens) if decode_text else None)


@dataclass(frozen=True)
class Decoded:
    """Texts that one number of sampling steps gave, with their scores per document."""

    num_sampling_steps: int
    tokens: list[np.ndarray]
    texts: list[str] | None
    accuracy: np.ndarray
    f1: np.ndarray
    exact: np.ndarray
    cosine: np.ndarray | None
    """(n,) between the true latent and that of the decoded text."""
    bleu: np.ndarray | None
    """(n, 10) what BLEU adds up."""

    def quantities(self, truth: Truth) -> dict[str, Quantity]:
        """Every score that there is; token accuracy counts every token once."""
        lengths = np.array([[len(a), len(b)] for a, b in zip(truth.tokens, self.tokens, strict=True)])
        sizes = lengths.max(1)
        found = {
            "token_accuracy": Quantity("tokens right", MORE, self.accuracy * sizes, sizes),
            "token_f1": Quantity("token F1", MORE, self.f1),
            "exact_match": Quantity("exact", MORE, self.exact),
            "right_length": Quantity("length right", MORE, (lengths[:, 0] == lengths[:, 1]).astype(float)),
        }
        if self.bleu is not None:
            found["bleu"] = Quantity("BLEU", MORE, self.bleu, kind="bleu")
        if self.cosine is not None:
            found["reencoded_cosine"] = Quantity("re-encoded cosine", MORE, self.cosine)
        return found


def invert(
    model: LoadedModel,
    truth: Truth,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    length_given: bool,
    decode_text: DecodeText | None,
    encode: EncodeText | None,
    seed: int,
    progress: SamplingProgress | None = None,
) -> Decoded:
    """Decode raw latents (n, S, C) of these documents; the length is given, or the likeliest by the length head."""
    keys = decode_keys(seed, truth.ids)
    lengths = np.array([len(tokens) for tokens in truth.tokens]) if length_given else None
    found = decode_latents(
        model, model.normalizer.normalize(latents), options, lengths=lengths, keys=keys, progress=progress
    )
    return score_texts(truth, found, options.num_sampling_steps, decode_text, encode)


def decode_keys(seed: int, ids: np.ndarray) -> np.ndarray:
    """(n,) the documents' sources of randomness in decoding."""
    return document_keys(int(make_key(seed, DECODE) >> np.uint64(2)), ids)


def score_texts(
    truth: Truth,
    found: list[np.ndarray],
    num_sampling_steps: int,
    decode_text: DecodeText | None,
    encode: EncodeText | None,
) -> Decoded:
    """What was decoded, compared with the truth."""
    texts = decode_text(found) if decode_text else None
    pairs = list(zip(truth.tokens, found, strict=True))
    return Decoded(
        num_sampling_steps=num_sampling_steps,
        tokens=found,
        texts=texts,
        accuracy=np.array([token_accuracy(*pair) for pair in pairs]),
        f1=np.array([token_f1(*pair) for pair in pairs]),
        exact=np.array([exact_match(*pair) for pair in pairs]),
        cosine=cosine(encode(texts), truth.latents) if encode and texts else None,
        bleu=bleu_counts(truth.texts, texts) if texts and truth.texts else None,
    )


def inversion_options(model: LoadedModel, num_sampling_steps: int, batch_tokens: int) -> SamplingOptions:
    """The run's own sampling settings, but always the most probable token: inversion has one right answer."""
    return SamplingOptions.from_config(
        model.config.sampling,
        num_sampling_steps=num_sampling_steps,
        temperature=0.0,
        batch_tokens=batch_tokens,
    )


def reference_cosines(truth: Truth, encode: EncodeText, seed: int) -> dict[str, float]:
    """What re-encoding can reach at best (the true tokens as text), and what two unrelated documents have."""
    assert truth.texts is not None
    ceiling = cosine(encode(truth.texts), truth.latents)
    other = truth.latents[strangers(len(truth.latents), seed)]
    return {"true_text": float(ceiling.mean()), "strangers": float(cosine(other, truth.latents).mean())}


@dataclass(frozen=True)
class Inversion:
    """Everything decoded, for each number of sampling steps from few to many."""

    truth: Truth
    given: list[Decoded]
    """With the true length."""
    modelled: list[Decoded]
    """With the model's own length; empty where it has none."""


def measure_inversion(context: Context, truth: Truth) -> tuple[dict[str, Any], Inversion]:
    """Decode at every number of steps, with the length given and modelled; whole and by length of the text."""
    _note_what_is_missing(context)
    given = _decode_all(context, truth, length_given=True)
    modelled = _decode_all(context, truth, length_given=False) if context.active.length else []
    found = Inversion(truth, given, modelled)
    options = inversion_options(context.model, max(context.config.step_counts), context.config.batch_tokens)
    encode = context.encode
    reference = reference_cosines(truth, encode, context.seed) if encode and truth.texts else None
    lengths = np.array([len(tokens) for tokens in truth.tokens])
    result = {
        "num_documents": len(truth.tokens),
        "num_tokens": int(lengths.sum()),
        "length_given": _points(context, found.truth, given, "given"),
        "length_modelled": _points(context, found.truth, modelled, "modelled"),
        "by_length": [
            _length_group(context, found, low, high, np.flatnonzero((lengths >= low) & (lengths <= high)))
            for low, high in length_groups(context.config.length_groups, int(lengths.max()))
        ],
        "cosine_reference": reference,
        "sampling": {key: value for key, value in asdict(options).items() if key in _DECODE_SETTINGS},
        "bleu_signature": bleu_signature() if context.decode_text else None,
    }
    return result, found


def length_groups(limits: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """(fewest, most) tokens of each group: up to the first limit, then up to the next, then all longer ones."""
    ends = sorted({limit for limit in limits if limit < longest})
    if not limits:
        return []
    ends.append(min([limit for limit in limits if limit >= longest], default=longest))
    return list(zip([1, *(end + 1 for end in ends[:-1])], ends, strict=True))


def _length_group(
    context: Context, found: Inversion, low: int, high: int, rows: np.ndarray
) -> dict[str, Any]:
    def points(all_decoded: list[Decoded]) -> list[dict[str, Any]]:
        if not len(rows):
            return []
        taken = [(d, {k: q.take(rows) for k, q in d.quantities(found.truth).items()}) for d in all_decoded]
        return [
            {"num_sampling_steps": decoded.num_sampling_steps}
            | {k: q[k].estimate(context.seed).to_json() if k in q else None for k in SCORES}
            for decoded, q in taken
        ]

    return {
        "shortest": low,
        "longest": high,
        "num_documents": len(rows),
        "length_given": points(found.given),
        "length_modelled": points(found.modelled),
    }


def _points(context: Context, truth: Truth, decoded: list[Decoded], length: str) -> list[dict[str, Any]]:
    """One entry for each number of steps; what could not be measured is null."""
    points = []
    for one in decoded:
        steps, point = one.num_sampling_steps, dict.fromkeys(SCORES)
        for name, quantity in one.quantities(truth).items():
            title = f"{quantity.title}, {steps} {'step' if steps == 1 else 'steps'}, length {length}"
            point[name] = context.record(f"decode/{length}/{steps}/{name}", replace(quantity, title=title))  # type: ignore[assignment]
        points.append({"num_sampling_steps": steps} | point)
    return points


def _note_what_is_missing(context: Context) -> None:
    if not context.active.length:
        context.notes.append("texts are decoded with their true length: this run does not model the length")
    if context.decode_text is None:
        context.notes.append("no BLEU and no re-encoded cosine: the pair store was made without a tokenizer")
    elif context.encode is None:
        context.notes.append("no re-encoded cosine: the encoder was not used")


def _decode_all(context: Context, truth: Truth, *, length_given: bool) -> list[Decoded]:
    counts = sorted(set(context.config.step_counts))
    whole = sum(counts) * len(truth.tokens)
    name = f"decoding, length {'given' if length_given else 'modelled'}"

    def decode(steps: int) -> Decoded:
        before = sum(count for count in counts if count < steps) * len(truth.tokens)
        return invert(
            context.model,
            truth,
            truth.latents,
            inversion_options(context.model, steps, context.config.batch_tokens),
            length_given=length_given,
            decode_text=context.decode_text,
            encode=context.encode,
            seed=context.seed,
            progress=lambda done, _: context.progress(name, before + done, whole),
        )

    return [decode(steps) for steps in counts]
