"""What a loss leaves without a gradient is declared, and autograd agrees to the row."""

import pytest
import torch

from mmldlm.config import ModeWeights, ObjectiveConfig
from mmldlm.model.weights import other_rows, unused_parameters
from mmldlm.objective.joint import Active, Objective
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents

DOCUMENTS = small_documents()
CASES = {
    "l2t": (ModeWeights(1, 0, 0), {}),
    "t2l": (ModeWeights(0, 1, 0), {}),
    "joint": (ModeWeights(0, 0, 1), {}),
    "mixed": (ModeWeights(), {}),
    "l2t without length": (ModeWeights(1, 0, 0), {"length_weight": 0.0}),
    "joint without text": (ModeWeights(0, 0, 1), {"text_weight": 0.0}),
    "length alone": (ModeWeights(1, 0, 0), {"text_weight": 0.0}),
}


@pytest.mark.parametrize(
    "model",
    [{}, {"depth": 1}, {"qk_norm": False}, {"tied_embedding": True}],
    ids=["plain", "one block", "no norms", "tied"],
)
@pytest.mark.parametrize("case", CASES)
def test_the_declaration_is_what_autograd_finds(case, model):
    modes, weights = CASES[case]
    denoiser, corruption = (
        small_denoiser(**model),
        small_corruption(mode_weights=modes, condition_dropout=0.5),
    )
    objective_config = ObjectiveConfig(**weights)
    active = Active.of(corruption.config, objective_config, length_modelled=True)
    objective = Objective(objective_config, corruption)
    batch = batch_of(DOCUMENTS)
    counts = corruption.count(
        DOCUMENTS.lengths, corruption.times(batch.positions, batch.keys), SHAPE.num_slots
    )
    objective(denoiser, corruption.corrupt(batch), counts).loss.backward()
    unused = unused_parameters(denoiser, **vars(active))
    dead = {
        name
        for name, parameter in denoiser.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    }
    assert dead == unused.names
    for name, parameter in denoiser.named_parameters():
        if name in dead or name == "token_embed.weight" or name.startswith("token_head"):
            continue  # tokens that do not occur have no gradient either
        without = ~parameter.grad.flatten(1).any(1) if parameter.ndim > 1 else parameter.grad == 0
        declared = torch.zeros_like(without)
        if name in unused.rows:
            declared[unused.rows[name]] = True
            assert not declared[other_rows(unused.rows[name])].any()
            assert declared[unused.rows[name]].all()
        assert torch.equal(without, declared), name
