"""The tables "Pairs from nothing" of docs/results.md: python docs/results/joint.py RUN STORE [COUNT [default]]

Pairs from nothing by orders, temperatures, turns and candidates. For each way: agreement of latent and text by the
encoder and by the model, repeated tokens, different pairs of tokens, distances of latents and of the texts' own latents
from held-out ones (Frechet and MMD, beside those of other held-out ones), and texts that are a training text, whole or
derived. With `default` only held-out pairs and the way that `generate` takes by itself.
"""

import json
import sys
import time
from typing import Any

import numpy as np

import mmldlm
from mmldlm.evaluation.generation import distinct, frechet_distance, main_directions, repeats
from mmldlm.latents import cosine

model, store = mmldlm.load(sys.argv[1]), mmldlm.PairStore.open(sys.argv[2])
count = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
real = store.splits["validation"]
shuffled = np.random.default_rng(0).permutation(len(real))  # files are often in an order of their own
real_latents, real_texts = np.asarray(real.latents)[shuffled], [list(real.texts)[i] for i in shuffled]
size = min(count, len(real_latents) // 2)
train = store.splits["train"]
everything = train.read(np.arange(len(train)))
known = [
    text.astype(np.int64).tobytes()
    for text in np.split(everything.tokens, np.cumsum(everything.lengths)[:-1])
]
is_derived = train.derived(np.arange(len(train)))
flags = np.zeros(len(train), bool) if is_derived is None else is_derived
whole = {text for text, flag in zip(known, flags, strict=True) if not flag}
derived = set(known) - whole
axes = main_directions(real_latents.reshape(len(real_latents), -1), size // 4)


def mmd(left: np.ndarray, right: np.ndarray) -> float:
    """Squared maximum mean discrepancy by the kernel (x'y + 1)^3 on unit vectors, without bias, times 1,000."""
    left, right = (
        x.reshape(len(x), -1) / np.linalg.norm(x.reshape(len(x), -1), axis=1)[:, None] for x in (left, right)
    )

    def within(x: np.ndarray) -> float:
        kernel = (x @ x.T + 1.0) ** 3
        return float((kernel.sum() - np.trace(kernel)) / (len(x) * (len(x) - 1)))

    return 1000 * (within(left) + within(right) - 2 * float(((left @ right.T + 1.0) ** 3).mean()))


def frechet(left: np.ndarray, right: np.ndarray) -> float:
    """In the directions in which held-out latents vary most."""
    return frechet_distance(*(x.reshape(len(x), -1) @ axes for x in (left, right)))


def show(name: str, texts: list[Any], latents: np.ndarray, own: np.ndarray | None, seconds: float) -> None:
    """One row."""
    tokens = [np.asarray(text) for text in model.tokenize([str(text) or "." for text in texts[:size]])]
    again, all_tokens = repeats(tokens, 1)
    read = model.embed([str(text) or "." for text in texts[:size]])
    part = real_latents[:size]
    row = {
        "agreement by the encoder": cosine(read, latents[:size]).mean(),
        "by the model": float("nan") if own is None else own.mean(),
        "repeated tokens": 100 * again.sum() / all_tokens.sum(),
        "distinct-2": 100 * distinct(tokens, 2).value,
        "length": all_tokens.mean(),
        "latents: Frechet": frechet(latents[:size], part),
        "MMD": mmd(latents[:size], part),
        "texts: Frechet": frechet(read, part),
        "MMD of texts": mmd(read, part),
        "training texts": 100 * np.mean([text.astype(np.int64).tobytes() in whole for text in tokens]),
        "derived texts": 100 * np.mean([text.astype(np.int64).tobytes() in derived for text in tokens]),
        "seconds": seconds,
    }
    print(
        json.dumps({"name": name} | {key: round(float(value), 3) for key, value in row.items()}), flush=True
    )


def agreement(texts: list[Any], latents: np.ndarray) -> np.ndarray:
    """(n,) cosine of each latent and that of its text by the model itself."""
    return cosine(model.encode([str(text) or "." for text in texts]), latents)


def pairs(number: int = 1, **options: Any) -> None:
    """Pairs at once; of several, the one that agrees best is kept."""
    began = time.perf_counter()
    made = [model.generate(count, seed=seed, **options) for seed in range(number)]
    agree = np.stack([agreement(one.texts, one.latents) for one in made])
    best = agree.argmax(0) if number > 1 else np.zeros(count, int)
    texts = [made[pick].texts[i] for i, pick in enumerate(best)]
    latents = np.stack([made[pick].latents[i] for i, pick in enumerate(best)])
    name = " ".join(f"{key}={value}" for key, value in options.items()) + (
        f" best of {number}" if number > 1 else ""
    )
    show(name, texts, latents, agree.max(0), time.perf_counter() - began)


def latent_then_decode(solver: str = "ddim", latent_steps: int = 32, **options: Any) -> None:
    """The latent from its own marginal, then the text from it as decode does, with the length it predicts."""
    began = time.perf_counter()
    latents = model.generate(
        count, steps=1, latent_steps=latent_steps, turns="latent_first", solver=solver
    ).latents
    texts = model.decode(latents, **options)
    name = f"latent ({solver}, {latent_steps}), then decode " + " ".join(
        f"{key}={value}" for key, value in options.items()
    )
    show(name, texts, latents, agreement(texts, latents), time.perf_counter() - began)


show("held-out pairs", real_texts[size : 2 * size], real_latents[size : 2 * size], None, 0.0)
if sys.argv[4:] == ["default"]:
    pairs(steps=32, latent_steps=32)
    for text in model.generate(12, seed=1).texts:
        print(text)
    sys.exit()
for turns in ("interleaved", "latent_first", "text_first"):
    for order in ("margin", "ancestral"):
        for temperature in (0.0, 0.5, 0.7, 1.0):
            pairs(turns=turns, order=order, temperature=temperature, steps=32, latent_steps=32)
for order in ("confidence", "first_hitting"):
    pairs(turns="latent_first", order=order, temperature=0.7, steps=32, latent_steps=32)
for turns in ("interleaved", "latent_first"):
    pairs(4, turns=turns, order="margin", temperature=0.7, steps=32, latent_steps=32)
for solver, latent_steps in (("ddim", 16), ("ddim", 100), ("heun", 32)):
    latent_then_decode(solver, latent_steps, order="margin", temperature=0.0, steps=32, candidates=1)
for order, temperature, candidates in (
    ("margin", 0.0, 1), ("margin", 0.0, 4), ("margin", 0.5, 4), ("margin", 0.7, 4), ("margin", 0.7, 8),
    ("ancestral", 0.5, 4), ("ancestral", 0.7, 4),
):  # fmt: skip
    latent_then_decode(order=order, temperature=temperature, steps=32, candidates=candidates)
for text in model.generate(
    12, turns="latent_first", order="margin", temperature=0.7, steps=32, latent_steps=32
).texts:
    print(text)
