"""What an autoregressive decoder of the same pairs can do: trained on a pair store, judged by the same scores.

    python examples/autoregressive_baseline.py data/wordnet-derived --seconds 90

The latent takes the first place of a causal transformer, the tokens follow, an end token closes the text. Decoding
takes the most probable token at each place, with keys and values kept; it finds its length, or is told the true one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmldlm
from mmldlm.data.store import Split
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.evaluation.inversion import Truth, score_texts

NO_TARGET = -100


@dataclass
class Settings:
    """Of the model and its training."""

    depth: int = 8
    width: int = 768
    heads: int = 12
    lr: float = 1e-3
    batch_tokens: int = 16384
    seconds: float = 90.0
    compile: bool = torch.cuda.is_available()


class Block(nn.Module):
    """Causal attention and a feed-forward half, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        """x (n, places, width); `past` holds keys and values of the places before, and gets those of x."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if past:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        if past is not None:
            past[:] = [key, value]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """From a latent (n, S, C) to a text."""

    def __init__(self, store: mmldlm.PairStore, settings: Settings) -> None:
        super().__init__()
        shape = store.manifest
        self.end, width = shape.vocab_size, settings.width
        self.longest = max(split["max_length"] for split in shape.splits.values())
        self.latent = nn.Linear(shape.num_slots * shape.num_channels, width)
        self.tokens, self.places = nn.Embedding(self.end + 1, width), nn.Embedding(self.longest + 9, width)
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.end + 1)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Logits (n, 1 + places, vocabulary) of the token that follows the latent, and each token."""
        x = torch.cat([self.latent(latents.flatten(1))[:, None], self.tokens(tokens)], 1)
        x = x + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def decode(self, latents: Tensor, lengths: Tensor | None = None) -> list[np.ndarray]:
        """The most probable token at each place, until the end token or the given lengths."""
        pasts: list[list[Tensor]] = [[] for _ in self.blocks]
        x, chosen = self.latent(latents.flatten(1))[:, None], []
        ended = torch.zeros_like(latents[:, 0, 0], dtype=torch.bool)
        for place in range(self.longest + 1):
            x = x + self.places.weight[place]
            for block, past in zip(self.blocks, pasts, strict=True):
                x = block(x, past)
            logits = self.head(self.norm(x))[:, -1]
            if lengths is not None:
                logits[:, self.end] = torch.where(place >= lengths, torch.inf, -torch.inf)
            token = torch.where(ended, self.end, logits.argmax(-1))
            ended = token == self.end
            chosen.append(token)
            x = self.tokens(token)[:, None]
        rows = torch.stack(chosen, 1).cpu().numpy()
        return [row[: int((row != self.end).cumprod().sum())] for row in rows]


def batches(split: Split, end: int, size: int, seed: int = 0) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless: latents, input tokens and targets, of documents of about the same length; few shapes."""
    rng, lengths = np.random.default_rng(seed), np.asarray(split.lengths)
    widths = -(-lengths // 8) * 8
    while True:
        for pool in np.array_split(rng.permutation(len(lengths)), max(1, len(lengths) // 32768)):
            groups = [pool[widths[pool] == width] for width in np.unique(widths[pool])]
            rows = [max(1, size // int(widths[group[0]])) for group in groups]
            parts = [g[i : i + n] for g, n in zip(groups, rows, strict=True) for i in range(0, len(g), n)]
            full = [part for part in parts if len(part) == size // int(widths[part[0]])] or parts
            for part in (full[i] for i in rng.permutation(len(full))):
                documents, width = split.read(part), widths[part[0]]
                inside = np.arange(width) < documents.lengths[:, None]
                tokens = np.full((len(part), width), end, dtype=np.int64)
                tokens[inside] = documents.tokens
                ended = np.concatenate([tokens, np.full((len(part), 1), end)], 1)
                scored = np.arange(width + 1) <= documents.lengths[:, None]
                yield documents.latents, tokens, np.where(scored, ended, NO_TARGET)


def train(store: mmldlm.PairStore, settings: Settings, device: str) -> tuple[Decoder, int]:
    """Train for the seconds of the settings, compilation included."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Decoder(store, settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for block in model.blocks if settings.compile else []:
        block.compile(dynamic=True)
    began, steps = time.perf_counter(), 0
    for arrays in batches(store.split("train"), model.end, settings.batch_tokens):
        passed = (time.perf_counter() - began) / settings.seconds
        if passed >= 1.0:
            break
        rate = min(passed / 0.03, 0.5 + 0.5 * float(np.cos(np.pi * passed)))
        optimizer.param_groups[0]["lr"] = settings.lr * max(rate, 1e-3)
        latents = torch.from_numpy(store.normalizer.normalize(arrays[0])).to(device)
        tokens, targets = (torch.from_numpy(array).to(device) for array in arrays[1:])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(latents, tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return model.eval(), steps


def judge(model: Decoder, store: mmldlm.PairStore, device: str, rows: int = 512) -> dict[str, float]:
    """Scores on held-out latents, with the model's own length and with the true one."""
    folder, split = store.tokenizer_path(), store.split("validation")
    tokenizer = Tokenizer.load(folder) if folder else None

    def decode_text(tokens: list[np.ndarray]) -> list[str]:
        return tokenizer.decode_batch([t.tolist() for t in tokens]) if tokenizer else []

    documents = split.read(np.arange(len(split)))
    truth, scores = Truth.of(documents, decode_text), {}
    latents = torch.from_numpy(store.normalizer.normalize(documents.latents)).to(device)
    for name, lengths in (
        ("own length", None),
        ("true length", torch.from_numpy(documents.lengths).to(device)),
    ):
        began, decoded = time.perf_counter(), []
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            for i in range(0, len(latents), rows):
                part = None if lengths is None else lengths[i : i + rows]
                decoded += model.decode(latents[i : i + rows], part)
        scores[f"{name}: texts per second"] = len(latents) / (time.perf_counter() - began)
        for quantity in score_texts(truth, decoded, 0, decode_text, None).quantities(truth).values():
            scores[f"{name}: {quantity.title}"] = quantity.value()
    return scores


def main(path: str, settings: Settings) -> dict[str, float]:
    """Train and judge; returns the scores."""
    store, device = mmldlm.PairStore.open(path), "cuda" if torch.cuda.is_available() else "cpu"
    model, steps = train(store, settings, device)
    return {"parameters": sum(p.numel() for p in model.parameters()), "steps": steps} | judge(
        model, store, device
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    words = parser.parse_args()
    print(json.dumps(main(words.store, Settings(seconds=words.seconds)), indent=1))
