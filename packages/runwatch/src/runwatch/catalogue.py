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
    """What to do, in anybody's trainer."""
    rule: str
    """When it is reported; `settings` are the thresholds."""
    settings: tuple[str, ...] = ()
    own_advice: str = ""
    """The same with the settings of MM-LDLM's trainer, for its runs."""
    passing: bool = False
    """An event rather than a state: over when it has not come again for `resolve_lines` lines."""


KINDS = (
    Kind(
        "M101", "nonfinite-loss", "error",
        "A loss was nan or infinite.",
        "Stop and go back to the last good checkpoint. Try a third of the learning rate, a longer warm-up, gradient "
        "clipping at 1.0, or bf16 instead of fp16; look at the data of that step.",
        "a loss in the line is not finite, or the trainer reports it",
        own_advice=(
            "Stop and go back to the last good checkpoint; try a third of optim.lr, a longer optim.warmup_steps, "
            "optim.clip_norm=1.0 or speed.precision=bf16 instead of fp16; look at the pairs of that step."
        ),
        passing=True,
    ),
    Kind(
        "M102", "loss-spike", "warn",
        "The loss jumped far above its own history.",
        "Harmless if it comes back at once. If it repeats: lower the learning rate, lower Adam's beta2 to 0.95, clip "
        "gradients, and look for unusual data at that step.",
        "a line is above the median of the run's history by all three measures. If losses per time bucket are logged, "
        "the median bucket decides, because the mean of a diffusion loss depends on the sampled times",
        ("history_lines", "warmup_lines", "spike_z", "spike_rise", "spike_tail"),
        own_advice=(
            "Harmless if it comes back at once. If it repeats: lower optim.lr, lower optim.beta2 to 0.95, set "
            "optim.clip_norm, and look for unusual pairs at that step."
        ),
        passing=True,
    ),
    Kind(
        "M103", "divergence", "error",
        "The loss rises and stays up.",
        "Stop; resume from a checkpoint before the first step named here with a lower learning rate or a "
        "longer warm-"
        "up; check that gradients are clipped.",
        "the running median stays above the best one of the run, or above the loss at the start. If the loss comes "
        "back down, the alert becomes a warning",
        ("divergence_lines", "divergence_rise", "divergence_start", "spike_z"),
        own_advice=(
            "Stop; resume from a checkpoint before the first step named here with a lower optim.lr or more "
            "optim.warmup_steps; check that optim.clip_norm is not 0."
        ),
    ),
    Kind(
        "M104", "plateau", "info",
        "The loss no longer falls although the learning rate is still high.",
        "Training on as before will gain little. Raise the learning rate, enlarge the model, use more data, or end "
        "the run.",
        "the loss fell by less than `plateau_gain` over the last third of the run",
        ("plateau_lines", "plateau_gain", "plateau_lr"),
        own_advice=(
            "Training on as before will gain little. Raise optim.lr or model.preset, prepare more pairs, or end "
            "the run."
        ),
    ),
    Kind(
        "M105", "loss-gone", "error",
        "Steps go on, but their loss is missing or exactly 0.",
        "Some trainers print 0 or nothing where the loss is nan: switch that filter off, look at the gradient norm "
        "and at skipped iterations, and go back to the last checkpoint with a finite loss.",
        "the loss is exactly 0 for several lines and was not small before, or steps are logged without a loss",
        ("zero_lines", "missing_lines"),
    ),
    Kind(
        "M201", "nonfinite-gradient", "warn",
        "The norm of the gradient was nan or infinite.",
        "One such step under fp16 is normal. In a row: use bf16 or fp32, lower the learning rate, check the data.",
        "grad_norm is not finite, or the trainer reports it. Several in a row are an error",
        ("nonfinite_streak",),
        own_advice=(
            "One such step under speed.precision=fp16 is normal. In a row: use bf16 or fp32, lower optim.lr, "
            "check the "
            "pairs."
        ),
        passing=True,
    ),
    Kind(
        "M202", "exploding-gradient", "warn",
        "The gradient is many times its usual norm.",
        "Clip gradients at 1.0, lower the learning rate or lengthen the warm-up; normalise queries and keys in "
        "attention.",
        "grad_norm is compared with the median of its history",
        ("explosion_ratio", "explosion_lines"),
        own_advice=(
            "Set optim.clip_norm=1.0, lower optim.lr or lengthen optim.warmup_steps; keep model.qk_norm=true."
        ),
        passing=True,
    ),
    Kind(
        "M203", "vanishing-gradient", "warn",
        "The gradient is almost zero while the loss is not.",
        "Look for frozen parameters, a loss weight of 0, saturated inputs or fp16 underflow.",
        "grad_norm is compared with its largest running median",
        ("vanishing_ratio", "vanishing_lines"),
        own_advice=(
            "Look for frozen parameters, a loss weight of 0 (objective.*), saturated inputs or speed.precision=fp16 "
            "underflow."
        ),
    ),
    Kind(
        "M204", "learning-rate", "warn",
        "The learning rate does something it should not.",
        "Compare the learning rate, warm-up, floor and number of steps of the schedule; after a resume the schedule "
        "must go on.",
        "the learning rate is 0 in mid-run, jumps up after it fell, still rises at half of the steps, or reaches its "
        "floor far too early",
        ("lr_jump", "lr_zero_lines", "lr_early"),
        own_advice=(
            "Compare optim.lr, optim.warmup_steps, optim.min_lr_ratio and train.steps; after a resume the "
            "schedule must "
            "go on."
        ),
    ),
    Kind(
        "M205", "skipped-updates", "warn",
        "Optimizer updates were skipped, so the model learned nothing from their data.",
        "Lower the learning rate or use bf16; a few at the start of an fp16 run are the loss scale finding its place.",
        "the fraction of skipped updates among the last steps is compared with a limit",
        ("skipped_share", "skipped_window"),
        own_advice=(
            "Lower optim.lr or use speed.precision=bf16; a few at the start of an fp16 run are the loss scale "
            "finding its "
            "place."
        ),
        passing=True,
    ),
    Kind(
        "M301", "throughput-drop", "warn",
        "The run became slower than it was.",
        "Look at the data loader, other processes on the machine, clocks and temperature of the GPU, and the file "
        "system.",
        "four of five lines are below a fraction of the median of the run",
        ("drop_ratio", "history_lines"),
        own_advice=(
            "Look at data_wait, other processes on the machine, clocks and temperature of the GPU, and the "
            "file system; "
            "data.num_workers if the data is late."
        ),
    ),
    Kind(
        "M302", "throughput-unstable", "warn",
        "The speed changes wildly from line to line.",
        "Often data that comes in bursts or recompilation: more loader workers, more prefetching, constant shapes.",
        "the median change from line to line is above a limit",
        ("unstable_change", "unstable_lines"),
        own_advice=(
            "Often data that comes in bursts or recompilation: raise data.num_workers and data.prefetch, keep "
            "speed.layout=packed so that shapes are constant."
        ),
    ),
    Kind(
        "M303", "waiting-for-data", "warn",
        "The run waits for data for a large part of the time.",
        "More loader workers and prefetching, data on a local disk, pinned memory.",
        "the median data_wait of ten lines is above a limit",
        ("wait_share",),
        own_advice=(
            "Raise data.num_workers and data.prefetch, put the pair store on a local disk, set data.pin_memory=true."
        ),
    ),
    Kind(
        "M304", "failing-loader", "warn",
        "Processes that read the data died or hung, and were restarted.",
        "Look for host memory, signals of others and a file system that hangs; use fewer workers.",
        "the ledger has an event loader_failed",
        own_advice=(
            "Look for host memory (every process holds data.prefetch steps), signals of others and a file "
            "system that "
            "hangs; lower data.num_workers, raise data.worker_timeout if the disk is slow."
        ),
        passing=True,
    ),
    Kind(
        "M401", "out-of-memory", "error",
        "The device ran out of memory.",
        "Use a smaller micro-batch with more accumulation, activation checkpointing, or shorter sequences.",
        "the log has a message or the ledger an event. If the trainer handled it, it is a warning",
        own_advice=(
            "Lower batch.micro_tokens (the loss stays the same), set speed.activation_checkpointing=block, or lower "
            "speed.chunk_rows."
        ),
        passing=True,
    ),
    Kind(
        "M402", "shrinking-batch", "warn",
        "The batch became smaller than it was.",
        "If the memory allows, set a batch that fits for good; look for growing memory use.",
        "micro_tokens, else batch_size, is compared with its largest median",
        ("shrink_ratio",),
        own_advice=(
            "If the memory allows, set batch.micro_tokens to a value that fits for good; look for growing memory use."
        ),
    ),
    Kind(
        "M403", "disk-filling", "warn",
        "The disk of the run will be full soon, or is.",
        "Free space, keep fewer checkpoints, or save less often; a full disk costs checkpoints.",
        "the free space is extrapolated. If the disk is full within the hour, it is an error",
        ("disk_hours", "disk_free_share"),
        own_advice=(
            "Free space, lower train.keep_checkpoints, or raise train.checkpoint_every; a full disk costs checkpoints."
        ),
    ),
    Kind(
        "M501", "stalled", "error",
        "No new line for much longer than usual.",
        "Look at the process (py-spy dump --pid PID), the GPU, the file system; a hung collective shows in "
        "the ranks' "
        "logs. Stop it and resume from the last checkpoint.",
        "the time since the last line is compared with the usual interval, which includes validations and checkpoints; "
        "or the ledger has an event hung_step",
        ("stall_factor", "stall_seconds", "start_seconds"),
        own_advice=(
            "Look at the process (py-spy dump --pid PID), the GPU, the file system; a hung collective shows in "
            "the ranks' "
            "logs. Stop it and run the same command: it goes on from the last checkpoint."
        ),
    ),
    Kind(
        "M502", "crash", "error",
        "The run ended by an error or was killed.",
        "Read the evidence; the rank named is the one that failed first. Resume from the last checkpoint.",
        "a traceback, a signal, torchrun's failure report or the ledger says so, or the process is gone without a last "
        "message; for a run on another machine, its heartbeat is too old",
        ("heartbeat_seconds",),
        own_advice=(
            "Read the evidence; the rank named is the one that failed first. The same train command goes on from "
            "the last "
            "checkpoint."
        ),
    ),
    Kind(
        "M503", "restart-loop", "error",
        "The run is restarted again and again without getting further.",
        "The cause is at the step it never passes: read the crash before it, then change settings instead of "
        "restarting.",
        "the run started three times at the same step without reaching its end",
    ),
    Kind(
        "M504", "rolled-back", "info",
        "The trainer went back to an earlier checkpoint by itself.",
        "Nothing if training continues well. The alert before it gives the reason. Often it helps to lower "
        "the learning rate.",
        "the ledger has an event rolled_back",
        own_advice=(
            "Nothing if training continues well. The alert before it gives the reason. Often it helps to lower "
            "optim.lr."
        ),
        passing=True,
    ),
    Kind(
        "M601", "straggling-rank", "warn",
        "One rank is slower than the others, and all others wait for it.",
        "Look at that rank's GPU (clocks, temperature, errors), its CPU load and its disk; take the node out if it "
        "stays.",
        "the time of arrival at the same step, or the rate, is compared with the median rank. A rank that is silent, "
        "or that the trainer names in its ledger, counts as well",
        ("straggler_lag", "straggler_share", "rank_silent_steps"),
    ),
    Kind(
        "M602", "nccl-failure", "error",
        "Communication between the ranks failed or timed out.",
        "Find the rank that died or hung first (M502, M601); the others only waited. NCCL_DEBUG=WARN and the network "
        "come next.",
        "the log has a message of NCCL, gloo or the process group",
    ),
    Kind(
        "M603", "rendezvous-failure", "error",
        "The ranks did not find each other.",
        "Check MASTER_ADDR, MASTER_PORT, the number of nodes and processes, firewalls, and whether an old run holds "
        "the port.",
        "the log has a message of torchrun's rendezvous or its store",
    ),
    Kind(
        "M701", "overdue-checkpoint", "warn",
        "The last checkpoint is much older than it should be.",
        "Look for M702 and M403; save more often if this much work may not be lost.",
        "the steps since the last checkpoint are compared with train.checkpoint_every, else with its usual period; "
        "the latter only if no validation is logged or one was better since",
        ("checkpoint_factor",),
        own_advice=(
            "Look for M702 and M403; lower train.checkpoint_every if this much work may not be lost."
        ),
    ),
    Kind(
        "M702", "failed-checkpoint", "error",
        "A checkpoint could not be saved.",
        "Read the reason, then free space or repair the file system. Training continues and the next save tries again.",
        "the ledger has an event save_failed, or the log has a message",
    ),
    Kind(
        "M801", "validation-drift", "warn",
        "The validation loss rises while the training loss falls: the model overfits.",
        "Use the checkpoint of the best validation; use more data, more weight decay or a smaller model.",
        "the validation loss is compared with its best value",
        ("drift_rise", "drift_count"),
        own_advice=(
            "Use the checkpoint of the best validation; prepare more pairs, raise optim.weight_decay or shrink "
            "model.preset."
        ),
    ),
    Kind(
        "M802", "latent-collapse", "error",
        "The latent prediction shrinks towards nothing.",
        "Check the weight of the latent loss, the prediction type and the normalisation of the latents; lower the "
        "learning rate.",
        "the norm or deviation of the latent prediction is compared with its usual size",
        ("collapse_ratio", "collapse_lines"),
        own_advice=(
            "Check objective.latent_weight, corruption.prediction_type and the latent normaliser of the "
            "store (mmldlm "
            "data inspect); lower optim.lr."
        ),
    ),
    Kind(
        "M803", "latent-ignored", "warn",
        "The text loss is no better with the right latent than with a shuffled one.",
        "Train the conditional direction more, drop the condition less often, and check that texts and "
        "latents belong "
        "together.",
        "valid_text_loss is compared with valid_text_loss_shuffled",
        ("ignored_gain", "ignored_count", "ignored_start"),
        own_advice=(
            "Raise corruption.mode_weights.l2t, lower corruption.condition_dropout, and check that texts and "
            "latents of "
            "the store belong together (mmldlm data inspect)."
        ),
    ),
)  # fmt: skip
BY_CODE = {kind.code: kind for kind in KINDS}
