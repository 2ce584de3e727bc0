"""What an autoregressive decoder of the same pairs can do: trained on a pair store, judged by the same scores.

    python examples/autoregressive_baseline.py data/wordnet-derived --seconds 90

The latent comes first, tokens follow, an end token closes the text. Decoding is greedy, with keys and values kept.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

import mmldlm
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.evaluation.context import Pairs
from mmldlm.evaluation.inversion import score_texts


@dataclass
class Settings:
    """Of the model and its training; each is an option of the command."""

    depth: int = 8
    width: int = 768
    heads: int = 12
    lr: float = 1e-3
    weight_decay: float = 0.1
    muon: bool = True  # for the matrices of the blocks
    batch_tokens: int = 16384
    seconds: float = 90.0  # compilation included
    steps: int = 0  # if not 0, so many instead of seconds
    seed: int = 0
    rows: int = 2048  # texts decoded at a time
    compile: bool = torch.cuda.is_available()


class Block(nn.Module):
    """Causal attention and a feed-forward half, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: Tensor | None = None, place: int = 0) -> Tensor:
        """x (n, places, width). `past` (2, n, heads, all places, K): keys and values, and place for those of x."""
        inner = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = inner.permute(2, 0, 3, 1, 4)
        if past is not None:
            past[:, :, :, place] = torch.stack([key, value])[:, :, :, 0]
            key, value = past[:, :, :, : place + 1]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """From a latent (n, S, C) to a text."""

    def __init__(self, store: mmldlm.PairStore, settings: Settings) -> None:
        super().__init__()
        shape, width = store.manifest, settings.width
        self.end, self.longest = shape.vocab_size, max(part["max_length"] for part in shape.splits.values())
        self.latent = nn.Linear(shape.num_slots * shape.num_channels, width)
        self.tokens, self.places = nn.Embedding(self.end + 1, width), nn.Embedding(self.longest + 9, width)
        self.blocks = nn.ModuleList(Block(width, settings.heads) for _ in range(settings.depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.end + 1)
        for matrix in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Logits (n, 1 + places, vocabulary) of the token that follows the latent, and each token."""
        x = torch.cat([self.latent(latents.flatten(1))[:, None], self.tokens(tokens)], 1)
        x = x + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, latents: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Mean nats of the tokens of each text and of the end token behind it."""
        scored = torch.arange(text.shape[1], device=text.device) <= lengths[:, None]
        targets = torch.where(scored, text.long(), -100).flatten()  # -100 is not counted
        return nn.functional.cross_entropy(self(latents, text[:, :-1].long()).flatten(0, 1), targets)

    def decode(self, latents: Tensor, lengths: Tensor | None = None) -> list[np.ndarray]:
        """The most probable token at each place, until the end token or the given lengths."""
        x, heads, places = self.latent(latents.flatten(1))[:, None], self.blocks[0].heads, self.longest + 1
        pasts = x.new_empty(len(self.blocks), 2, len(x), heads, places, x.shape[2] // heads)
        chosen, going = torch.full((len(x), places), self.end, device=x.device), x.new_ones(len(x)).bool()
        for place in range(places):
            x = x + self.places.weight[place]
            for block, past in zip(self.blocks, pasts, strict=True):
                x = block(x, past, place)
            logits = self.head(self.norm(x))[:, -1]
            if lengths is not None:
                logits[:, self.end] = torch.where(place >= lengths, torch.inf, -torch.inf)
            token = torch.where(going, logits.argmax(-1), self.end)
            chosen[:, place], going = token, token != self.end
            if place % 8 == 7 and not going.any():  # looking makes the host wait
                break
            x = self.tokens(token)[:, None]
        return [row[: int((row != self.end).cumprod().sum())] for row in chosen.cpu().numpy()]


def parts(lengths: np.ndarray, size: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Endless: a width, and documents that it fits for a step; few shapes."""
    rng, widths = np.random.default_rng(seed), -(-lengths // 8) * 8
    while True:
        order, cut = rng.permutation(len(widths)), []
        for width in np.unique(widths):
            group, rows = order[widths[order] == width], max(1, size // width)
            cut += [(int(width), group[i : i + rows]) for i in range(0, max(1, len(group) - rows + 1), rows)]
        yield from (cut[i] for i in rng.permutation(len(cut)))


def on_device(store: mmldlm.PairStore, name: str, end: int, device: str) -> tuple[Tensor, ...]:
    """All latents of a split, tokens with end tokens behind them, and lengths: small enough to stay there."""
    documents = store.split(name).read(np.arange(len(store.split(name))))
    places = np.arange(-(-documents.lengths.max() // 8) * 8 + 1)
    tokens = np.full((len(documents.lengths), len(places)), end, dtype=np.int32)
    tokens[places < documents.lengths[:, None]] = documents.tokens
    arrays = (store.normalizer.normalize(documents.latents), tokens, documents.lengths)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def train(store: mmldlm.PairStore, settings: Settings, device: str) -> tuple[Decoder, int]:
    """Train for the seconds of the settings, compilation included, or for their steps."""
    torch.manual_seed(settings.seed)
    model = Decoder(store, settings).to(device)
    latents, tokens, lengths = on_device(store, "train", model.end, device)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2] if settings.muon else []
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    both: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True)]
    both += [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")] if matrices else []
    for block in model.blocks if settings.compile else []:
        block.compile(dynamic=True)
    began, batches = time.perf_counter(), parts(store.lengths("train"), settings.batch_tokens, settings.seed)
    for steps, (width, part) in enumerate(batches):
        seconds = time.perf_counter() - began
        passed = steps / settings.steps if settings.steps else seconds / settings.seconds
        if passed >= 1.0:
            break
        rows = torch.from_numpy(part).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model.loss(latents[rows], tokens[rows, : width + 1], lengths[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = settings.lr * min(passed / 0.03 + 1e-3, 0.5 + 0.5 * float(np.cos(np.pi * passed)) + 1e-3)
        for optimizer in both:
            optimizer.param_groups[0] |= {"lr": rate, "weight_decay": settings.weight_decay}
            optimizer.step()
        model.zero_grad()
    return model.eval(), steps


@torch.no_grad()
def judge(model: Decoder, store: mmldlm.PairStore, device: str, rows: int) -> dict[str, float]:
    """Scores on held-out latents, with the model's own length and with the true one."""
    folder, scores = store.tokenizer_path(), {}
    texts_of, split = Tokenizer.load(folder).decode_batch if folder else None, store.split("validation")
    truth = Pairs.of(split.read(np.arange(len(split))), texts_of)
    latents, tokens, lengths = on_device(store, "validation", model.end, device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        documents = zip(*(x.split(256) for x in (latents, tokens, lengths)), strict=True)
        nats = sum(float(model.loss(*part) * (part[2] + 1).sum()) for part in documents)
        scores["perplexity, end counted"] = float(np.exp(nats / (truth.lengths + 1).sum()))
        for name, known in (("own length", [None] * len(lengths)), ("true length", lengths.split(rows))):
            began, pairs = time.perf_counter(), zip(latents.split(rows), known, strict=False)
            decoded = [text for pair in pairs for text in model.decode(*pair)]
            scores[f"{name}: texts per second"] = len(decoded) / (time.perf_counter() - began)
            for quantity in score_texts(truth, decoded, 0, texts_of, None).quantities(truth).values():
                scores[f"{name}: {quantity.title}"] = quantity.value()
    return scores


def main(path: str, settings: Settings) -> dict[str, float]:
    store, device = mmldlm.PairStore.open(path), "cuda" if torch.cuda.is_available() else "cpu"
    model, steps = train(store, settings, device)
    sizes = {"parameters": sum(p.numel() for p in model.parameters()), "steps": steps}
    return sizes | judge(model, store, device, settings.rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    for name, value in asdict(Settings()).items():
        kind = json.loads if isinstance(value, bool) else type(value)  # true or false
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, type=kind)
    words = vars(parser.parse_args())
    try:
        print(json.dumps(main(words.pop("store"), Settings(**words)), indent=1))
    except mmldlm.UserError as error:
        parser.error(str(error))
