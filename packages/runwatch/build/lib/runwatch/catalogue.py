"""Everything the monitor can find: code, name, level, what it means, what to do, which settings decide."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("info", "warn", "error")


@dataclass(frozen=True)
class Kind:
    """One thing that can be wrong with a run."""

    code: str
    name: str
    level: str
    meaning: str
    advice: str
    """What to do, with our own settings named."""
    rule: str
    """When it is said, in words; `settings` are the thresholds."""
    settings: tuple[str, ...] = ()
    passing: bool = False
    """An event rather than a state: over when it has not come again for `resolve_lines` lines."""


KINDS = (
    Kind(
        "M101", "nonfinite-loss", "error",
        "A loss was nan or infinite.",
        "Stop and go back to the last good checkpoint; try a third of optim.lr, a longer optim.warmup_steps, "
        "optim.clip_norm=1.0 or speed.precision=bf16 instead of fp16; look at the pairs of that step.",
        "any loss of a line is not finite, or the trainer says so", passing=True,
    ),
    Kind(
        "M102", "loss-spike", "warn",
        "The loss jumped far above its own history.",
        "Harmless if it comes back at once. If it repeats: lower optim.lr, lower optim.beta2 to "
        "0.95, set optim.clip_norm, "
        "and look for unusual pairs at that step.",
        "a line lies above the median of the run's history by all three measures; where losses per "
        "time bucket are logged, "
        "the median bucket must, because the raw mean of a diffusion loss depends on the times drawn",
        ("history_lines", "warmup_lines", "spike_z", "spike_rise", "spike_tail"), passing=True,
    ),
    Kind(
        "M103", "divergence", "error",
        "The loss rises and stays up.",
        "Stop; resume from a checkpoint before the first step named here with a lower optim.lr or more "
        "optim.warmup_steps; check that optim.clip_norm is not 0.",
        "the running median stays above the best one the run had, or above the loss at the start",
        ("divergence_lines", "divergence_rise", "divergence_start", "spike_z"),
    ),
    Kind(
        "M104", "plateau", "info",
        "The loss no longer falls although the learning rate is still high.",
        "More of the same will bring little: raise optim.lr or model.preset, prepare more pairs, "
        "or end the run.",
        "over the last third of the run so far the loss fell by less than the gain",
        ("plateau_lines", "plateau_gain", "plateau_lr"),
    ),
    Kind(
        "M201", "nonfinite-gradient", "warn",
        "The norm of the gradient was nan or infinite.",
        "One such step under speed.precision=fp16 is normal. In a row: use bf16 or fp32, lower "
        "optim.lr, check the pairs.",
        "grad_norm is not finite, or the trainer says so; in a row it is an error",
        ("nonfinite_streak",), passing=True,
    ),
    Kind(
        "M202", "exploding-gradient", "warn",
        "The gradient is many times its usual norm.",
        "Set optim.clip_norm=1.0, lower optim.lr or lengthen optim.warmup_steps; keep model.qk_norm=true.",
        "grad_norm against the median of its history", ("explosion_ratio", "explosion_lines"), passing=True,
    ),
    Kind(
        "M203", "vanishing-gradient", "warn",
        "The gradient is almost zero while the loss is not.",
        "Look for frozen parameters, a loss weight of 0 (objective.*), saturated inputs or "
        "speed.precision=fp16 underflow.",
        "grad_norm against its largest running median", ("vanishing_ratio", "vanishing_lines"),
    ),
    Kind(
        "M204", "learning-rate", "warn",
        "The learning rate does something it should not.",
        "Compare optim.lr, optim.warmup_steps, optim.min_lr_ratio and train.steps; after a "
        "resume the schedule must go on.",
        "zero in mid-run, a jump upwards after it fell, still warming up at half time, or at its "
        "floor far too early",
        ("lr_jump", "lr_zero_lines", "lr_early"),
    ),
    Kind(
        "M205", "skipped-updates", "warn",
        "Optimizer updates were skipped, so their data taught nothing.",
        "Lower optim.lr or use speed.precision=bf16; a few at the start of an fp16 run are the "
        "loss scale finding its place.",
        "share of skipped updates among the last steps", ("skipped_share", "skipped_window"), passing=True,
    ),
    Kind(
        "M301", "throughput-drop", "warn",
        "The run became slower than it was.",
        "Look at data_wait, other processes on the machine, clocks and temperature of the GPU, "
        "and the file system; "
        "data.num_workers if the data is late.",
        "four of five lines against the median of the run", ("drop_ratio", "history_lines"),
    ),
    Kind(
        "M302", "throughput-unstable", "warn",
        "The speed changes wildly from line to line.",
        "Often data that comes in bursts or recompilation: raise data.num_workers and data.prefetch, "
        "keep speed.layout=packed so that shapes are constant.",
        "median change from line to line", ("unstable_change", "unstable_lines"),
    ),
    Kind(
        "M303", "waiting-for-data", "warn",
        "A good part of the time passes waiting for data.",
        "Raise data.num_workers and data.prefetch, put the pair store on a local disk, set "
        "data.pin_memory=true.",
        "median data_wait of ten lines", ("wait_share",),
    ),
    Kind(
        "M304", "failing-loader", "warn",
        "Processes that read the data died or hung, and were started anew.",
        "Look for host memory (every process holds data.prefetch steps), signals of others and a file system "
        "that hangs; lower data.num_workers, raise data.worker_timeout if the disk is slow.",
        "event loader_failed of the ledger", passing=True,
    ),
    Kind(
        "M401", "out-of-memory", "error",
        "The device ran out of memory.",
        "Lower batch.micro_tokens (the loss stays the same), set "
        "speed.activation_checkpointing=block, or lower speed.chunk_rows.",
        "a message or an event of the ledger; one that the trainer handled itself is a warning", passing=True,
    ),
    Kind(
        "M402", "shrinking-batch", "warn",
        "The batch became smaller than it was.",
        "If the memory allows, set batch.micro_tokens to a value that fits for good; look for "
        "growing memory use.",
        "micro_tokens, else batch_size, against its largest median", ("shrink_ratio",),
    ),
    Kind(
        "M403", "disk-filling", "warn",
        "The disk of the run will be full soon, or is.",
        "Free space, lower train.keep_checkpoints, or raise train.checkpoint_every; a full disk "
        "costs checkpoints.",
        "free space extrapolated; within the hour, or full, it is an error",
        ("disk_hours", "disk_free_share"),
    ),
    Kind(
        "M501", "stalled", "error",
        "No new line for much longer than usual.",
        "Look at the process (py-spy dump --pid PID), the GPU, the file system; a hung "
        "collective shows in the ranks' logs. "
        "Stop it and run the same command: it goes on from the last checkpoint.",
        "time since the last line against the usual interval, with validation and checkpoints "
        "within the grace; or event hung_step of the ledger",
        ("stall_factor", "stall_seconds", "start_seconds"),
    ),
    Kind(
        "M502", "crash", "error",
        "The run ended by an error or was killed.",
        "Read the evidence; the rank named is the one that failed first. The same train command "
        "goes on from the last checkpoint.",
        "a traceback, a signal, torchrun's failure report, the ledger, or a process that is gone "
        "without a word; from another machine, a heartbeat that is too old",
        ("heartbeat_seconds",),
    ),
    Kind(
        "M503", "restart-loop", "error",
        "The run is restarted again and again without getting further.",
        "The cause is at the step it never passes: read the crash before it, then change "
        "settings instead of restarting.",
        "three starts at the same step",
    ),
    Kind(
        "M504", "rolled-back", "info",
        "The trainer went back to an earlier checkpoint by itself.",
        "Nothing, if it goes on well; the alert before it tells why. Often: lower optim.lr.",
        "event rolled_back of the ledger", passing=True,
    ),
    Kind(
        "M601", "straggling-rank", "warn",
        "One rank is slower than the others, and all wait for it.",
        "Look at that rank's GPU (clocks, temperature, errors), its CPU load and its disk; take "
        "the node out if it stays.",
        "arrival at the same step, or own rate, against the median rank; a rank that falls silent counts too",
        ("straggler_lag", "straggler_share", "rank_silent_steps"),
    ),
    Kind(
        "M602", "nccl-failure", "error",
        "Communication between the ranks failed or timed out.",
        "Find the rank that died or hung first (M502, M601); the others only waited. "
        "NCCL_DEBUG=WARN and the network come next.",
        "messages of NCCL, gloo or the process group",
    ),
    Kind(
        "M603", "rendezvous-failure", "error",
        "The ranks did not find each other.",
        "Check MASTER_ADDR, MASTER_PORT, the number of nodes and processes, firewalls, and "
        "whether an old run holds the port.",
        "messages of torchrun's rendezvous or the store",
    ),
    Kind(
        "M701", "overdue-checkpoint", "warn",
        "The last checkpoint is much older than it should be.",
        "Look for M702 and M403; lower train.checkpoint_every if this much work may not be lost.",
        "steps since the last one against train.checkpoint_every, else against its usual period",
        ("checkpoint_factor",),
    ),
    Kind(
        "M702", "failed-checkpoint", "error",
        "A checkpoint could not be saved.",
        "Read the reason; free space or mend the file system. Training goes on and the next save "
        "tries again.",
        "event save_failed of the ledger, or a message",
    ),
    Kind(
        "M801", "validation-drift", "warn",
        "Held-out loss rises while the training loss falls: the run memorises.",
        "Use the checkpoint of the best validation; prepare more pairs, raise optim.weight_decay "
        "or shrink model.preset.",
        "validation against its best", ("drift_rise", "drift_count"),
    ),
    Kind(
        "M802", "latent-collapse", "error",
        "The latent prediction shrinks towards nothing.",
        "Check objective.latent_weight, corruption.prediction_type and the latent normaliser of the store "
        "(mmldlm data inspect); lower optim.lr.",
        "norm or deviation of the latent prediction against its usual size",
        ("collapse_ratio", "collapse_lines"),
    ),
    Kind(
        "M803", "latent-ignored", "warn",
        "The text loss is no better with the right latent than with a shuffled one.",
        "Raise corruption.mode_weights.l2t, lower corruption.condition_dropout, and check that "
        "texts and latents of the store "
        "belong together (mmldlm data inspect).",
        "valid_text_loss against valid_text_loss_shuffled", ("ignored_gain", "ignored_count", "ignored_start"),
    ),
)  # fmt: skip
BY_CODE = {kind.code: kind for kind in KINDS}
