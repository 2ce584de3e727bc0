"""Settings of the optimizer and of the course of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.config.fields import choice, number

PARTS = ("text", "latent", "shared", "token_head", "latent_head", "length_head")
"""Of the denoiser's parameters: both streams, the time embedding that they share, and the heads."""


@dataclass
class OptimConfig:
    """The optimizer, the learning-rate schedule and the average of the weights."""

    name: str = choice("adamw", "adamw", "muon")
    """muon: for the matrices inside blocks; AdamW for all else."""
    muon_momentum: float = number(0.95, 0, 1, below=True)
    lr: float = number(5e-4, 0, above=True)
    schedule: str = choice("cosine", "cosine", "restarts", "wsd", "constant", "plateau")
    """The learning rate after the warm-up. cosine: down to min_lr_ratio at the last step; restarts: the same over and
    over; wsd: stable, then a straight line down over the last decay_share of the steps; constant; plateau: multiplied
    with plateau_factor whenever the loss has stopped falling."""
    min_lr_ratio: float = number(0.1, 0, 1)
    """Where cosine, restarts and wsd end, as a share of lr."""
    warmup_steps: int = number(100, 0)
    """Steps in which the rate rises to lr in a straight line, whatever the schedule."""
    restart_period: int = number(1000, 1)
    """Steps of the first cosine of schedule=restarts."""
    restart_factor: float = number(1.0, 1, 100)
    """Each further cosine is so many times as long."""
    decay_share: float = number(0.2, 0, 1, above=True)
    """Share of the steps over which schedule=wsd falls."""
    plateau_patience: int = number(1000, 1)
    """Steps without a new best loss after which schedule=plateau reduces the rate: valid_loss where the run validates
    on its way, else the mean loss between two lines of the log."""
    plateau_factor: float = number(0.5, 0, 1, above=True, below=True)
    plateau_min_lr: float = number(1e-6, 0)
    """The rate is not reduced below this."""
    plateau_threshold: float = number(0.01, 0, 1, below=True)
    """A loss is a new best one if it is smaller than the best so far by this share."""
    beta1: float = number(0.9, 0, 1, below=True)
    beta2: float = number(0.98, 0, 1, below=True)
    eps: float = number(1e-8, 0, above=True)
    weight_decay: float = number(0.05, 0)
    clip_norm: float = number(1.0, 0)
    """Largest norm of the gradient; 0: no clipping."""
    ema_decay: float = number(0.999, 0, 1, below=True)
    """Decay of the average of the weights; 0: no average is kept."""


@dataclass
class TrainConfig:
    """How long, how often, where."""

    steps: int = number(10000, 1)
    seed: int = number(0, 0, 2**62)
    init: str | None = None
    """A run or an export whose averaged weights training starts from, with a fresh optimizer; null: new weights. A run
    that resumes from its own checkpoint does not look at it."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    num_threads: int | None = number(None, 1)
    """CPU threads; null: left to PyTorch."""
    log_every: int = number(10, 1)
    valid_every: int = number(500, 0)
    """Steps between validations; 0: only at the end."""
    valid_documents: int = number(256, 1)
    valid_samples: int = number(4, 0)
    """Held-out latents decoded into text at each validation."""
    checkpoint_every: int = number(500, 1)
    keep_checkpoints: int = number(3, 1)
    """Newest checkpoints that are kept."""
    keep_best: int = number(0, 0)
    """So many more are kept: those with the smallest valid_loss. Checkpoints must be saved where a run validates."""
    keep_every: int = number(0, 0)
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    skip_budget: int = number(50, 1)
    """Updates that may be skipped because their gradient is not finite, in a row or between two lines of the log; then
    the run goes back to the last good checkpoint and leaves out the data since."""
    max_rollbacks: int = number(3, 0)
    """So often a run may go back; then it ends."""
    rollback_lr_factor: float = number(1.0, 0, 1, above=True)
    """The learning rate is multiplied with this at each rollback, for the rest of the run."""
    step_timeout: float = number(1800.0, 0)
    """A step that takes more seconds is reported with the stacks of all threads; compilation, validation and saving do
    not count; 0: off."""
    step_timeout_action: str = choice("report", "report", "exit")
    """What else happens then; exit: the process ends with exit code 76."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the denoiser that get no update in the whole run: text, latent, shared, token_head, latent_head,
    length_head."""
    tensorboard: bool = True
    profile: bool = False
    """Record a stretch of steps with torch.profiler, into the run's profile folder: trace, top kernels, busy share."""
    profile_wait: int = number(10, 0)
    """Steps before the profiler starts."""
    profile_warmup: int = number(10, 1)
    """Steps that the profiler runs without recording."""
    profile_steps: int = number(20, 1)
    """Steps that are recorded."""
    profile_details: bool = True
    """Record shapes, memory and stacks too; without them the profiler disturbs the run least."""
