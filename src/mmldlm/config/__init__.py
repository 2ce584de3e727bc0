"""Typed settings of a run, each with its meaning and its allowed values: `settings`, `checks`, `recipe`."""

# ruff: noqa: F401 (names for other rooms)
from mmldlm.config.checks import find_problems
from mmldlm.config.settings import (
    ACCELERATORS,
    DEVICE_NAME,
    MODES,
    PARTS,
    PRESETS,
    BatchConfig,
    BatchStage,
    Config,
    CorruptionConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    ModelConfig,
    ModelShape,
    ModeStage,
    ModeWeights,
    ObjectiveConfig,
    OptimConfig,
    SamplingConfig,
    SpeedConfig,
    StageWeights,
    TrainConfig,
    chosen_modes,
    leaves_condition_out,
    resolve_model,
    weights_in_force,
)
