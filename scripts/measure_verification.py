"""What verifying a pair store costs: documents per second with and without, by turns, on a first epoch.

python scripts/measure_verification.py loader                 one process makes the steps of one epoch
python scripts/measure_verification.py train RECIPE [STEPS] [section.key=value ...]
                                                              short runs, each in a process of its own, on random
                                                              documents unless data.store says otherwise
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmldlm.benchmark.arms import Synthetic, make_store
from mmldlm.config.recipe import make_config
from mmldlm.data import files
from mmldlm.data.loader import plan_steps
from mmldlm.runtime import start_runtime
from mmldlm.training.setup import set_up

REPEATS = 5
DOCUMENTS = 65_536
_RUN = """
import sys
from mmldlm.data import files
if sys.argv.pop(1) == "without":
    files.Blocks.require = lambda *_: True
from mmldlm.cli.main import main
main()
"""


def measure_loader(folder: Path) -> None:
    """Steps of sentences with one latent of 384 channels, by the time of this process on its core."""
    store = make_documents(DOCUMENTS)
    config = make_config("small", {"data.store": str(store), "model.preset": "tiny", "train.device": "cpu"})
    verify, rates = files.Blocks.require, {"with": [], "without": []}
    for arm in ["with", "without"] * REPEATS:
        files.Blocks.require = verify if arm == "with" else lambda *_: True
        reader = set_up(config, start_runtime(config)).reader()
        began, done = time.process_time(), 0
        for where in plan_steps(reader.order, reader.split.lengths, reader.plan, 0):
            if where.end > DOCUMENTS:
                break
            done += reader.make(where).num_documents
        rates[arm].append(done / (time.process_time() - began))
    report(rates)


def make_documents(count: int) -> Path:
    """A store of random sentences with one latent of 384 channels, kept in the cache."""
    return make_store(Synthetic(4, 64, 30_522, 384, count, 0))


def measure_training(folder: Path, recipe: str, steps: str, *settings: str) -> None:
    """The documents per second that a run logs after its first third."""
    if not any(word.startswith("data.store=") for word in settings):
        settings = (*settings, f"data.store={make_documents(4 * DOCUMENTS)}")
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for turn, arm in enumerate(["with", "without"] * 2):
        run = folder / f"{turn}-{arm}"
        words = ["train", "--recipe", recipe, "--run", str(run), f"train.steps={steps}", "train.log_every=10",
                 "train.valid_every=0", "train.checkpoint_every=1000000", *settings]  # fmt: skip
        subprocess.run([sys.executable, "-c", _RUN, arm, *words], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "training_log.jsonl").read_text().splitlines()]
        late = [line["documents_per_second"] for line in lines if "documents_per_second" in line][
            len(lines) // 3 :
        ]
        rates[arm].append(statistics.median(late))
        print(f"{arm}: {rates[arm][-1]:,.0f} documents/s", flush=True)
    report(rates)


def report(rates: dict[str, list[float]]) -> None:
    """Medians, quartiles and their ratio."""
    for arm, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{arm} verification: {middle:,.0f} documents/s (quartiles {low:,.0f} to {high:,.0f})")
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    print(f"with / without: {ratio:.4f}")


def main(words: list[str]) -> None:
    """Measure what the first word names."""
    with tempfile.TemporaryDirectory() as folder:
        if words[:1] == ["loader"]:
            measure_loader(Path(folder))
        elif words[:1] == ["train"] and len(words) > 1:
            steps = words[2] if len(words) > 2 and words[2].isdigit() else "300"
            measure_training(Path(folder), words[1], steps, *(word for word in words[2:] if "=" in word))
        else:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
