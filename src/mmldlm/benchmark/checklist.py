"""The users' validation checklist, judged from the files that runs leave: figures of a run, and a check for each line.

Documents, order, masks and noise are functions of the seed, so two runs of one recipe compute the same losses on the
plain and on the optimised path, up to rounding. Over the first steps nothing else can differ (`START`). Later, rounding
has led the weights apart, and the losses with them, but both still score the same noisy documents: their difference
stays far below that from one step to the next (`CURVE`). Loss, text loss and latent loss are compared, and the worst
counts: in their sum, errors may cancel. Measured in fp32 over 600 steps of a small model: 5e-7 at most. Attention that
did not stop at the end of a document came to 4e-4 at the start, another momentum of the optimizer to 4e-3 on the curve.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.benchmark.comparison import loss_difference
from mmldlm.checkpoint.files import SUFFIX, DamagedError, check_file, published, read_latest, read_manifest
from mmldlm.metrics import read_log
from mmldlm.run_folder import RunFolder

START, CURVE = 1e-5, 1e-3
"""Largest differences in fp32."""
START_ROUNDED, CURVE_ROUNDED = 2e-3, 1e-2
"""The same for products in fewer bits: bf16 keeps 8 of them, a relative error of 4e-3 in each factor."""
PARTS = ("loss", "text_loss", "latent_loss")
KEPT = 3
"""Checkpoints that a validation keeps: the plan's number."""
BUSY = 0.85
"""Least share of the time in which the device works: the plan's number."""
GPU_SPEED, GPU_MEMORY = 1.25, 0.70
"""The plan: at least 25 % faster, at least 30 % less memory."""
CPU_SPEED, CPU_MEMORY = 0.9, 1.05
"""Most of the plan's steps are for GPUs: on a CPU the optimised path must be no worse, up to noise."""
_ERROR = re.compile(r"^\S+ \S+ (ERROR|CRITICAL)\s")
_WARNING = re.compile(r"^\S+ \S+ WARNING\s")


@dataclass(frozen=True)
class Figures:
    """What the files of one run say."""

    failure: str | None = None
    seconds_per_step: float | None = None
    """Median over the lines of its log, without the first fifth, in which things are compiled."""
    memory: int | None = None
    """Peak bytes on the GPU, or of the process where there is none."""
    steps: list[int] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of each part, means over the steps since the line before."""
    held_out: dict[str, list[float]] = field(default_factory=dict)
    """Of each part, over the run: the same documents and noise each time."""
    skipped: int = 0
    """Updates with a gradient that was not finite."""
    busy: float | None = None
    """Share of the time in which the device worked: by the profiler on a GPU, else without waiting for data."""
    errors: list[str] = field(default_factory=list)
    num_warnings: int = 0


@dataclass(frozen=True)
class Check:
    """One line of the checklist; `passed` is None where it was not run."""

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        mark = {True: "✓", False: "✗", None: "-"}[self.passed]
        return f"{mark} {self.name}: {self.detail}"


def read_figures(run: RunFolder, output: Path, failure: str | None, resident: int) -> Figures:
    """From a run's log; `output` is what its process said, `resident` the peak of its memory in bytes."""
    logged = list(read_log(run.training_log))
    lines = [line for line in logged if "loss" in line]
    held_out = {
        part: [float(line[f"valid_{part}"]) for line in logged if f"valid_{part}" in line] for part in PARTS
    }
    on_gpu = [line["gpu_memory_allocated"] for line in lines if line.get("gpu_memory_allocated")]
    train_log = _text(run.train_log).splitlines()
    errors = [line for line in train_log if _ERROR.match(line)]
    errors += [line for line in _text(output).splitlines() if line.startswith("Traceback")]
    return Figures(
        failure, _seconds_per_step(lines), max(on_gpu, default=resident), [int(line["step"]) for line in lines],
        {part: [float(line[part]) for line in lines] for part in PARTS},
        {part: losses for part, losses in held_out.items() if losses},
        sum(int(line.get("skipped_steps") or 0) for line in lines), _busy(run, lines), errors,
        sum(bool(_WARNING.match(line)) for line in train_log),
    )  # fmt: skip


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace")
    return ""


