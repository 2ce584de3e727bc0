"""Both bounds on held-out pairs: text given a latent, latent given a text; right, shuffled and none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mmldlm.config import leaves_condition_out
from mmldlm.evaluation import latent_bound, likelihood
from mmldlm.evaluation.calibration import calibration_error, equal_mass, equal_width, reliability
from mmldlm.evaluation.context import Context
from mmldlm.evaluation.quantities import LESS, MORE, Quantity
from mmldlm.evaluation.selection import take_first
from mmldlm.evaluation.tables import LATENT_NAMES, TEXT_NAMES

_PILOT_DOCUMENTS, _PILOT_DRAWS = 64, 8


def measure_text_bound(context: Context) -> dict[str, Any] | None:
    """Nats per token, per byte and per character; what the latent buys; calibration."""
    if not context.active.text:
        context.notes.append("the text bound and decoding are left out: this run has no loss on text")
        return None
    if not leaves_condition_out(context.model.config.corruption):
        context.notes.append(
            "'no latent' lies outside what this run was trained on: it has no joint mode and "
            "corruption.condition_dropout=0"
        )
    if not context.decodes:
        context.notes.append(
            "this run never saw a latent (corruption.condition_dropout=1): of the text bounds only 'no latent' is "
            "about what it was trained for, and decoding is left out"
        )
    bounds = {
        latent: likelihood.text_bound(
            context.model,
            context.selection.documents,
            latent=latent,
            num_draws=context.config.num_draws,
            batch_tokens=context.config.batch_tokens,
            seed=context.seed,
            progress=context.progress,
        )
        for latent in likelihood.LATENTS
    }
    for name, bound in bounds.items():
        title = f"text bound, {LATENT_NAMES[name]}, nats / token"
        context.record(f"text_bound/{name}", Quantity(title, LESS, bound.nats, bound.num_tokens))
    sizes = _text_sizes(context)
    result: dict[str, Any] = {
        name: bound.to_json() | _per_size(context, bound, sizes) | _calibration(context, bound)
        for name, bound in bounds.items()
    }
    result["gain"] = {
        name: context.record(
            f"text_gain/{name}",
            Quantity(
                f"nats / token saved by the right latent, against {LATENT_NAMES[name]}",
                MORE,
                bounds[name].nats - bounds["right"].nats,
                bounds["right"].num_tokens,
            ),
        )
        for name in likelihood.LATENTS[1:]
    }
    return result


def _text_sizes(context: Context) -> dict[str, np.ndarray]:
    """Bytes (UTF-8) and characters of each text as it was before the tokenizer; nothing where it is not known."""
    texts = context.selection.texts
    if any(text is None for text in texts):
        context.notes.append("no bits per byte: the pair store does not hold the texts themselves")
        return {}
    whole = [text for text in texts if text is not None]
    if context.decode_text is not None:
        tokens = np.split(
            context.selection.documents.tokens, np.cumsum(context.selection.documents.lengths)[:-1]
        )
        changed = sum(a != b for a, b in zip(whole, context.decode_text(tokens), strict=True))
        if changed:
            context.notes.append(
                f"the tokenizer does not give back {changed} of {len(whole)} texts as they were (case, spaces or "
                "unknown characters), so bits per byte leave out what it loses"
            )
    return {
        "byte": np.array([len(text.encode("utf-8", "replace")) for text in whole]),
        "character": np.array([len(text) for text in whole]),
    }


def _per_size(context: Context, bound: likelihood.Bound, sizes: dict[str, np.ndarray]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for unit in ("byte", "character"):
        key = f"bits_per_{unit}"
        if unit not in sizes:
            found[key] = None
            continue
        title = f"text bound, {LATENT_NAMES[bound.latent]}, bits / {unit}"
        quantity = Quantity(title, LESS, bound.nats / math.log(2.0), sizes[unit])
        found[key] = context.record(f"{key}/{bound.latent}", quantity)
    return found


def _calibration(context: Context, bound: likelihood.Bound) -> dict[str, Any]:
    """Expected calibration error in buckets of equal width and of equal mass, and the reliability diagram."""
    edges = {"equal_width": equal_width(), "equal_mass": equal_mass(bound.answers.arrays()[1])}
    errors, diagrams = {}, {}
    for kind, marks in edges.items():
        title = f"calibration error, {LATENT_NAMES[bound.latent]}, buckets of {kind.replace('_', ' ')}"
        quantity = calibration_error(bound.answers, marks, len(bound.nats), title)
        errors[kind] = context.record(f"calibration/{bound.latent}/{kind}", quantity)
        diagrams[kind] = reliability(bound.answers, marks)
    return {"calibration_error": errors, "reliability": diagrams}


def measure_latent_bound(context: Context) -> dict[str, Any] | None:
    """Nats per dimension of the latent; what the text buys."""
    if not context.active.latent:
        return None
    model, config, documents = context.model, context.config, context.selection.documents
    snr = _choose_snr(context)
    errors = {
        text: latent_bound.latent_errors(
            model,
            documents,
            text=text,
            largest_snr=snr,
            num_draws=config.num_draws,
            batch_tokens=config.batch_tokens,
            seed=context.seed,
            progress=context.progress,
        )
        for text in latent_bound.TEXTS
    }
    dimensions = errors["right"].num_dimensions
    nats = {text: found.nats() / dimensions for text, found in errors.items()}
    # raw coordinates differ by the normaliser's scale, one number or one per channel
    log_scale = float(np.log(model.normalizer.scale).mean())
    result: dict[str, Any] = {
        text: _latent_json(context, text, nats[text], log_scale) | {"snr_curve": errors[text].curve()}
        for text in latent_bound.TEXTS
    }
    result["gain"] = {
        text: context.record(
            f"latent_gain/{text}",
            Quantity(
                f"nats / dimension saved by the right text, against {TEXT_NAMES[text]}",
                MORE,
                nats[text] - nats["right"],
            ),
        )
        for text in latent_bound.TEXTS[1:]
    }
    normal = latent_bound.normal_nats(model.normalizer.normalize(documents.latents), snr)
    return result | {
        "normal_nats_per_dimension": float(normal.mean() / dimensions),
        "snr": snr,
        "prior_nats_per_dimension": 0.0,
        "reconstruction_nats_per_dimension": latent_bound.reconstruction_nats(1, snr),
        "num_documents": len(normal),
        "num_dimensions": dimensions,
        "num_draws": config.num_draws,
    }


def _choose_snr(context: Context) -> float:
    """Where the bound ends, from a few documents with the right text; see `latent_bound`."""
    pilot = latent_bound.latent_errors(
        context.model,
        take_first(context.selection.documents, _PILOT_DOCUMENTS),
        text="right",
        largest_snr=context.config.latent_snr,
        num_draws=_PILOT_DRAWS,
        batch_tokens=context.config.batch_tokens,
        seed=context.seed,
    )
    return float(pilot.edges[pilot.best_parts()])


def _latent_json(context: Context, text: str, nats: np.ndarray, log_scale: float) -> dict[str, Any]:
    quantity = Quantity(f"latent bound, {TEXT_NAMES[text]}, nats / dimension", LESS, nats)
    found = context.record(f"latent_bound/{text}", quantity)
    return {
        "nats_per_dimension": found["value"],
        "bits_per_dimension": found["value"] / math.log(2.0),
        "interval": [found["low"], found["high"]],
        "standard_error": found["standard_error"],
        "nats_per_dimension_raw": found["value"] + log_scale,
    }
