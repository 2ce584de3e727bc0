"""What is compared: the ladder of switches as data, arms of one's own, the values of a sweep; and random documents.

An arm names the value of every switch, so it means the same under any recipe. The ladder begins as the old code
was (padded, eager, every logit, fp32), turns on one switch after the other, and ends with everything; then each
switch is left out once, and what trades speed for memory is tried on top of everything.

The ladder `plan` has the steps of the users' plan in their order, each on top of the one before, with what they
expected. Its baseline is how the research code trained: padded, eager, every logit, bf16 on a GPU, no loader processes,
a step in four micro-batches. No step changes what is trained, so every arm passes through the loss gate. Steps that
this machine cannot run keep their row, which says why.

Pair stores of random documents are made once per description and kept in the cache. Times and memory depend on their
lengths alone. The writer recognises a finished or a half-made store, so a benchmark that was stopped continues it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.config import BatchConfig
from mmldlm.data.format import checksum
from mmldlm.data.writer import StoreWriter, store_state
from mmldlm.errors import UserError
from mmldlm.runtime import spare_workers

BASELINE, EVERYTHING, AGAIN = "baseline", "everything", "again"
LADDERS = ("full", "short", "plan", "none")


@dataclass(frozen=True)
class Expected:
    """What a plan hoped for, as shares of its baseline."""

    speed: float
    memory: float


@dataclass(frozen=True)
class Arm:
    """Settings under a name."""

    name: str
    settings: tuple[str, ...] = ()
    change: str = ""
    """What differs from the arm it builds on, for people."""
    gpu_only: bool = False
    absent: str = ""
    """Why it cannot run on this machine; its row says so."""
    expected: Expected | None = None

    @property
    def comparable(self) -> bool:
        """Whether its losses must be those of the reference: only how the work is done differs, not what is done."""
        same = (
            "speed.",
            "data.num_workers=",
            "data.prefetch=",
            "data.pin_memory=",
            "batch.micro_",
            "batch.adapt=",
        )
        return all(word.startswith(same) for word in self.settings)


@dataclass(frozen=True)
class Switch:
    """One speed-up: how it is turned off and on."""

    name: str
    off: str
    on: str
    gpu_only: bool = False


SWITCHES = (
    Switch("tf32", "speed.tf32=false", "speed.tf32=true", gpu_only=True),
    Switch("bf16", "speed.precision=fp32", "speed.precision=bf16", gpu_only=True),
    Switch("packed", "speed.layout=padded", "speed.layout=packed"),
    Switch("attention", "speed.attention=rows", "speed.attention=auto", gpu_only=True),
    Switch("scored rows", "speed.scored_rows=false", "speed.scored_rows=true"),
    Switch("compile", "speed.compile=false", "speed.compile=true"),
    Switch("fused optimizer", "speed.fused_optimizer=false", "speed.fused_optimizer=true"),
    Switch("fused kernels", "speed.fused_kernels=false", "speed.fused_kernels=true", gpu_only=True),
    Switch("overlap copies", "speed.overlap_copies=false", "speed.overlap_copies=true", gpu_only=True),
    Switch("cuda graphs", "speed.cuda_graphs=false", "speed.cuda_graphs=true", gpu_only=True),
)
PLAIN = ("speed.activation_checkpointing='off'",)  # bare, YAML would read a truth value
VARIANTS = (
    Arm("checkpointing selective", ("speed.activation_checkpointing=selective",)),
    Arm("checkpointing block", ("speed.activation_checkpointing=block",)),
    Arm("checkpointing budget", ("speed.activation_checkpointing=budget",)),
    Arm("attention tiles", ("speed.attention=tiles",), gpu_only=True),
    Arm("attention varlen", ("speed.attention=varlen",), gpu_only=True),
    Arm("attention sdpa", ("speed.attention=sdpa",)),
)


def reference_settings() -> tuple[str, ...]:
    """Every switch off: the plain fp32 path that all losses are compared with."""
    return (*(switch.off for switch in SWITCHES), *PLAIN)


def ladder(kind: str, on_gpu: bool) -> list[Arm]:
    """The arms of a ladder; those that need a GPU are marked, and on a CPU no other arm turns such a switch on."""
    if kind == "none":
        return []
    climbed = _rungs(on_gpu)
    if kind == "short":
        return [climbed[0], *(arm for arm in climbed if arm.name in ("bf16", EVERYTHING))]
    defaults = Arm("defaults", (), "what the recipe gives by itself")
    return _without_twins([*climbed, defaults, *_left_out(on_gpu), *_variants(on_gpu)])


def _settings(on: set[str]) -> tuple[str, ...]:
    return (*(switch.on if switch.name in on else switch.off for switch in SWITCHES), *PLAIN)


def _usable(on_gpu: bool) -> list[Switch]:
    return [switch for switch in SWITCHES if on_gpu or not switch.gpu_only]


def _rungs(on_gpu: bool) -> list[Arm]:
    arms = [Arm(BASELINE, reference_settings(), "padded, eager, unfused, every logit, fp32")]
    on: set[str] = set()
    for switch in SWITCHES:
        if switch.gpu_only and not on_gpu:
            arms.append(Arm(switch.name, _settings(on | {switch.name}), f"+ {switch.on}", gpu_only=True))
            continue
        on.add(switch.name)
        name = EVERYTHING if switch == _usable(on_gpu)[-1] else switch.name
        arms.append(Arm(name, _settings(on), f"+ {switch.on}", switch.gpu_only))
    return arms


def _left_out(on_gpu: bool) -> list[Arm]:
    everything = {switch.name for switch in _usable(on_gpu)}
    return [
        Arm(f"without {switch.name}", _settings(everything - {switch.name}), f"everything, {switch.off}")
        for switch in _usable(on_gpu)
    ]


def _variants(on_gpu: bool) -> list[Arm]:
    everything = _settings({switch.name for switch in _usable(on_gpu)})
    return [
        replace(arm, settings=(*everything, *arm.settings), change=f"everything, {arm.settings[0]}")
        for arm in VARIANTS
    ]


def _without_twins(arms: list[Arm]) -> list[Arm]:
    """The last switch left out is the rung below the top: measured once."""
    first: dict[tuple[str, ...], Arm] = {}
    for arm in arms:
        first.setdefault(arm.settings, arm)
    return list(first.values())


def parse_arm(text: str) -> Arm:
    """`name: section.key=value ...` as an arm."""
    name, colon, words = text.partition(":")
    name = name.strip()
    if not colon or not name or set(name) & set(",()"):
        raise UserError(
            f"--arm {text!r}: an arm is written 'name: section.key=value section.key=value', the name without ,()"
        )
    settings = tuple(shlex.split(words))
    return Arm(name, settings, " ".join(settings) or "as the recipe says")


def select(arms: list[Arm], only: list[str], baseline: str) -> list[Arm]:
    """The arms of these names, and the baseline that they are compared with; all without names."""
    names = [arm.name for arm in arms]
    for name in [*only, baseline]:
        if name not in names:
            raise UserError(f"no arm is called {name!r}; the arms are {', '.join(names)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--arm {twice[0]}: two arms have this name; choose another")
    return [arm for arm in arms if not only or arm.name in only or arm.name == baseline]


def again(arm: Arm) -> Arm:
    """The same arm under another name: what differs between the two is noise."""
    return replace(arm, name=f"{arm.name} {AGAIN}", change=f"the same as {arm.name}")


def interleave(arms: list[Arm], repeat: int, repeats: int) -> list[Arm]:
    """Order of a round. The first begins with the baseline against itself; later ones begin elsewhere, and the two
    are then half a round apart, so that slow drift shows up between them."""
    if repeat == 0 or len(arms) < 3:
        return arms
    middle = len(arms) // 2 + 1
    spread = [arms[0], *arms[2:middle], arms[1], *arms[middle:]]
    start = repeat * len(arms) // repeats
    return spread[start:] + spread[:start]


_SEVERAL = "not run: needs several devices"
"""An arm runs on one."""


@dataclass(frozen=True)
class Step:
    """One line of the plan's table of expected gains."""

    name: str
    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    expected: Expected | None = None
    """Of all steps so far, as shares of the baseline; None where the plan names no figure."""
    gpu_only: bool = False
    absent: str = ""


