"""The environment variables of `scripts/train_qwen_english_l2t_stable.sh` become a launch and settings of a run.

A variable that is set counts as it is. What is not set follows from the machines by a rule below, or is left to the
recipe. A rank's batch is counted in documents of the longest length, as that script did. The documents of a step are
fixed here, and the batch of a rank only says how many of them a micro-batch may hold.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mmldlm.config.old_settings import PRECISIONS
from mmldlm.config.recipe import load_recipe
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.launch.ranks import PORT, LaunchPlan, plan_launch

RECIPE, STORE, SAVE_DIR, RUN_NAME = "qwen-english", "data/qwen-english", "saved", "qwen-english-l2t"
TOKENIZER, VALIDATION = "builtin:qwen", 0.01
NO_GPU_BATCH = 4
SAME_VALUE = {
    "GRAD_CLIP_NORM": "optim.clip_norm",
    "LATENT_LOSS_WEIGHT": "objective.latent_weight",
    "DTYPE": "speed.precision",
    "DATA_WORKERS": "data.num_workers",
    "L2T_COMPILE": "speed.compile",
}
FREQUENCIES = {
    "L2T_BASE_SAVE_FREQ": "train.checkpoint_every",
    "L2T_BASE_LOG_FREQ": "train.log_every",
    "L2T_BASE_EVAL_FREQ": "train.valid_every",
}
KNOWN = (
    "NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "BASE_WORLD_SIZE", "L2T_PRESET",
    "L2T_CONFIG", "L2T_RUN_NAME", "L2T_SAVE_DIR", "L2T_STORE", "TOKEN_DIR", "LATENT_DIR", "TOKENIZER", "LATENT_DIM",
    "L2T_TRAIN_BS", "GRAD_ACCUM_STEPS", "L2T_BASE_STEPS", "L2T_EVAL_BS", "LEARNING_RATE", "WARMUP_STEPS",
    *FREQUENCIES, *SAME_VALUE,
)  # fmt: skip
"""Variables that are read, in the order in which they are shown."""


@dataclass(frozen=True)
class Machine:
    """What the rules need to know of a rank's device."""

    num_gpus: int = 0
    gib: float = 0.0
    """Memory of one GPU."""


@dataclass
class VariableRun:
    """A run as the variables describe it."""

    launch: LaunchPlan
    recipe: str = RECIPE
    store: Path = Path(STORE)
    run: Path = Path(SAVE_DIR) / RUN_NAME
    words: list[str] = field(default_factory=list)
    """Settings, `section.key=value`."""
    explained: list[tuple[str, str, str]] = field(default_factory=list)
    """Variable, value, and where the value comes from."""
    import_from: Path | None = None
    """An old layout that becomes the store first."""
    tokenizer: str = TOKENIZER

    def command(self) -> list[str]:
        """What every rank runs."""
        return ["train", "--recipe", self.recipe, "--run", str(self.run), *self.words]


