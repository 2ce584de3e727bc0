"""Samples as records: one dictionary a document, the same for the terminal, a file and other programs.

Latents in records are raw, as the encoder makes them. Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.sampling.decode import Progress, decode_latents, document_keys, encode_tokens, generate
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.self_check import cosine
from mmldlm.sampling.sources import Given, texts_of


@dataclass(frozen=True)
class Samples:
    """What was sampled."""

    records: list[dict[str, Any]]
    latents: np.ndarray | None
    """(n, S, C) raw, where latents were sampled."""


def sample_texts(
    model: LoadedModel,
    given: Given,
    latents: np.ndarray,
    options: SamplingOptions,
    lengths: np.ndarray | None,
    progress: Progress,
) -> Samples:
    """A text for each raw latent, beside the original where there is one."""
    keys = document_keys(options.seed, given.ids)
    normalised = model.normalize(latents)
    tokens = decode_latents(model, normalised, options, lengths=lengths, keys=keys, progress=progress)
    records: list[dict[str, Any]] = [
        {"text": text, "tokens": ids.tolist()}
        for text, ids in zip(texts_of(model, tokens), tokens, strict=True)
    ]
    if given.texts is not None:
        records = [{"original": text, **record} for text, record in zip(given.texts, records, strict=True)]
    return Samples(records, None)


def sample_latents(
    model: LoadedModel, given: Given, real: np.ndarray | None, options: SamplingOptions, progress: Progress
) -> Samples:
    """A latent for each text, with its cosine to the encoder's own where that is known."""
    assert given.tokens is not None
    assert given.texts is not None
    keys = document_keys(options.seed, given.ids)
    made = model.denormalize(encode_tokens(model, given.tokens, options, keys=keys, progress=progress))
    cosines = [None] * len(made) if real is None else cosine(made, real).tolist()
    records = [
        {"text": text, "cosine": value, "latent": latent.tolist()}
        for text, value, latent in zip(given.texts, cosines, made, strict=True)
    ]
    return Samples(records, made)


def sample_pairs(
    model: LoadedModel, count: int, options: SamplingOptions, lengths: np.ndarray | None, progress: Progress
) -> Samples:
    """Texts and their latents from nothing."""
    keys = document_keys(options.seed, count)
    tokens, latents = generate(model, count, options, lengths=lengths, keys=keys, progress=progress)
    made = model.denormalize(latents)
    records = [
        {"text": text, "tokens": ids.tolist(), "latent": latent.tolist()}
        for text, ids, latent in zip(texts_of(model, tokens), tokens, made, strict=True)
    ]
    return Samples(records, made)


def write_samples(path: Path, samples: Samples) -> None:
    """Latents into a .npy file, records into any other, one JSON object a line."""
    if path.suffix == ".npy":
        assert samples.latents is not None
        np.save(path, samples.latents)
        return
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in samples.records]
    path.write_text("".join(lines), encoding="utf-8")
