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
    """Lines of the robust baseline (median and median deviation)."""
    warmup_lines: int = _number(20, 4, 10_000)
    """Lines of grace before anything is compared with a baseline."""
    resolve_lines: int = _number(20, 1)
    """A passing event, such as a spike, is over after so many lines without another."""
    cooldown_seconds: float = _number(900, 0)
    """An alert that goes on, or comes back, is sent again at most so often."""

    nonfinite_streak: int = _number(3, 1)
    """A gradient that is not finite is a warning; so many lines in a row are an error."""
    spike_z: float = _number(8, 1)
    """A spike is so many robust standard deviations above the baseline ..."""
    spike_rise: float = _number(0.3, 0)
    """... above it by this share ..."""
    spike_tail: float = _number(1.5, 0)
    """... and so many times as far above it as any line before: small batches have heavy tails."""
    divergence_lines: int = _number(10, 3)
    """Divergence: the median of so many lines ..."""
    divergence_rise: float = _number(0.25, 0.01)
    """... lies above the best median of a history window by this share, and for certain above its noise."""
    divergence_start: float = _number(2, 1.01)
    """... or above the loss at the start by this factor."""
    zero_lines: int = _number(10, 2)
    """A loss that is exactly 0 for so many lines, and was not small before, is gone ..."""
    missing_lines: int = _number(5, 2)
    """... and so is one that so many steps in a row do not show."""
    plateau_lines: int = _number(300, 30)
    """Plateau: over the last third of the run so far, at least so many lines, ..."""
    plateau_gain: float = _number(0.01, 0, 1)
    """... the loss fell by less than this share, for certain, ..."""
    plateau_lr: float = _number(0.2, 0, 1)
    """... while the learning rate was above this share of its peak."""

    explosion_ratio: float = _number(10, 1.5)
    """An exploding gradient is so many times its baseline."""
    explosion_lines: int = _number(3, 1)
    """So many lines of the last ten, or one line at ten times the ratio."""
    vanishing_ratio: float = _number(1e-3, 0, 1)
    """A vanishing gradient is below this share of its usual norm ..."""
    vanishing_lines: int = _number(5, 1)
    """... for so many lines in a row, while the loss is still above 5 % of what it was."""
    lr_jump: float = _number(5, 1.1)
    """The learning rate may not grow by more than this factor from line to line after it had begun to fall."""
    lr_zero_lines: int = _number(5, 1)
    """So many lines with a learning rate of 0 are a mistake, unless the run is at its end."""
    lr_early: float = _number(0.6, 0, 1)
    """A rate that is at its floor (below 1 % of the peak) before this share of the steps ended too early."""
    skipped_share: float = _number(0.02, 0, 1)
    """Skipped updates as a share of the last `skipped_window` steps; above it is a warning, below it a note."""
    skipped_window: int = _number(500, 10)
    """Steps over which that share is taken."""

    drop_ratio: float = _number(0.6, 0, 1)
    """Throughput (four of five lines) below this share of the baseline is a drop."""
    unstable_change: float = _number(0.25, 0.01)
    """Throughput is unstable if its median change from line to line exceeds this share ..."""
    unstable_lines: int = _number(40, 8)
    """... over so many lines."""
    wait_share: float = _number(0.2, 0, 1)
    """Share of the time spent waiting for data (median of ten lines)."""
    stall_factor: float = _number(10, 1.5)
    """No new line for so many times the usual interval is a stall ..."""
    stall_seconds: float = _number(60, 0)
    """... but never before so many seconds."""
    start_seconds: float = _number(1800, 1)
    """A run without any step after so many seconds is stalled too."""
    heartbeat_seconds: float = _number(120, 15)
    """A run of ours whose heartbeat and log are older is gone, where its process cannot be looked at."""
    straggler_lag: float = _number(0.2, 0)
    """A rank straggles if it comes later than the median rank by this share of a step, or is slower by it ..."""
    straggler_share: float = _number(0.7, 0, 1)
    """... in this share of the last steps that all ranks logged."""
    rank_silent_steps: int = _number(20, 1)
    """A rank that is so many logged steps behind the first one has fallen silent."""

    shrink_ratio: float = _number(0.6, 0, 1)
    """A batch (micro_tokens, else batch_size) below this share of its largest median is shrinking."""
    disk_hours: float = _number(6, 0)
    """Warn when the disk will be full within so many hours at the present rate."""
    disk_free_share: float = _number(0.02, 0, 1)
    """Warn when less than this share of the disk is free."""
    checkpoint_factor: float = _number(2.5, 1.1)
    """A checkpoint is overdue after so many of its usual periods."""
    drift_rise: float = _number(0.03, 0)
    """Validation drifts if it is above its best by this share ..."""
    drift_count: int = _number(3, 1)
    """... at so many validations in a row, while the training loss went on falling."""
    collapse_ratio: float = _number(0.1, 0, 1)
    """The latent collapses if the norm or deviation of its prediction is below this share of its usual size ..."""
    collapse_lines: int = _number(3, 1)
    """... for so many lines in a row."""
    ignored_gain: float = _number(0.01, 0)
    """The latent is ignored if a shuffled one costs less than this share of the text loss ..."""
    ignored_count: int = _number(3, 1)
    """... at so many validations in a row ..."""
    ignored_start: float = _number(0.05, 0, 1)
    """... after this share of the steps: no model reads its latents from the first step on."""


def load_settings(words: Iterable[str] = (), file: Path | None = None) -> MonitorSettings:
    """The defaults, changed by a YAML file and then by `key=value` words; all problems are told at once."""
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
