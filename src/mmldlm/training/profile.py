"""A stretch of training under torch.profiler: a trace, the kernels that take longest, how busy the device was.

The trace opens in Perfetto (ui.perfetto.dev) and in TensorBoard. With details, the history of device memory is recorded
too, and written when memory runs out; pytorch.org/memory_viz shows it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mmldlm.config import TrainConfig
from mmldlm.durable import replace_file

log = logging.getLogger(__name__)
_SHOWN = 30
_MEMORY_EVENTS = 100_000
_LABELS = ("ProfilerStep", "Optimizer.", "enumerate(DataLoader)#")
"""Labels of torch; a number sign alone is none, kernels of lambdas have it in their names too."""


class StepProfiler:
    """Call `step` after each step; it finishes by itself."""

    def __init__(self, folder: Path, config: TrainConfig, device: torch.device) -> None:
        self.folder, self.device = folder, device
        folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._remembers_memory = device.type == "cuda" and config.profile_details
        if self._remembers_memory:
            # documented by PyTorch under this name, as is _dump_snapshot; there is no other
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._recorded = -config.profile_wait - config.profile_warmup
        self._left = config.profile_wait + config.profile_warmup + config.profile_steps
        self._profile: Any = profile(
            activities=activities,
            schedule=schedule(
                wait=config.profile_wait, warmup=config.profile_warmup, active=config.profile_steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=config.profile_details,
            profile_memory=config.profile_details,
            with_stack=config.profile_details,
        )
        self._profile.start()

    def step(self) -> None:
        """A step is over."""
        if self._profile is None:
            return
        self._left -= 1
        self._recorded += 1
        self._profile.step()
        if self._left == 0:
            self.close()

    def out_of_memory(self, step: int) -> None:
        """Write what memory was used for."""
        if self._remembers_memory and self._profile is not None:
            path = self.folder / f"out_of_memory_{step:08d}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            log.info("what memory was used for: %s (open it at pytorch.org/memory_viz)", path)

    def close(self) -> None:
        """Stop, also before the end."""
        if self._profile is None:
            return
        self._profile.stop()
        self._profile = None
        if self._remembers_memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, done: Any) -> None:
        done.export_chrome_trace(str(self.folder / "trace.json.gz"))
        steps = max(1, self._recorded)
        summary = summarize(done, self.device.type == "cuda", steps)
        replace_file(self.folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        replace_file(self.folder / "summary.md", _table(summary).encode())
        busy = summary["device_busy"]
        share = "" if busy is None else f", device busy {busy:.1%}"
        log.info("profile of %d steps in %s%s", steps, self.folder, share)


def summarize(done: Any, on_gpu: bool, steps: int) -> dict[str, Any]:
    """Longest kernels (operators on a CPU) and the share of the time in which the device computed."""
    kernels = [event for event in done.events() if _is_kernel(event)] if on_gpu else []
    totals = _kernel_times(kernels) if kernels else _operator_times(done)
    whole = sum(entry[0] for entry in totals.values()) or 1.0
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:_SHOWN]
    return {
        "steps": steps,
        "what": "kernels" if kernels else "operators",
        "device_busy": busy_share([(e.time_range.start, e.time_range.end) for e in kernels])
        if kernels
        else None,
        "num_kernels_per_step": sum(entry[1] for entry in totals.values()) / steps,
        "longest": [
            {"name": name, "ms_per_step": ms / steps, "calls_per_step": calls / steps, "share": ms / whole}
            for name, (ms, calls) in longest
        ],
    }


def _is_kernel(event: Any) -> bool:
    """Work of the device; the profiler also draws the host's labels, such as whole steps, on the device's line."""
    labelled = event.is_user_annotation or event.name.startswith(_LABELS)
    return str(event.device_type).endswith("CUDA") and not labelled


def _kernel_times(kernels: list[Any]) -> dict[str, list[float]]:
    """Name -> milliseconds and calls."""
    totals: dict[str, list[float]] = {}
    for event in kernels:
        entry = totals.setdefault(event.name, [0.0, 0.0])
        entry[0] += event.time_range.elapsed_us() / 1000.0
        entry[1] += 1
    return totals


def _operator_times(done: Any) -> dict[str, list[float]]:
    """Name -> milliseconds in the operator itself and calls; lines of Python are left out."""
    rows = [row for row in done.key_averages() if "::" in row.key or "#" in row.key]
    return {row.key: [row.self_cpu_time_total / 1000.0, row.count] for row in rows}


def busy_share(ranges: list[tuple[float, float]]) -> float:
    """Share of the time from the first begin to the last end that at least one of the ranges covers."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    first = min(begin for begin, _ in ranges)
    return covered / max(reached - first, 1e-9)


def _table(summary: dict[str, Any]) -> str:
    busy = summary["device_busy"]
    lines = [
        f"# Profile of {summary['steps']} steps",
        "",
        "The device is the CPU." if busy is None else f"The device was busy {busy:.1%} of the time.",
        f"{summary['num_kernels_per_step']:.0f} {summary['what']} a step; `trace.json.gz` opens in Perfetto.",
        "",
        f"| ms a step | calls a step | share | {summary['what']} |",
        "|---|---|---|---|",
    ]
    for row in summary["longest"]:
        name = row["name"].replace("|", "\\|")[:100]
        lines.append(
            f"| {row['ms_per_step']:.3f} | {row['calls_per_step']:.1f} | {row['share']:.1%} | {name} |"
        )
    return "\n".join(lines) + "\n"
