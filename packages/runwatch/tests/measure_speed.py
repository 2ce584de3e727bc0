"""Lines per second and memory of the monitor, each log read by a fresh process.

python -m tests.measure_speed 1000000
python -m tests.measure_speed --gigabytes 5
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READ = """
import json, resource, sys, time
from runwatch.session import Session
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
session = Session(find_runs([sys.argv[1]]), MonitorSettings())
before, began, used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
session.look(live=False)
print(json.dumps({
    "wall_seconds": time.perf_counter() - began,
    "cpu_seconds": time.process_time() - used,
    "lines_read": session.runs[0].num_lines,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "before_mib": before / 1024,
}))
"""


def losses(count: int) -> Iterator[tuple[int, float, float]]:
    """A falling loss, and the same with noise."""
    noise = random.Random(0)
    for step in range(1, count + 1):
        smooth = 1.5 + 4 * math.exp(-3 * step / count)
        yield step, smooth, smooth + noise.gauss(0, 0.05)


def plain_line(step: int, loss: float) -> dict[str, Any]:
    """Numbers only, most of them short."""
    line = {"step": step, "time": 1.7e9 + step, "loss": loss, "text_loss": loss - 0.5, "latent_loss": 0.5}
    line |= {"grad_norm": 1.2, "lr": 3e-4, "tokens_per_second": 51234.5, "data_wait": 0.013, "epoch": 0.5}
    return line | {"documents_per_second": 812.1, "batch_size": 64, "tokens": 4096 * step, "fill": 0.97}


def own_line(step: int, loss: float, noise: random.Random) -> dict[str, Any]:
    """What `mmldlm train` logs on a GPU; a test compares the keys with those of a run."""
    share, documents = noise.gauss(1, 0.02), noise.randint(380, 420)
    by_time = [0.2 * bucket * loss * noise.gauss(1, 0.1) for bucket in range(1, 9)]
    latent_by_time = [0.1 * bucket * noise.gauss(1, 0.2) for bucket in range(1, 9)]
    if noise.random() < 0.05:
        by_time[0] = None  # no masked token had so early a time
    line = {"step": step, "time": round(1.7e9 + 0.25 * step + share, 3), "loss": loss}
    line |= {"text_loss": loss - 0.7, "latent_loss": 0.5 * share, "length_loss": 2.1 * share}
    line |= {"text_loss_by_time": by_time, "latent_loss_by_time": latent_by_time}
    line |= {"text_accuracy": 0.4 * share, "grad_norm": 1.2 * share, "skipped_steps": 0, "longest_skip": 0}
    line |= {"batch_size": documents, "documents_per_second": 1600 * share, "tokens_per_second": 5e4 * share}
    line |= {"flops_per_second": 1.1e14 * share, "mfu": 0.35 * share, "data_wait": 0.003 * share}
    line |= {"fill": 0.9 * share, "micro_batches": 4.0, "extra_micro_batches": 0, "lr": 3e-4 / share}
    line |= {"epoch": step / 777, "tokens": 4096 * step, "documents": 128 * step, "micro_tokens": 1024}
    return line | {"gpu_memory_allocated": 2**33 + documents, "gpu_memory_reserved": 2**34}


def validation_line(step: int, loss: float) -> dict[str, Any]:
    """What `mmldlm train` logs every `train.valid_every` steps, between two lines of training."""
    line = {"step": step, "time": round(1.7e9 + 0.25 * step + 2, 3), "valid_loss": 1.01 * loss}
    line |= {"valid_text_loss": loss - 0.7, "valid_latent_loss": 0.5 + loss / 100, "valid_length_loss": 2.1}
    line |= {"valid_text_accuracy": 0.4 - loss / 100, "valid_text_loss_shuffled": 1.1 * loss}
    return line | {"valid_latent_prediction_std": 0.7 + loss / 1000}


def write_logs(folder: Path, count: int) -> dict[str, Path]:
    """The same run as plain JSON, as our trainer logs it by default, and as nanoGPT does; and rubbish.

    Ours: `train.log_every` is 10 and `train.valid_every` 500, so every 51st line is one of validation.
    """
    names = ("plain.jsonl", "training_log.jsonl", "nanogpt.log", "rubbish.log")
    paths, noise = {name: folder / name for name in names}, random.Random(1)
    plain, own, nano, rubbish = (paths[name].open("w") for name in names)
    with plain, own, nano, rubbish:
        for step, smooth, loss in losses(count):
            plain.write(json.dumps(plain_line(step, loss)) + "\n")
            done = 10 * (step - step // 51)
            line = own_line(done, loss, noise) if step % 51 else validation_line(done, smooth)
            own.write(json.dumps(line) + "\n")
            nano.write(f"iter {step}: loss {loss:.4f}, time {120 + step % 7:.2f}ms, mfu 31.20%\n")
            rubbish.write(f"a line of {step} words that means nothing to anybody, but has to be read\n")
    return paths


def write_big(path: Path, gigabytes: float) -> int:
    """A chatty log: a line of numbers after every nine long ones of debugging."""
    long = ("tensor(" + "0.125, " * 280 + ")\n") * 9
    count = 0
    with path.open("w") as file:
        while file.tell() < gigabytes * 1e9:
            for _ in range(1000):
                count += 10
                file.write(f"{long}step={count} loss={2 + math.exp(-count / 1e6):.5f} lr=3.0e-04\n")
    return count


def main() -> None:
    """Write, read, tell."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "--gigabytes":
            path = Path(folder) / "big.log"
            measure({path.name: path}, write_big(path, float(sys.argv[2])))
        else:
            measure(write_logs(Path(folder), int(sys.argv[1])), int(sys.argv[1]))


def measure(paths: dict[str, Path], count: int) -> None:
    """Read each in a fresh process."""
    for name, path in paths.items():
        done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        size, rate = path.stat().st_size / 1e6, count / found["cpu_seconds"]
        memory = f"{found['peak_mib']:.0f} MiB at most ({found['before_mib']:.0f} before)"
        seconds = f"{found['cpu_seconds']:.1f} s of CPU, {found['wall_seconds']:.1f} s in all"
        print(f"{name}: {count} lines, {size:.0f} MB: {seconds}, {rate:,.0f} lines/s of CPU, {memory}")


if __name__ == "__main__":
    main()
