"""Typed settings of a run, each with its meaning and its allowed values.

Each section is a dataclass; `recipe.py` fills them from a YAML recipe and `section.key=value` words and refuses
unknown keys. `find_problems` returns everything that is wrong at once. `null` means "chosen automatically".
"""

from mmldlm.config.checks import find_problems
from mmldlm.config.corruption import (
    MODES,
    CorruptionConfig,
    ModeStage,
    ModeWeights,
    StageWeights,
    leaves_condition_out,
    weights_in_force,
)
from mmldlm.config.data import BatchConfig, BatchStage, DataConfig
from mmldlm.config.model import PRESETS, ModelConfig, ModelShape, resolve_model
from mmldlm.config.objective import ObjectiveConfig
from mmldlm.config.run import Config
from mmldlm.config.speed import DistributedConfig, SpeedConfig
from mmldlm.config.train import PARTS, OptimConfig, TrainConfig
from mmldlm.config.use import EvaluationConfig, SamplingConfig

__all__ = [
    "MODES",
    "PARTS",
    "PRESETS",
    "BatchConfig",
    "BatchStage",
    "Config",
    "CorruptionConfig",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "ModeStage",
    "ModeWeights",
    "ModelConfig",
    "ModelShape",
    "ObjectiveConfig",
    "OptimConfig",
    "SamplingConfig",
    "SpeedConfig",
    "StageWeights",
    "TrainConfig",
    "find_problems",
    "leaves_condition_out",
    "resolve_model",
    "weights_in_force",
]
