"""Settings of the MM-LDLM research code and of the plan for it: what each one is called here.

`IGNORED` was checked by reading that code: no line reads these keys, or what is read never reaches the network.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from mmldlm.errors import UserError

SECTIONS = {"training", "loss", "logging", "optimizer", "tokenizer", "defaults", "hydra"}
"""Sections that only the old settings have."""
_OURS = {"batch", "corruption", "objective", "optim", "train", "speed", "distributed"}

DIRECT: dict[str, str] = {
    "data.num_workers": "data.num_workers",
    "model.hidden_size": "model.width",
    "model.n_blocks": "model.depth",
    "model.cond_dim": "model.time_width",
    "training.seed": "train.seed",
    "training.num_train_steps": "train.steps",
    "training.compile_model": "speed.compile",
    "training.warmup_steps": "optim.warmup_steps",
    "training.cfg_dropout_prob": "corruption.condition_dropout",
    "loss.latent_loss_weight": "objective.latent_weight",
    "optimizer.lr": "optim.lr",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.eps": "optim.eps",
    "optimizer.grad_clip_norm": "optim.clip_norm",
    "logging.run_name": "name",
    "logging.log_freq": "train.log_every",
    "logging.eval_freq": "train.valid_every",
    "logging.save_freq": "train.checkpoint_every",
    "training.min_lr_ratio": "optim.min_lr_ratio",
    "training.enable_profiling": "train.profile",
    "training.profile_steps": "train.profile_steps",
    "training.keep_last_n": "train.keep_checkpoints",
    "training.static_graph": "distributed.static_graph",
    "data.prefetch_factor": "data.prefetch",
    "data.pin_memory": "data.pin_memory",
}
"""Old key -> ours, same value."""

TRANSLATED: dict[str, str] = {
    "training.train_batch_size": "batch.documents_per_step: documents of a step on all ranks together",
    "training.gradient_accumulation_steps": "batch.documents_per_step: documents of a step, cut by batch.micro_tokens",
    "training.effective_batch_size": "batch.documents_per_step",
    "training.dtype": "speed.precision",
    "training.lr_schedule": "optim.schedule",
    "training.restart_period": "optim.schedule=restarts with optim.restart_period",
    "training.loss_type": "corruption.mode_weights",
    "training.mode_weights": "corruption.mode_weights with corruption.mode_choice=batch",
    "training.sequential_schedule": "corruption.mode_schedule with corruption.mode_repeat=true",
    "loss.loss_type": "corruption.mode_weights",
    "loss.latent_loss_type": "objective.latent_loss",
    "model.use_gradient_checkpointing": "speed.activation_checkpointing=block",
    "model.latent_parameterization": "corruption.prediction_type",
    "model.latent_beta_schedule": "corruption.latent_schedule",
    "model.type": "model.preset",
    "model.use_latent_conditioning": "corruption.condition_dropout=1 where it is false",
    "model.diffusion_process": "corruption.text_schedule",
    "optimizer.betas": "optim.beta1 and optim.beta2",
    "optimizer.beta1": "optim.beta1",
    "optimizer.beta2": "optim.beta2",
    "optimizer.type": "optim.name",
    "data.token_dir": "data.store, the folder that 'mmldlm data import' writes",
    "data.latent_dir": "data.store, the folder that 'mmldlm data import' writes",
    "data.latent_data_root": "data.store, the folder that 'mmldlm data import' writes",
}
"""Old key -> what it becomes, where the value changes too."""

IGNORED: dict[str, str] = {
    "model.n_heads": "it never reached the network, which always had 8 heads of 64; only a FLOP estimate read it",
    "model.qk_rmsnorm": "it never reached attention; queries and keys are normalised here (model.qk_norm)",
    "model.use_multimodal": "read by a sampling script only",
    "model.latent_diffusion_process": "read by nothing",
    "loss.text_loss_weight": "read by nothing; the text loss had weight 1",
    "loss.reduction": "read by nothing",
    "loss.use_cross_entropy": "read by nothing",
    "loss.text_kl_weight": "read by nothing",
    "optimizer.use_fused": "read by nothing; the optimizer was not fused",
    "optimizer.name": "the code looked for optimizer.type",
    "tokenizer.cache_dir": "read by nothing",
    "tokenizer.local_files_only": "read by nothing; local files only, always",
    "tokenizer.add_mask_token": "read by nothing",
    "data.tokenizer_path": "read by nothing; tokenizer.path was used",
    "data.tokenizer_name": "read by nothing",
    "data.local_files_only": "read by nothing",
    "data.sequential_schedule": "it was looked for under training",
    "training.save_every_n_steps": "read by nothing; logging.save_freq was used",
    "training.world_size": "overwritten at start by the number of processes",
}
"""Old key -> why changing it changed nothing."""

READ_BY_BASELINES: dict[str, str] = {
    "model.n_heads": "",
    "data.tokenizer_name": "",
    "loss.reduction": "the loss is always a mean over tokens",
}
"""Of the ignored keys those that the baselines (model.type=diffusion) read -> why one has no counterpart, if so."""

DROPPED: dict[str, str] = {
    "model.max_seq_len": "documents are not padded; 'mmldlm prepare --max-tokens' bounds their length",
    "model.latent_dim": "the pair store knows its own width",
    "model.dropout": "the denoiser has none",
    "model.num_residual_streams": "the denoiser has one residual stream per modality",
    "model.cluster_size": "no token clusters",
    "model.p_uniform": "tokens are only masked, as with p_uniform 0",
    "model.t_eps": "times reach 0 and 1 exactly",
    "model.latent_beta_min": "the latent schedule is a function of continuous time",
    "model.latent_beta_max": "the latent schedule is a function of continuous time",
    "model.latent_timesteps": "time is continuous",
    "training.eval_batch_size": "validation has its own size (train.valid_documents)",
    "training.num_epochs": "a run ends after train.steps; the old loop ended after num_epochs in any case",
    "training.low_discrepancy_sampling": "times are a fixed function of seed, epoch and document",
    "training.resume": "resume is the same command again",
    "loss.loss_scale": "no constant factor on the loss",
    "loss.loss_weighting": "objective.text_weighting has other choices; set it as you want",
    "loss.min_loss_weight": "objective.text_weighting has other choices; set it as you want",
    "loss.max_loss_weight": "objective.text_weighting has other choices; set it as you want",
    "logging.wandb_project": "add wandb to train.trackers; WANDB_PROJECT in the environment sets it",
    "logging.wandb_entity": "add wandb to train.trackers; WANDB_ENTITY in the environment sets it",
    "logging.wandb_dir": "add wandb to train.trackers; WANDB_DIR in the environment sets it",
    "data.persistent_workers": "loader processes stay for the whole run",
    "data.drop_last": "steps are taken from one endless order, so no short one is left over",
    "training.find_unused_parameters": "what gets no loss is known before the first step",
    "training.gradient_as_bucket_view": "always on",
    "training.broadcast_buffers": "there are no buffers to broadcast",
    "logging.num_eval_batches": "train.valid_documents counts documents",
    "logging.save_dir": "the folder of a run is saved/<name>, or that of --run",
}
"""Old key -> why it has no counterpart."""

MODES: dict[str, dict[str, float]] = {
    "l2t": {"l2t": 1.0},
    "t2l": {"t2l": 1.0},
    "unconditional": {"joint": 1.0},
    "joint": {"joint": 1.0},
    "mixed": {"l2t": 1.0, "t2l": 1.0, "joint": 1.0},
    "random": {"l2t": 1.0, "t2l": 1.0, "joint": 1.0},
    "sequential": {"l2t": 1.0, "t2l": 1.0, "joint": 1.0},
}
PRECISIONS = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}
PREDICTIONS = {
    "epsilon": "noise",
    "eps": "noise",
    "noise": "noise",
    "x0": "clean",
    "v": "velocity",
    "velocity": "velocity",
}


KNOWN = DIRECT | TRANSLATED | IGNORED | DROPPED
_BY_LAST_NAME = {key.rsplit(".", 1)[-1]: key for key in reversed(KNOWN)}


def is_old(values: dict[str, Any]) -> bool:
    """Whether these are settings of the research code."""
    return bool(SECTIONS & set(values)) and not _OURS & set(values)


def explain_old(key: str, *, by_last_name: bool = False) -> str | None:
    """What became of an old setting, for a message; `by_last_name`: also in another section, or without one."""
    name = key if key in KNOWN or not by_last_name else _BY_LAST_NAME.get(key.rsplit(".", 1)[-1], "")
    if name not in KNOWN:
        return None
    if name in DIRECT or name in TRANSLATED:
        fate = f"now {DIRECT.get(name) or TRANSLATED[name]}"
    else:
        fate = f"without a counterpart ({IGNORED.get(name) or DROPPED[name]})"
    return f"a setting of the research code, {fate}; 'mmldlm migrate' translates old settings"


def nearest_old(key: str) -> str | None:
    """The old setting of the same section that a misspelled one is nearest to."""
    near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.8)
    return near[0] if near and near[0].split(".")[0] == key.split(".")[0] else None


def old_number(key: str, value: Any, path: str) -> float:
    """The value of an old setting, or of one of its elements, which must be a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}: {key}: {value!r} is not a number; write the number into the file") from None


