"""Every threshold of the monitor, with its meaning; `key=value` words or a YAML file change them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from runwatch.errors import UserError


def _number(default: float, low: float, high: float = 1e12) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class MonitorSettings:
    """Baselines are the run's own history; *lines* are lines of the log that hold the value in question."""

    history_lines: int = _number(64, 8, 10_000)
    """Length of the baseline in lines. The baseline is a median and a median absolute deviation."""
    warmup_lines: int = _number(20, 4, 10_000)
    """Nothing is compared with a baseline before it has this many lines."""
    resolve_lines: int = _number(20, 1)
    """An event such as a spike is over when it has not occurred for this many lines."""
    cooldown_seconds: float = _number(900, 0)
    """Least time in seconds before an alert that continues or returns is sent again."""

    nonfinite_streak: int = _number(3, 1)
    """A gradient norm that is not finite is a warning. This many in a row are an error."""
    spike_z: float = _number(8, 1)
    """Spike: the loss is this many robust standard deviations above the baseline ..."""
    spike_rise: float = _number(0.3, 0)
    """... and above it by this fraction ..."""
    spike_tail: float = _number(1.5, 0)
    """... and this many times as far above it as any earlier line. (Losses of small batches have heavy tails.)"""
    divergence_lines: int = _number(10, 3)
    """Divergence: the median of this many lines ..."""
    divergence_rise: float = _number(0.25, 0.01)
    """... is above the best median of a history window by this fraction, and above its noise ..."""
    divergence_start: float = _number(2, 1.01)
    """... or above the loss at the start by this factor."""
    zero_lines: int = _number(10, 2)
    """Loss gone: the loss is exactly 0 for this many lines and was not small before ..."""
    missing_lines: int = _number(5, 2)
    """... or this many steps in a row are logged without a loss."""
    plateau_lines: int = _number(300, 30)
    """Plateau: over the last third of the run, which has at least this many lines, ..."""
    plateau_gain: float = _number(0.01, 0, 1)
    """... the loss fell by less than this fraction ..."""
    plateau_lr: float = _number(0.2, 0, 1)
    """... while the learning rate was above this fraction of its peak."""

    explosion_ratio: float = _number(10, 1.5)
    """Exploding gradient: the norm is this many times its baseline ..."""
    explosion_lines: int = _number(3, 1)
    """... in this many of the last ten lines, or ten times that in one line."""
    vanishing_ratio: float = _number(1e-3, 0, 1)
    """Vanishing gradient: the norm is below this fraction of its usual size ..."""
    vanishing_lines: int = _number(5, 1)
    """... for this many lines in a row, while the loss is above 5 % of its first value."""
    lr_jump: float = _number(5, 1.1)
    """Once the learning rate has begun to fall, it may not grow by more than this factor from line to line."""
    lr_zero_lines: int = _number(5, 1)
    """This many lines with a learning rate of 0 are a mistake, except at the end of the run."""
    lr_early: float = _number(0.6, 0, 1)
    """The learning rate may not reach its floor (below 1 % of the peak) before this fraction of the steps."""
    skipped_share: float = _number(0.02, 0, 1)
    """Skipped updates as a fraction of the last `skipped_window` steps. Above it is a warning, below it a note."""
    skipped_window: int = _number(500, 10)
    """Number of steps over which that fraction is computed."""

    drop_ratio: float = _number(0.6, 0, 1)
    """Drop: four of five lines have a throughput below this fraction of the baseline."""
    unstable_change: float = _number(0.25, 0.01)
    """Unstable: the median change of the throughput from line to line exceeds this fraction ..."""
    unstable_lines: int = _number(40, 8)
    """... over this many lines."""
    wait_share: float = _number(0.2, 0, 1)
    """Fraction of the time spent waiting for data (median of ten lines)."""
    stall_factor: float = _number(10, 1.5)
    """Stall: no new line for this many times the usual interval ..."""
    stall_seconds: float = _number(60, 0)
    """... and for at least this many seconds."""
    start_seconds: float = _number(1800, 1)
    """A run without any step after this many seconds is stalled as well."""
    heartbeat_seconds: float = _number(120, 15)
    """For runs of MM-LDLM on another machine: the run is gone if its heartbeat and its log are older than this."""
    straggler_lag: float = _number(0.2, 0)
    """Straggler: a rank is later than the median rank by this fraction of a step, or slower by it ..."""
    straggler_share: float = _number(0.7, 0, 1)
    """... in this fraction of the last steps that all ranks logged."""
    rank_silent_steps: int = _number(20, 1)
    """A rank that is this many logged steps behind the first one is silent."""

    shrink_ratio: float = _number(0.6, 0, 1)
    """Shrinking batch: micro_tokens, else batch_size, is below this fraction of its largest median."""
    disk_hours: float = _number(6, 0)
    """Warn if the disk will be full within this many hours at the current rate."""
    disk_free_share: float = _number(0.02, 0, 1)
    """Warn if less than this fraction of the disk is free."""
    checkpoint_factor: float = _number(2.5, 1.1)
    """A checkpoint is overdue after this many of its usual periods."""
    drift_rise: float = _number(0.03, 0)
    """Validation drift: the validation loss is above its best value by this fraction and by its own noise ..."""
    drift_count: int = _number(3, 1)
    """... in this many validations in a row, while the training loss keeps falling."""
    collapse_ratio: float = _number(0.1, 0, 1)
    """Latent collapse: the norm or deviation of the prediction is below this fraction of its usual size ..."""
    collapse_lines: int = _number(3, 1)
    """... for this many lines in a row."""
    ignored_gain: float = _number(0.01, 0)
    """Latent ignored: shuffling the latents raises the text loss by less than this fraction ..."""
    ignored_count: int = _number(3, 1)
    """... in this many validations in a row ..."""
    ignored_start: float = _number(0.05, 0, 1)
    """... after this fraction of the steps. (No model uses its latents from the first step.)"""


def load_settings(words: Iterable[str] = (), file: Path | None = None) -> MonitorSettings:
    """The defaults, changed by a YAML file and then by `key=value` words; all problems are reported together."""
    wanted = dict(_from_file(file)) if file is not None else {}
    problems: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(f"--set {word}: write it as key=value")
        wanted[key.strip()] = value.strip()
    types = {item.name: item for item in fields(MonitorSettings)}
    values: dict[str, Any] = {}
    for key, value in wanted.items():
        if key not in types:
            problems.append(f"--set {key}: there is no such setting{_nearest(key, types)}")
            continue
        try:
            values[key] = _parse(types[key], value)
        except ValueError as error:
            problems.append(f"--set {key}={value}: {error}")
    if problems:
        raise UserError("; ".join(problems))
    return replace(MonitorSettings(), **values)


def _parse(item: Any, value: Any) -> float | int:
    low, high, whole = item.metadata["low"], item.metadata["high"], item.type == "int"
    allowed = f"a {'whole ' if whole else ''}number from {low:g} to {high:g} is needed"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(allowed) from None
    if not low <= number <= high or (whole and number != int(number)):
        raise ValueError(allowed)
    return int(number) if whole else number


def _nearest(key: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else "; 'runwatch --explain settings' lists them"


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--settings {path}: cannot be read ({reason}); give a YAML file of key: value"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"--settings {path}: holds no settings; give a YAML file of key: value")
    return {str(key): value for key, value in content.items()}