class Variables:
    """Reads variables and notes what was taken from where."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {name: environment[name] for name in KNOWN if environment.get(name)}
        self.explained: list[tuple[str, str, str]] = []
        for name in sorted(environment.keys() - set(KNOWN)):
            if name.startswith("L2T_"):
                near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.explained.append((name, environment[name], f"unknown, read by nothing{hint}"))

    def unused(self, names: Iterable[str], why: str) -> None:
        """Show variables that are set and count for nothing here."""
        self.explained += [(name, self.environment[name], why) for name in names if name in self.environment]

    def text(self, name: str, default: str, where: str = "default") -> str:
        """A variable as it is set, or the default."""
        value = self.environment.get(name, default)
        self.explained.append((name, value, "environment" if name in self.environment else where))
        return value

    def number(self, name: str, default: int, where: str = "default") -> int:
        """A whole number from 1 (NODE_RANK from 0)."""
        text = self.text(name, str(default), where)
        if not text.isdecimal() or (int(text) < 1 and name != "NODE_RANK"):
            raise UserError(f"{name}={text}: a whole number from 1 is needed; correct or unset the variable")
        return int(text)

    def real(self, name: str, default: float, where: str) -> float:
        """A positive number."""
        text = self.text(name, f"{default:g}", where)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value > 0:
            raise UserError(f"{name}={text}: a number above 0 is needed; correct or unset the variable")
        return value


def read_machine() -> Machine:
    """The GPUs of this machine; the smallest one counts."""
    import torch

    count = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(index).total_memory / 2**30 for index in range(count)]
    return Machine(count, min(sizes, default=0.0))


def import_store(run: VariableRun, report: Callable[[str], None], wait_seconds: float = 3600.0) -> None:
    """Make the pair store of TOKEN_DIR and LATENT_DIR, unless it is there; other nodes wait for the first one."""
    from mmldlm.data.tokenizer import Tokenizer
    from mmldlm.preparation.old_layout import import_old_layout

    manifest = run.store / "manifest.json"
    if manifest.is_file() or run.import_from is None:
        return
    if run.launch.node_rank not in (None, 0):
        report(f"{run.store}: node 0 imports it; waiting")
        deadline = time.monotonic() + wait_seconds
        while not manifest.is_file() and time.monotonic() < deadline:
            time.sleep(1.0)
        return
    report(f"import {run.import_from} into {run.store}, {VALIDATION:.0%} of it for validation")
    splits = {path.name for path in (run.import_from / "tokens").glob("*") if path.is_dir()}
    share = 0.0 if splits & {"validation", "val", "valid", "dev"} else VALIDATION
    import_old_layout(run.import_from, run.store, Tokenizer.load(run.tokenizer), validation=share)


def read_variables(environment: Mapping[str, str], machine: Machine) -> VariableRun:
    """The run that the environment describes. The store is looked at for its longest document, if it is there."""
    read = Variables(environment)
    preset_name = read.text("L2T_PRESET", "balanced")
    if preset_name not in PRESETS:
        raise UserError(f"L2T_PRESET={preset_name}: allowed are {', '.join(PRESETS)}")
    preset = PRESETS[preset_name]
    launch = _read_launch(read, machine)
    result = VariableRun(launch)
    _read_places(read, result)
    longest = _longest(read, result)
    world = launch.nnodes[1] * launch.nproc_per_node
    base_world = read.number("BASE_WORLD_SIZE", launch.nproc_per_node, "ranks of one node")
    documents, base_documents = _read_batch(read, result, machine, longest, world, base_world)
    _read_schedule(read, result, preset.lr, documents, base_documents)
    if "GRAD_CLIP_NORM" not in read.environment:
        read.explained.append(("GRAD_CLIP_NORM", f"{preset.clip_norm:g}", f"preset {preset_name}"))
        result.words.append(f"optim.clip_norm={preset.clip_norm:g}")
    for name, setting in SAME_VALUE.items():
        if name in read.environment:
            value = read.text(name, "")
            result.words.append(f"{setting}={PRECISIONS.get(value, value) if name == 'DTYPE' else value}")
    result.explained = read.explained
    return result


def _read_launch(read: Variables, machine: Machine) -> LaunchPlan:
    nodes = read.number("NNODES", 1)
    local = read.number(
        "NPROC_PER_NODE", machine.num_gpus or 1, "GPUs here" if machine.num_gpus else "no GPU here"
    )
    if nodes == 1:
        read.unused(("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), "not needed: one node")
        return plan_launch({}, nproc_per_node=local)
    rank = read.number("NODE_RANK", 0)
    if "MASTER_ADDR" not in read.environment:
        raise UserError(
            f"MASTER_ADDR is not set, but NNODES={nodes}: set it to the first node, the same on all nodes"
        )
    address = read.text("MASTER_ADDR", "")
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    endpoint = f"{host}:{read.number('MASTER_PORT', PORT)}"
    return plan_launch({}, nnodes=str(nodes), nproc_per_node=local, rdzv_endpoint=endpoint, node_rank=rank)


def _read_places(read: Variables, result: VariableRun) -> None:
    result.recipe = read.text("L2T_CONFIG", RECIPE)
    name = read.text("L2T_RUN_NAME", RUN_NAME)
    result.run = Path(read.text("L2T_SAVE_DIR", SAVE_DIR)) / name
    result.store = Path(read.text("L2T_STORE", STORE))
    result.words += [f"name={_quoted(name)}", f"data.store={_quoted(str(result.store))}"]
    if "TOKEN_DIR" in read.environment or "LATENT_DIR" in read.environment:
        tokens, latents = (Path(read.text(name, "")) for name in ("TOKEN_DIR", "LATENT_DIR"))
        root = tokens.parent.parent
        if tokens != root / "tokens" / tokens.name or latents != root / "latents" / tokens.name:
            raise UserError(
                f"TOKEN_DIR={tokens} LATENT_DIR={latents}: FOLDER/tokens/train and FOLDER/latents/train are needed"
            )
        result.import_from = root
        result.tokenizer = read.text("TOKENIZER", TOKENIZER)


def _quoted(text: str) -> str:
    """As the value of a setting, which is read as YAML: quoted where that would make something else of it."""
    simple = re.fullmatch(r"[A-Za-z/.][\w./-]*", text) and yaml.safe_load(text) == text
    return text if simple else json.dumps(text)


def _longest(read: Variables, result: VariableRun) -> int:
    """Tokens of the longest document; 2,048 where there is no store yet. LATENT_DIM is compared with the store."""
    dimension = read.number("LATENT_DIM", 0) if "LATENT_DIM" in read.environment else None
    if not (result.store / "manifest.json").is_file():
        return 2048
    store = PairStore.open(result.store)
    channels = store.manifest.num_channels
    if dimension not in (None, channels):
        raise UserError(
            f"LATENT_DIM={dimension}: the latents of {result.store} have {channels} channels; unset it, or prepare "
            f"the store again with --dimension {dimension}"
        )
    return int(max(split["max_length"] for split in store.manifest.splits.values()))


def _read_batch(
    read: Variables, result: VariableRun, machine: Machine, longest: int, world: int, base_world: int
) -> tuple[int, int]:
    """Documents of a step, here and with the ranks that L2T_BASE_STEPS is meant for."""
    preset = PRESETS[read.environment.get("L2T_PRESET", "balanced")]
    if machine.gib:
        batch = batch_from_memory(machine.gib, longest, world, preset.memory_share)
        where = f"{preset.memory_share:.0%} of {machine.gib:.0f} GiB, documents of up to {longest} tokens"
    else:
        batch, where = NO_GPU_BATCH, "no GPU here"
    batch = read.number("L2T_TRAIN_BS", batch, where)
    fixed = "GRAD_ACCUM_STEPS" in read.environment
    accumulation = read.number(
        "GRAD_ACCUM_STEPS",
        accumulation_for(batch, world),
        f"towards {TARGET_DOCUMENTS} documents per step on {world} ranks",
    )
    documents, base_documents = (
        batch * ranks * accumulation if fixed else max(TARGET_DOCUMENTS, batch * ranks)
        for ranks in (world, base_world)
    )
    result.words += [
        f"batch.documents_per_step={documents}", "batch.tokens_per_step=null", f"batch.micro_tokens={batch * longest}"
    ]  # fmt: skip
    if "L2T_EVAL_BS" in read.environment:
        result.words.append(f"evaluation.batch_tokens={read.number('L2T_EVAL_BS', 0) * longest}")
    return documents, base_documents


def _read_schedule(
    read: Variables, result: VariableRun, lr: float, documents: int, base_documents: int
) -> None:
    scale = (
        ""
        if documents == base_documents
        else f", scaled from {base_documents} to {documents} documents per step"
    )
    rate = read.real(
        "LEARNING_RATE",
        scaled_lr(lr, documents),
        f"{lr:g} x square root of {max(documents, BASE_DOCUMENTS)} / {BASE_DOCUMENTS} documents per step",
    )
    result.words.append(f"optim.lr={rate:g}")
    if "L2T_BASE_STEPS" in read.environment:
        steps = scaled_steps(read.number("L2T_BASE_STEPS", 0), base_documents, documents)
        read.explained[-1] = ("L2T_BASE_STEPS", str(steps), f"environment{scale}")
        result.words.append(f"train.steps={steps}")
    else:
        steps = load_recipe(result.recipe).train.steps
    warmup = read.text(
        "WARMUP_STEPS", str(warmup_for(steps)), f"2 % of {steps} steps within 1,000 to 5,000, at most a tenth"
    )
    result.words.append(f"optim.warmup_steps={warmup}")
    for name, setting in FREQUENCIES.items():
        if name in read.environment:
            every = scaled_steps(read.number(name, 0), base_documents, documents)
            read.explained[-1] = (name, str(every), f"environment{scale}")
            result.words.append(f"{setting}={every}")


TARGET_DOCUMENTS = 128
"""Documents of a step on all ranks together."""
BASE_DOCUMENTS = 32
"""The documents of a step for which a preset's learning rate is meant."""
FIXED_GIB, GIB_PER_TOKEN = 20.0, 1.9 / 2048
"""Memory of the shape `reference` with 151,936 tokens: weights, optimizer, logits; and what a token adds.

Rounded up from 17.3 GiB with 4 and 68.8 GiB with 32 documents of 2,048 tokens (30,522 tokens, docs/benchmarks.md)."""
WARMUP_SHARE, FEWEST_WARMUP, MOST_WARMUP = 0.02, 1000, 5000


