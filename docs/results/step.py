"""One way to compute a step, timed: python docs/results/step.py DOCUMENTS [key=value ...]

Random documents of 2,048 tokens, recipe `reference`; with 0 for DOCUMENTS, documents of 4 to 64 tokens in batches
counted as the recipe and the settings have it: milliseconds a step, samples per second, share of the device's
peak, and memory; with PROFILE=FILE in the environment also the time of every kernel, with WARMUP=STEPS so many steps
before the clock, 10 or 20 otherwise: small batches need more, until all their shapes are recorded. In one process and
without the repetitions of `mmldlm benchmark`, which says how far its figures can be trusted.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from mmldlm.benchmark.arms import Synthetic, make_store
from mmldlm.benchmark.worker import Drive
from mmldlm.config.recipe import load_recipe
from mmldlm.runtime import start_runtime
from mmldlm.training.setup import set_up

documents = int(sys.argv[1])
large = documents > 8 or not documents
store = make_store(
    Synthetic(2048, 2048, 30522, 32, 2048, 0) if documents else Synthetic(4, 64, 30522, 384, 200_000, 0)
)
words = [f"data.store={store}"]
words += ["batch.tokens_per_step=null", f"batch.documents_per_step={documents}"] if documents else []
config = load_recipe("reference", [*words, *sys.argv[2:]])
with tempfile.TemporaryDirectory() as folder:
    drive = Drive(set_up(config, start_runtime(config)), Path(folder) / "run", None)
    drive.block(int(os.environ.get("WARMUP", 10 if large else 20)))
    steps = 6 if large else 12
    blocks = [drive.block(steps) for _ in range(3)]
    seconds = statistics.median(block.seconds / steps for block in blocks)
    rate = statistics.median(block.flops / block.seconds for block in blocks)
    names = ("documents", "tokens", "places")
    samples, tokens, places = (sum(getattr(block, name) for block in blocks) / (3 * steps) for name in names)
    print(
        f"{1e3 * seconds:.2f} ms a step, {samples / seconds:.1f} samples/s, {tokens / seconds:,.0f} tokens/s, "
        f"fill {100 * tokens / places:.1f} %, MFU {100 * rate / 989e12:.1f} % of an H200, "
        f"{(drive.memory().allocated or 0) / 2**30:.2f} GiB, loss {float(drive.read()['loss']):.5f}"
    )
    if path := os.environ.get("PROFILE"):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            drive.block(3)
        rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
        lines = [
            f"{row.self_device_time_total / 3e3:9.3f} ms {row.count / 3:8.1f} x  {row.key}" for row in rows
        ]
        Path(path).write_text("\n".join(lines))
    drive.close()
