"""What may change between two starts of the same run, and what may not."""

from __future__ import annotations

from typing import Any

from mmldlm.config import Config
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError

FIXED = (
    "model",
    "corruption",
    "objective",
    "optim",
    "data.train_split",
    "batch.tokens_per_step",
    "batch.documents_per_step",
    "train.seed",
    "train.steps",
    "train.frozen",
)
"""Settings that decide what the weights become. All others may change at any time."""

LONGER = ("train.steps",)
"""Of these, a larger value is allowed: it stretches the learning-rate schedule."""


def check_resume(config: Config, store: PairStore, meta: dict[str, Any], run: str) -> None:
    """Refuse to go on with settings or data under which the run would become another one."""
    if meta["content"] != store.content:
        other = (
            "other documents" if meta["fingerprint"] == store.fingerprint else "another tokenizer or encoder"
        )
        raise UserError(
            f"data.store={config.data.store}: the run in {run} was trained on another pair store "
            f"(this one has {other}); give the old store, or a new --run folder"
        )
    # a setting younger than the run had its default, which means what was done before
    old = _flatten(config_to_dict(Config())) | _flatten(meta["settings"])
    new = _flatten(config_to_dict(config))
    for values in (old, new):
        values["batch.schedule"] = [
            {key: value for key, value in stage.items() if not key.startswith("micro_")}
            for stage in values["batch.schedule"]
        ]
    changed = [
        f"{key}: {old.get(key)} -> {new[key]}"
        for key in new
        if _is_fixed(key) and not _allowed(key, old, new)
    ]
    if changed:
        raise UserError(
            f"the run in {run} was started with other settings ({'; '.join(changed)}); "
            f"put them back, or give a new --run folder"
        )


def same_micro_batches(config: Config, settings: dict[str, Any]) -> bool:
    """Whether the sizes of micro-batches are still those of the checkpoint's settings."""
    old = config_to_dict(Config())["batch"] | settings["batch"]
    return bool(old == config_to_dict(config)["batch"])


def _is_fixed(key: str) -> bool:
    return key == "batch.schedule" or any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)


def _allowed(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    return old[key] == new[key] or (key in LONGER and new[key] > old[key])


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
