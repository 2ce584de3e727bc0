"""`mmldlm export`: weights for use from the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to; the run's own export folder unless told otherwise.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The pair store of the run, where it has moved to since.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema/--no-ema", help="Averaged weights, or those of the last step.")
    ] = True,
) -> None:
    """Write the weights of a run's newest checkpoint with all that is needed to use them."""
    import logging

    from mmldlm.checkpoint.export import write_export
    from mmldlm.checkpoint.resume import load_latest
    from mmldlm.config.recipe import config_from_dict
    from mmldlm.data.store import PairStore
    from mmldlm.errors import UserError
    from mmldlm.run_folder import existing_run
    from mmldlm.training.export import make_export
    from mmldlm.training.setup import data_shape_of

    folder = existing_run(run)
    snapshot = load_latest(
        folder.checkpoints, report=logging.getLogger(__name__).warning, groups=("model", "ema")
    )
    if snapshot is None:
        raise UserError(f"{run}: holds no checkpoint yet; train it first")
    config = config_from_dict(snapshot.meta["settings"])
    store = PairStore.open_of_run(config.data.store, data)
    if store.content != snapshot.meta["content"]:
        raise UserError(
            f"{store.path}: is not the pair store that {run} was trained on; say where that one is with --data"
        )
    config.data.store = str(store.path.absolute())
    weights = snapshot.tensors["ema" if ema and "ema" in snapshot.tensors else "model"]
    target = out or folder.export
    write_export(target, make_export(weights, config, store, data_shape_of(store), snapshot.step))
    typer.echo(f"step {snapshot.step} of {run} exported to {target}")
