"""What one vector of a paragraph holds, and four: python docs/results/slots.py TEXT HELD_OUT OUT [key=value ...]

TEXT and HELD_OUT are text files with a blank line between paragraphs. Paragraphs of 32 to 256 tokens are encoded by
MiniLM as a whole (one slot), or as so many parts of about equal length, cut between words (a slot for each). The models
differ in nothing else. The row of each is printed and written to OUT/SLOTS/row.json.

    python docs/results/curve_corpus.py paragraphs 300000 --paragraphs
    python docs/results/slots.py paragraphs/train.txt.gz paragraphs/validation.txt.gz saved/slots --slots 1 4
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
from judge import STEPS, Pairs, decoding, retrieval, rounded

import mmldlm
from mmldlm.latents import cosine
from mmldlm.preparation.encoders import load_encoder

GROUPS = ((1, 64), (65, 128), (129, 256))


class Parts:
    """MiniLM on parts of a text: (texts, slots, channels)."""

    def __init__(self, slots: int) -> None:
        self.slots, self.name = slots, f"minilm in {slots} parts"
        self.encoder = load_encoder("builtin:minilm", lambda: "text", normalize=True)

    def encode(self, texts: list[str]) -> np.ndarray:
        """A text of fewer words than slots gives some of them twice."""
        parts = []
        for words in map(str.split, texts):
            cuts = [len(words) * slot // self.slots for slot in range(self.slots + 1)]
            parts += [
                " ".join(words[a:b] or words[min(a, len(words) - 1) :]) for a, b in itertools.pairwise(cuts)
            ]
        return self.encoder.encode(parts).reshape(len(texts), self.slots, -1)


def main(words: argparse.Namespace) -> None:
    """One arm for each number of slots."""
    for slots in words.slots:
        folder, encoder = words.out / str(slots), Parts(slots)
        store = mmldlm.prepare(
            words.text, folder / "store", encoder=encoder, validation_source=words.held_out, cut="paragraphs",
            min_tokens=32, max_tokens=256, derive=words.derive, batch_size=2048,
        )  # fmt: skip
        run = mmldlm.train(
            "wordnet",
            store=store,
            run=folder / "run",
            overrides=["train.valid_every=0", "train.trackers=[]", *words.settings],
        )
        model, split = mmldlm.load(run, encoder=encoder), store.splits["validation"]
        held_out = np.random.default_rng(0).permutation(len(split))[: words.held_out_paragraphs]
        truth = Pairs.of(split.read(held_out), model.codec.texts_of)
        decoded = model.decode(
            truth.latents, lengths=truth.lengths, steps=words.sampling_steps, temperature=0
        )
        row = {"slots": slots, "pairs": len(store.splits["train"]), "held out": len(held_out)}
        for low, high in ((1, 10**9), *GROUPS):
            chosen = [i for i, size in enumerate(truth.lengths) if low <= size <= high]
            if chosen:
                tokens, texts = [truth.tokens[i] for i in chosen], [truth.texts[i] for i in chosen]
                part = Pairs(tokens, truth.latents[chosen], texts, truth.ids[chosen])
                name = "all" if high == 10**9 else f"{low} to {high} tokens ({len(chosen)})"
                row |= decoding(model, part, [decoded[i].tokens for i in chosen], name)
        texts = [str(text) for text in split.read_texts(held_out)]
        own = model.encode(texts)
        again = model.embed([str(text) or "." for text in decoded])
        row |= {
            "re-encoded cosine": cosine(again, truth.latents).mean(), "t2l: cosine": cosine(own, truth.latents).mean(),
            "t2l: retrieval@1": retrieval(own, truth.latents),
            "text bound": model.score(texts, truth.latents, draws=4).sum() / truth.lengths.sum(),
        }  # fmt: skip
        (folder / "row.json").write_text(json.dumps(rounded(row)))
        print(json.dumps(rounded(row)), flush=True)
        for i in range(2):
            print(f"  {truth.texts[i][:200]}\n  -> {str(decoded[i])[:200]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", default=[], help="such as train.steps=2000")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--held-out-paragraphs", type=int, default=1024)
    parser.add_argument("--derive", type=int, default=0)
    parser.add_argument("--sampling-steps", type=int, default=4 * STEPS)
    main(parser.parse_intermixed_args())
