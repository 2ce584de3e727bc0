"""One of two ranks of a labelled run; started with torchrun's variables as `... FOLDER NAME`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mmldlm.config import Config
from mmldlm.distributed.launch import start_ranks
from mmldlm.errors import UserError
from tests.health.trainer_corpus import AT, USUAL
from tests.health.trainer_faults import before_each_step
from tests.runs import make_trainer


def main(folder: Path, name: str) -> None:
    """Rank 1 has the fault, if there is one."""
    config = Config()
    config.distributed.timeout_minutes = 0.5
    torch.set_num_threads(1)
    with start_ranks(config) as ranks:
        trainer = make_trainer(folder / name, folder / "store", *USUAL, "train.steps=90", ranks=ranks)

        def act(batch: Any) -> None:
            if ranks.rank == 1 and trainer.step + 1 >= AT:
                if name == "ranks_killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.3 if name == "ranks_slow" else 0.0)

        before_each_step(trainer, act)
        with contextlib.suppress(UserError):
            trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
