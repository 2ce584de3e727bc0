"""Small training runs for tests."""

from __future__ import annotations

from pathlib import Path

from mmldlm.distributed.ranks import Ranks
from mmldlm.recipe import load_recipe
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import start_runtime
from mmldlm.train.loop import Hooks, Trainer
from mmldlm.train.setup import set_up

RECIPE = """
name: small
data: {{store: {store}}}
batch: {{tokens_per_step: 256}}
model: {{preset: tiny, depth: 2, width: 32, latent_width: 16, num_heads: 2, head_width: 8, time_width: 16}}
optim: {{lr: 3.0e-3, warmup_steps: 5, ema_decay: 0.9}}
train: {{steps: 12, log_every: 3, valid_every: 6, checkpoint_every: 4, tensorboard: false}}
"""


class Silent:
    """Shows nothing."""

    def start(self, step: int, num_steps: int) -> None:
        pass

    def update(self, step: int, fields: dict) -> None:
        pass


def write_recipe(folder: Path, store: Path) -> Path:
    """A recipe file for a run of a second or two."""
    path = folder / "small.yaml"
    path.write_text(RECIPE.format(store=store))
    return path


def make_trainer(folder: Path, store: Path, *overrides: str, ranks: Ranks | None = None) -> Trainer:
    """A run that is set up but not started."""
    ranks, run = ranks or Ranks(), RunFolder(folder / "run")
    if ranks.main:
        folder.mkdir(exist_ok=True)
        write_recipe(folder, store)
        run.create()
    ranks.barrier()
    config = load_recipe(str(folder / "small.yaml"), list(overrides))
    return Trainer(
        set_up(config, start_runtime(config), ranks),
        run,
        Hooks(lambda d: {"valid_loss": 1.0}, lambda d, s: [], Silent()),
    )
