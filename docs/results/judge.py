"""One row of docs/results.md for each run: python docs/results/judge.py STORE RUN [RUN ...] [order=NAME]

All held-out pairs of the store, in seconds instead of the minutes of `mmldlm eval`, without intervals: latents decoded
in 16 and 32 steps with the true length and without, texts encoded, the text bound, and 1,024 pairs from nothing.
With an order of unmasking, decoding alone, in this order. An encoder that is code is named by encoder=MODULE:NAME.
"""

import json
import sys
import time
from typing import Any

import numpy as np

import mmldlm
from mmldlm.data.store import Split
from mmldlm.evaluation.context import Pairs
from mmldlm.evaluation.generation import distinct, repeats
from mmldlm.evaluation.inversion import score_texts
from mmldlm.latents import cosine

STEPS, GENERATED, DRAWS = 16, 1024, 8
SCORES = ("token_accuracy", "tokens_aligned", "exact_match", "bleu", "right_length")


def decoding(model: mmldlm.Model, truth: Pairs, tokens: list[np.ndarray], name: str) -> dict[str, float]:
    """Scores of decoded texts, in per cent."""
    quantities = score_texts(truth, tokens, STEPS, model.codec.texts_of, None).quantities(truth)
    shares = {key: quantities[key].value() * (1 if key == "bleu" else 100) for key in SCORES}
    return {f"{name}: {quantities[key].title}": value for key, value in shares.items()}


def retrieval(own: np.ndarray, latents: np.ndarray) -> float:
    """Share of texts whose own latent is the nearest of all, in per cent."""
    own, latents = (x.reshape(len(x), -1).astype(np.float32) for x in (own, latents))
    near = (own / np.linalg.norm(own, axis=1)[:, None]) @ (
        latents / np.linalg.norm(latents, axis=1)[:, None]
    ).T
    return 100 * float((near.argmax(1) == np.arange(len(near))).mean())


def judge(
    model: mmldlm.Model, split: Split, generated: int = GENERATED, order: str | None = None
) -> dict[str, float]:
    """Every figure, by name; with an order, those of decoding in it."""
    truth, began = Pairs.of(split.read(np.arange(len(split))), model.codec.texts_of), time.perf_counter()
    texts, row = [str(text) for text in split.texts], {}
    for steps, more in ((STEPS, ""), (2 * STEPS, f", {2 * STEPS} steps")):
        for name, lengths in (("true length", truth.lengths), ("own length", None)):
            decoded = model.decode(truth.latents, steps=steps, temperature=0, lengths=lengths, order=order)
            row |= decoding(model, truth, [text.tokens for text in decoded], name + more)
    if order is not None:
        return row | {"seconds": time.perf_counter() - began}
    own = model.encode(texts)
    row |= {
        "t2l: cosine": cosine(own, truth.latents).mean(),
        "t2l: retrieval@1": retrieval(own, truth.latents),
    }
    row["text bound"] = model.score(texts, truth.latents, draws=DRAWS).sum() / truth.lengths.sum()
    if generated:
        row |= joint(model, generated)
    return row | {"seconds": time.perf_counter() - began}


def joint(model: mmldlm.Model, count: int) -> dict[str, float]:
    """Pairs from nothing."""
    pairs = model.generate(count, steps=32, latent_steps=32)
    tokens = [text.tokens for text in pairs.texts]
    again, all_tokens = repeats(tokens, 1)
    return {
        "joint: agreement by the encoder": cosine(
            model.embed([str(text) or "." for text in pairs.texts]), pairs.latents
        ).mean(),
        "joint: repeated tokens": 100 * again.sum() / all_tokens.sum(),
        "joint: distinct pairs": distinct(tokens, 2).value,
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """For a line of output."""
    return {key: round(float(value), 3) for key, value in row.items()}


if __name__ == "__main__":
    held_out = mmldlm.PairStore.open(sys.argv[1]).splits["validation"]
    options = dict(word.split("=", 1) for word in sys.argv[2:] if word.startswith(("order=", "encoder=")))
    for run in (word for word in sys.argv[2:] if word.split("=", 1)[0] not in options):
        model = mmldlm.load(run, encoder=options.get("encoder"))
        row = judge(model, held_out, order=options.get("order"))
        print(json.dumps({"run": run} | rounded(row)), flush=True)
