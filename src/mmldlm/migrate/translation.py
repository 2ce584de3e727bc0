"""One settings file of the research code -> a recipe, with everything that was lost, ignored or contradictory."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.config import MODES as OUR_MODES
from mmldlm.config.old_settings import (
    DIRECT,
    DROPPED,
    IGNORED,
    MODES,
    PRECISIONS,
    PREDICTIONS,
    READ_BY_BASELINES,
    TRANSLATED,
    flatten,
    nearest_old,
    old_number,
    other_model,
)
from mmldlm.errors import SettingsError, UserError

TURN_STEPS = 100
"""Steps of a turn, which the old settings do not state; each change of modes takes time, see docs/modes.md."""
VALIDATION = 0.01
"""Share that is held out of a layout with a training split alone, where the old settings do not state it."""
_SETTINGS = "settings are a mapping of sections, such as 'data:' and 'model:'"
_LAST_NAMES = {key.rsplit(".", 1)[-1]: key for key in (*DIRECT, *TRANSLATED)}


@dataclass
class Translation:
    """The outcome for one file."""

    source: str
    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested settings of ours."""
    make_store: str = ""
    """The command that makes the pair store of the recipe."""
    ignored: list[str] = field(default_factory=list)
    """What the old code silently ignored."""
    dropped: list[str] = field(default_factory=list)
    """What has no counterpart, and why."""
    contradictions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Keys that neither side knows."""


def read_composed(path: Path) -> dict[str, Any]:
    """The values of a settings file with the files that its `defaults` name, as Hydra puts them together."""
    return _compose(path, ())


def _compose(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """`above`: the files that led here, which are not read again."""
    from omegaconf import OmegaConf

    from mmldlm.config.recipe import read_mapping

    own = read_mapping(path, _SETTINGS)
    defaults = own.get("defaults")
    parts: list[Any] = []
    for entry in defaults if isinstance(defaults, list) else []:
        # `group: name` is a file of the folder of that name, `name` alone one beside this file
        for group, name in entry.items() if isinstance(entry, dict) else [("", entry)]:
            file = path.parent / str(group) / f"{name}.yaml"
            if file.is_file() and file not in (path, *above):
                values = _compose(file, (path, *above))
                parts.append({str(group): values} if group else values)
    merged = OmegaConf.to_container(
        OmegaConf.merge(*parts, {k: v for k, v in own.items() if k != "defaults"})
    )
    return {str(key): value for key, value in merged.items()}  # type: ignore[union-attr]


def translate(values: dict[str, Any], source: str, ranks: int | None = None) -> Translation:
    """Our recipe for old settings; `ranks` of a command line go before those of the file."""
    flat = flatten(values)
    _reject_other_models(flat, source)
    result = Translation(source)
    read = READ_BY_BASELINES if is_baseline(flat) else {}
    for key, value in flat.items():
        if key not in read:
            _translate_key(result, key, value)
        elif read[key]:
            result.dropped.append(f"{key}={value}: {read[key]}")
    _translate_batch(result, flat, ranks)
    _translate_mode(result, flat)
    _translate_kind(result, flat)
    _translate_rate(result, flat)
    _find_contradictions(result, flat)
    _translate_shape(result, flat)
    _translate_store(result, flat)
    return result


def _reject_other_models(flat: dict[str, Any], source: str) -> None:
    if what := other_model(flat, source):
        raise UserError(f"{source}: {what}; only masked diffusion is trained here, so it is not translated")


def _translate_key(result: Translation, key: str, value: Any) -> None:
    section, _, last = key.partition(".")
    if key not in DIRECT and key not in TRANSLATED and section in ("model", "training", "loss"):
        key = _LAST_NAMES.get(last, key) if key not in IGNORED and key not in DROPPED else key
    if key in IGNORED:
        result.ignored.append(f"{key}={value}: {IGNORED[key]}")
    if "${" in str(value) and (key in DIRECT or key in TRANSLATED):
        ours = DIRECT.get(key) or TRANSLATED[key]
        result.dropped.append(f"{key}={value}: computed when the old code started; set {ours} by hand")
    elif key in DIRECT:
        if value is not None:
            _put(result, DIRECT[key], value)
    elif key in DROPPED:
        result.dropped.append(f"{key}={value}: {DROPPED[key]}")
    elif (
        key not in IGNORED
        and key not in TRANSLATED
        and section not in ("hydra", "defaults", "data", "tokenizer")
    ):
        near = nearest_old(key) or (None if "." in key else _LAST_NAMES.get(key))
        result.unknown.append(f"{key}={value}" + (f"; did you mean {near}?" if near else ""))


def _put(result: Translation, key: str, value: Any) -> None:
    node = result.recipe
    *sections, last = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value


def _translate_batch(result: Translation, flat: dict[str, Any], ranks: int | None) -> None:
    batch = _integer(flat.get("training.train_batch_size"))
    if batch is None:
        return
    accumulation = _integer(flat.get("training.gradient_accumulation_steps")) or 1
    world = ranks or _integer(flat.get("training.world_size")) or 1
    length = _integer(flat.get("model.max_seq_len")) or 512
    effective = _integer(flat.get("training.effective_batch_size"))
    documents = effective or batch * accumulation * world
    origin = f"batch {batch} x {accumulation} micro-batches x {world} processes"
    if effective:
        origin = f"training.effective_batch_size (not {origin})"
    _put(result, "batch.documents_per_step", documents)
    _put(result, "batch.tokens_per_step", documents * length)
    _put(result, "batch.micro_tokens", batch * length)
    result.notes.append(
        f"batch.documents_per_step={documents} is {origin}; it stays the same on any number of GPUs, "
        "so do not scale it by hand"
    )
    if accumulation > 1 and not effective:
        result.notes.append(
            f"training.gradient_accumulation_steps={accumulation} was never read by the old trainer, whose steps had "
            f"{batch * world} documents; it counts here"
        )


def _translate_mode(result: Translation, flat: dict[str, Any]) -> None:
    name = str(flat.get("loss.loss_type") or "")
    if name not in MODES:
        name = str(flat.get("training.loss_type") or "")
    if name not in MODES and is_baseline(flat):
        _put(result, "corruption.mode_weights", {"l2t": 1.0})
        if not flat.get("model.use_latent_conditioning"):
            _put(result, "corruption.condition_dropout", 1.0)
            result.notes.append(
                "a model of text alone: l2t with corruption.condition_dropout=1, which never shows a latent"
            )
        return
    if name not in MODES:
        result.notes.append(
            f"no mode is set ({_no_mode(name, flat)}); the default trains l2t, t2l and joint alike"
        )
        return
    weights = dict(MODES[name])
    shares = flat.get("training.mode_weights")
    if name == "random" and isinstance(shares, list) and len(shares) == 3:
        numbers = [old_number("training.mode_weights", share, result.source) for share in shares]
        weights = dict(zip(("joint", "l2t", "t2l"), numbers, strict=True))
    _put(result, "corruption.mode_weights", weights)
    if name == "sequential":
        _translate_turns(result, flat.get("training.sequential_schedule"))
    elif name not in OUR_MODES:
        spelled = ", ".join(f"{mode}: {weight:g}" for mode, weight in weights.items())
        choice = " with corruption.mode_choice: batch" if name == "random" else ""
        result.notes.append(f"loss_type {name} is now corruption.mode_weights: {{{spelled}}}{choice}")
    if name == "random":
        _put(result, "corruption.mode_choice", "batch")


def _no_mode(name: str, flat: dict[str, Any]) -> str:
    if not name and "loss_type" in flat:
        return f"loss_type={flat['loss_type']} has no effect at the top level; move it to {_LAST_NAMES['loss_type']}"
    return name or "no loss_type"


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


def is_baseline(flat: dict[str, Any]) -> bool:
    return flat.get("model.type") == "diffusion"


_BY_VALUE: dict[str, tuple[str, dict[Any, str]]] = {
    "training.dtype": ("speed.precision", PRECISIONS),
    "model.latent_parameterization": ("corruption.prediction_type", PREDICTIONS),
    "model.latent_beta_schedule": ("corruption.latent_schedule", {"cosine": "cosine", "linear": "linear"}),
    "loss.latent_loss_type": (
        "objective.latent_loss", {name: name for name in ("mse", "cosine", "normalized_mse")},
    ),
    **dict.fromkeys(
        ("model.use_gradient_checkpointing", "training.use_gradient_checkpointing"),
        ("speed.activation_checkpointing", {True: "block", False: "off"}),
    ),
}  # fmt: skip
"""Old key -> ours, and what becomes of its values; others have no counterpart."""


def _translate_kind(result: Translation, flat: dict[str, Any]) -> None:
    for key, (ours, values) in _BY_VALUE.items():
        value = flat.get(key)
        if isinstance(value, str | bool) and value in values:
            _put(result, ours, values[value])
        else:
            _report_value(result, flat, key, values, ours)
    loss = result.recipe.get("objective", {}).get("latent_loss", "mse")
    kind = result.recipe.get("corruption", {}).get("prediction_type", "clean")
    if loss != "mse" and kind != "clean":
        _put(result, "corruption.prediction_type", "clean")
        result.notes.append(
            f"loss.latent_loss_type={loss} ignores the length of a vector, so it needs clean predictions: "
            f"corruption.prediction_type=clean instead of {kind}"
        )
    _translate_betas(result, flat)


def _report_value(
    result: Translation, flat: dict[str, Any], key: str, known: Iterable[Any], ours: str
) -> None:
    """A value that is set, but not one of those known here."""
    value = flat.get(key)
    if value is not None and value not in known and "${" not in str(value):
        names = ", ".join(str(each).lower() if isinstance(each, bool) else each for each in known)
        result.dropped.append(
            f"{key}={value}: known are {names}; {ours} keeps its default: set it as you want"
        )


def _translate_betas(result: Translation, flat: dict[str, Any]) -> None:
    """The old code read `betas` alone; `beta1` and `beta2` count where it is not there."""
    betas = flat.get("optimizer.betas")
    own = [flat.get("optimizer.beta1"), flat.get("optimizer.beta2")]
    if isinstance(betas, list) and len(betas) == 2:
        result.ignored += [
            f"optimizer.beta{number}={value}: the code read optimizer.betas={betas}"
            for number, value in enumerate(own, 1)
            if value is not None
        ]
        own = [old_number("optimizer.betas", beta, result.source) for beta in betas]
    elif own != [None, None]:
        result.notes.append(
            "optimizer.betas, which the old trainer read, is not set; beta1 and beta2 count here"
        )
    for number, value in enumerate(own, 1):
        if value is not None:
            _put(result, f"optim.beta{number}", value)


def _translate_rate(result: Translation, flat: dict[str, Any]) -> None:
    shape, period = str(flat.get("training.lr_schedule") or ""), _integer(flat.get("training.restart_period"))
    warmup = _integer(flat.get("training.warmup_steps")) or 0
    steps = _integer(flat.get("training.num_train_steps"))
    if period or "restart" in shape:
        _put(result, "optim.schedule", "restarts")
        if period:
            _put(result, "optim.restart_period", period)
    elif shape == "constant":
        _put(result, "optim.schedule", "constant")
    elif "plateau" in shape:
        _put(result, "optim.schedule", "plateau")
    elif shape == "linear":
        _put(result, "optim.schedule", "wsd")
        _put(result, "optim.min_lr_ratio", 0.0)
        _put(result, "optim.decay_share", max((steps - warmup) / steps, 0.01) if steps else 1.0)
    else:
        known = ("constant", "cosine", "linear", "plateau", "restarts")
        _report_value(result, flat, "training.lr_schedule", known, "optim.schedule")
    if flat.get("optimizer.type") == "muon":
        _put(result, "optim.name", "muon")
    _report_value(result, flat, "optimizer.type", ("adam", "adamw", "muon"), "optim.name")
    if flat.get("optimizer.grad_clip_norm", 0) is None:
        _put(result, "optim.clip_norm", 0.0)
    if steps is None:
        result.notes.append(
            "training.num_train_steps is not set; train.steps keeps its default: set it as you want"
        )


def _translate_shape(result: Translation, flat: dict[str, Any]) -> None:
    """Of the multimodal network always 8 heads of 64; the baselines read theirs."""
    _put(result, "model.preset", "reference")
    width, heads = _integer(flat.get("model.hidden_size")), _integer(flat.get("model.n_heads"))
    if is_baseline(flat) and width and heads:
        _put(result, "model.num_heads", heads)
        _put(result, "model.head_width", width // heads)
    else:
        _put(result, "model.num_heads", 8)
        _put(result, "model.head_width", 64)


def _translate_store(result: Translation, flat: dict[str, Any]) -> None:
    """Where the recipe looks for its pair store, and the command that makes it."""
    store = f"data/{Path(result.source).stem or 'store'}"
    tokens, latents = flat.get("data.token_dir"), flat.get("data.latent_dir")
    if tokens and latents:
        roots = {_root(Path(str(tokens)), "tokens"), _root(Path(str(latents)), "latents")}
        folder = str(roots.pop() or "FOLDER") if len(roots) == 1 else "FOLDER"
        if folder == "FOLDER":
            result.notes.append(
                f"{tokens} and {latents}: 'data import' reads FOLDER/tokens/train and FOLDER/latents/train; link them"
            )
    else:
        folder = str(flat.get("data.latent_data_root") or "FOLDER")
    tokenizer = flat.get("tokenizer.path") or flat.get("tokenizer.name") or flat.get("data.tokenizer_name")
    known = {"bert-base-uncased": "builtin:minilm", "gpt2": "builtin:gpt2", "None": "NAME"}
    named = known.get(str(tokenizer), str(tokenizer))
    _put(result, "data.store", store)
    words = ["mmldlm", "data", "import", folder, "--out", store, "--tokenizer", named]
    share = flat.get("data.val_ratio")
    share = share if isinstance(share, float) and 0.0 < share < 1.0 else VALIDATION
    result.make_store = shlex.join([*words, "--validation", f"{share:g}"])


def _root(path: Path, kind: str) -> Path | None:
    """The folder that `kind/<split>` or `kind` lies in."""
    return path.parent if path.name == kind else path.parent.parent if path.parent.name == kind else None


def _find_contradictions(result: Translation, flat: dict[str, Any]) -> None:
    width, heads = _integer(flat.get("model.hidden_size")), _integer(flat.get("model.n_heads"))
    if width and heads and width % heads:
        result.contradictions.append(f"model.hidden_size={width} cannot be split over model.n_heads={heads}")
    first, second = flat.get("loss.loss_type"), flat.get("training.loss_type")
    if first in MODES and second in MODES and first != second:
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
    """A whole number, also as 1e5 or in quotes, which YAML reads as something else."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number is not None and number.is_integer() else None


def check_recipe(recipe: dict[str, Any]) -> list[str]:
    """What our own loader says about a translated recipe."""
    from mmldlm.config.recipe import config_from_dict

    try:
        config_from_dict(recipe)
    except UserError as error:
        return error.problems if isinstance(error, SettingsError) else [str(error)]
    return []


def recipe_text(translation: Translation) -> str:
    """The recipe as YAML, with where it came from."""
    from omegaconf import OmegaConf

    order = (
        "name",
        "data",
        "batch",
        "model",
        "corruption",
        "objective",
        "optim",
        "train",
        "speed",
        "distributed",
    )
    ordered = {key: translation.recipe[key] for key in order if key in translation.recipe}
    return (
        f"# Translated from {translation.source}. Its pair store is made by\n#   {translation.make_store}\n"
        + OmegaConf.to_yaml(OmegaConf.create(ordered))
    )
