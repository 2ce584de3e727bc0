"""The same faults in settings: Hydra blocks that build a DataLoader, an optimizer or a DDP wrapper, and plain keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traindoctor.registry import Rule
from traindoctor.targets import Target, find_targets, place, set_argument
from traindoctor.types import Finding, Fix, TextEdit
from traindoctor.yaml_file import Entry, YamlFile

LOADER = "torch.utils.data.DataLoader"
DDP = "torch.nn.parallel.DistributedDataParallel"
FUSABLE = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
FUSED_RAISES = frozenset({"sparse"})
"""A fused optimizer takes no sparse gradients."""
UNFUSED = ("lightning",)
"""Lightning's mixed precision cannot clip gradients with a fused optimizer."""
VIEW_RAISES = frozenset({"detached_in_place"})
"""detach_() on a gradient raises where gradients are views of buckets."""
KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")
WORKER_KEYS = ("num_workers", "dataloader_num_workers", "n_workers", "loader_workers")
STRATEGY = "ddp_find_unused_parameters_true"
TRAINS = {"train", "training", "trainloader", "trainset", "traindata"}
EVALUATES = {
    *("eval", "evaluation", "evaluator", "evaluators", "val", "valid", "validation", "test", "dev"),
    *("testloader", "valloader", "predict"),
}
PURE_HALF = ("bf16-true", "16-true")
_SEARCH_KEYS = ("find_unused_parameters", "ddp_find_unused_parameters")
_SMALL = {"debug", "tests", "smoke", "toy", "demo"}


def name_words(*texts: str | None) -> set[str]:
    """The words of names and paths, in lower case."""
    return {word for text in texts if text for word in re.split(r"[^a-z0-9]+", text.lower())}


def _loaders(file: YamlFile) -> list[Target]:
    return [block for block in find_targets(file) if block.name == LOADER]


def _workers(block: Target) -> str | None:
    """The number of workers as written; '0' where none is given and nothing else can give it."""
    given = block.scalar("num_workers")
    return "0" if given is None and not block.is_merged() else given


def _trains(block: Target) -> bool:
    words = name_words(block.path)
    return bool(words & TRAINS) or (block.is_true("shuffle") and not words & EVALUATES)


def _replaced(file: YamlFile, entry: Entry, value: str) -> Fix:
    edit = TextEdit(*file.range(entry.value), value)
    return Fix(f"set {entry.name}: {value}", False, text_edits=(edit,))


