"""Round trips: latent to text to latent, and text to latent to text, with what is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mmldlm.evaluation.context import Context
from mmldlm.evaluation.inversion import SCORES, Inversion, inversion_options, invert
from mmldlm.evaluation.quantities import MORE, Quantity
from mmldlm.latents import cosine


def measure_round_trips(context: Context, inversion: Inversion) -> dict[str, Any]:
    """Both ways, at the largest number of steps, with the true length; the documents are those decoded."""
    truth, decoded = inversion.truth, inversion.given[-1]
    tokens = truth.tokens
    own_of_decoded = context.own_latents(decoded.tokens, truth.ids, context.watch("round trip, to latents"))
    own_of_true = context.own_latents(tokens, truth.ids)
    back = invert(
        context.model,
        truth,
        own_of_true,
        inversion_options(context.model, decoded.num_sampling_steps, context.config.batch_tokens),
        length_given=True,
        decode_text=context.decode_text,
        encode=context.encode,
        seed=context.seed,
        progress=context.watch("round trip, to texts"),
    )
    return {
        "num_documents": len(tokens),
        "num_sampling_steps": decoded.num_sampling_steps,
        "latent_text_latent": {
            "own": _cosine(context, "own", cosine(own_of_decoded, truth.latents)),
            "encoder": None if decoded.cosine is None else _cosine(context, "encoder", decoded.cosine),
            "own_of_true_text": Quantity("", MORE, cosine(own_of_true, truth.latents))
            .estimate(context.seed)
            .to_json(),
        },
        "text_latent_text": dict.fromkeys(SCORES)
        | {
            name: context.record(
                f"round_trip/text/{name}",
                replace(quantity, title=f"text to own latent to text, {quantity.title}"),
            )
            for name, quantity in back.quantities(truth).items()
        },
    }


def _cosine(context: Context, who: str, values: np.ndarray) -> dict[str, float]:
    by = "the model itself" if who == "own" else "the encoder"
    title = f"latent to text to latent by {by}, cosine"
    return context.record(f"round_trip/latent/{who}", Quantity(title, MORE, values))
