"""`mmldlm.evaluate` measures a trained model on held-out pairs; `mmldlm.compare` compares such results.

`add_side_by_side` puts a run and a model that an installed package carries on the same sentences in the run's report.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.api.model import Model, load
from mmldlm.api.values import local_folder, store_folder
from mmldlm.checkpoint.load import find_model
from mmldlm.config import Config
from mmldlm.config.recipe import make_config, override_words
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.durable import require_writable
from mmldlm.errors import UserError
from mmldlm.evaluation.compare import Comparison, Evaluated, compare_results, folder_name
from mmldlm.evaluation.context import EncodeText, ReferenceLM, require_same_fingerprint
from mmldlm.evaluation.report import SideBySide, load_evaluated, write_comparison, write_report
from mmldlm.evaluation.results import DecodedExample, Evaluation, Example
from mmldlm.evaluation.retrieval import read_scored_pairs
from mmldlm.evaluation.run import Tools, evaluate_model
from mmldlm.latents import cosine
from mmldlm.preparation.encoders import AnyEncoder
from mmldlm.reports import Table, percent
from mmldlm.run_folder import RunFolder
from mmldlm.sampling.decode import Progress

Source = str | os.PathLike[str] | Model
"""A run or an export by its folder or name, or what `mmldlm.train` or `mmldlm.load` returned."""
_SECTIONS = ("evaluation", "sampling")
"""Sections whose settings may differ from those of the run."""


def evaluate(
    run: Source,
    *,
    data: str | os.PathLike[str] | PairStore | None = None,
    split: str | None = None,
    num: int | None = None,
    steps: Sequence[int] | None = None,
    num_decoded: int | None = None,
    num_generated: int | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    encoder: bool | AnyEncoder = True,
    sts: str | os.PathLike[str] | None = None,
    reference_lm: str | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | bool | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a trained model on held-out pairs; the same arguments give the same numbers.

    `data` is the pair store, by default the one the run was trained on, and `split` the run's validation split. `num`
    documents are measured (0: all), `num_decoded` of them are decoded at each of the numbers of `steps`, and
    `num_generated` pairs are generated from nothing. `overrides` changes other settings of the sections `evaluation`
    and `sampling`, such as `{"evaluation.candidates": [1, 4]}`. With `encoder=False` no text is encoded again; a name
    or an object with `encode` replaces the encoder where the model cannot find it by itself. `sts` is a file of scored
    pairs of texts, `reference_lm` a causal language model that scores generated texts. With `out` a report is written
    into that folder, with `out=True` into `reports/` of the run.

    >>> result = evaluate(run, num_decoded=4, num_generated=0, steps=[1, 2])
    >>> 0 <= result.inversion.tokens_right.value <= 1
    True
    >>> result.bounds.text.right.nats_per_token.low > 0
    True
    >>> Evaluation.from_json(result.to_json()) == result
    True
    """
    sizes = {
        "num_documents": num, "num_decoded": num_decoded, "num_generated": num_generated,
        "step_counts": None if steps is None else _step_counts(steps),
    }  # fmt: skip
    where = None if data is None or isinstance(data, PairStore) else store_folder(data, "data")
    words = override_words(overrides)
    words += [f"evaluation.{name}={value}" for name, value in sizes.items() if value is not None]
    chosen = _load(run, device, encoder)
    model = replace(chosen.loaded, config=_configure(chosen.loaded.config, words))
    split = split or model.config.data.valid_split
    folder = _report_folder(run, model.config, data, split) if out is True else Path(out) if out else None
    if folder is not None:
        require_writable(folder)
    store = data if isinstance(data, PairStore) else PairStore.open_of_run(model.config.data.store, where)
    require_same_fingerprint(model, store)  # before the encoder is loaded, which takes a while
    store.split(split)
    tools = _tools(chosen, store, encoder is not False, sts, reference_lm)
    result = evaluate_model(model, store, split, model.config.evaluation, tools, seed=seed, progress=progress)
    asked: dict[str, Any] = {"data": data, "split": split, "sts": sts, "reference-lm": reference_lm}
    asked |= {"no-encoder": encoder is False or None, "seed": seed or None}
    result = replace(result, command=_command(run, asked, words))
    if folder is None:
        return result
    log = home.training_log if (home := _home(run)) else None
    return replace(result, report=str(write_report(folder, result, training_log=log)))


