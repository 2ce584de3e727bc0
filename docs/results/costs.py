"""What saves, the profiler, halves and freezing cost on a CPU, docs/improvements.md: python docs/results/costs.py STORE

Recipe `demo` on one thread, seconds of CPU time of the training thread alone, so that other work on the machine does
not count; medians of ten steps or saves.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mmldlm.benchmark.worker import Drive
from mmldlm.config.recipe import load_recipe
from mmldlm.runtime import start_runtime
from mmldlm.training.profile import StepProfiler
from mmldlm.training.setup import set_up


def seconds(work: Callable[[], object]) -> float:
    """Median of ten."""
    times = []
    for _ in range(10):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def a_step(run: Drive) -> str:
    """Of a run, for people."""
    return f"a step {1e3 * seconds(lambda: run.block(1)):.0f} ms"


def drive(folder: str, *words: str) -> Drive:
    """A run after its first steps."""
    fixed = ["train.device=cpu", "train.num_threads=1", "data.num_workers=0", "train.trackers=[]"]
    config = load_recipe("demo", [f"data.store={sys.argv[1]}", *fixed, *words])
    made = Drive(set_up(config, start_runtime(config)), Path(folder) / "run", None)
    made.block(3)
    return made


with tempfile.TemporaryDirectory() as folder:
    run = drive(folder)

    def save() -> None:
        run.trainer.checkpoints.saver.wait()
        run.trainer.save(wait=False)

    print(f"{a_step(run)}; the training waits {1e3 * seconds(save):.0f} ms for a save")
    size = sum(file.stat().st_size for file in Path(folder).glob("run/checkpoints/step_*/*"))
    print(f"a checkpoint has {size / 2**20:.0f} MiB")
    run.close()

for details in ("true", "false"):
    with tempfile.TemporaryDirectory() as folder:
        words = (
            "train.profile=true",
            "train.profile_wait=0",
            "train.profile_warmup=1",
            "train.profile_steps=14",
        )
        run = drive(folder, *words, f"train.profile_details={details}")
        run.trainer.profiler = StepProfiler(Path(folder) / "profile", run.setup.config.train, run.device)
        run.block(2)
        print(f"profiled, details {details}: {a_step(run)}")
        run.close()

with tempfile.TemporaryDirectory() as folder:
    run = drive(folder, "batch.micro_tokens=512")
    print(f"in halves, as after memory ran out: {a_step(run)}")
    run.close()

for words in ([], ["train.frozen=[text]"], ["train.frozen=[text,shared]"]):
    with tempfile.TemporaryDirectory() as folder:
        run = drive(folder, "corruption.mode_weights={t2l: 1}", "objective.balance=fixed", *words)
        print(f"t2l alone {' '.join(words)}: {a_step(run)}")
        run.close()
