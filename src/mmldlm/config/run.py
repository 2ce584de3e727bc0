"""All sections of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.config.corruption import CorruptionConfig
from mmldlm.config.data import BatchConfig, DataConfig
from mmldlm.config.model import ModelConfig
from mmldlm.config.objective import ObjectiveConfig
from mmldlm.config.speed import DistributedConfig, SpeedConfig
from mmldlm.config.train import OptimConfig, TrainConfig
from mmldlm.config.use import EvaluationConfig, SamplingConfig


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
