"""Use a trained model: `python examples/decode.py builtin:wordnet "a coil of rope" "the open sea"`

Works with any run or export, such as saved/demo. The texts are encoded by the model itself where its encoder is not
at hand.
"""

from __future__ import annotations

import sys

import mmldlm


def main(source: str, texts: list[str], steps: int = 16) -> list[str]:
    """Texts to latents and back; returns what was decoded."""
    model = mmldlm.load(source)
    print(model)
    try:
        latents = model.embed(texts)  # the encoder that made the training latents
    except mmldlm.UserError as error:
        print(f"without the encoder: {error}")
        latents = model.encode(texts)  # the model itself
    decoded = model.decode(latents, steps=steps)
    for text, again in zip(texts, decoded, strict=True):
        print(f"{text}\n  decoded     {again}")
    best = model.decode(latents, steps=steps, candidates=4)
    for text in best:
        print(f"  best of 4   {text}   (cosine {text.check.cosine:.3f})")
    if len(texts) > 1:
        for text in model.interpolate(latents[0], latents[1], points=3).texts:
            print(f"  on the way  {text}")
    return [str(text) for text in decoded]


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "builtin:wordnet", sys.argv[2:] or ["a coil of rope"])
    except mmldlm.UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
