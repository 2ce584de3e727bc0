"""l2t: decode held-out latents into text, always from fully masked text, and compare with the true text.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import Documents
from mmldlm.evaluation.statistics import DECODE, cosine, mean_estimate, ratio_estimate, strangers
from mmldlm.evaluation.text_scores import corpus_bleu, exact_match, token_accuracy, token_f1
from mmldlm.randomness import make_key
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import decode_latents, document_keys
from mmldlm.sampling.options import SamplingOptions

DecodeText = Callable[[Sequence[Any]], list[str]]
EncodeText = Callable[[list[str]], np.ndarray]


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
    bleu: float | None

    def to_json(self, truth: Truth, seed: int) -> dict[str, Any]:
        """Plain values over all documents; token accuracy counts every token once."""
        sizes = np.array([max(len(a), len(b)) for a, b in zip(truth.tokens, self.tokens, strict=True)])
        right_length = np.array([len(a) == len(b) for a, b in zip(truth.tokens, self.tokens, strict=True)])
        return {
            "num_sampling_steps": self.num_sampling_steps,
            "token_accuracy": ratio_estimate(self.accuracy * sizes, sizes, seed).to_json(),
            "token_f1": mean_estimate(self.f1, seed).to_json(),
            "exact_match": mean_estimate(self.exact, seed).to_json(),
            "bleu": self.bleu,
            "reencoded_cosine": None if self.cosine is None else mean_estimate(self.cosine, seed).to_json(),
            "right_length": float(right_length.mean()),
        }


def invert(
    model: LoadedModel,
    truth: Truth,
    num_sampling_steps: int,
    *,
    length_given: bool,
    decode_text: DecodeText | None,
    encode: EncodeText | None,
    batch_tokens: int,
    seed: int,
    progress: SamplingProgress | None = None,
) -> Decoded:
    """Decode every latent; the length is given, or the likeliest one by the model's length head."""
    options = inversion_options(model, num_sampling_steps, batch_tokens)
    keys = document_keys(int(make_key(seed, DECODE) >> np.uint64(2)), truth.ids)
    lengths = np.array([len(tokens) for tokens in truth.tokens]) if length_given else None
    latents = model.normalize(truth.latents)
    found = decode_latents(model, latents, options, lengths=lengths, keys=keys, progress=progress)
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
        bleu=corpus_bleu(truth.texts, texts) if texts and truth.texts else None,
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