def compare(
    first: Evaluation | str | os.PathLike[str],
    *others: Evaluation | str | os.PathLike[str],
    split: str | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | bool | None = None,
) -> Comparison:
    """Compare evaluations, each with the first, paired over the documents that they share.

    Each is a result of `evaluate`, or where one was written: a run that has a report (on `split`, where it has
    several), the folder of a report, or its `result.json`. With `out` a report is written into that folder, with
    `out=True` beside that of the first.

    >>> result = evaluate(run, num_decoded=4, num_generated=0, steps=[1, 2])
    >>> compare(result, result)["text_bound/right"].verdict
    'no measurable difference'
    """
    if not others:
        raise UserError("compare: two results or more are needed")
    results = [
        Evaluated(f"result {number}", one)
        if isinstance(one, Evaluation)
        else load_evaluated(Path(one), split)
        for number, one in enumerate((first, *others), 1)
    ]
    folder = _comparison_folder(results) if out is True else Path(out) if out else None
    if folder is not None:
        require_writable(folder)
    comparison = compare_results(results, seed)
    if all(one.folder is not None for one in results):
        words = ["mmldlm", "compare", *(one.label for one in results), *(["--split", split] if split else [])]
        comparison = replace(comparison, command=shlex.join(words))
    if folder is None:
        return comparison
    return replace(comparison, report=str(write_comparison(folder, comparison)))


def _step_counts(steps: Any) -> list[Any]:
    """The numbers of `steps`, which may be an array; their values are checked with the other settings."""
    if isinstance(steps, str) or not isinstance(steps, Iterable):
        raise UserError(f"steps={steps!r}: a list of whole numbers is needed, such as [1, 4, 16]")
    return [step.item() if isinstance(step, np.generic) else step for step in steps]


def _configure(config: Config, words: list[str]) -> Config:
    """The run's settings with those of this evaluation."""
    changed = make_config(config, words)
    for name in (item.name for item in fields(Config)):
        if name not in _SECTIONS and getattr(changed, name) != getattr(config, name):
            raise UserError(
                f"overrides: settings of {name} belong to the training; allowed are those of {', '.join(_SECTIONS)}"
            )
    return changed


def _load(run: Source, device: str, encoder: bool | AnyEncoder) -> Model:
    own = None if isinstance(encoder, bool) else encoder
    if not isinstance(run, Model):
        return load(run, device, encoder=own)
    return run if own is None else Model(run.loaded, run.source, own)


def _home(run: Source) -> RunFolder | None:
    """The folder of a run, also where its export was named; None for a loaded model and for one on the Hub."""
    if isinstance(run, Model):
        return None
    try:
        path = find_model(run)
    except UserError:
        return None
    return RunFolder(path.parent if path.name == "export" else path)


def _report_folder(run: Source, config: Config, data: Any, split: str) -> Path:
    """`reports/SPLIT`, or `reports/SPLIT-of-STORE` for another store than the run's own, which may have moved."""
    home = _home(run)
    if home is None:
        raise UserError("out: this model has no folder of its own for the report; name one")
    own = Path(config.data.store)
    other = own if data is None else Path(data.path if isinstance(data, PairStore) else data).resolve()
    return home.reports / (split if other.name == own.name else f"{split}-of-{other.name}")


def _comparison_folder(results: Sequence[Evaluated]) -> Path:
    if results[0].folder is None:
        raise UserError("out: the first result has no folder for the report; name one")
    return results[0].folder.parent / folder_name(results)


def _tools(
    model: Model,
    store: PairStore,
    encoder: bool,
    sts: str | os.PathLike[str] | None,
    reference_lm: str | None,
) -> Tools:
    """Tokenizer, encoder and whatever else was asked for; the quick ones first, so that mistakes show at once."""
    pairs = read_scored_pairs(Path(sts)) if sts is not None else None
    reference = ReferenceLM.load(reference_lm, model.device) if reference_lm else None
    folder = store.tokenizer_path()
    if folder is None:
        return Tools(reference_lm=reference, scored_pairs=pairs)
    tokenizer = Tokenizer.load(folder)
    return Tools(
        decode_text=tokenizer.decode_batch,
        tokenize=tokenizer.encode_batch,
        encode=_encode(model) if encoder else None,
        reference_lm=reference,
        special_ids=frozenset(tokenizer.special_ids()),
        scored_pairs=pairs,
    )


def _encode(model: Model) -> EncodeText | None:
    """The encoder that made the latents; None where none is known."""
    if not model.codec.has_encoder:
        return None
    try:
        model.encoder  # noqa: B018 (loaded now, so that a mistake shows before anything is measured)
    except UserError as error:
        raise UserError(f"{error}; or evaluate without it (encoder=False)") from error
    return model.embed


def _command(run: Source, asked: dict[str, Any], words: list[str]) -> str | None:
    """The command line that gives this result again; None for a model or a store that is not named by its folder."""
    if isinstance(run, Model) or isinstance(asked["data"], PairStore):
        return None
    line = ["mmldlm", "eval", os.fspath(run)]
    for name, value in asked.items():
        line += [f"--{name}"] if value is True else [] if value is None else [f"--{name}", str(value)]
    return shlex.join([*line, *words])


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
    latents, tokens = model.codec.embed(texts), model.tokenize(texts)
    decoded = model.decode(latents, lengths=[len(one) for one in tokens])
    again = cosine(model.codec.embed([str(text).strip() or "." for text in decoded]), latents)
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
