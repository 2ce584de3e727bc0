"""Samples as records: one dictionary a document, the same for the terminal, a file and other programs.

Latents in records are raw, as the encoder makes them. Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm import durable, randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.latents import cosine
from mmldlm.sampling.decode import (
    Progress,
    decode_latents,
    document_keys,
    encode_tokens,
    generate,
    infill_tokens,
    vary,
)
from mmldlm.sampling.judge import Encode
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.self_check import decode_checked
from mmldlm.sampling.sources import Given, texts_of


@dataclass(frozen=True)
class Samples:
    """What was sampled."""

    records: list[dict[str, Any]]
    latents: np.ndarray | None
    """(n, S, C) raw, where latents were sampled."""
    about: np.ndarray | None = None
    """(n, S, C) raw, the latents that the texts belong to."""


@dataclass(frozen=True)
class SelfCheck:
    """How much work is spent on finding better texts; see `self_check`."""

    num_candidates: int = 1
    num_rounds: int = 0
    encode: Encode | None = None
    """None: the model's own t2l side."""


def sample_texts(
    model: LoadedModel,
    given: Given,
    latents: np.ndarray,
    options: SamplingOptions,
    lengths: np.ndarray | None,
    progress: Progress,
    *,
    against: np.ndarray | None = None,
    check: SelfCheck | None = None,
) -> Samples:
    """A text for each raw latent, beside the original where there is one; `against` holds raw latents too."""
    keys = document_keys(options.seed, given.ids)
    normalised, away = (
        model.normalizer.normalize(latents),
        None if against is None else model.normalizer.normalize(against),
    )
    if check is None:
        tokens = decode_latents(
            model, normalised, options, lengths=lengths, keys=keys, progress=progress, against=away
        )
        return Samples(_with_originals(given, text_records(model, tokens)), None, latents)
    found = decode_checked(
        model, normalised, options, keys=keys, lengths=lengths, num_candidates=check.num_candidates,
        num_rounds=check.num_rounds, drawn=_drawn(model, options), encode=check.encode, against=away, progress=progress,
    )  # fmt: skip
    records = text_records(model, found.tokens)
    for index, record in enumerate(records):
        record["cosine"] = float(found.cosine[index])
        record["first_cosine"] = float(found.first_cosine[index])
        for name in ("passes", "num_encoded", "num_accepted"):
            record[name] = int(getattr(found, name)[index])
    return Samples(_with_originals(given, records), None, latents)


def _drawn(model: LoadedModel, options: SamplingOptions) -> SamplingOptions:
    """How further candidates and rounds are drawn: at temperature 0 each would be the first one again."""
    if options.temperature > 0:
        return options
    return replace(options, temperature=model.config.evaluation.candidate_temperature)


def fill_texts(
    model: LoadedModel,
    given: Given,
    latents: np.ndarray | None,
    options: SamplingOptions,
    progress: Progress,
    *,
    against: np.ndarray | None = None,
) -> Samples:
    """Texts whose blanks are filled in, to suit raw latents where there are any."""
    assert given.blanks is not None
    assert given.asked is not None
    tokens = infill_tokens(
        model, given.blanks, options, latents=None if latents is None else model.normalizer.normalize(latents),
        keys=document_keys(options.seed, given.ids), progress=progress,
        against=None if against is None else model.normalizer.normalize(against),
    )  # fmt: skip
    records = text_records(model, tokens)
    records = [{"infill": text, **record} for text, record in zip(given.asked, records, strict=True)]
    return Samples(records, None, latents)


def vary_texts(
    model: LoadedModel,
    given: Given,
    latents: np.ndarray,
    options: SamplingOptions,
    lengths: np.ndarray | None,
    progress: Progress,
    *,
    strength: float,
    what: str,
) -> Samples:
    """Paraphrases: the latent is noised to time `strength`, or that share of the tokens is masked, or both."""
    assert given.tokens is not None
    keys, normalised = document_keys(options.seed, given.ids), model.normalizer.normalize(latents)
    blanks = some_blanks(given.tokens, keys, strength, model.corruption.text.mask_id)
    if what == "text":
        tokens = infill_tokens(model, blanks, options, latents=normalised, keys=keys, progress=progress)
        return Samples(_with_originals(given, text_records(model, tokens)), None, latents)
    tokens, made = vary(
        model, normalised, options, strength=strength, tokens=blanks if what == "both" else None,
        lengths=lengths, keys=keys, progress=progress,
    )  # fmt: skip
    return Samples(
        _with_originals(given, text_records(model, tokens)), None, model.normalizer.denormalize(made)
    )


def some_blanks(tokens: list[np.ndarray], keys: np.ndarray, share: float, mask_id: int) -> list[np.ndarray]:
    """Texts with about this share of their tokens masked, at least one."""
    result = []
    for text, key in zip(tokens, keys, strict=True):
        chance = randomness.uniform(key, randomness.TEXT_MASK, np.arange(len(text)))
        result.append(np.where((chance < share) | (chance == chance.min()), mask_id, text))
    return result


def text_records(model: LoadedModel, tokens: list[np.ndarray]) -> list[dict[str, Any]]:
    """Text and token ids of each document."""
    return [
        {"text": text, "tokens": ids.tolist()}
        for text, ids in zip(texts_of(model, tokens), tokens, strict=True)
    ]


def _with_originals(given: Given, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if given.texts is None:
        return records
    return [{"original": text, **record} for text, record in zip(given.texts, records, strict=True)]


def sample_latents(
    model: LoadedModel, given: Given, real: np.ndarray | None, options: SamplingOptions, progress: Progress
) -> Samples:
    """A latent for each text, with its cosine to the encoder's own where that is known."""
    assert given.tokens is not None
    assert given.texts is not None
    keys = document_keys(options.seed, given.ids)
    made = model.normalizer.denormalize(
        encode_tokens(model, given.tokens, options, keys=keys, progress=progress)
    )
    cosines = [None] * len(made) if real is None else cosine(made, real).tolist()
    records = [
        {"text": text, "cosine": value, "latent": latent.tolist()}
        for text, value, latent in zip(given.texts, cosines, made, strict=True)
    ]
    return Samples(records, made, made)


def sample_pairs(
    model: LoadedModel, count: int, options: SamplingOptions, lengths: np.ndarray | None, progress: Progress
) -> Samples:
    """Texts and their latents from nothing."""
    keys = document_keys(options.seed, count)
    tokens, latents = generate(model, count, options, lengths=lengths, keys=keys, progress=progress)
    made = model.normalizer.denormalize(latents)
    records = [
        {"text": text, "tokens": ids.tolist(), "latent": latent.tolist()}
        for text, ids, latent in zip(texts_of(model, tokens), tokens, made, strict=True)
    ]
    return Samples(records, made, made)


def write_samples(path: Path, samples: Samples) -> None:
    """Latents into a .npy file, records into any other, one JSON object a line; a full disk leaves what was there."""
    if path.suffix == ".npy":
        assert samples.latents is not None
        content = io.BytesIO()
        np.save(content, samples.latents)
        durable.replace_file(path, content.getvalue())
        return
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in samples.records]
    durable.replace_file(path, "".join(lines).encode())
