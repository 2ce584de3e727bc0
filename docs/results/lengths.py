"""The table "The length, when it is not known" of docs/results.md: python docs/results/lengths.py RUN STORE [bound]

Decodes the latents of the validation split with their true length, with the likeliest one, and with the best of the
likeliest few by several scores: w log p(length) + cosine of the text's own latent - b nats per token of its bound, or
- log of what the model misses of the noisy latent when it sees the text (`read_errors`). Bounds take most of the time
and are left out unless asked for.
"""

import copy
import json
import sys
import time

import numpy as np

import mmldlm
from mmldlm import randomness
from mmldlm.latents import cosine
from mmldlm.sampling.decode import likely_lengths, read_errors
from mmldlm.sampling.options import SamplingOptions
from mmldlm.statistics import aligned_tokens, bleu_counts, bleu_of_sums

SCORES = {
    "cosine": (0.0, 1.0, 0.0, 0.0),
    "cosine + 0.01 log p": (0.01, 1.0, 0.0, 0.0),
    "cosine + 0.03 log p": (0.03, 1.0, 0.0, 0.0),
    "- log error": (0.0, 0.0, 0.0, 1.0),
    "- log error + 0.01 log p": (0.01, 0.0, 0.0, 1.0),
    "- log error + 0.02 log p": (0.02, 0.0, 0.0, 1.0),
    "- log error + 0.03 log p": (0.03, 0.0, 0.0, 1.0),
    "the truth itself": (0.0, 0.0, 0.0, 0.0),
    "bound": (1.0, 0.0, 1.0, 0.0),
    "bound per token": (0.0, 0.0, 1.0, 0.0),
    "cosine + 0.01 log p - 0.01 bound per token": (0.01, 1.0, 0.01, 0.0),
    "- log error + 0.01 log p - 0.05 bound per token": (0.01, 0.0, 0.05, 1.0),
}
"""Weights of the log-probability, the cosine, the bound and the logarithm of the error; the truth chooses what is
exact, or else right in most places."""
COUNTS = (1, 2, 3, 4, 6)
STEPS = 16
model, split = mmldlm.load(sys.argv[1]), mmldlm.PairStore.open(sys.argv[2]).splits["validation"]
with_bound = sys.argv[3:] == ["bound"]
latents, truth = np.asarray(split.latents), model.tokenize(list(split.texts))
lengths = np.array([len(text) for text in truth])
wanted = model.codec.texts_of(truth)


class Texts:
    """Decoded texts with what each of them adds to the scores of all."""

    def __init__(self, tokens: list[np.ndarray], texts: list[str]) -> None:
        self.sizes = np.maximum(lengths, [len(text) for text in tokens])
        pairs = list(zip(tokens, truth, strict=True))
        self.right = np.array([(a[: len(b)] == b[: len(a)]).sum() for a, b in pairs])
        self.exact = np.array([np.array_equal(a, b) for a, b in pairs])
        self.aligned, self.bleu = aligned_tokens(truth, tokens), bleu_counts(wanted, texts)

    def show(self, name: str, seconds: float) -> None:
        """One row."""
        total = self.sizes.sum()
        row = {
            "tokens right": 100 * self.right.sum() / total,
            "after alignment": 100 * self.aligned.sum() / total,
            "exact": 100 * self.exact.mean(),
            "BLEU": bleu_of_sums(self.bleu.sum(0)[None])[0],
            "seconds": seconds,
        }
        print(
            json.dumps({"name": name} | {key: round(float(value), 2) for key, value in row.items()}),
            flush=True,
        )

    def put(self, rows: np.ndarray, other: "Texts") -> None:
        """Take some texts of another."""
        for name in ("sizes", "right", "exact", "aligned", "bleu"):
            getattr(self, name)[rows] = getattr(other, name)[rows]


def decode(**options: object) -> tuple[list[np.ndarray], list[str], float]:
    """Tokens, texts and seconds."""
    began = time.perf_counter()
    texts = model.decode(latents, steps=STEPS, temperature=0, **({"candidates": 1} | options))
    return [text.tokens for text in texts], list(map(str, texts)), time.perf_counter() - began


decode(lengths=lengths)  # what is done once is done
for name, options in (("true length", {"lengths": lengths}), ("likeliest length", {})):
    tokens, texts, seconds = decode(**options)
    Texts(tokens, texts).show(name, seconds)
normalised = model.loaded.normalizer.normalize(latents)
likely = likely_lengths(model.loaded, normalised, max(COUNTS))
keys = randomness.make_key(0, np.arange(len(latents)))
for count in COUNTS:
    share = (likely.lengths[:, :count] == lengths[:, None]).any(1).mean()
    print(json.dumps({"true length among the likeliest": count, "share": round(100 * float(share), 2)}))
best: dict[str, tuple[Texts, np.ndarray]] = {}
spent = {"cosine": 0.0, "bound": 0.0}
for number in range(likely.lengths.shape[1]):
    tokens, texts, seconds = decode(lengths=likely.lengths[:, number])
    scored = Texts(tokens, texts)
    began = time.perf_counter()
    nearness = cosine(model.encode(texts), latents)
    middle = time.perf_counter()
    missed = np.log(read_errors(model.loaded, tokens, normalised, SamplingOptions(), keys=keys))
    after = time.perf_counter()
    nats = model.score(texts, latents, draws=8) if with_bound else np.zeros(len(texts))
    spent["cosine"] += seconds + middle - began
    spent["bound"] += seconds + time.perf_counter() - after
    for name, (prior, near, cost, read) in SCORES.items():
        if cost and not with_bound:
            continue
        paid = nats if name == "bound" else nats / likely.lengths[:, number]
        score = prior * likely.log_probabilities[:, number] + near * nearness - cost * paid - read * missed
        if name == "the truth itself":
            score = scored.exact + scored.right / scored.sizes
        kept, kept_score = best.get(name) or (copy.deepcopy(scored), np.full(len(tokens), -np.inf))
        kept.put(score > kept_score, scored)
        best[name] = (kept, np.maximum(score, kept_score))
        if number + 1 in COUNTS:
            kept.show(f"{number + 1} likely lengths, {name}", spent["bound" if cost else "cosine"])
for options in ({"candidates": 3}, {"candidates": 3, "check": "encoder"}):
    tokens, texts, seconds = decode(**options)
    Texts(tokens, texts).show(str(options), seconds)
