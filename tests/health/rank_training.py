"""Ranks that really train together over gloo, with a fault in rank 1: run by torchrun, once per labelled log.

python -m torch.distributed.run --nproc-per-node 3 --log-dir D --redirects 3 rank_training.py MODE
"""

from __future__ import annotations

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

FAULT_STEP, STEPS, STEP_SECONDS = 30, 80, 0.05


@record
def main(mode: str) -> None:
    """Least squares by gradients that are averaged over the ranks; every rank logs its own steps before it waits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    weight, truth = torch.zeros(8), torch.arange(8.0)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 8, generator=generator)
        error = inputs @ weight - inputs @ truth
        time.sleep(STEP_SECONDS)
        if rank == 1 and step >= FAULT_STEP:
            misbehave(mode)
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        print(f"{now} INFO step {step}/{STEPS} loss={error.square().mean():.4f}", flush=True)
        gradient = 2 * inputs.T @ error / 64
        dist.all_reduce(gradient)
        weight -= 0.05 * gradient / dist.get_world_size()
    dist.destroy_process_group()


def misbehave(mode: str) -> None:
    """What goes wrong in rank 1."""
    if mode == "crash":
        raise ValueError("a batch that cannot be read")
    if mode == "straggler":
        time.sleep(STEP_SECONDS)
    if mode == "hang":
        time.sleep(20)


if __name__ == "__main__":
    main(sys.argv[1])
