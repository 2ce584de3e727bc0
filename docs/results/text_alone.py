"""Text alone, counted in two ways: python docs/results/text_alone.py TEXT OUT [key=value ...]

TEXT becomes two pair stores whose latents say nothing: its sentences, and blocks in the way of MDLM. There the
sentences follow each other with an end token behind each; the stream is cut every BLOCK - 2 tokens, a first token is
put before each part and an end token behind it, and all BLOCK tokens are counted. On each store a masked model that
never sees a latent (preset `tiny`) and the decoder of `examples/autoregressive_baseline.py` see the same number of
tokens, at each rate. Printed are nats and perplexity of a counted token on all held-out text. For sentences text
and length together (the decoder: text and end token) are divided by tokens and sentences; blocks have one length.

    python docs/results/text_alone.py builtin:sotu saved/text-alone
"""

import argparse
import json
import math
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch

import mmldlm
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import StoreWriter
from mmldlm.evaluation.text_bound import text_costs

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import autoregressive_baseline as peer

BLOCK, DRAWS = 128, 4
DEPTH, WIDTH, HEADS = 4, 192, 4
"""Of the decoder, as those of preset `tiny`."""
ALONE = (
    "model.preset=tiny", "corruption.mode_weights={l2t: 1}", "corruption.condition_dropout=1",
    "objective.balance=fixed", "train.valid_every=0", "train.trackers=[]",
)  # fmt: skip


def in_blocks(sentences: list[np.ndarray], first: int, end: int) -> list[np.ndarray]:
    """Equal blocks of the stream of sentences; what is left at its end is dropped."""
    stream = np.concatenate([part for tokens in sentences for part in (tokens, [end])])
    inner = BLOCK - 2
    return [
        np.concatenate([[first], stream[i : i + inner], [end]])
        for i in range(0, len(stream) - inner + 1, inner)
    ]


def nothing(texts: list[str]) -> np.ndarray:
    """Latents for those who read none."""
    return np.zeros((len(texts), 8), np.float32)


def in_blocks_of(store: mmldlm.PairStore, path: Path) -> mmldlm.PairStore:
    """The same tokens, in blocks."""
    if (path / "manifest.json").exists():
        return mmldlm.PairStore.open(path)
    tokenizer = Tokenizer.load(store.tokenizer_path())
    first, end = map(tokenizer.backend.token_to_id, ("[CLS]", "[SEP]"))
    writer = StoreWriter(
        path, vocab_size=store.manifest.vocab_size, num_slots=1, num_channels=8, tokenizer=tokenizer
    )
    for name in ("train", "validation"):
        sentences = store.split(name).read(np.arange(len(store.split(name)))).split_tokens()
        blocks = in_blocks(sentences, first, end)
        writer.add(name, blocks, np.zeros((len(blocks), 1, 8)), ids=np.arange(len(blocks)))
    return writer.finish()


def masked(store: mmldlm.PairStore, words: argparse.Namespace, rate: float) -> dict[str, float]:
    """Nats of the held-out text and of its lengths, by the bound of masked diffusion."""
    settings = [
        f"batch.tokens_per_step={words.batch_tokens}",
        f"train.steps={words.steps}",
        f"optim.lr={rate}",
    ]
    folder = store.path.with_name(f"{store.path.name}-masked-{rate:g}")
    run = mmldlm.train("small", store=store, run=folder, overrides=[*ALONE, *settings, *words.settings])
    loaded, split = mmldlm.load(run).loaded, store.split("validation")
    documents = split.read(np.arange(len(split)))
    costs = text_costs(loaded, documents, latent="none", num_draws=DRAWS, batch_tokens=8192, seed=0)
    parameters = sum(p.numel() for p in loaded.denoiser.parameters())
    return {
        "parameters": parameters, "nats of texts": costs.nats.sum(), "nats of lengths": costs.length_nats.sum()
    }  # fmt: skip


def autoregressive(store: mmldlm.PairStore, words: argparse.Namespace, rate: float) -> dict[str, float]:
    """Nats of the held-out text with the end token behind each document."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = peer.Settings(
        DEPTH, WIDTH, HEADS, lr=rate, muon=False, batch_tokens=words.batch_tokens, steps=words.steps
    )
    model, _ = peer.train(store, settings, device)
    parts = (x.split(256) for x in peer.on_device(store, "validation", model.end, device))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        nats = sum(float(model.loss(*part) * (part[2] + 1).sum()) for part in zip(*parts, strict=True))
    return {"parameters": sum(p.numel() for p in model.parameters()), "nats of texts": nats}


def main(words: argparse.Namespace) -> None:
    """Two stores, and on each the masked model and the decoder at each rate."""
    sentences = mmldlm.prepare(
        words.text, words.out / "sentences", encoder=nothing, cut="sentences", max_tokens=64, validation=0.01
    )
    blocks = in_blocks_of(sentences, words.out / "blocks")
    for kind, store in (("sentences", sentences), ("blocks", blocks)):
        lengths = store.lengths("validation")
        counted = int(lengths.sum()) + (len(lengths) if store is sentences else 0)
        for arm, rate in product((masked, autoregressive), words.rates):
            began = time.perf_counter()
            row = arm(store, words, rate)
            each = (row["nats of texts"] + row.get("nats of lengths", 0.0)) / counted
            row |= {"counted": counted, "nats each": each, "perplexity": math.exp(each)}
            row |= {"seconds": time.perf_counter() - began}
            print(json.dumps({"text": kind, "model": arm.__name__, "rate": rate} | row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "settings", nargs="*", default=[], help="of the masked model, such as train.device=cpu"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3])
    main(parser.parse_intermixed_args())
