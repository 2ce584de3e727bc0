"""Muon against PyTorch's own, and what a step does that is to be skipped."""

import pytest
import torch

from mmldlm.training.optim import Muon, Optimizers, orthogonalize
from tests.runs import make_trainer
from tests.stores import write_store

SHAPES = [(16, 8), (8, 24), (16, 8), (12, 12)]


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_it_does_what_pytorch_does_one_matrix_at_a_time():
    ours, theirs = matrices(), matrices()
    mine = Muon([{"params": ours, "weight_decay": 0.1}], lr=0.02, momentum=0.9)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(parameters, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_singular_values_come_near_one():
    x = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x).float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    same = orthogonalize(x.mT).mT
    torch.testing.assert_close(same, orthogonalize(x), atol=2e-2, rtol=2e-2)


def test_a_skipped_step_changes_nothing_and_gradients_are_divided_first():
    parameters = matrices()
    optimizer = Muon(parameters, lr=0.02)
    give_gradients(parameters, 0)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(
        torch.equal(a, optimizer.state[p]["momentum_buffer"])
        for a, p in zip(buffers, parameters, strict=True)
    )
    first, second = matrices(), matrices()
    scaled, plain = Muon(first, lr=0.02), Muon(second, lr=0.02)
    give_gradients(first, 1)
    give_gradients(second, 1)
    for parameter in first:
        parameter.grad *= 8.0
    scaled.grad_scale = torch.tensor(8.0)
    scaled.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_run_with_muon_learns_and_resumes_bit_by_bit(tmp_path):
    store = write_store(tmp_path / "store", num_train=120).path
    words = ["optim.name=muon", "optim.lr=3e-3"]
    whole = make_trainer(tmp_path / "whole", store, *words)
    whole.fit()
    groups = whole.stepper.optimizers.parts[1].param_groups
    assert {p.ndim for group in groups for p in group["params"]} == {2}
    names = {p: name for name, p in whole.setup.denoiser.named_parameters()}
    assert all(names[p].startswith("blocks.") for group in groups for p in group["params"])

    half = make_trainer(tmp_path / "half", store, *words)

    class CrashError(Exception):
        pass

    run = half.train_step

    def one_step(*args):
        run(*args)
        if half.step == 6:
            raise CrashError

    half.train_step = one_step
    with pytest.raises(CrashError):
        half.fit()
    again = make_trainer(tmp_path / "half", store, *words)
    again.fit()
    for (name, a), b in zip(
        whole.setup.denoiser.state_dict().items(), again.setup.denoiser.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_rows_that_stand_still_have_no_say_in_the_update_of_the_others():
    """The momentum that they keep is not made orthogonal together with the rest."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(12, 16, generator=generator))
    part, start = torch.nn.Parameter(whole.detach()[4:].clone()), whole.detach()[:4].clone()
    both = [Optimizers([Muon([{"params": [p], "part": "text"}], lr=0.1)]) for p in (whole, part)]
    both[0].still = {whole: slice(0, 4)}
    momentum = torch.zeros(12, 16)
    momentum[:4] = 5.0
    both[0].parts[0].state[whole]["momentum_buffer"] = momentum
    off = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        gradient = torch.randn(8, 16, generator=generator)
        whole.grad, part.grad = torch.cat([torch.zeros(4, 16), gradient]), gradient
        for optimizers in both:
            optimizers.step(off, torch.zeros(()), None)
    torch.testing.assert_close(whole.detach()[4:], part.detach(), atol=5e-3, rtol=0)
    assert torch.equal(whole.detach()[:4], start)
    assert (momentum[:4] == 5.0).all()


@pytest.mark.parametrize(("words", "recorded"), [
    (("speed.fused_optimizer=true",), True),
    (("speed.fused_optimizer=true", "optim.name=muon"), True),
    (("speed.fused_optimizer=false",), False),
])  # fmt: skip
def test_an_update_that_asks_the_device_whether_to_skip_is_not_recorded(tmp_path, words, recorded):
    trainer = make_trainer(tmp_path, write_store(tmp_path / "store", num_train=40).path, *words)
    calls = []

    class Graphs:
        broken, fresh = "", False

        def __call__(self, parcel, run):
            return run(parcel.open())

        def update(self, run):
            calls.append(run)
            return run()

    trainer.stepper.graphs = Graphs()
    trainer.train_step(*trainer.next_batch())
    trainer.close()
    assert bool(calls) == recorded