def other_model(flat: Mapping[str, Any], path: str) -> str | None:
    """What these settings train, where it is no masked diffusion of tokens and so not turned into one."""
    kind, loss, process = (
        str(flat.get(key)) for key in ("model.type", "loss.loss_type", "model.diffusion_process")
    )
    clusters = flat.get("model.cluster_size")
    if kind == "autoregressive" or loss == "ar":
        return "an autoregressive model (model.type=autoregressive)"
    if process == "hdlm" or loss == "hdlm" or (isinstance(clusters, int) and clusters > 0):
        return f"a hierarchical model with token clusters (model.cluster_size={clusters})"
    if old_number("model.p_uniform", flat.get("model.p_uniform") or 0, path) > 0:
        return f"a model that replaces tokens at random (model.p_uniform={flat['model.p_uniform']})"
    return None


def old_settings_message(values: dict[str, Any], path: str) -> str:
    """For somebody who trains with an old file: what its settings are called now, and what translates them."""
    if what := other_model(flatten(values), path):
        return (
            f"{path}: settings of the MM-LDLM research code for {what}; only masked diffusion is trained here"
        )
    new_names = TRANSLATED | DIRECT
    names = [
        f"{key} is now {re.split('[:,]', new_names[key])[0]}"
        for key in flatten(values)
        if new_names.get(key, key) != key
    ]
    listed = f" ({', '.join(names)})" if names else ""
    remedy = f"'mmldlm migrate {shlex.quote(path)} --out new' writes a recipe of them, or says why not"
    return f"{path}: settings of the MM-LDLM research code{listed}; {remedy}"


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
