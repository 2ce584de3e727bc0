"""All settings of a run: one dataclass per section, each setting with its meaning, default and allowed values.

`null` means "chosen automatically". `checks.py` reports what is wrong with values, `recipe.py` fills the sections from
YAML files and `section.key=value` words.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

MOST_STEPS = 1_000_000
"""Of a sampler; all are planned before the first, which takes memory."""


def number(
    default: Any, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> Any:
    """A number in [low, high]; `above` and `below` leave out the ends."""
    return field(default=default, metadata={"low": low, "high": high, "above": above, "below": below})


def choice(default: Any, *allowed: str) -> Any:
    """One of these words."""
    return field(default=default, metadata={"allowed": allowed})


@dataclass
class DataConfig:
    """Where the pairs come from and how they are read."""

    store: str = ""
    """Folder of the pair store, relative to where the command is run."""
    train_split: str = "train"
    """Split of the pair store that is trained on."""
    valid_split: str = "validation"
    """Split of the pair store that is validated and evaluated on."""
    num_workers: int | None = number(None, 0, 256)
    """Loader processes; null: min(8, CPUs // ranks of the machine) on a GPU, 0 on a CPU, where they would compete with
    the model."""
    prefetch: int = number(4, 1, 64)
    """Steps that each worker prepares ahead."""
    pin_memory: bool | None = None
    """Page-locked host memory for faster copies; null: on with a GPU."""
    worker_timeout: float = number(300.0, 0)
    """Seconds that loader processes may take for a step before they are restarted; 0: no timeout."""
    worker_restarts: int = number(3, 0)
    """How often loader processes that died or hung are restarted; 100 good steps reset the count."""


@dataclass
class BatchStage:
    """The batch of the first part of a run; what is null is as in `batch`."""

    until: int = number(0, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    tokens_per_step: int | None = number(None, 1, 2**28)
    documents_per_step: int | None = number(None, 1, 2**24)
    micro_tokens: int | None = number(None, 1)
    micro_documents: int | None = number(None, 1)


@dataclass
class BatchConfig:
    """What one step trains on: the same documents whatever the number of ranks or micro-batches.

    How many micro-batches a step takes follows from these sizes; gradients are added up over them.
    """

    tokens_per_step: int | None = number(8192, 1, 2**28)
    """Documents are taken in order until their tokens would exceed this; null: documents_per_step alone decides."""
    documents_per_step: int | None = number(None, 1, 2**24)
    """At most this many documents a step; null: about as many as fit."""
    micro_tokens: int | None = number(None, 1)
    """Most tokens of a micro-batch on one rank, at least the longest document; null: the whole step at once. More
    micro-batches, same loss."""
    micro_documents: int | None = number(None, 1)
    """Most documents of a micro-batch on one rank; null: as many as its tokens allow."""
    slack: float = number(0.01, 0, 0.5)
    """Room left in a micro-batch, as a share, so that whole documents always fit."""
    schedule: list[BatchStage] = field(default_factory=list)
    """Stages before the sizes above hold, such as [{until: 1000, tokens_per_step: 16384}]."""
    adapt: bool = True
    """When memory runs out, redo the step in micro-batches of half the size, and try the full size again later."""
    grow_after: int = number(1000, 0)
    """Good steps after which a size that was halved is doubled again; 0: never."""


@dataclass
class ModelConfig:
    """Shape of the denoiser. The preset gives every value that is null."""

    preset: str = choice("small", "tiny", "small", "base", "large", "xlarge", "reference")
    depth: int | None = number(None, 1)
    width: int | None = number(None, 1)
    """Width of the text stream."""
    latent_width: int | None = number(None, 1)
    """Width of the latent stream."""
    num_heads: int | None = number(None, 1)
    head_width: int | None = number(None, 2)
    mlp_ratio: float | None = number(None, 0, above=True)
    time_width: int | None = number(None, 4)
    """Width of the time embedding that modulates both streams."""
    qk_norm: bool = True
    """Queries and keys are normalised before attention."""
    rope_base: float = number(10000.0, 1, above=True)
    length: str = choice("modelled", "modelled", "given")
    """modelled: a head predicts the document length from the noisy latent; given: the user states it."""
    tied_embedding: bool = False
    """The output head reads its matrix from the token embedding: a smaller model, for large vocabularies."""
    unigram_init: bool = True
    """Start the output bias at the log frequency of each token in the training split."""


def _shape(
    depth: int, width: int, latent_width: int, num_heads: int, head_width: int, time_width: int
) -> dict[str, Any]:
    names = ("depth", "width", "latent_width", "num_heads", "head_width", "time_width")
    values = (depth, width, latent_width, num_heads, head_width, time_width)
    return dict(zip(names, values, strict=True)) | {"mlp_ratio": 4.0}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(4, 192, 192, 4, 48, 128),
    "small": _shape(8, 512, 384, 8, 64, 256),
    "base": _shape(12, 768, 384, 12, 64, 384),
    "large": _shape(24, 1024, 512, 16, 64, 512),
    "xlarge": _shape(24, 2048, 512, 16, 128, 512),
    "reference": _shape(24, 1024, 256, 8, 64, 512),
}
"""Shapes by name. `reference` has the text stream of the original research code."""


@dataclass(frozen=True)
class ModelShape:
    """The denoiser's shape with nothing left open."""

    depth: int
    width: int
    latent_width: int
    num_heads: int
    head_width: int
    mlp_ratio: float
    time_width: int
    qk_norm: bool
    rope_base: float
    length: str
    tied_embedding: bool


def resolve_model(model: ModelConfig) -> ModelShape:
    """Fill the values that are null from the preset."""
    preset = PRESETS[model.preset]
    chosen = {item.name: getattr(model, item.name) for item in fields(ModelShape)}
    return ModelShape(**{name: preset[name] if value is None else value for name, value in chosen.items()})


MODES = ("l2t", "t2l", "joint")


@dataclass
class ModeWeights:
    """Share of documents in each mode; a recipe that names some modes gives the others no share."""

    l2t: float = number(1.0, 0)
    t2l: float = number(1.0, 0)
    joint: float = number(1.0, 0)


@dataclass
class StageWeights:
    """Share of documents in each mode during a stage; modes that are not named have none."""

    l2t: float = number(0.0, 0)
    t2l: float = number(0.0, 0)
    joint: float = number(0.0, 0)


@dataclass
class ModeStage:
    """The modes of a part of a run."""

    until: int | None = number(None, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    until_epoch: float | None = number(None, 0, above=True)
    """The same in passes over the documents; all stages are counted one way or the other."""
    mode_weights: StageWeights = field(default_factory=StageWeights)
    """Shares of the modes in this stage."""
    ramp: bool = False
    """Go over to the modes of the next stage little by little, in a straight line, instead of at its end."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the denoiser that get no update meanwhile, as in train.frozen."""


@dataclass
class CorruptionConfig:
    """The forward process: which modes, which times, which noise."""

    mode_weights: ModeWeights = field(default_factory=ModeWeights)
    """Shares of the modes among the documents."""
    condition_dropout: float = number(0.1, 0, 1)
    """Share of l2t and t2l documents whose condition is replaced by pure noise, for guidance; below 1 of whole ones
    alone where the store has derived documents. 1, with l2t alone: a model of text that never sees a latent."""
    text_schedule: str = choice("linear", "linear", "cosine")
    latent_schedule: str = choice("cosine", "cosine", "linear", "flow")
    """cosine, linear: the variance of the noisy latent stays that of the data; flow: a straight line from the latent to
    the noise, as in flow matching."""
    latent_time_power: float = number(1.0, 0, above=True)
    """Latent times are u^power for even u; below 1 more of them are near 1, where only the text gives the latent."""
    prediction_type: str = choice("clean", "clean", "noise", "velocity")
    """What the latent side predicts. velocity: signal * noise - sigma * clean, with the flow schedule noise - clean."""
    mode_choice: str = choice("document", "document", "batch")
    """Who draws a mode by these weights: each document, or each step for all of its documents."""
    mode_schedule: list[ModeStage] = field(default_factory=list)
    """Stages before the weights above hold, such as [{until: 1000, mode_weights: {l2t: 1}}]."""
    mode_repeat: bool = False
    """Continue with the first stage after the last one, without end: the modes alternate."""


def chosen_modes(weights: ModeWeights | StageWeights) -> list[str]:
    """Modes with a weight above 0."""
    return [mode for mode in MODES if getattr(weights, mode) > 0]


def weights_in_force(config: CorruptionConfig) -> list[ModeWeights | StageWeights]:
    """The weights that some part of a run has: those of its stages, and of what follows them unless they repeat."""
    stages: list[ModeWeights | StageWeights] = [stage.mode_weights for stage in config.mode_schedule]
    return stages if stages and config.mode_repeat else [*stages, config.mode_weights]


def leaves_condition_out(config: CorruptionConfig) -> bool:
    """Whether training ever shows one side without the other; guidance compares with that prediction."""
    return config.condition_dropout > 0 or any(weights.joint > 0 for weights in weights_in_force(config))


@dataclass
class ObjectiveConfig:
    """How the parts of the loss are weighted."""

    text_weight: float = number(1.0, 0)
    latent_weight: float = number(1.0, 0)
    length_weight: float = number(0.1, 0)
    text_weighting: str = choice("uniform", "uniform", "bound")
    """uniform: cross-entropy in which every masked token counts the same; bound: the continuous-time bound on the
    likelihood."""
    latent_loss: str = choice("mse", "mse", "cosine", "normalized_mse")
    """How far a predicted latent is from the right one. cosine and normalized_mse: the direction of each slot, and its
    length by least squares; for prediction_type=clean only."""
    balance: str = choice("gradient_norm", "gradient_norm", "fixed")
    """What scales text and latent besides their weights. gradient_norm: factors under which their gradients have norms
    in the ratio of their weights, measured in steps that have both losses; fixed: nothing. Length keeps its weight,
    and validation uses fixed weights."""
    balance_every: int = number(100, 1)
    """Steps between two measurements of the gradient norms, each of which costs about as much as two steps."""


ACCELERATORS = ("cuda", "mps", "xpu")
DEVICE_NAME = re.compile(rf"auto|cpu|({'|'.join(ACCELERATORS)})(:\d+)?")
"""What a device may be called; with an index one of several is meant, as cuda:1."""

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


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Where curves can go, by the names of their packages."""


@dataclass
class TrainConfig:
    """How long, how often, where."""

    steps: int = number(10000, 1)
    seed: int = number(0, 0, 2**62)
    init: str | None = None
    """A run or an export whose averaged weights training starts from, with a fresh optimizer; null: new weights. A run
    that resumes from its own checkpoint does not look at it."""
    device: str = "auto"
    """auto: an accelerator if there is one; cpu, cuda, mps, xpu, or one of several as cuda:1."""
    num_threads: int | None = number(None, 1, 4096)
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
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where the curves go besides training_log.jsonl: tensorboard, wandb, mlflow, trackio, any number of them; [] for
    none. Imported only then, and never asks for an account."""
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


@dataclass
class SpeedConfig:
    """Every speed-up is a switch here; none of them changes the loss beyond rounding."""

    precision: str | None = choice(None, "fp32", "bf16", "fp16", "fp8")
    """Type of the matrix products, weights stay fp32; null: bf16 where a GPU has it, else fp32. fp8: those of the text
    stream inside blocks in 8 bits with a scale for each row, in training alone, everything else bf16; bf16 where the
    device lacks it."""
    compile: bool | None = None
    """torch.compile per block; null: on with a GPU."""
    attention: str = choice("auto", "auto", "tiles", "varlen", "sdpa", "split", "rows", "reference")
    """auto: the fastest by a short measurement that is remembered; tiles: our kernel for short documents;
    varlen: flash; sdpa: cuDNN or flash on documents of equal length, else rows; split: that among tokens alone, latent
    slots merged in by our kernels, in training; rows: padded inside attention only; reference: one dense mask."""
    fused_kernels: bool | None = None
    """Triton kernels for norms, modulation, GELU and the way into attention; null: on where they run."""
    layout: str = choice("packed", "packed", "padded")
    """packed: one stream without padding; padded: the classic rectangular batch, the honest baseline."""
    activation_checkpointing: str = choice("off", "off", "selective", "block", "budget")
    """What the backward pass computes again to save memory. selective: all but matrix products and attention; block:
    each block; budget: a share of the blocks, see activation_budget."""
    activation_budget: float = number(0.5, 0, 1)
    """Share of the blocks that keep their activations under activation_checkpointing=budget."""
    cuda_graphs: bool | None = None
    """Record the work of a micro-batch once and replay it; null: on with a GPU where launching takes half of a
    step or more, which the first steps show; ranks of ddp also time recorded steps."""
    residual: str = choice("fp32", "fp32", "bf16")
    """Type of the residual stream; bf16 takes less memory and time, and rounds after every block."""
    overlap_copies: bool = True
    """Copy the next step to the GPU while the current one is computed."""
    tf32: bool = True
    """Matrix products that stay in fp32 may round their inputs to 19 bits, on a GPU."""
    fused_optimizer: bool = True
    """One kernel for the update of all weights."""
    scored_rows: bool = True
    """The output head sees only the tokens that are scored."""
    chunk_rows: int = number(2048, 1)
    """Rows of logits that exist at a time; a compiled run fills its last chunk up, so that all have one shape."""


@dataclass
class DistributedConfig:
    """Several ranks under torchrun; for one rank nothing here matters but `parallel` and what belongs to it."""

    parallel: str = choice("ddp", "ddp", "fsdp", "hybrid")
    """ddp: every rank holds the whole network; fsdp: weights, gradients, moments and averages are divided among all
    ranks; hybrid: divided among the ranks of a machine, the same on every machine. May change when a run resumes."""
    reshard: bool = True
    """fsdp and hybrid: weights of a block are dropped after its forward pass and gathered again for the backward pass;
    false: kept in between, which saves a third of the traffic and takes the memory of the whole network."""
    gather: str | None = choice(None, "fp32", "bf16", "fp16")
    """fsdp and hybrid: type in which the weights of blocks travel; null: that of matrix products (speed.precision)."""
    cpu_offload: bool = False
    """fsdp and hybrid: weights, gradients, moments and averages stay in host memory, where the update is computed."""
    backend: str | None = choice(None, "nccl", "gloo")
    """null: nccl on GPUs, gloo on CPUs; gloo also lets several ranks share a GPU."""
    timeout_minutes: float = number(30.0, 0, above=True)
    """Timeout of a rank: if one does not answer for this long, the run ends with an error."""
    compression: str = choice("none", "none", "bf16", "fp16")
    """Type in which gradients travel; bf16 and fp16 halve the bytes and round the sum."""
    bucket_mb: float = number(100.0, 0, above=True)
    """ddp: gradients are summed in pieces of this many MiB, beside the backward pass. Under fsdp a piece is a block."""
    static_graph: bool = False
    """ddp: let it assume that every step uses the same parameters in the same way, which holds here; used where the
    first step has one micro-batch a rank."""


@dataclass
class SamplingConfig:
    """Defaults of the samplers; `Model.decode` and its siblings have an argument for each."""

    text_sampler: str = choice("confidence", "confidence", "ancestral", "first_hitting", "margin", "block")
    """confidence, margin: surest tokens first, by two measures; ancestral: the exact reverse process in steps of time;
    first_hitting: the same token by token; block: left to right in blocks."""
    block_length: int = number(32, 1, 1_000_000)
    """Tokens of a block, for the sampler block."""
    latent_sampler: str = choice("ddim", "ddim", "dpmpp_2m", "heun")
    """ddim: first order; dpmpp_2m: second order at the same cost; heun: second order, two passes a step."""
    joint_order: str = choice("text_first", "interleaved", "latent_first", "text_first")
    """Joint sampling: text and latent in turn, or one of them first, from noise alone."""
    joint_sampler: str = choice("ancestral", "confidence", "ancestral", "first_hitting", "margin", "block")
    """Text sampler of joint sampling. Surest tokens first, which suits a given latent, repeats words without one."""
    joint_temperature: float = number(1.0, 0)
    """Temperature of joint sampling."""
    num_sampling_steps: int = number(16, 1, MOST_STEPS)
    num_latent_steps: int = number(16, 1, MOST_STEPS)
    """Steps of the latent in joint sampling."""
    num_encode_steps: int | None = number(None, 1, MOST_STEPS)
    """Steps of t2l. 1 gives the mean of what the model believes, the best embedding; more steps draw one possible
    latent. null: 1, but 16 with a prediction of noise, whose first step determines little of the latent."""
    num_lengths: int = number(3, 1)
    """Likely lengths that are decoded where none is given, at temperature 0; the text is kept beside which the model
    predicts the noisy latent best. Costs so many times one length; 1: the likeliest alone."""
    temperature: float = number(0.0, 0)
    """0: the most probable token always, since a latent has one right text. Pairs from nothing have
    `joint_temperature`."""
    top_p: float = number(1.0, 0, 1, above=True)
    guidance: float = number(1.0, -100, 100)
    """1: none; larger follows the condition more strongly; below 1 less so, below 0 it leads away from it."""


@dataclass
class EvaluationConfig:
    """Size of an evaluation."""

    num_documents: int = number(512, 0)
    """Held-out documents; 0: all."""
    num_decoded: int = number(64, 0)
    """How many of them are decoded into text, which costs most of the time; 0: all."""
    num_draws: int = number(4, 1)
    """Draws of time and noise per document in the text bound, and in the latent bound."""
    step_counts: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    """Numbers of sampling steps at which decoding is measured."""
    length_groups: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Decoding is also reported by length of the text: up to the first number of tokens, up to the next, and longer;
    []: not by length."""
    latent_snr: float = number(100.0, 0, above=True)
    """Largest signal-to-noise ratio of the latent bound: latents are distinguished to 1/sqrt(latent_snr) of
    their spread."""
    num_generated: int = number(64, 0)
    """Pairs generated from nothing; 0: none."""
    candidates: list[int] = field(default_factory=list)
    """Numbers of texts decoded for each latent, of which the one nearest to the latent is kept, such as [1, 4, 16]; []:
    not measured."""
    refine: int = number(0, 0)
    """Rounds that improve what is kept, measured beside none: single tokens are replaced by other probable ones that
    bring the text nearer to the latent; 0: none."""
    candidate_temperature: float = number(1.0, 0, above=True)
    """Of all candidates but the first, which takes the most probable tokens, and of the rounds."""
    check: str = choice("auto", "auto", "model", "encoder")
    """What turns candidates back into latents: the model's own t2l side or the encoder; auto: the model, or the encoder
    where a run has no t2l side."""
    text_samplers: list[str] = field(default_factory=list)
    """Text samplers beside each other; []: the run's own."""
    guidances: list[float] = field(default_factory=list)
    """Strengths of guidance beside each other; []: the run's own."""
    batch_tokens: int = number(8192, 1)


@dataclass
class Config:
    """A whole run."""

    name: str = "run"
    """Runs are in saved/<name> by default."""
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
