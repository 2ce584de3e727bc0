"""Typed settings of a run, each with its meaning and its allowed values.

Each section is a dataclass; `recipe.py` fills them from a YAML recipe and `section.key=value` words and refuses
unknown keys. `find_problems` returns everything that is wrong at once. `null` means "chosen automatically".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

MODES = ("l2t", "t2l", "joint")
PARTS = ("text", "latent", "shared", "token_head", "latent_head", "length_head")
"""Of the denoiser's parameters: both streams, the time embedding that they share, and the heads."""


def _number(
    default: Any, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> Any:
    """A number in [low, high]; `above` and `below` leave out the ends."""
    return field(default=default, metadata={"low": low, "high": high, "above": above, "below": below})


def _choice(default: Any, *allowed: str) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass
class DataConfig:
    """Where the pairs come from and how they are read."""

    store: str = ""
    """Folder of the pair store, relative to where the command is run."""
    train_split: str = "train"
    valid_split: str = "validation"
    num_workers: int | None = _number(None, 0, 256)
    """Loader processes; null: min(8, CPUs // ranks of the machine) on a GPU, 0 on a CPU, where they would compete with
    the model."""
    prefetch: int = _number(4, 1, 64)
    """Steps that each worker prepares ahead."""
    pin_memory: bool | None = None
    """Page-locked host memory for faster copies; null: on with a GPU."""
    worker_timeout: float = _number(300.0, 0)
    """Seconds that loader processes may take for a step before they are started anew; 0: as long as they want."""
    worker_restarts: int = _number(3, 0)
    """Loader processes that died or hung are started anew so often, unless 100 good steps lie between."""


@dataclass
class BatchStage:
    """The batch of the first part of a run; what is null is as in `batch`."""

    until: int = _number(0, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    tokens_per_step: int | None = _number(None, 1)
    documents_per_step: int | None = _number(None, 1)
    micro_tokens: int | None = _number(None, 1)
    micro_documents: int | None = _number(None, 1)


@dataclass
class BatchConfig:
    """What one step trains on: the same documents whatever the number of ranks or micro-batches.

    How many micro-batches a step takes follows from these sizes; gradients are added up over them.
    """

    tokens_per_step: int | None = _number(8192, 1)
    """Documents are taken in order until their tokens would exceed this; null: documents_per_step alone decides."""
    documents_per_step: int | None = _number(None, 1)
    """At most this many documents a step; null: about as many as fit."""
    micro_tokens: int | None = _number(None, 1)
    """Most tokens of a micro-batch on one rank, at least the longest document; null: the whole step at once. More
    micro-batches, same loss."""
    micro_documents: int | None = _number(None, 1)
    """Most documents of a micro-batch on one rank; null: as many as its tokens allow."""
    slack: float = _number(0.01, 0, 0.5)
    """Room left in a micro-batch, as a share, so that whole documents always fit."""
    schedule: list[BatchStage] = field(default_factory=list)
    """Stages before the sizes above hold, such as [{until: 1000, tokens_per_step: 16384}]."""
    adapt: bool = True
    """When memory runs out, redo the step in micro-batches of half the size, and try the full size again later."""
    grow_after: int = _number(1000, 0)
    """Good steps after which a size that was halved is doubled again; 0: never."""


@dataclass
class ModelConfig:
    """Shape of the denoiser. The preset gives every value that is null."""

    preset: str = _choice("small", "tiny", "small", "base", "large", "xlarge", "reference")
    depth: int | None = _number(None, 1)
    width: int | None = _number(None, 1)
    """Width of the text stream."""
    latent_width: int | None = _number(None, 1)
    """Width of the latent stream."""
    num_heads: int | None = _number(None, 1)
    head_width: int | None = _number(None, 2)
    mlp_ratio: float | None = _number(None, 0, above=True)
    time_width: int | None = _number(None, 4)
    """Width of the time embedding that modulates both streams."""
    qk_norm: bool = True
    rope_base: float = _number(10000.0, 1, above=True)
    length: str = _choice("modelled", "modelled", "given")
    """modelled: a head predicts the document length from the noisy latent; given: the user states it."""
    unigram_init: bool = True
    """Start the output bias at the log frequency of each token in the training split."""


@dataclass
class ModeWeights:
    """Share of documents in each mode; a recipe that names some modes gives the others no share."""

    l2t: float = _number(1.0, 0)
    t2l: float = _number(1.0, 0)
    joint: float = _number(1.0, 0)


@dataclass
class StageWeights:
    """Share of documents in each mode during a stage; modes that are not named have none."""

    l2t: float = _number(0.0, 0)
    t2l: float = _number(0.0, 0)
    joint: float = _number(0.0, 0)


@dataclass
class ModeStage:
    """The modes of a part of a run."""

    until: int | None = _number(None, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    until_epoch: float | None = _number(None, 0, above=True)
    """The same in passes over the documents; all stages are counted one way or the other."""
    mode_weights: StageWeights = field(default_factory=StageWeights)
    ramp: bool = False
    """Go over to the modes of the next stage little by little, in a straight line, instead of at its end."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the denoiser that get no update meanwhile, as in train.frozen."""


@dataclass
class CorruptionConfig:
    """The forward process: which modes, which times, which noise."""

    mode_weights: ModeWeights = field(default_factory=ModeWeights)
    condition_dropout: float = _number(0.1, 0, 1, below=True)
    """Share of l2t and t2l documents whose condition is replaced by pure noise, for guidance."""
    text_schedule: str = _choice("linear", "linear", "cosine")
    text_noise: str = _choice("mask", "mask", "hybrid")
    """mask: tokens turn into masks; hybrid: some turn into random tokens first, so that the model learns to find and
    mend wrong ones (GIDD). Sample such a model with sampling.text_sampler=hybrid."""
    uniform_share: float = _number(0.2, 0, 1, above=True, below=True)
    """Share of random tokens among the noise at small times, with hybrid noise; it falls to 0 at time 1."""
    latent_schedule: str = _choice("cosine", "cosine", "linear", "flow")
    """cosine, linear: the variance of the noisy latent stays that of the data; flow: a straight line from the latent to
    the noise, as in flow matching."""
    latent_time_power: float = _number(1.0, 0, above=True)
    """Latent times are u^power for even u; below 1 more of them are near 1, where the text alone tells the latent."""
    prediction_type: str = _choice("clean", "clean", "noise", "velocity")
    """What the latent side predicts. velocity: signal * noise - sigma * clean, with the flow schedule noise - clean."""
    mode_choice: str = _choice("document", "document", "batch")
    """Who draws a mode by these weights: each document, or each step for all of its documents."""
    mode_schedule: list[ModeStage] = field(default_factory=list)
    """Stages before the weights above hold, such as [{until: 1000, mode_weights: {l2t: 1}}]."""
    mode_repeat: bool = False
    """Begin again with the first stage after the last one, for ever: the modes take turns."""


@dataclass
class ObjectiveConfig:
    """How the parts of the loss are weighted."""

    text_weight: float = _number(1.0, 0)
    latent_weight: float = _number(1.0, 0)
    length_weight: float = _number(0.1, 0)
    text_weighting: str = _choice("bound", "bound", "uniform")
    """bound: the continuous-time bound on the likelihood; uniform: cross-entropy in which every masked token counts the
    same, or every token of a noisy text with hybrid noise."""
    latent_loss: str = _choice("mse", "mse", "huber", "cosine", "normalized_mse")
    """How far a predicted latent is from the right one. huber: squared error with a bounded gradient; cosine and
    normalized_mse: the direction of each slot, and its length by least squares; for prediction_type=clean only."""
    huber_scale: float = _number(1.0, 0, above=True)
    """Error of a slot, as root mean square over its channels, beyond which huber grows linearly."""
    latent_weighting: str = _choice("uniform", "uniform", "min_snr")
    """uniform: every latent time counts the same; min_snr: as an error of the clean latent weighs min(SNR, gamma)."""
    min_snr_gamma: float = _number(5.0, 0, above=True)
    """Largest weight of an error of the clean latent under min_snr."""
    balance: str = _choice("fixed", "fixed", "uncertainty", "gradient_norm")
    """What scales text and latent besides their weights. fixed: nothing; uncertainty: a learned log-variance for each
    and for each of eight buckets of its time; gradient_norm: factors under which their gradients have norms in the
    ratio of their weights. Length keeps its weight, and validation knows fixed weights only."""
    balance_every: int = _number(100, 1)
    """Steps between two measurements of the gradient norms, each of which costs about as much as two steps."""


@dataclass
class OptimConfig:
    """The optimizer, the learning-rate schedule and the average of the weights."""

    name: str = _choice("adamw", "adamw", "muon")
    """muon: for the matrices inside blocks; AdamW for all else."""
    muon_momentum: float = _number(0.95, 0, 1, below=True)
    lr: float = _number(5e-4, 0, above=True)
    schedule: str = _choice("cosine", "cosine", "restarts", "wsd", "constant", "plateau")
    """The learning rate after the warm-up. cosine: down to min_lr_ratio at the last step; restarts: the same over and
    over; wsd: stable, then a straight line down over the last decay_share of the steps; constant; plateau: multiplied
    with plateau_factor whenever the loss has stopped falling."""
    min_lr_ratio: float = _number(0.1, 0, 1)
    """Where cosine, restarts and wsd end, as a share of lr."""
    warmup_steps: int = _number(100, 0)
    """Steps in which the rate rises to lr in a straight line, whatever the schedule."""
    restart_period: int = _number(1000, 1)
    """Steps of the first cosine of schedule=restarts."""
    restart_factor: float = _number(1.0, 1, 100)
    """Each further cosine is so many times as long."""
    decay_share: float = _number(0.2, 0, 1, above=True)
    """Share of the steps over which schedule=wsd falls."""
    plateau_patience: int = _number(1000, 1)
    """Steps without a new best loss after which schedule=plateau reduces the rate: valid_loss where the run validates
    on its way, else the mean loss between two lines of the log."""
    plateau_factor: float = _number(0.5, 0, 1, above=True, below=True)
    plateau_min_lr: float = _number(1e-6, 0)
    """The rate is not reduced below this."""
    plateau_threshold: float = _number(0.01, 0, 1, below=True)
    """A loss is a new best one if it is smaller than the best so far by this share."""
    beta1: float = _number(0.9, 0, 1, below=True)
    beta2: float = _number(0.98, 0, 1, below=True)
    eps: float = _number(1e-8, 0, above=True)
    weight_decay: float = _number(0.05, 0)
    clip_norm: float = _number(1.0, 0)
    """Largest norm of the gradient; 0: no clipping."""
    ema_decay: float = _number(0.999, 0, 1, below=True)
    """Decay of the average of the weights; 0: no average is kept."""


@dataclass
class TrainConfig:
    """How long, how often, where."""

    steps: int = _number(10000, 1)
    seed: int = _number(0, 0, 2**62)
    device: str = _choice("auto", "auto", "cpu", "cuda")
    num_threads: int | None = _number(None, 1)
    """CPU threads; null: left to PyTorch."""
    log_every: int = _number(10, 1)
    valid_every: int = _number(500, 0)
    """Steps between validations; 0: only at the end."""
    valid_documents: int = _number(256, 1)
    valid_samples: int = _number(4, 0)
    """Held-out latents decoded into text at each validation."""
    checkpoint_every: int = _number(500, 1)
    keep_checkpoints: int = _number(3, 1)
    """Newest checkpoints that are kept."""
    keep_best: int = _number(0, 0)
    """So many more are kept: those with the smallest valid_loss. Checkpoints must be saved where a run validates."""
    keep_every: int = _number(0, 0)
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    skip_budget: int = _number(50, 1)
    """Updates that may be skipped because their gradient is not finite, in a row or between two lines of the log; then
    the run goes back to the last good checkpoint and leaves out the data since."""
    max_rollbacks: int = _number(3, 0)
    """So often a run may go back; then it ends."""
    rollback_lr_factor: float = _number(1.0, 0, 1, above=True)
    """The learning rate is multiplied with this at each rollback, for the rest of the run."""
    step_timeout: float = _number(1800.0, 0)
    """A step that takes more seconds is reported with the stacks of all threads; compilation, validation and saving do
    not count; 0: off."""
    step_timeout_action: str = _choice("report", "report", "exit")
    """What else happens then; exit: the process ends with exit code 76."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the denoiser that get no update in the whole run: text, latent, shared, token_head, latent_head,
    length_head."""
    tensorboard: bool = True
    profile: bool = False
    """Record a stretch of steps with torch.profiler, into the run's profile folder: trace, top kernels, busy share."""
    profile_wait: int = _number(10, 0)
    """Steps before the profiler starts."""
    profile_warmup: int = _number(10, 1)
    """Steps that the profiler runs without recording."""
    profile_steps: int = _number(20, 1)
    """Steps that are recorded."""
    profile_details: bool = True
    """Record shapes, memory and stacks too; without them the profiler disturbs the run least."""


@dataclass
class SpeedConfig:
    """Every speed-up is a switch here; none of them changes the loss beyond rounding."""

    precision: str | None = _choice(None, "fp32", "bf16", "fp16")
    """Type of the matrix products, weights stay fp32; null: bf16 where a GPU has it, else fp32."""
    compile: bool | None = None
    """torch.compile per block; null: on with a GPU."""
    attention: str = _choice("auto", "auto", "tiles", "varlen", "flex", "sdpa", "rows", "reference")
    """auto: the fastest by a short measurement that is remembered; tiles: our kernel for short documents;
    varlen: flash; flex: FlexAttention; sdpa: cuDNN or flash on documents of equal length, else rows;
    rows: padded inside attention only; reference: one dense mask."""
    fused_kernels: bool | None = None
    """Triton kernels for norms, modulation and the way into attention; null: on where they run."""
    layout: str = _choice("packed", "packed", "padded")
    """packed: one stream without padding; padded: the classic rectangular batch, the honest baseline."""
    activation_checkpointing: str = _choice("off", "off", "selective", "block", "budget")
    """What the backward pass computes again to save memory. selective: all but matrix products and attention; block:
    each block; budget: a share of the blocks, see activation_budget."""
    activation_budget: float = _number(0.5, 0, 1)
    """Share of the blocks that keep their activations under activation_checkpointing=budget."""
    cuda_graphs: bool | None = None
    """Record the work of a micro-batch once and replay it; null: on with a GPU where launching takes longer than
    computing, which the first steps show."""
    residual: str = _choice("fp32", "fp32", "bf16")
    """Type of the residual stream; bf16 takes less memory and time, and rounds after every block."""
    overlap_copies: bool = True
    """Copy the next step to the GPU while the current one is computed."""
    tf32: bool = True
    """Matrix products that stay in fp32 may round their inputs to 19 bits, on a GPU."""
    fused_optimizer: bool = True
    scored_rows: bool = True
    """The output head sees only the tokens that are scored."""
    chunk_rows: int = _number(2048, 1)
    """Rows of logits that exist at a time; a compiled run fills its last chunk up, so that all have one shape."""


@dataclass
class DistributedConfig:
    """Several ranks under torchrun; for one rank nothing here matters."""

    backend: str | None = _choice(None, "nccl", "gloo")
    """null: nccl on GPUs, gloo on CPUs; gloo also lets several ranks share a GPU."""
    timeout_minutes: float = _number(30.0, 0, above=True)
    """A rank that does not answer for so long is given up, and the run ends with a clear line."""
    compression: str = _choice("none", "none", "bf16", "fp16")
    """Type in which gradients travel; bf16 and fp16 halve the bytes and round the sum."""
    bucket_mb: float = _number(100.0, 0, above=True)
    """Gradients are summed in pieces of this many MiB, beside the backward pass."""
    static_graph: bool = False
    """Let DDP assume that every step uses the same parameters in the same way, which holds here; used where the first
    step has one micro-batch a rank."""


@dataclass
class SamplingConfig:
    """Defaults of the samplers; `mmldlm sample` has an option for each."""

    text_sampler: str = _choice(
        "confidence",
        "confidence",
        "ancestral",
        "first_hitting",
        "entropy",
        "margin",
        "block",
        "remask",
        "hybrid",
    )
    """confidence, entropy, margin: surest tokens first, by three measures; ancestral: the exact reverse process in
    steps of time; first_hitting: the same token by token; block: left to right in blocks; remask: corrects itself;
    hybrid: for corruption.text_noise=hybrid, which has no other."""
    block_length: int = _number(32, 1)
    """Tokens of a block, for the sampler block."""
    remask_share: float = _number(0.1, 0, 1)
    """Share of the unmasked tokens that the sampler remask masks again at each step."""
    latent_sampler: str = _choice("ddim", "ddim", "dpmpp_2m", "heun")
    """ddim: first order; dpmpp_2m: second order at the same cost; heun: second order, two passes a step."""
    joint_order: str = _choice("interleaved", "interleaved", "latent_first", "text_first")
    """Joint sampling: text and latent in turn, or one of them first, from noise alone."""
    num_sampling_steps: int = _number(16, 1)
    num_latent_steps: int = _number(16, 1)
    """Steps of the latent in joint sampling."""
    num_encode_steps: int | None = _number(None, 1)
    """Steps of t2l. 1 gives the mean of what the model believes, the best embedding; more steps draw one possible
    latent. null: 1, but 16 where the first step says little about the latent: with a prediction of noise, and with
    min_snr, which does not train it."""
    temperature: float = _number(1.0, 0)
    """0: the most probable token always."""
    top_p: float = _number(1.0, 0, 1, above=True)
    guidance: float = _number(1.0, -100, 100)
    """1: none; larger follows the condition more strongly; below 1 less so, below 0 it leads away from it."""


@dataclass
class EvaluationConfig:
    """Size of an evaluation."""

    num_documents: int = _number(512, 0)
    """Held-out documents; 0: all."""
    num_decoded: int = _number(64, 0)
    """How many of them are decoded into text, which costs most of the time; 0: all."""
    num_draws: int = _number(4, 1)
    """Draws of time and noise per document in the text bound, and in the latent bound."""
    step_counts: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    """Numbers of sampling steps at which decoding is measured."""
    length_groups: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Decoding is also told by length of the text: up to the first number of tokens, up to the next, and longer; []:
    not by length."""
    latent_snr: float = _number(100.0, 0, above=True)
    """Largest signal-to-noise ratio of the latent bound: latents are told apart to 1/sqrt(latent_snr) of their
    spread."""
    num_generated: int = _number(64, 0)
    """Pairs generated from nothing; 0: none."""
    batch_tokens: int = _number(8192, 1)


@dataclass
class Config:
    """A whole run."""

    name: str = "run"
    """Runs live in saved/<name> unless told otherwise."""
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


def resolve_model(model: ModelConfig) -> ModelShape:
    """Fill the values that are null from the preset."""
    preset = PRESETS[model.preset]
    chosen = {item.name: getattr(model, item.name) for item in fields(ModelShape)}
    return ModelShape(**{name: preset[name] if value is None else value for name, value in chosen.items()})


def find_problems(config: Config) -> list[str]:
    """Everything that is wrong with the values, each as `section.key=value: what is allowed`."""
    return [*_field_problems(config, ""), *_joint_problems(config)]


def _field_problems(section: Any, prefix: str) -> list[str]:
    found: list[str] = []
    for item in fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        if is_dataclass(value):
            found += _field_problems(value, f"{key}.")
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                found += _field_problems(entry, f"{key}[{number}].") if is_dataclass(entry) else []
        elif value is not None and "allowed" in item.metadata and value not in item.metadata["allowed"]:
            found.append(f"{key}={value}: allowed are {', '.join(item.metadata['allowed'])}")
        elif value is not None and "low" in item.metadata:
            found += _range_problem(key, value, **item.metadata)
    return found


def _range_problem(
    key: str, value: float, low: float, high: float = math.inf, above: bool = False, below: bool = False
) -> list[str]:
    too_low = value <= low if above else value < low
    too_high = value >= high if below else value > high
    if not (too_low or too_high or math.isnan(value) or math.isinf(value)):
        return []
    limits = [f"{'more than' if above else 'at least'} {low:g}"]
    if high < math.inf:
        limits.append(f"{'less than' if below else 'at most'} {high:g}")
    return [f"{key}={value}: allowed is {' and '.join(limits)}"]


def _joint_problems(config: Config) -> list[str]:
    """What a single field cannot tell."""
    found: list[str] = []
    if not config.name or "/" in config.name or config.name.startswith("."):
        found.append(f"name={config.name!r}: a plain folder name is needed")
    if not config.data.store:
        found.append("data.store is not set: give the folder of a pair store, made by 'mmldlm prepare'")
    if config.model.head_width is not None and config.model.head_width % 2:
        found.append(
            f"model.head_width={config.model.head_width}: an even number is needed, rotary positions turn pairs"
        )
    if config.model.time_width is not None and config.model.time_width % 4:
        found.append(f"model.time_width={config.model.time_width}: a multiple of 4 is needed, for two times")
    if sum(getattr(config.corruption.mode_weights, mode) for mode in MODES) <= 0:
        found.append("corruption.mode_weights: at least one mode needs a weight above 0")
    found += _mode_problems(config)
    if config.speed.layout == "padded" and config.speed.attention in ("tiles", "varlen", "flex"):
        found.append(
            f"speed.attention={config.speed.attention}: needs speed.layout=packed; "
            f"a padded batch is attended to by rows"
        )
    found += _batch_problems(config.batch)
    found += _objective_problems(config)
    found += _optim_problems(config.optim)
    found += _plateau_problems(config)
    found += _balance_problems(config)
    every, valid = config.train.checkpoint_every, config.train.valid_every
    if config.train.keep_best and (not valid or valid % every):
        found.append(
            f"train.keep_best={config.train.keep_best}: train.valid_every={valid} must be a multiple of "
            f"train.checkpoint_every={every}, so that there is a checkpoint at each validation"
        )
    if not config.evaluation.step_counts or min(config.evaluation.step_counts) < 1:
        found.append(
            f"evaluation.step_counts={config.evaluation.step_counts}: a list of numbers from 1 is needed"
        )
    if config.evaluation.length_groups and min(config.evaluation.length_groups) < 1:
        found.append(
            f"evaluation.length_groups={config.evaluation.length_groups}: numbers of tokens from 1 are needed"
        )
    return found


def _objective_problems(config: Config) -> list[str]:
    found: list[str] = []
    loss, kind = config.objective.latent_loss, config.corruption.prediction_type
    if loss in ("cosine", "normalized_mse") and kind != "clean":
        found.append(
            f"objective.latent_loss={loss}: needs corruption.prediction_type=clean, not {kind}; the length of a "
            f"predicted {kind} matters, and without it no sampler's formula would hold"
        )
    if config.corruption.text_noise == "hybrid" and config.sampling.text_sampler != "hybrid":
        found.append(
            f"sampling.text_sampler={config.sampling.text_sampler}: assumes that all noise is masks; "
            f"corruption.text_noise=hybrid needs sampling.text_sampler=hybrid"
        )
    return found


def _batch_problems(batch: BatchConfig) -> list[str]:
    found: list[str] = []
    ends = [stage.until for stage in batch.schedule]
    if ends != sorted(set(ends)):
        found.append(f"batch.schedule: the stages end at {ends}; each must end after the one before it")
    if batch.tokens_per_step is None and batch.documents_per_step is None:
        found.append("batch.tokens_per_step=null: then batch.documents_per_step is needed")
    return found


def _optim_problems(optim: OptimConfig) -> list[str]:
    if optim.schedule == "plateau" and optim.plateau_min_lr >= optim.lr:
        return [
            f"optim.plateau_min_lr={optim.plateau_min_lr}: less than optim.lr={optim.lr} is needed, or the rate could "
            f"never be reduced"
        ]
    return []


def _plateau_problems(config: Config) -> list[str]:
    """A training loss whose modes change cannot be compared with an earlier one."""
    train, corruption = config.train, config.corruption
    num_modes = sum(getattr(corruption.mode_weights, mode) > 0 for mode in MODES)
    changing = bool(corruption.mode_schedule) or (corruption.mode_choice == "batch" and num_modes > 1)
    if config.optim.schedule != "plateau" or 0 < train.valid_every < train.steps or not changing:
        return []
    return [
        f"optim.schedule=plateau: the modes change from step to step, and training losses of different modes cannot be "
        f"compared; let the run validate on its way: train.valid_every={train.valid_every} must be from 1 to "
        f"{train.steps - 1}"
    ]


def _balance_problems(config: Config) -> list[str]:
    """Whether there is something to balance."""
    corruption, objective = config.corruption, config.objective
    modes: list[ModeWeights | StageWeights] = [stage.mode_weights for stage in corruption.mode_schedule]
    if not (modes and corruption.mode_repeat):
        modes.append(corruption.mode_weights)
    text = any(at.l2t + at.joint > 0 for at in modes) and objective.text_weight > 0
    latent = any(at.t2l + at.joint > 0 for at in modes) and objective.latent_weight > 0
    least = {"fixed": 0, "uncertainty": 1, "gradient_norm": 2}.get(objective.balance, 0)
    if text + latent >= least:
        return _measure_problems(config) if least == 2 else []
    needed = "a loss on text and one on latents are" if least == 2 else "a loss on text or on latents is"
    return [
        f"objective.balance={objective.balance}: {needed} needed, each with a weight and a mode that has it; "
        f"objective.balance=fixed goes without"
    ]


def _measure_problems(config: Config) -> list[str]:
    """Gradient norms are compared where one step has both losses and they share a part that is trained."""
    corruption = config.corruption
    stages: list[tuple[ModeWeights | StageWeights, list[str]]] = [
        (stage.mode_weights, stage.frozen) for stage in corruption.mode_schedule
    ]
    if not (stages and corruption.mode_repeat):
        stages.append((corruption.mode_weights, []))
    by_step = corruption.mode_choice == "batch"
    for number, (at, frozen) in enumerate(stages):
        ramps = number < len(corruption.mode_schedule) and corruption.mode_schedule[number].ramp
        after = stages[(number + 1) % len(stages)][0] if ramps else at
        l2t, t2l, joint = (getattr(at, mode) + getattr(after, mode) > 0 for mode in MODES)
        if (joint or (l2t and t2l and not by_step)) and {"text", "latent", "shared"} - {
            *frozen,
            *config.train.frozen,
        }:
            return []
    return [
        "objective.balance=gradient_norm: no step has both losses on a part that is not frozen, so their gradients can "
        "never be compared; give a stage both l2t and t2l (unless corruption.mode_choice=batch) or joint, or use "
        "objective.balance=uncertainty"
    ]


def _mode_problems(config: Config) -> list[str]:
    """Stages that cannot be, and stages in which nothing would be trained."""
    corruption, stages = config.corruption, config.corruption.mode_schedule
    found = _stage_end_problems(corruption)
    for name, parts in _frozen_lists(config).items():
        found += [
            f"{name}: {part!r} is no part; allowed are {', '.join(PARTS)}"
            for part in parts
            if part not in PARTS
        ]
    for number, stage in enumerate(stages):
        name, weights = f"corruption.mode_schedule[{number}]", stage.mode_weights
        if weights.l2t + weights.t2l + weights.joint <= 0:
            found.append(f"{name}.mode_weights: at least one mode needs a weight above 0")
        elif not _trains(config, weights, [*stage.frozen, *config.train.frozen]):
            found.append(
                f"{name}: no loss of its modes reaches a part that is not frozen; nothing would be trained"
            )
    last = corruption.mode_weights
    if (stages and corruption.mode_repeat) or _trains(config, last, config.train.frozen):
        return found
    if _trains(config, last, []):
        return [
            *found,
            f"train.frozen={config.train.frozen}: no loss reaches any other part; nothing would be trained",
        ]
    reason = "no part of the loss has a weight above 0 in the chosen modes; nothing would be trained"
    return [*found, f"objective: {reason}"]


def _stage_end_problems(corruption: CorruptionConfig) -> list[str]:
    stages = corruption.mode_schedule
    if corruption.mode_repeat and not stages:
        return ["corruption.mode_repeat=True: there are no stages to repeat; give corruption.mode_schedule"]
    by_step, by_epoch = [s.until for s in stages], [s.until_epoch for s in stages]
    whole = [ends for ends in (by_step, by_epoch) if None not in ends]
    other = [end for ends in (by_step, by_epoch) if None in ends for end in ends if end is not None]
    if stages and (len(whole) != 1 or other):
        return [
            "corruption.mode_schedule: every stage needs an end, either all 'until' (a step) or all 'until_epoch'"
        ]
    ends = whole[0] if stages else []
    if ends != sorted(set(ends)):  # type: ignore[type-var]
        return [f"corruption.mode_schedule: the stages end at {ends}; each must end after the one before it"]
    return []


def _frozen_lists(config: Config) -> dict[str, list[str]]:
    """Where parts are named, and which."""
    stages = enumerate(config.corruption.mode_schedule)
    named = {f"corruption.mode_schedule[{number}].frozen": stage.frozen for number, stage in stages}
    return {"train.frozen": config.train.frozen} | named


def _trains(config: Config, modes: ModeWeights | StageWeights, frozen: list[str]) -> bool:
    """Whether some loss of these modes reaches a part of the denoiser that is not frozen."""
    weights = config.objective
    text, latent = modes.l2t + modes.joint > 0, modes.t2l + modes.joint > 0
    inner = {"text", "latent", "shared"}
    reached: set[str] = set()
    if text and weights.text_weight > 0:
        reached |= inner | {"token_head"}
    if latent and weights.latent_weight > 0:
        reached |= inner | {"latent_head"}
    if text and weights.length_weight > 0 and config.model.length == "modelled":
        reached |= {"length_head"}
    return bool(reached - set(frozen))