def plan_ladder(batch: BatchConfig, longest: int, on_gpu: bool) -> list[Arm]:
    """The arms for a recipe's batch; `longest` is the number of tokens of the longest document."""
    steps = _steps(batch, longest)
    precision = "bf16" if on_gpu else "fp32"
    always = (
        f"speed.precision={precision}",
        "speed.scored_rows=false",
        "speed.fused_kernels=false",
        "speed.cuda_graphs=false",
    )
    on: set[str] = set()

    def settings(more: str = "") -> tuple[str, ...]:
        words = (word for step in steps for word in (step.on if step.name in on | {more} else step.off))
        return (*always, *words)

    arms = [Arm(BASELINE, settings(), "padded, eager, unfused, no loader", expected=Expected(1.0, 1.0))]
    for step in steps:
        change = "+ " + " ".join(step.on)
        arms.append(Arm(step.name, settings(step.name), change, step.gpu_only, step.absent, step.expected))
        if not step.absent and (on_gpu or not step.gpu_only):
            on.add(step.name)
    return [*arms, Arm("defaults", (), "what the recipe gives by itself; the plan ends above")]


def _steps(batch: BatchConfig, longest: int) -> list[Step]:
    small, large = (_micro_batch(batch, longest, parts) for parts in (4, 2))
    few = "not run: a step of this recipe holds too few documents for four micro-batches"
    flash = (
        "speed.layout=packed",
        "speed.attention=varlen",
    )  # document bounds exist in the packed stream only
    loader = ("data.num_workers=0", "data.pin_memory=false", "speed.overlap_copies=false")
    ahead = (
        f"data.num_workers={spare_workers(1)}",
        "data.pin_memory=true",
        "speed.overlap_copies=true",
    )
    return [
        Step("data loading", loader, ahead, Expected(1.1, 1.0)),
        Step(
            "activation checkpointing", ("speed.activation_checkpointing='off'",),
            ("speed.activation_checkpointing=block",), Expected(1.1, 0.65),
        ),
        Step("larger batch", (small,), (large,), Expected(1.3, 0.65), absent=few if small == large else ""),
        Step("DDP", expected=Expected(1.5, 0.65), absent=_SEVERAL),
        Step("fused optimizer", ("speed.fused_optimizer=false",), ("speed.fused_optimizer=true",), Expected(1.8, 0.65)),
        Step("compile", ("speed.compile=false",), ("speed.compile=true",)),
        Step("flash attention", ("speed.layout=padded", "speed.attention=rows"), flash, gpu_only=True),
        Step("accumulation without sync", absent=_SEVERAL),
    ]  # fmt: skip


