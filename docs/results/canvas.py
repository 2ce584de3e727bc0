"""Is a canvas of end tokens a better way to the length? python docs/results/canvas.py STORE OUT [key=value ...]

Models like LLaDA write onto a canvas that is longer than the text and fill the rest with end tokens. Here every
document of a pair store gets end tokens up to the next multiple of --bucket, at least one; training, loss and sampling
are as ever. Then the length head predicts the size of the canvas, which is easier than the length, and the text ends
before its first end token. Judged on the documents of the store itself, beside what `judge.py` says of a run on it with
as many tokens. 64 is one canvas for all sentences of up to 63 tokens.

    python docs/results/canvas.py data/wordnet-derived saved/canvas --buckets 8 16 64
"""

import argparse
import json
from pathlib import Path

import numpy as np
from judge import STEPS, Pairs, decoding, rounded

import mmldlm
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import StoreWriter

AT_ONCE = 65536


def end_token(store: mmldlm.PairStore) -> int:
    """The id of [SEP], which no document holds."""
    return json.loads((store.tokenizer_path() / "tokenizer.json").read_text())["model"]["vocab"]["[SEP]"]  # type: ignore[operator]


def with_ends(store: mmldlm.PairStore, out: Path, bucket: int, end: int) -> mmldlm.PairStore:
    """The store with end tokens after each document."""
    shape, ends = store.manifest, np.full(bucket, end)
    with StoreWriter(
        out, vocab_size=shape.vocab_size, num_slots=shape.num_slots, num_channels=shape.num_channels,
        tokenizer=Tokenizer.load(store.tokenizer_path()), encoder=shape.encoder,
        settings={"canvas": bucket, "of": store.fingerprint},
    ) as writer:  # fmt: skip
        for name, split in store.splits.items():
            for start in range(0, len(split), AT_ONCE):
                rows = np.arange(start, min(start + AT_ONCE, len(split)))
                documents, texts = split.read(rows), split.read_texts(rows)
                tokens = documents.split_tokens()
                sizes = (documents.lengths // bucket + 1) * bucket
                ended = [
                    np.concatenate((row, ends[: size - len(row)]))
                    for row, size in zip(tokens, sizes, strict=True)
                ]
                writer.add(name, ended, documents.latents, texts, documents.ids)
        return writer.finish()


def until_end(tokens: np.ndarray, end: int) -> np.ndarray:
    """What stands before the first end token; a text has at least one token."""
    return tokens[: max(1, int((tokens != end).cumprod().sum()))]


def main(words: argparse.Namespace) -> None:
    """One arm for each bucket."""
    store = mmldlm.PairStore.open(words.store)
    end, split = end_token(store), store.splits["validation"]
    for bucket in words.buckets:
        folder = words.out / str(bucket)
        canvas = with_ends(store, folder / "store", bucket, end)
        run = mmldlm.train(
            "wordnet",
            store=canvas,
            run=folder / "run",
            overrides=["train.valid_every=0", "train.trackers=[]", *words.settings],
        )
        model = mmldlm.load(run)
        truth = Pairs.of(split.read(np.arange(len(split))), model.codec.texts_of)
        sizes = (truth.lengths // bucket + 1) * bucket
        for name, options in (
            ("true canvas", {"lengths": sizes}),
            ("likeliest canvas", {"candidates": 1}),
            ("best of 3 canvases", {"candidates": 3}),
        ):  # fmt: skip
            decoded = [
                text.tokens
                for text in model.decode(truth.latents, steps=words.sampling_steps, temperature=0, **options)
            ]
            right = float((np.array([len(text) for text in decoded]) == sizes).mean())
            row = decoding(model, truth, [until_end(text, end) for text in decoded], name)
            print(
                json.dumps({"bucket": bucket} | rounded(row | {f"{name}: canvas right": 100 * right})),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", default=[], help="such as train.steps=3100")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16])
    parser.add_argument("--sampling-steps", type=int, default=STEPS)
    main(parser.parse_intermixed_args())
