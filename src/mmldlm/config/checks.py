"""What is wrong with the values of a run, all problems together."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from mmldlm.config.settings import (
    ACCELERATORS,
    DEVICE_NAME,
    PARTS,
    TRACKERS,
    BatchConfig,
    Config,
    CorruptionConfig,
    DistributedConfig,
    ModeWeights,
    SamplingConfig,
    StageWeights,
    chosen_modes,
    leaves_condition_out,
    weights_in_force,
)


def find_problems(config: Config) -> list[str]:
    """Everything that is wrong with the values, each as `section.key=value: what is allowed`."""
    return [*field_problems(config, ""), *_joint_problems(config)]


def field_problems(section: Any, prefix: str = "") -> list[str]:
    """Values of a section that its own fields do not allow; one line for each."""
    problems: list[str] = []
    for item in fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        if is_dataclass(value):
            problems += field_problems(value, f"{key}.")
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                problems += field_problems(entry, f"{key}[{number}].") if is_dataclass(entry) else []
        elif value is not None and "allowed" in item.metadata and value not in item.metadata["allowed"]:
            problems.append(f"{key}={str(value)[:80]}: allowed are {', '.join(item.metadata['allowed'])}")
        elif value is not None and "low" in item.metadata:
            problems += _range_problem(key, value, **item.metadata)
    return problems


def _range_problem(
    key: str, value: float, low: float, high: float = math.inf, above: bool = False, below: bool = False
) -> list[str]:
    too_low = value <= low if above else value < low
    too_high = value >= high if below else value > high
    if not (too_low or too_high or math.isnan(value) or math.isinf(value)):
        return []
    limits = [f"{'more than' if above else 'at least'} {_plain(low)}"]
    if math.isinf(value) and high == math.inf:
        limits.append("finite")
    if high < math.inf:
        limits.append(f"{'less than' if below else 'at most'} {_plain(high)}")
    return [f"{key}={value}: allowed is {' and '.join(limits)}"]


def _plain(limit: float) -> str:
    """A whole number with all of its digits."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _joint_problems(config: Config) -> list[str]:
    """Problems between several settings."""
    train, model, evaluation = config.train, config.model, config.evaluation
    every, valid = train.checkpoint_every, train.valid_every
    names = ", ".join(ACCELERATORS)
    problems = {
        f"name={config.name[:80]!r}: a plain folder name is needed": (
            not config.name or "/" in config.name or config.name.startswith(".")
        ),
        "data.store is not set: give the folder of a pair store, made by 'mmldlm prepare'": not config.data.store,
        f"train.device={train.device[:80]}: allowed are auto, cpu, {names}, or cuda:1": (
            not DEVICE_NAME.fullmatch(train.device)
        ),
        **{
            f"train.trackers: {name!r}: allowed are {', '.join(TRACKERS)}": name not in TRACKERS
            for name in train.trackers
        },
        f"model.head_width={model.head_width}: an even number is needed, rotary positions turn pairs": (
            (model.head_width or 0) % 2 > 0
        ),
        f"model.time_width={model.time_width}: a multiple of 4 is needed, for two times": (
            (model.time_width or 0) % 4 > 0
        ),
        "corruption.mode_weights: at least one mode needs a weight above 0": (
            not chosen_modes(config.corruption.mode_weights)
        ),
        **dict.fromkeys(_mode_problems(config), True),
        **_text_problems(config),
        **_batch_problems(config.batch),
        **_objective_problems(config),
        **_parallel_problems(config),
        f"train.keep_best={train.keep_best}: train.valid_every={valid} must be a multiple of train.checkpoint_every="
        f"{every}, so that there is a checkpoint at each validation": bool(
            train.keep_best and (not valid or valid % every)
        ),
        **_decoding_problems(config),
        f"evaluation.step_counts={evaluation.step_counts}: a list of numbers from 1 is needed": (
            min(evaluation.step_counts, default=0) < 1
        ),
        f"evaluation.length_groups={evaluation.length_groups}: numbers of tokens from 1 are needed": (
            min(evaluation.length_groups, default=1) < 1
        ),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _text_problems(config: Config) -> dict[str, bool]:
    """A model of text alone has no other mode; a padded batch is attended to by rows."""
    corruption, attention = config.corruption, config.speed.attention
    others = any(weights.t2l or weights.joint for weights in weights_in_force(corruption))
    return {
        f"corruption.condition_dropout={corruption.condition_dropout:g}: needs l2t as the only mode "
        "(corruption.mode_weights={l2t: 1}), which makes a model of text alone; with others use less than 1": (
            corruption.condition_dropout >= 1 and others
        ),
        f"speed.attention={attention}: needs speed.layout=packed; a padded batch is attended to by rows": (
            config.speed.layout == "padded" and attention in ("tiles", "varlen", "split")
        ),
    }


def _batch_problems(batch: BatchConfig) -> dict[str, bool]:
    ends = [stage.until for stage in batch.schedule]
    return {
        f"batch.schedule: the stages end at {ends}; each must end after the one before it": ends
        != sorted(set(ends)),
        "batch.tokens_per_step=null: then batch.documents_per_step is needed": (
            batch.tokens_per_step is None and batch.documents_per_step is None
        ),
    }


def _objective_problems(config: Config) -> dict[str, bool]:
    """A loss that does not suit what is predicted; a plateau of losses that cannot be compared; guidance."""
    loss, kind, optim, train = (
        config.objective.latent_loss, config.corruption.prediction_type, config.optim, config.train,
    )  # fmt: skip
    corruption, guidance = config.corruption, config.sampling.guidance
    num_modes = len(chosen_modes(corruption.mode_weights))
    changing = bool(corruption.mode_schedule) or (corruption.mode_choice == "batch" and num_modes > 1)
    plateau = optim.schedule == "plateau"
    return {
        f"objective.latent_loss={loss}: needs corruption.prediction_type=clean, not {kind}; the length of a "
        f"predicted {kind} matters, and without it no sampler's formula would hold": (
            loss in ("cosine", "normalized_mse") and kind != "clean"
        ),
        f"optim.plateau_min_lr={optim.plateau_min_lr}: less than optim.lr={optim.lr} is needed, or the rate could "
        "never be reduced": plateau and optim.plateau_min_lr >= optim.lr,
        "optim.schedule=plateau: the modes change from step to step, and training losses of different modes cannot be "
        f"compared; let the run validate on its way: train.valid_every={train.valid_every} must be from 1 to "
        f"{train.steps - 1}": plateau and changing and not 0 < train.valid_every < train.steps,
        f"sampling.guidance={guidance}: compares with the prediction without the condition, which this run never "
        "trains (no joint mode, and corruption.condition_dropout=0); use 1, or give it one of them": (
            guidance != 1.0 and not leaves_condition_out(corruption)
        ),
    }


def _parallel_problems(config: Config) -> dict[str, bool]:
    """Settings of one kind of parallelism under another."""
    chosen, default = config.distributed, DistributedConfig()
    foreign, needed = ["static_graph"], "distributed.parallel=ddp"
    if chosen.parallel == "ddp":
        foreign, needed = ["reshard", "gather", "cpu_offload"], "distributed.parallel=fsdp or hybrid"
    return {
        f"distributed.{name}={getattr(chosen, name)}: needs {needed}": getattr(chosen, name)
        != getattr(default, name)
        for name in foreign
    }


def _decoding_problems(config: Config) -> dict[str, bool]:
    """What is wrong with the ways to decode that an evaluation compares."""
    evaluation = config.evaluation
    known = next(item for item in fields(SamplingConfig) if item.name == "text_sampler").metadata["allowed"]
    return {
        f"evaluation.candidates={evaluation.candidates}: numbers of texts from 1 are needed, such as [1, 4, 16]": (
            min(evaluation.candidates, default=1) < 1
        ),
        f"evaluation.guidances={evaluation.guidances}: allowed is at least -100 and at most 100 for each": (
            not all(-100 <= guidance <= 100 for guidance in evaluation.guidances)
        ),
        **{
            f"evaluation.text_samplers: {name!r} is no text sampler; allowed are {', '.join(known)}": name
            not in known
            for name in evaluation.text_samplers
        },
    }


def _mode_problems(config: Config) -> list[str]:
    """Stages that cannot be, and stages in which nothing would be trained."""
    corruption, stages = config.corruption, config.corruption.mode_schedule
    problems = _stage_end_problems(corruption)
    for name, parts in _frozen_lists(config).items():
        problems += [
            f"{name}: {part!r} is no part; allowed are {', '.join(PARTS)}"
            for part in parts
            if part not in PARTS
        ]
    for number, stage in enumerate(stages):
        name, weights = f"corruption.mode_schedule[{number}]", stage.mode_weights
        if not chosen_modes(weights):
            problems.append(f"{name}.mode_weights: at least one mode needs a weight above 0")
        elif not _trains(config, weights, [*stage.frozen, *config.train.frozen]):
            problems.append(
                f"{name}: no loss of its modes reaches a part that is not frozen; nothing would be trained"
            )
    last = corruption.mode_weights
    if (stages and corruption.mode_repeat) or _trains(config, last, config.train.frozen):
        return problems
    if _trains(config, last, []):
        return [
            *problems,
            f"train.frozen={config.train.frozen}: no loss reaches any other part; nothing would be trained",
        ]
    reason = "no part of the loss has a weight above 0 in the chosen modes; nothing would be trained"
    return [*problems, f"objective: {reason}"]


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