def _micro_batch(batch: BatchConfig, longest: int, parts: int) -> str:
    """The setting that cuts a step into about so many micro-batches."""
    if batch.tokens_per_step is not None:
        return f"batch.micro_tokens={max(longest, batch.tokens_per_step // parts)}"
    assert batch.documents_per_step is not None, "settings require one of the two"
    return f"batch.micro_documents={max(1, batch.documents_per_step // parts)}"


_SHARD = 65536
_VALIDATION = 64
_DEFAULT_TOKENS = 2**22


@dataclass(frozen=True)
class Synthetic:
    """A description of random documents; the same description gives the same store."""

    min_length: int
    max_length: int
    vocabulary: int
    channels: int
    documents: int
    seed: int

    def folder(self) -> Path:
        """Where it is kept."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        lengths = f"{self.min_length}-{self.max_length}"
        return Path(home) / "mmldlm" / "synthetic" / f"{lengths}-{checksum(asdict(self))[:12]}"

    def lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Log-normal around the geometric middle, two deviations to either end; equal ends give one length."""
        middle = 0.5 * (np.log(self.min_length) + np.log(self.max_length))
        deviation = 0.25 * (np.log(self.max_length) - np.log(self.min_length))
        drawn = np.exp(rng.normal(middle, deviation, count))
        return np.clip(np.rint(drawn), self.min_length, self.max_length).astype(np.int64)


def describe(
    length: int | None, lengths: str | None, vocabulary: int, channels: int, documents: int | None, seed: int
) -> Synthetic:
    """The description that the options of the command give; sentences of 4 to 64 tokens if they say nothing."""
    if length is not None and lengths is not None:
        raise UserError(f"--length {length} and --lengths {lengths}: give one of the two")
    low, high = (length, length) if length is not None else parse_lengths(lengths or "4:64")
    if documents is None:
        documents = int(np.clip(_DEFAULT_TOKENS // int(np.sqrt(low * high)), 512, _SHARD))
    return Synthetic(low, high, vocabulary, channels, documents, seed)


def parse_lengths(text: str) -> tuple[int, int]:
    """`4:64` as numbers."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise UserError(f"--lengths {text}: write the shortest and the longest document, such as 4:64")
    return int(low), int(high)


def make_store(described: Synthetic) -> Path:
    """The folder of the store; written if it is not there yet."""
    path, settings = described.folder(), {"synthetic": asdict(described)}
    if store_state(path, settings) == "finished":
        return path
    writer = StoreWriter(
        path, vocab_size=described.vocabulary, num_slots=1, num_channels=described.channels,
        encoder={"name": "synthetic", "prompt": "", "normalize": False, "dimension": described.channels},
        shard_documents=_SHARD, settings=settings,
    )  # fmt: skip
    try:
        for split, documents in _parts(described):
            writer.add(split, **documents)
        writer.finish()
    finally:
        writer.close()
    return path


def _parts(described: Synthetic) -> Iterator[tuple[str, dict[str, Any]]]:
    """A shard at a time, each from its own seed. The first document is as long as any may be."""
    for start in range(0, described.documents, _SHARD):
        count = min(_SHARD, described.documents - start)
        yield "train", _documents(described, count, start)
    yield "validation", _documents(described, _VALIDATION, 2**40)


def _documents(described: Synthetic, count: int, start: int) -> dict[str, Any]:
    rng = np.random.default_rng([described.seed, start])
    lengths = described.lengths(count, rng)
    lengths[0] = described.max_length
    flat = rng.integers(0, described.vocabulary, int(lengths.sum()))
    return {
        "token_lists": np.split(flat, np.cumsum(lengths)[:-1]),
        "latents": rng.standard_normal((count, 1, described.channels), dtype=np.float32),
        "ids": np.arange(start, start + count),
    }
