"""What the benchmark asks of a fresh process, and what it gets back; both travel as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True)
class Job:
    """One measurement in one process."""

    recipe: str
    settings: tuple[str, ...]
    """`section.key=value` words; later ones win."""
    steps: int
    """Timed steps; 0: none, only the losses."""
    warmup: int
    block: int
    """Steps between two looks at the clock."""
    gate_steps: int = 0
    """Steps at the start whose losses are read one by one; never timed."""
    memory_limit: int | None = None
    """Bytes: of the GPU, or of the process where there is none."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The reverse."""
        return cls(**values | {"settings": tuple(values["settings"])})


@dataclass
class Block:
    """Some consecutive steps between two looks at the clock, the device idle at both."""

    steps: int = 0
    seconds: float = 0.0
    documents: int = 0
    tokens: int = 0
    """Real tokens, without padding."""
    places: int = 0
    """Room for tokens, padding included."""
    flops: float = 0.0
    """Of forward and backward, for real tokens."""

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Memory:
    """Peak bytes."""

    allocated: int | None = None
    """On the GPU, in tensors; null without one."""
    reserved: int | None = None
    """On the GPU, taken by the allocator; null without one."""
    resident: int = 0
    """Of the process, on the host."""

    @property
    def peak(self) -> int:
        """The figure to compare: tensors on the GPU, else the process."""
        return self.resident if self.allocated is None else self.allocated


@dataclass
class Measurement:
    """What one process measured."""

    device: str
    precision: str
    attention: str
    compiled: bool
    set_up_seconds: float
    first_step_seconds: float = 0.0
    warmup_seconds: float = 0.0
    """The steps before the clock: compilation, caches, the steps of the loss gate and the held-out loss after them."""
    losses: list[float | None] = field(default_factory=list)
    """Of the first steps; null where a loss was not finite."""
    valid_loss: float | None = None
    """Held-out loss after them; null without a gate, or where it was not finite."""
    blocks: list[Block] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    data_wait: float = 0.0
    """Share of the timed steps in which the device waited for data."""
    warnings: list[str] = field(default_factory=list)
    """What the engine said, such as that it went on without a switch."""
    peak_flops: float | None = None
    """What the device could do per second in this precision; null where that is not known."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The reverse."""
        known = {item.name: values[item.name] for item in fields(cls)}
        blocks = [Block(**block) for block in values["blocks"]]
        return cls(**known | {"blocks": blocks, "memory": Memory(**values["memory"])})
