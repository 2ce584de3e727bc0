"""The table "The length, when it is not known" of docs/results.md: python docs/results/lengths.py RUN STORE [STEPS]

Decodes the latents of the validation split with their true length, with the likeliest one, with the best of the
likeliest few, and with drawn candidates.
"""

import json
import sys
import time

import numpy as np
import sacrebleu

import mmldlm
from mmldlm.latents import cosine
from mmldlm.sampling.decode import likely_lengths

WEIGHTS, COUNTS = (0.0, 0.003, 0.01, 0.03), (2, 3, 4, 6, 8, 12, 16)
model, split = mmldlm.load(sys.argv[1]), mmldlm.PairStore.open(sys.argv[2]).splits["validation"]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 16
latents, truth = np.asarray(split.latents), model.tokenize(list(split.texts))
lengths = np.array([len(text) for text in truth])


def show(name: str, tokens: list[np.ndarray], seconds: float) -> None:
    """One row."""
    right = sum(
        (ours[: len(theirs)] == theirs[: len(ours)]).sum() for ours, theirs in zip(tokens, truth, strict=True)
    )
    exact = np.mean([np.array_equal(ours, theirs) for ours, theirs in zip(tokens, truth, strict=True)])
    texts, wanted = (
        model.codec.tokenizer.decode_batch([t.tolist() for t in some]) for some in (tokens, truth)
    )
    bleu = sacrebleu.corpus_bleu(texts, [wanted]).score
    row = {
        "tokens_right": 100 * right / lengths.sum(),
        "exact": 100 * exact,
        "bleu": bleu,
        "seconds": seconds,
    }
    print(
        json.dumps({"name": name} | {key: round(float(value), 2) for key, value in row.items()}), flush=True
    )


def decode(**options: object) -> tuple[list[np.ndarray], list[str], float]:
    """Tokens, texts and seconds."""
    began = time.perf_counter()
    texts = model.decode(latents, steps=steps, **options)
    return (
        [np.asarray(text.tokens) for text in texts],
        [str(text) for text in texts],
        time.perf_counter() - began,
    )


for name, options in (("true length", {"lengths": lengths}), ("likeliest length", {})):
    tokens, _, seconds = decode(**options)
    show(name, tokens, seconds)
likely = likely_lengths(model.loaded, model.loaded.normalizer.normalize(latents), max(COUNTS))
for count in (1, 2, 4, 8, 16):
    share = (likely.lengths[:, :count] == lengths[:, None]).any(1).mean()
    print(json.dumps({"true length among the likeliest": count, "share": round(100 * float(share), 2)}))
best: dict[float, tuple[list[np.ndarray], np.ndarray]] = {}
total = 0.0
for number in range(max(COUNTS)):
    tokens, texts, seconds = decode(lengths=likely.lengths[:, number])
    began = time.perf_counter()
    nearness = cosine(model.encode(texts), latents)
    total += seconds + time.perf_counter() - began
    for weight in WEIGHTS:
        score = nearness + weight * likely.log_probabilities[:, number]
        kept, kept_score = best.get(weight, (list(tokens), np.full(len(tokens), -np.inf)))
        for place in np.nonzero(score > kept_score)[0]:
            kept[place] = tokens[place]
        best[weight] = (kept, np.maximum(score, kept_score))
        if number + 1 in COUNTS:
            show(f"{number + 1} likely lengths, w = {weight}", kept, total)
for count in (4, 8):
    tokens, _, seconds = decode(candidates=count)
    show(f"candidates={count}", tokens, seconds)