def _seconds_per_step(lines: list[dict[str, Any]]) -> float | None:
    before = {"step": 0, "documents": 0}
    times = []
    for line in lines:
        if line.get("documents_per_second"):
            seconds = (line["documents"] - before["documents"]) / line["documents_per_second"]
            times.append(seconds / (line["step"] - before["step"]))
        before = line
    return statistics.median(times[len(times) // 5 :]) if times else None


def _busy(run: RunFolder, lines: list[dict[str, Any]]) -> float | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        share = json.loads((run.path / "profile" / "summary.json").read_text())["device_busy"]
        if share is not None:
            return float(share)
    waits = [line["data_wait"] for line in lines if line.get("data_wait") is not None]
    return 1.0 - statistics.median(waits) if waits else None


def compare_runs(plain: Figures, optimised: Figures, precision: str, on_gpu: bool) -> list[Check]:
    """Time, memory, and losses of the plain path against the optimised one."""
    failures = {"plain": plain.failure, "optimised": optimised.failure}
    if any(failures.values()):
        reasons = [f"{name}: {reason}" for name, reason in failures.items() if reason]
        return [Check("both paths", False, "; ".join(reasons))]
    speed, memory = (GPU_SPEED, GPU_MEMORY) if on_gpu else (CPU_SPEED, CPU_MEMORY)
    return [
        _check_time(plain.seconds_per_step or 0.0, optimised.seconds_per_step or 0.0, speed),
        _check_memory(plain.memory or 0, optimised.memory or 0, memory),
        *_check_losses(plain, optimised, precision),
    ]


def _check_time(plain: float, optimised: float, least: float) -> Check:
    ratio = plain / optimised if optimised else 0.0
    times = f"plain {1e3 * plain:,.1f} ms, optimised {1e3 * optimised:,.1f} ms"
    figures = {"plain": plain, "optimised": optimised, "ratio": ratio}
    return Check("time per step", ratio >= least, f"{times}: {ratio:.2f}x (at least {least:g}x)", figures)


def _check_memory(plain: int, optimised: int, most: float) -> Check:
    ratio = optimised / plain if plain and optimised else math.inf
    sizes = f"plain {plain / 2**30:.2f} GiB, optimised {optimised / 2**30:.2f} GiB"
    figures = {"plain": plain, "optimised": optimised, "ratio": ratio}
    return Check("memory", ratio <= most, f"{sizes}: {_percent(ratio)} (at most {_percent(most)})", figures)


def _check_losses(plain: Figures, optimised: Figures, precision: str) -> list[Check]:
    start, curve = _limits(precision)
    if plain.steps != optimised.steps or not plain.steps:
        counts = f"{len(plain.steps)} and {len(optimised.steps)} points"
        return [Check("loss curve", False, f"{counts}, not of the same steps")]
    each = _differences(optimised.losses, plain.losses)
    whole, last = statistics.fmean(each), _differences(optimised.held_out, plain.held_out)[-1]
    points = f"{len(each)} points differ by {whole:.1e}, the farthest by {max(each):.1e}"
    ends = ", ".join(f"{part} {values[-1]:.4f}" for part, values in plain.held_out.items())
    reason = f": same documents and noise, so only rounding differs, {precision} against fp32"
    return [
        _limited("loss at the start", each[0], start, f"steps 1 to {plain.steps[0]} differ by {each[0]:.1e}", reason),
        _limited("loss curve", whole, curve, points, reason),
        _limited("held-out loss", last, curve, f"{ends or 'none'}: differs by {last:.1e}"),
    ]  # fmt: skip


def _limits(precision: str) -> tuple[float, float]:
    """At the start and on the curve."""
    return (START, CURVE) if precision == "fp32" else (START_ROUNDED, CURVE_ROUNDED)


def _limited(name: str, value: float, limit: float, detail: str, reason: str = "") -> Check:
    figures = {"difference": value, "limit": limit}
    return Check(name, value <= limit, f"{detail} (at most {limit:g}{reason})", figures)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _differences(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> list[float]:
    """At each point the relative difference of the part that differs most; infinite where one is not finite."""
    sizes = [{part: len(values) for part, values in losses.items()} for losses in (ours, theirs)]
    if sizes[0] != sizes[1] or not any(sizes[0].values()):
        return [math.inf]
    columns = [zip(ours[part], theirs[part], strict=True) for part in theirs]
    return [max(_difference(*pair) for pair in point) for point in zip(*columns, strict=True)]


def _difference(ours: float, theirs: float) -> float:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return loss_difference([ours], [theirs])


def check_course(runs: dict[str, Figures]) -> list[Check]:
    """Whether the loss falls, everything is finite, the device is busy, and nothing failed, as far as runs ended."""
    optimised = runs.get("optimised")
    checks = [_check_fall(optimised.held_out.get("loss", []))] if optimised else []
    checks += [_check_finite(runs)] if runs else []
    checks += [_check_busy(optimised.busy)] if optimised else []
    checks += [_check_errors(runs)] if runs else []
    return checks


def _check_busy(busy: float | None) -> Check:
    detail = "not known" if busy is None else f"{_percent(busy)} of the time (at least {_percent(BUSY)})"
    return Check("device busy", busy is not None and busy >= BUSY, detail, {"share": busy})


def _check_errors(runs: dict[str, Figures]) -> Check:
    errors = {name: run.errors for name, run in runs.items() if run.errors}
    warnings = sum(run.num_warnings for run in runs.values())
    detail = f"{sum(map(len, errors.values()))} errors, {warnings} warnings in the logs of {len(runs)} runs"
    first = next((f"; {name}: {lines[0]}" for name, lines in errors.items()), "")
    return Check("no error in the log", not errors, detail + first, {"errors": errors, "warnings": warnings})


def _check_fall(losses: list[float]) -> Check:
    """Of held-out losses: training losses of a short run differ more by their documents than by what was learned."""
    if len(losses) < 2:
        return Check("loss falls", False, f"{len(losses)} held-out losses are no curve")
    first, last = losses[0], losses[-1]
    detail = f"held-out, from {first:.4f} to {last:.4f} in {len(losses)} validations"
    return Check("loss falls", last < first, detail, {"first": first, "last": last})


def _check_finite(runs: dict[str, Figures]) -> Check:
    losses = {name: run.losses.get("loss", []) for name, run in runs.items()}
    bad = {name: sum(not math.isfinite(loss) for loss in values) for name, values in losses.items()}
    skipped = {name: run.skipped for name, run in runs.items()}
    steps = max((run.steps[-1] for run in runs.values() if run.steps), default=0)
    counts = f"{sum(bad.values())} losses not finite, {sum(skipped.values())} updates skipped"
    passed = not any(bad.values()) and not any(skipped.values())
    detail = f"{counts} in {steps:,} steps ({', '.join(runs)})"
    return Check("no NaN", passed and steps > 0, detail, {"not_finite": bad, "skipped": skipped})


def check_checkpoints(run: RunFolder, due: list[int]) -> Check:
    """Of the checkpoints that were due, the newest are there with the right checksums, and the others are gone."""
    kept = published(run.checkpoints)
    steps, latest = [read_manifest(path).step for path in kept], read_latest(run.checkpoints)
    try:
        for path in kept:
            for file in read_manifest(path).files:
                check_file(path, file)
    except DamagedError as error:
        return Check("checkpoints", False, str(error))
    wanted = due[-KEPT:]
    listed = ", ".join(map(str, steps)) or "none"
    passed = steps == wanted and latest is not None and latest.name == kept[-1].name
    detail = f"{len(due)} were due, kept are those of steps {listed} (the newest {KEPT}), checksums right"
    return Check("checkpoints", passed, detail, {"due": due, "kept": steps})


def check_resumed(whole: RunFolder, resumed: RunFolder, since: int, step: int) -> Check:
    """Whether the last checkpoint of a resumed run is that of the run that was never interrupted, bit for bit."""
    ours, theirs = (_digests(run, step) for run in (resumed, whole))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    same = f"{len(theirs)} files of step {step} are the same bit for bit"
    detail = f"from step {since}: " + (
        f"different: {', '.join(different) or 'all'}" if different or not theirs else same
    )
    return Check("resume", bool(theirs) and not different, detail, {"from": since, "different": different})


def _digests(run: RunFolder, step: int) -> dict[str, str]:
    """Checksums of the tensors of a checkpoint."""
    for path in published(run.checkpoints):
        manifest = read_manifest(path)
        if manifest.step == step:
            return {file.name: file.sha256 for file in manifest.files if file.name.endswith(SUFFIX)}
    return {}


def check_ranks(alone: Figures, several: Figures, since: int, count: int, precision: str) -> Check:
    """Whether several ranks continue a run as one rank did."""
    if several.failure:
        return Check("ranks", False, f"{count} ranks: {several.failure}")
    ours, theirs = _since(several, since), _since(alone, since)
    value = statistics.fmean(_differences(ours, theirs))
    detail = f"{count} ranks from step {since}: losses differ from those of one by {value:.1e}"
    return _limited("ranks", value, _limits(precision)[1], detail)


def _since(run: Figures, first: int) -> dict[str, list[float]]:
    kept = [idx for idx, step in enumerate(run.steps) if step > first]
    return {part: [losses[idx] for idx in kept] for part, losses in run.losses.items()}


@dataclass(frozen=True)
class Validation:
    """The checklist of a recipe on this machine."""

    checks: list[Check]
    runs: dict[str, Figures]
    environment: dict[str, Any]
    settings: dict[str, Any]
    """Recipe, steps, device and precision."""
    folder: Path
    partial: bool = False
    """Whether it was stopped before its end."""

    @property
    def passed(self) -> bool:
        """Whether it came to its end and no check failed."""
        return not self.partial and all(check.passed is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": 1, "passed": self.passed, "partial": self.partial, "settings": self.settings,
            "checks": [asdict(check) for check in self.checks],
            "runs": {name: asdict(run) for name, run in self.runs.items()}, "environment": self.environment,
        }  # fmt: skip
