"""What a user may choose about sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mmldlm.config import Config, DataConfig, SamplingConfig, find_problems
from mmldlm.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of the samplers (see `SamplingConfig`), the seed, and how much is sampled at a time."""

    text_sampler: str = "confidence"
    block_length: int = 32
    latent_sampler: str = "ddim"
    joint_order: str = "interleaved"
    num_sampling_steps: int = 16
    num_latent_steps: int = 16
    num_encode_steps: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    guidance: float = 1.0
    seed: int = 0
    batch_tokens: int = 8192
    """Tokens and latent slots that are sampled at a time; changes speed and memory, never a sample."""

    def __post_init__(self) -> None:
        config = SamplingConfig(**{item.name: getattr(self, item.name) for item in fields(SamplingConfig)})
        checked = Config(data=DataConfig(store="not read here"), sampling=config)
        problems = [problem.removeprefix("sampling.") for problem in find_problems(checked)]
        problems += [
            f"{name}={value}: allowed is at least {low}"
            for name, value, low in (("seed", self.seed, 0), ("batch_tokens", self.batch_tokens, 1))
            if value < low
        ]
        if problems:
            raise UserError("; ".join(problems))

    @classmethod
    def from_config(cls, config: SamplingConfig, **changes: Any) -> SamplingOptions:
        """The defaults of a run, some of them changed."""
        return cls(**(asdict(config) | changes))