def loader_without_workers(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DAT001 in a block, or as a plain key."""
    blocks = _loaders(file)
    for block in blocks:
        options = ("prefetch_factor", "persistent_workers")
        if _workers(block) == "0" and _trains(block) and not any(map(block.get, options)):
            fix = set_argument(file, block, "num_workers", "4", safe=False)
            message = (
                f"{block.path}: training DataLoader without workers: the process that feeds the GPU loads"
            )
            yield about.at(file.path, place(file, block), message, fix)
    built = {id(value) for block in blocks for _, value in block.arguments.value}
    for entry in file.entries:
        if entry.name not in WORKER_KEYS or entry.scalar != "0" or id(entry.value) in built:
            continue
        if not name_words(entry.key, file.path) & (EVALUATES | _SMALL):
            message = f"{entry.key}: 0: the process that feeds the GPU loads every batch itself"
            fix = _replaced(file, entry, "4")
            yield about.at(file.path, file.span(entry.value), message, fix, needs=["torch"])


def loader_without_pinning(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DAT002 in a block."""
    for block in _loaders(file):
        missing = block.get("pin_memory") is None and not block.is_merged()
        off = (block.scalar("pin_memory") or "").lower() == "false"
        if _workers(block) != "0" and (missing or off):
            fix = set_argument(file, block, "pin_memory", "true", safe=False)
            message = f"{block.path} does not pin memory: copies to the GPU block"
            yield about.at(file.path, place(file, block), message, fix, needs=["torch"])


def loader_not_persistent(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DAT003 in a block."""
    for block in _loaders(file):
        missing = block.get("persistent_workers") is None and not block.is_merged()
        if missing and _trains(block) and re.fullmatch(r"[1-9]\d*", _workers(block) or ""):
            fix = set_argument(file, block, "persistent_workers", "true", safe=False)
            message = f"{block.path} restarts its workers in every epoch"
            yield about.at(file.path, place(file, block), message, fix)


def loader_option_without_workers(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DAT004 in a block."""
    for block in _loaders(file):
        prefetches = (block.scalar("prefetch_factor") or "").isdigit()
        if _workers(block) == "0" and (block.is_true("persistent_workers") or prefetches):
            message = (
                f"{block.path}: a worker option without workers raises ValueError; set num_workers above 0"
            )
            yield about.at(file.path, place(file, block), message)


def unfused_block(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """OPT001 in a block."""
    for block in find_targets(file):
        if block.name in FUSABLE and not block.is_merged() and not any(map(block.get, KERNEL_CHOICES)):
            fix = set_argument(file, block, "fused", "true", safe=False, dropped_if=FUSED_RAISES)
            message = (
                f"{block.path}: {block.name} without fused: true updates the parameters in several passes"
            )
            yield about.at(file.path, place(file, block), message, fix, unless=UNFUSED)


def coupled_decay_block(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """OPT006 in a block."""
    for block in find_targets(file):
        decay = block.scalar("weight_decay") or "0"
        if block.name == "torch.optim.Adam" and re.search(r"[1-9]", re.split("[eE]", decay)[0]):
            message = f"{block.path}: Adam couples weight decay with the gradient's scale; AdamW does not"
            yield about.at(file.path, place(file, block), message)


def unused_parameters_searched(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DDP001 as a key, in a block or not, and as Lightning's strategy."""
    for entry in file.entries:
        if entry.scalar == STRATEGY:
            message = f"{entry.key}: {STRATEGY} walks the graph in every step"
            yield about.at(file.path, file.span(entry.value), message, _replaced(file, entry, "ddp"))
        elif entry.name in _SEARCH_KEYS and (entry.scalar or "").lower() == "true":
            message = f"{entry.key}: true walks the graph in every step; freeze unused parameters instead"
            fix = _replaced(file, entry, "false")
            yield about.at(file.path, file.span(entry.value), message, fix, needs=["torch"])


def bucket_view_missing(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DDP002 in a block."""
    for block in find_targets(file):
        wraps = block.name in (DDP, "DDPStrategy") and not block.is_merged()
        if wraps and block.get("gradient_as_bucket_view") is None:
            fix = set_argument(
                file,
                block,
                "gradient_as_bucket_view",
                "true",
                safe=block.name == DDP,  # what Lightning does with gradients is not in sight
                unsafe_if=frozenset({"grad_read"}),
                dropped_if=VIEW_RAISES,
            )
            message = f"{block.path}: DDP copies gradients into buckets; views save one copy"
            yield about.at(file.path, place(file, block), message, fix)


def waits_for_days(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """DDP006 in a block: `timeout: {_target_: datetime.timedelta, days: 10}`."""
    for block in find_targets(file):
        days = block.scalar("days") or ""
        if (
            block.name == "datetime.timedelta"
            and "timeout" in block.path
            and days.isdigit()
            and int(days) > 1
        ):
            message = f"{block.path}: the process group waits {days} days for a lost rank"
            yield about.at(file.path, place(file, block), message)


def half_weights_asked_for(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """AMP005 as Lightning's precision."""
    for entry in file.entries:
        if entry.name == "precision" and entry.scalar in PURE_HALF:
            message = (
                f"{entry.key}: {entry.scalar} keeps the weights themselves in half precision; use bf16-mixed"
            )
            yield about.at(file.path, file.span(entry.value), message)


def anomaly_detection_asked_for(file: YamlFile, about: Rule) -> Iterator[Finding]:
    """SYN005 as a key."""
    for entry in file.entries:
        small = name_words(entry.key, file.path) & _SMALL
        if entry.name == "detect_anomaly" and (entry.scalar or "").lower() == "true" and not small:
            message = f"{entry.key}: true slows every step; put it behind a debug configuration"
            fix = _replaced(file, entry, "false")
            yield about.at(file.path, file.span(entry.value), message, fix)
