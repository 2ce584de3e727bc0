"""How long a thousand files take: `python -m tests.measure_speed`, the table of docs/accuracy.md."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from traindoctor import transactions
from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options

Result = TypeVar("Result")
NUM_FILES = 1000
TRAINING = """import torch
from torch.utils.data import DataLoader
from torch.nn.parallel import DistributedDataParallel as DDP

def train(args, train_set, model):
    loader = DataLoader(train_set, batch_size=8, shuffle=True, num_workers=4)
    model = DDP(model.cuda(), device_ids=[args.rank])
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
    )
    for x in loader:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = torch.load(args.path)
"""
OTHER = "def f{0}(a, b):\n    v = g(a, k={0})\n    return [v, b, {{'x': {0}}}]\n"


def _measure(name: str, task: Callable[[], Result]) -> Result:
    started, used = time.perf_counter(), os.times()
    result = task()
    now = os.times()
    processor = sum(now[:4]) - sum(used[:4])
    print(f"| {name} | {time.perf_counter() - started:.1f} s | {processor:.1f} s |")
    return result


def main() -> None:
    """Audit, fix and undo; the files and the fixes are the same every time."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(NUM_FILES):
            text = TRAINING + "".join(OTHER.format(idx) for idx in range(60))
            (root / f"module_{number}.py").write_text(text)
        options = load_options(root, external=False)
        print("| what | time | processor time |\n|---|---|---|")
        report = _measure(f"check {NUM_FILES:,} files", lambda: audit(root, options))
        changes = plan(report, options, unsafe=True)
        fixes = sum(len(change.fixed) for change in changes)
        _measure(f"plan {fixes:,} fixes", lambda: plan(report, options, unsafe=True))
        _measure("write them, with the journal", lambda: transactions.apply(root, changes))
        _measure("undo", lambda: transactions.undo(root))


if __name__ == "__main__":
    main()