@dataclass(frozen=True)
class Preset:
    """How close to the limits of memory and learning rate a run goes."""

    memory_share: float
    """Of the GPU's memory that a micro-batch may fill."""
    lr: float
    clip_norm: float


PRESETS = {
    "conservative": Preset(0.6, 2.5e-5, 0.3),
    "balanced": Preset(0.8, 5e-5, 0.5),
    "aggressive": Preset(0.9, 1e-4, 1.0),
}


def batch_from_memory(gib: float, longest: int, world_size: int, share: float = 0.8) -> int:
    """Documents of the longest length that a rank takes at once, at least 1 and no more than its part of a step."""
    fitting = int((gib * share - FIXED_GIB) / (GIB_PER_TOKEN * longest))
    return max(1, min(fitting, math.ceil(TARGET_DOCUMENTS / world_size)))


def accumulation_for(batch: int, world_size: int, target: int = TARGET_DOCUMENTS) -> int:
    """Micro-batches of a rank in a step of the target size; at least 1."""
    return max(1, target // (batch * world_size))


def scaled_lr(lr: float, documents: int, base: int = BASE_DOCUMENTS) -> float:
    """The learning rate for larger steps: with the square root of their size; smaller steps keep it."""
    return float(f"{lr * math.sqrt(max(documents, base) / base):.6g}")


def warmup_for(steps: int) -> int:
    """2 % of the steps within 1,000 to 5,000, but no more than a tenth of a short run."""
    warmup = min(max(int(steps * WARMUP_SHARE), FEWEST_WARMUP), MOST_WARMUP)
    return min(warmup, max(1, steps // 10))


def scaled_steps(base: int, base_documents: int, documents: int) -> int:
    """As many steps of `documents` as hold the documents of `base` steps of `base_documents`, rounded up."""
    return max(1, -(-base * base_documents // documents))
