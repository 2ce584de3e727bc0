"""What each setting of the research code meant, and what becomes of it.

`IGNORED` was checked by reading its code: no line reads these keys, or what is read never reaches the network.
"""

from __future__ import annotations

from typing import Any

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
    "optimizer.beta1": "optim.beta1",
    "optimizer.beta2": "optim.beta2",
    "optimizer.eps": "optim.eps",
    "optimizer.grad_clip_norm": "optim.clip_norm",
    "logging.run_name": "name",
    "logging.log_freq": "train.log_every",
    "logging.eval_freq": "train.valid_every",
    "logging.save_freq": "train.checkpoint_every",
}
"""Old key -> ours, same value."""

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
    "optimizer.beta1": "the code looked for optimizer.betas",
    "optimizer.beta2": "the code looked for optimizer.betas",
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

DROPPED: dict[str, str] = {
    "model.max_seq_len": "documents are not padded; 'mmldlm prepare --max-tokens' bounds their length",
    "model.latent_dim": "the pair store knows its own width",
    "model.dropout": "the denoiser has none",
    "model.num_residual_streams": "the denoiser has one residual stream per modality",
    "model.cluster_size": "no token clusters",
    "model.p_uniform": "tokens are masked, never replaced at random",
    "model.t_eps": "times reach 0 and 1 exactly",
    "model.latent_beta_min": "the latent schedule is a function of continuous time",
    "model.latent_beta_max": "the latent schedule is a function of continuous time",
    "model.latent_timesteps": "time is continuous",
    "training.eval_batch_size": "validation has its own size (train.valid_documents)",
    "training.num_epochs": "a run ends after train.steps; the old loop ended after num_epochs in any case",
    "training.low_discrepancy_sampling": "times are a fixed function of seed, epoch and document",
    "training.resume": "resume is the same command again",
    "loss.loss_scale": "no constant factor on the loss",
    "logging.wandb_project": "W&B is off unless asked for",
    "logging.wandb_entity": "W&B is off unless asked for",
    "logging.wandb_dir": "W&B is off unless asked for",
    "logging.num_eval_batches": "train.valid_documents counts documents",
    "logging.save_dir": "a run lives in saved/<name>",
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

CHANGES: tuple[tuple[str, str], ...] = (
    (
        "Gradient accumulation",
        "the documents of a step are fixed; micro-batches are cut from them and give the same loss.",
    ),
    (
        "l2t",
        "was trained fully masked only, but sampled partly unmasked; now all masking levels are trained.",
    ),
    ("t2l", "was trained at pure noise only, so the text did not matter; now all noise levels are trained."),
    (
        "Latent loss",
        "the noise target was normalised, so no sampler formula held; the target is what `prediction_type` says.",
    ),
    (
        "Latents",
        "were used as they came; now they are standardised with the training split's own statistics.",
    ),
    ("Padding", "was a target; now there is none."),
    ("Weights", "were bfloat16 and lost small updates; now float32, with bf16 products."),
    ("Resume", "could not work; now it continues the same run bit for bit in its random choices."),
    (
        "Data",
        "only the first 10,000 files were read; now all. A file that cannot be read stops the run instead of "
        "becoming zeros.",
    ),
    ("A bad batch", "was skipped by one rank alone and hung the others; now all ranks skip together."),
)
"""What behaves differently, and how."""


def flatten(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
