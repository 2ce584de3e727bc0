"""The loss inside the training loop is the objective over all batches together, however they are cut."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmldlm.config import ModeWeights, ObjectiveConfig
from mmldlm.evaluation.validation import Spread, make_validation, validation_loss, with_wrong_latents
from mmldlm.layout import Caps
from mmldlm.objective.joint import Objective
from tests import batches
from tests.runs import make_trainer
from tests.stores import write_store

CPU = torch.device("cpu")


def loss_of(
    parts: list[list[int]], *, caps: Caps | None = None, prebuilt: bool = False, **changes: Any
) -> dict[str, float]:
    documents, corruption = batches.small_documents(), batches.small_corruption()
    corruption = replace(corruption, config=replace(corruption.config, **changes))
    objective = Objective(ObjectiveConfig(), corruption)
    clean = [batches.batch_of(documents, np.array(part), caps) for part in parts]
    given = [corruption.corrupt(batch) for batch in clean] if prebuilt else clean
    denoiser = batches.small_denoiser().train()
    found = validation_loss(denoiser, corruption, objective, given, CPU, contextlib.nullcontext)
    assert denoiser.training
    return found


def test_any_cut_filler_and_order_give_the_same_loss() -> None:
    whole = loss_of([[0, 1, 2, 3, 4, 5]])
    names = ("loss", "text_loss", "latent_loss", "length_loss", "text_accuracy", "text_loss_shuffled")
    assert set(whole) == {f"valid_{name}" for name in (*names, "latent_prediction_std")}
    other = loss_of([[3, 1], [5, 0, 2], [4]])
    assert other.pop("valid_text_loss_shuffled") > 0  # another order, other wrong latents
    assert other == pytest.approx({name: whole[name] for name in other}, rel=1e-5)
    assert loss_of([[0, 1, 2, 3, 4, 5]], caps=Caps(64, 8, 12)) == pytest.approx(whole, rel=1e-5)
    assert loss_of([[0, 1, 2], [3, 4, 5]], prebuilt=True) == pytest.approx(whole, rel=1e-5)


def test_seeds_are_judged_by_the_same_documents_and_noise(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store").path
    setups = [
        make_trainer(tmp_path / seed, store, f"train.seed={seed}", "train.valid_documents=3").setup for seed in "07"
    ]  # fmt: skip
    first, second = (make_validation(setup)(setups[0].denoiser) for setup in setups)
    assert first == second
    assert first != make_validation(setups[0])(setups[1].denoiser)


def test_a_model_of_text_alone_is_not_asked_what_its_latent_buys() -> None:
    """It ignores latents by design; the monitor would warn of it (M803)."""
    found = loss_of([[0, 1, 2, 3, 4, 5]], condition_dropout=1.0, mode_weights=ModeWeights(1, 0, 0))
    assert found["valid_text_loss"] > 0
    assert "valid_text_loss_shuffled" not in found


def test_wrong_latents_are_those_of_another_document_under_the_same_noise() -> None:
    corruption = batches.small_corruption()
    noisy = corruption.corrupt(batches.batch_of(batches.small_documents(), caps=Caps(64, 8, 12)))
    (wrong,) = with_wrong_latents([noisy], corruption)
    for document in range(6):
        assert torch.equal(wrong.latents[document], noisy.latents[document - 1 if document else 5])
    assert torch.equal(wrong.latent_noise, noisy.latent_noise)
    clean = noisy.latent_time == 0
    assert torch.equal(wrong.noisy_latents[clean], wrong.latents[clean])
    pure = noisy.latent_time == 1
    assert torch.equal(wrong.noisy_latents[pure], noisy.noisy_latents[pure])


def test_collapsed_predictions_have_no_spread() -> None:
    spread, chosen = Spread(), torch.tensor([True, True, False, True])
    spread.see(torch.ones(4, 1, 3) * 7)
    spread.keep(chosen)
    assert spread.deviation() == 0
    spread.see(torch.zeros(4, 1, 3))  # a first pass, which does not count
    spread.see(torch.tensor([1.0, 3.0, 100.0, 1.0])[:, None, None].expand(4, 1, 3))
    spread.keep(chosen)
    expected = torch.tensor([7.0, 7.0, 7.0, 1.0, 3.0, 1.0]).std()
    assert spread.deviation() == pytest.approx(expected.item())
