"""The loss inside the training loop is the objective over all batches together, however they are cut."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from mmldlm.config import Config, ObjectiveConfig
from mmldlm.evaluation.validation import validation_loss
from mmldlm.layout import Caps
from mmldlm.objective.joint import Active, Objective
from tests import batches

CPU = torch.device("cpu")


def loss_of(parts: list[list[int]], *, caps: Caps | None = None, prebuilt: bool = False) -> dict[str, float]:
    documents, corruption = batches.small_documents(), batches.small_corruption()
    active = Active.of(Config().corruption, ObjectiveConfig(), length_modelled=True)
    objective = Objective(ObjectiveConfig(), corruption.latent, active)
    clean = [batches.batch_of(documents, np.array(part), caps) for part in parts]
    given = [corruption.corrupt(batch) for batch in clean] if prebuilt else clean
    denoiser = batches.small_denoiser().train()
    found = validation_loss(denoiser, corruption, objective, given, CPU, contextlib.nullcontext)
    assert denoiser.training
    return found


def test_any_cut_filler_and_order_give_the_same_loss() -> None:
    whole = loss_of([[0, 1, 2, 3, 4, 5]])
    assert set(whole) == {
        f"valid_{name}" for name in ("loss", "text_loss", "latent_loss", "length_loss", "text_accuracy")
    }
    assert loss_of([[3, 1], [5, 0, 2], [4]]) == pytest.approx(whole, rel=1e-5)
    assert loss_of([[0, 1, 2, 3, 4, 5]], caps=Caps(64, 8, 12)) == pytest.approx(whole, rel=1e-5)
    assert loss_of([[0, 1, 2], [3, 4, 5]], prebuilt=True) == pytest.approx(whole, rel=1e-5)
