"""Lines per second and memory of the monitor, each log read by a fresh process.

python -m tests.diagnostics.monitor.measure_speed 1000000
python -m tests.diagnostics.monitor.measure_speed --gigabytes 5
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

READ = """
import json, resource, sys, time
from mmldlm.diagnostics.monitor.session import Session
from mmldlm.diagnostics.monitor.settings import MonitorSettings
from mmldlm.diagnostics.monitor.sources import find_runs
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


def losses(count: int) -> Iterator[tuple[int, float]]:
    """A falling loss with noise."""
    noise = random.Random(0)
    for step in range(1, count + 1):
        yield step, 1.5 + 4 * math.exp(-3 * step / count) + noise.gauss(0, 0.05)


def write_logs(folder: Path, count: int) -> dict[str, Path]:
    """The same run as plain JSON, as our trainer logs it (with losses by time) and as nanoGPT does; and rubbish."""
    paths = {
        name: folder / name for name in ("plain.jsonl", "training_log.jsonl", "nanogpt.log", "rubbish.log")
    }
    with (
        paths["plain.jsonl"].open("w") as own,
        paths["training_log.jsonl"].open("w") as full,
        paths["nanogpt.log"].open("w") as nano,
    ):
        for step, loss in losses(count):
            line = {
                "step": step,
                "time": 1.7e9 + step,
                "loss": loss,
                "text_loss": loss - 0.5,
                "latent_loss": 0.5,
            }
            line |= {
                "grad_norm": 1.2,
                "lr": 3e-4,
                "tokens_per_second": 51234.5,
                "data_wait": 0.013,
                "epoch": 0.5,
            }
            line |= {"documents_per_second": 812.1, "batch_size": 64, "tokens": 4096 * step, "fill": 0.97}
            own.write(json.dumps(line) + "\n")
            by_time = [loss + 0.1 * bucket for bucket in range(8)]
            line |= {"text_loss_by_time": by_time, "latent_loss_by_time": by_time}
            full.write(json.dumps(line) + "\n")
            nano.write(f"iter {step}: loss {loss:.4f}, time {120 + step % 7:.2f}ms, mfu 31.20%\n")
    with paths["rubbish.log"].open("w") as file:
        file.writelines(
            f"a line of {step} words that means nothing to anybody, but has to be read\n"
            for step in range(count)
        )
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
