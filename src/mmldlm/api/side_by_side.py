"""A run and a model that an installed package carries, on the same held-out sentences, in the report of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.api.model import Model, load
from mmldlm.api.values import local_folder
from mmldlm.errors import UserError
from mmldlm.evaluation.report import SideBySide, load_evaluated, write_report
from mmldlm.evaluation.results import DecodedExample, Example
from mmldlm.latents import cosine
from mmldlm.reports import Table, percent
from mmldlm.run_folder import RunFolder

FIGURES = "figures.json"
"""Beside the export in a package: how the model was trained, and what its evaluation measured."""


def is_installed(name: str) -> bool:
    """Whether a package carries the model `builtin:NAME`."""
    try:
        return local_folder(name).is_dir()
    except UserError:
        return False


def packaged_figures(name: str) -> dict[str, Any]:
    """What a package says about its model."""
    return dict(json.loads((local_folder(name).parent / FIGURES).read_text("utf-8")))


def add_side_by_side(run: str | Path, packaged: str, num: int = 8) -> Path:
    """Decode held-out sentences of an evaluated run by both models, and write its report again with both; its page."""
    own, other = load(run), load(packaged)
    evaluated = load_evaluated(Path(run))
    split = own.open_store(None).split(evaluated.result.data.split)
    texts = [text for text in split.read_texts(np.arange(min(num, len(split)))) if text]
    models, figures = {"this run": own, packaged: other}, packaged_figures(packaged)
    decoded = {name: decode_held_out(model, texts) for name, model in models.items()}
    trained = {"this run": f"{own.step:,} steps", packaged: figures["trained"]}
    examples = [
        Example(text, {name: rows[idx] for name, rows in decoded.items()}) for idx, text in enumerate(texts)
    ]
    beside = SideBySide(_table(models, decoded, trained, _about(packaged, figures)), examples)
    assert evaluated.folder is not None
    log = RunFolder(Path(run)).training_log
    return write_report(evaluated.folder, evaluated.result, training_log=log, beside=beside)


def decode_held_out(model: Model, texts: list[str]) -> list[DecodedExample]:
    """Each text from its embedding alone, at its true length."""
    latents, tokens = model.embed(texts), model.tokenize(texts)
    decoded = model.decode(latents, lengths=[len(one) for one in tokens])
    again = cosine(model.embed([str(text).strip() or "." for text in decoded]), latents)
    right = [float(np.mean(text.tokens == true)) for text, true in zip(decoded, tokens, strict=True)]
    return [
        DecodedExample(str(text), *pair) for text, *pair in zip(decoded, right, again.tolist(), strict=True)
    ]


def _about(name: str, figures: dict[str, Any]) -> str:
    return (
        f"The same held-out sentences, each from its embedding alone with its true length. `{name}` was trained by "
        f"recipe {figures['recipe']} ({figures['trained']}) on other text: {figures['data']}. On held-out text of that "
        f"kind it decodes {percent(figures['tokens_right'])} of tokens right: that is what a GPU adds."
    )


def _table(
    models: Mapping[str, Model],
    decoded: Mapping[str, list[DecodedExample]],
    trained: Mapping[str, str],
    about: str,
) -> Table:
    rows = []
    for name, model in models.items():
        size = sum(parameter.numel() for parameter in model.loaded.denoiser.parameters())
        accuracy = float(np.mean([one.token_accuracy for one in decoded[name]]))
        close = float(np.mean([one.reencoded_cosine for one in decoded[name]]))
        rows.append([name, f"{size / 1e6:.1f} M", trained[name], percent(accuracy), f"{close:.3f}"])
    return Table(
        "Side by side",
        about,
        ["model", "parameters", "trained for", "tokens right", "re-encoded cosine"],
        rows,
    )
