"""One settings file of the research code -> a recipe, with everything that was lost, ignored or contradictory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.config import MODES as OUR_MODES
from mmldlm.errors import UserError
from mmldlm.migrate.old_settings import (
    DIRECT,
    DROPPED,
    IGNORED,
    MODES,
    PRECISIONS,
    PREDICTIONS,
    flatten,
)

TURN_STEPS = 100
"""Of a turn, where the old settings do not tell; each change costs a moment, see docs/modes.md."""
OLD_SECTIONS = {"training", "loss", "logging", "optimizer", "tokenizer", "defaults", "hydra"}
_HANDLED = {
    "training.train_batch_size",
    "training.gradient_accumulation_steps",
    "training.dtype",
    "training.lr_schedule",
    "training.loss_type",
    "training.mode_weights",
    "training.sequential_schedule",
    "loss.loss_type",
    "model.latent_parameterization",
    "model.latent_beta_schedule",
    "model.type",
    "model.diffusion_process",
    "optimizer.betas",
    "optimizer.type",
}


@dataclass
class Translation:
    """The outcome for one file."""

    source: str
    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested settings of ours; `data.store` is to be filled in."""
    ignored: list[str] = field(default_factory=list)
    """What the old code silently ignored."""
    dropped: list[str] = field(default_factory=list)
    """What has no counterpart, and why."""
    contradictions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Keys that neither side knows."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The nested values of a settings file; interpolations stay as written."""
    from mmldlm.config.recipe import read_mapping

    if not path.is_file():
        raise UserError(f"{path}: no such file; give a YAML settings file")
    loaded = read_mapping(path, "settings are a mapping of sections, such as 'data:' and 'model:'")
    return {str(key): value for key, value in loaded.items()}


def is_old(values: dict[str, Any]) -> bool:
    """Whether these are settings of the research code."""
    return bool(OLD_SECTIONS & set(values)) and "model" in values


def translate(values: dict[str, Any], source: str) -> Translation:
    """Our recipe for an old settings file."""
    result = Translation(source)
    flat = flatten(values)
    for key, value in flat.items():
        _translate_key(result, key, value)
    _translate_batch(result, flat)
    _translate_mode(result, flat)
    _translate_kind(result, flat)
    _find_contradictions(result, flat)
    _put(result, "model.preset", "reference")
    _put(result, "model.num_heads", 8)
    _put(result, "model.head_width", 64)
    result.notes.append("data.store: fill in the folder that 'mmldlm data import' or 'mmldlm prepare' makes")
    return result


def _translate_key(result: Translation, key: str, value: Any) -> None:
    if key in IGNORED and not (key in DIRECT and value is None):
        result.ignored.append(f"{key}={value}: {IGNORED[key]}")
    if key in DIRECT:
        if value is not None and not _is_reference(value):
            _put(result, DIRECT[key], value)
    elif key in DROPPED:
        result.dropped.append(f"{key}={value}: {DROPPED[key]}")
    elif (
        key not in IGNORED
        and key not in _HANDLED
        and key.split(".", 1)[0] not in ("hydra", "defaults", "data", "tokenizer")
    ):
        result.unknown.append(f"{key}={value}")


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _put(result: Translation, key: str, value: Any) -> None:
    node = result.recipe
    *sections, last = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value


def _translate_batch(result: Translation, flat: dict[str, Any]) -> None:
    batch = _integer(flat.get("training.train_batch_size"))
    if batch is None:
        return
    accumulation = _integer(flat.get("training.gradient_accumulation_steps")) or 1
    if accumulation > 1:
        result.ignored.append(
            f"training.gradient_accumulation_steps={accumulation}: the old trainer never read it; a step was one batch,"
            f" while the learning rate was scaled for {accumulation}. For the larger batch set batch.documents_per_step"
        )
    world = _integer(flat.get("training.world_size")) or 1
    length = _integer(flat.get("model.max_seq_len")) or 512
    documents = batch * world
    _put(result, "batch.documents_per_step", documents)
    _put(result, "batch.tokens_per_step", documents * length)
    _put(result, "batch.micro_tokens", batch * length)
    result.notes.append(
        f"batch.documents_per_step={documents} is batch {batch} x {world} processes; "
        "it stays the same on any number of GPUs, so do not scale it by hand"
    )


def _translate_mode(result: Translation, flat: dict[str, Any]) -> None:
    name = str(flat.get("loss.loss_type") or "")
    if name not in MODES:
        name = str(flat.get("training.loss_type") or "")
    if name not in MODES:
        result.notes.append(
            f"corruption.mode_weights: no mode was found ({name or 'none given'}); all three are trained"
        )
        return
    weights = dict(MODES[name])
    shares = flat.get("training.mode_weights")
    if name == "random" and isinstance(shares, list) and len(shares) == 3:
        weights = dict(zip(("joint", "l2t", "t2l"), map(float, shares), strict=True))
    _put(result, "corruption.mode_weights", weights)
    if name == "sequential":
        _translate_turns(result, flat.get("training.sequential_schedule"))
    elif name not in OUR_MODES:
        spelled = ", ".join(f"{mode}: {weight:g}" for mode, weight in weights.items())
        choice = " with corruption.mode_choice: batch" if name == "random" else ""
        result.notes.append(f"loss_type {name} is now corruption.mode_weights: {{{spelled}}}{choice}")
    if name == "random":
        _put(result, "corruption.mode_choice", "batch")


