"""The documents that a command line names, and what an option says about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.errors import UserError

if TYPE_CHECKING:  # the commands answer --help without torch
    import numpy as np

    from mmldlm.api.model import Model
    from mmldlm.sampling.stream import Inputs

DEFAULT_COUNT = 8


def require_one_of(sources: dict[str, Any]) -> None:
    """Exactly one of these options is set."""
    chosen = [name for name, value in sources.items() if value not in (None, [])]
    if len(chosen) != 1:
        raise UserError(f"{'only ' if chosen else ''}one of {', '.join(sources)} is needed")


def require_effect(option: str, value: Any, *others: Any, needs: str) -> None:
    """An option that is set needs another one to have an effect."""
    if value not in (None, 0) and not any(others):
        raise UserError(f"{option}: has an effect only with {needs}; leave it out")


def named_documents(
    model: Model,
    texts: list[str] | None = None,
    latents: Path | None = None,
    from_split: str | None = None,
    num: int | None = None,
    data: Path | None = None,
) -> Inputs:
    """The documents that --text, --latents or --from-split name."""
    from mmldlm.sampling.stream import Inputs, read_latents

    if texts:
        return Inputs(texts=texts)
    if latents is not None:
        return Inputs(latents=read_latents(latents, (model.num_slots, model.num_channels)))
    assert from_split is not None
    return _of_split(model, from_split, DEFAULT_COUNT if num is None else num, data)


def _of_split(model: Model, name: str, num: int, data: Path | None) -> Inputs:
    import numpy as np

    from mmldlm.sampling.stream import Inputs

    split = model.open_store(data).split(name)
    if num < 1 or not len(split):
        raise UserError(f"-n {num}: at least 1 pair is needed; the split {name} has {len(split)}")
    indices = np.arange(min(num, len(split)))
    documents = split.read(indices)
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    stored = split.read_texts(indices)
    decoded = model.codec.texts_of(tokens)
    return Inputs(
        texts=[text or instead for text, instead in zip(stored, decoded, strict=True)],
        latents=documents.latents,
        document_ids=documents.ids.astype(np.uint64),
        lengths=documents.lengths,
    )


def latents_of(model: Model, inputs: Inputs, encode_with: str, seed: int = 0) -> np.ndarray:
    """(n, slots, channels): given, or made of the texts by the encoder or by the model itself."""
    if encode_with not in ("encoder", "model"):
        raise UserError(f"--encode-with {encode_with}: allowed are encoder, model")
    if inputs.latents is not None:
        return inputs.latents
    assert inputs.texts is not None
    return model.embed(inputs.texts) if encode_with == "encoder" else model.encode(inputs.texts, seed=seed)


def lengths_of(model: Model, word: str | None, inputs: Inputs | None = None) -> Any:
    """What --length says: None, a number, or the lengths of the original texts."""
    if word is None:
        return None
    if word == "original":
        if inputs is None or inputs.texts is None:
            raise UserError("--length original: there is no original text here; give a number")
        if inputs.lengths is not None:
            return inputs.lengths
        return [len(tokens) for tokens in model.tokenize(inputs.texts)]
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= model.max_length):
        raise UserError(
            f"--length {word}: allowed are 'original' and 1 to {model.max_length}, the longest in training"
        )
    return int(word)


def against_of(model: Model, word: str | None, encode_with: str, seed: int) -> Any:
    """What --against names: latents of a file, or of a text."""
    from mmldlm.sampling.stream import Inputs, read_latents

    if word is None:
        return None
    if word.endswith(".npy"):
        return read_latents(Path(word), (model.num_slots, model.num_channels))
    return latents_of(model, Inputs(texts=[word]), encode_with, seed)