def _translate_turns(result: Translation, order: Any) -> None:
    """Turns of equal length, in the order that was given or that of the old names."""
    listed = [MODES.get(str(mode), {}) for mode in order] if isinstance(order, list) else []
    modes = (
        listed
        if listed and all(len(mode) == 1 for mode in listed)
        else [{mode: 1.0} for mode in MODES["mixed"]]
    )
    turns = [{"until": (number + 1) * TURN_STEPS, "mode_weights": mode} for number, mode in enumerate(modes)]
    _put(result, "corruption.mode_schedule", turns)
    _put(result, "corruption.mode_repeat", True)
    result.notes.append(
        f"sequential is now corruption.mode_schedule with corruption.mode_repeat=true: turns of {TURN_STEPS} steps "
        f"for {', '.join(next(iter(mode)) for mode in modes)}; set their ends (until, until_epoch) as you want"
    )


def _translate_kind(result: Translation, flat: dict[str, Any]) -> None:
    dtype = str(flat.get("training.dtype") or "")
    if dtype in PRECISIONS:
        _put(result, "speed.precision", PRECISIONS[dtype])
    kind = str(flat.get("model.latent_parameterization") or "")
    if kind in PREDICTIONS:
        _put(result, "corruption.prediction_type", PREDICTIONS[kind])
    schedule = flat.get("model.latent_beta_schedule")
    if schedule in ("cosine", "linear"):
        _put(result, "corruption.latent_schedule", schedule)
    betas = flat.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        _put(result, "optim.beta1", float(betas[0]))
        _put(result, "optim.beta2", float(betas[1]))
    shape = flat.get("training.lr_schedule")
    if shape == "constant":
        _put(result, "optim.min_lr_ratio", 1.0)
    elif shape == "linear":
        _put(result, "optim.min_lr_ratio", 0.0)
        result.notes.append("training.lr_schedule=linear: the decay is a cosine here, down to the same 0")


def _find_contradictions(result: Translation, flat: dict[str, Any]) -> None:
    width, heads = _integer(flat.get("model.hidden_size")), _integer(flat.get("model.n_heads"))
    if width and heads and width % heads:
        result.contradictions.append(f"model.hidden_size={width} cannot be split over model.n_heads={heads}")
    first, second = flat.get("loss.loss_type"), flat.get("training.loss_type")
    if first and second and first != second:
        result.contradictions.append(
            f"loss.loss_type={first} and training.loss_type={second}: the first one counted in the newer code"
        )
    train, valid = flat.get("data.data_files.train"), flat.get("data.data_files.validation")
    if train and train == valid:
        result.contradictions.append(f"validation reads the training file {train}")
    workers = _integer(flat.get("data.num_workers"))
    if workers and workers > 32:
        result.contradictions.append(
            f"data.num_workers={workers} for every process; null chooses min(8, CPUs // ranks)"
        )
        _put(result, "data.num_workers", None)
    warmup, steps = (
        _integer(flat.get("training.warmup_steps")),
        _integer(flat.get("training.num_train_steps")),
    )
    if warmup and steps and warmup >= steps:
        result.contradictions.append(
            f"training.warmup_steps={warmup} is not below training.num_train_steps={steps}"
        )
    names = {flat.get("data.tokenizer_path"), flat.get("tokenizer.path")} - {None}
    if len(names) > 1:
        result.contradictions.append("data.tokenizer_path and tokenizer.path differ; the second one counted")


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_recipe(recipe: dict[str, Any], store: str = "store") -> list[str]:
    """What our own loader says about a translated recipe; the store's folder is assumed."""
    from mmldlm.config.recipe import config_from_dict

    filled = recipe | {
        "data": recipe.get("data", {}) | {"store": recipe.get("data", {}).get("store") or store}
    }
    try:
        config_from_dict(filled)
    except UserError as error:
        return str(error).split("; ")
    return []


def recipe_text(translation: Translation) -> str:
    """The recipe as YAML, with where it came from."""
    from omegaconf import OmegaConf

    order = ("name", "data", "batch", "model", "corruption", "objective", "optim", "train", "speed")
    recipe = {"data": {"store": "???"}} | translation.recipe
    recipe["data"] = {"store": "???"} | recipe["data"]
    ordered = {key: recipe[key] for key in order if key in recipe}
    return f"# Translated from {translation.source}.\n" + OmegaConf.to_yaml(OmegaConf.create(ordered))
