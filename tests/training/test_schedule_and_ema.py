import math

import pytest
import torch
from torch import nn

from mmldlm.config import OptimConfig
from mmldlm.training.optim import Ema, Plateau, lr_at


def test_learning_rate_warms_up_and_falls_on_a_cosine():
    config = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [lr_at(step, 110, config) for step in range(111)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[110] == pytest.approx(0.1)
    assert lr_at(500, 110, config) == pytest.approx(0.1)


def test_learning_rate_without_warmup_and_with_warmup_past_the_end():
    assert lr_at(0, 10, OptimConfig(lr=2.0, warmup_steps=0)) == 2.0
    assert lr_at(9, 10, OptimConfig(lr=2.0, warmup_steps=100)) == pytest.approx(0.2)


def rates_of(steps, **settings):
    config = OptimConfig(lr=2.0, min_lr_ratio=0.1, warmup_steps=10, **settings)
    return [lr_at(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "restarts", "wsd", "constant", "plateau"])
def test_every_schedule_warms_up_to_the_same_rate_and_stays_between_floor_and_peak(schedule):
    rates = rates_of(200, schedule=schedule, restart_period=50)
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert all(0.2 - 1e-12 <= rate <= 2.0 + 1e-12 for rate in rates[10:])


def test_restarts_are_the_cosine_of_a_short_run_over_and_over():
    short = rates_of(60, schedule="cosine")[10:]
    rates = rates_of(170, schedule="restarts", restart_period=50)
    assert rates[10:60] == rates[60:110] == rates[110:160] == short
    growing = rates_of(370, schedule="restarts", restart_period=50, restart_factor=2.0)
    assert growing[60:160] == rates_of(110, schedule="cosine")[10:]
    assert growing[160:360] == rates_of(210, schedule="cosine")[10:]
    assert growing[360] == 2.0
    uneven = rates_of(200, schedule="restarts", restart_period=10, restart_factor=1.5)
    starts = [step for step in range(11, 200) if uneven[step] > uneven[step - 1]]
    assert starts == [20, 35, 57, 91, 142]  # periods 10, 15, 22, 34, 51 and 76


def test_stable_then_a_straight_line_to_the_floor_at_the_end():
    rates = rates_of(200, schedule="wsd", decay_share=0.25)
    assert set(rates[10:151]) == {2.0}
    assert rates[150:] == pytest.approx([2.0 * (1 - 0.9 * i / 50) for i in range(50)])
    assert lr_at(500, 200, OptimConfig(lr=2.0, schedule="wsd")) == pytest.approx(0.2)
    # a longer run goes the same way up to the decay
    assert rates_of(400, schedule="wsd", decay_share=0.25)[:150] == rates[:150]
    # the decay waits for the warm-up
    assert rates_of(40, schedule="wsd", decay_share=1.0)[9:12] == pytest.approx(
        [2.0, 2.0, 2.0 * (1 - 0.9 / 30)]
    )


def test_constant_and_plateau_stay_where_they_are():
    assert set(rates_of(100, schedule="constant")[10:]) == {2.0}
    config = OptimConfig(lr=2.0, schedule="plateau", warmup_steps=10, plateau_min_lr=0.3)
    assert [lr_at(50, 100, config, reduction) for reduction in (1.0, 0.5, 0.125)] == [2.0, 1.0, 0.3]
    assert lr_at(4, 100, config, 0.5) == pytest.approx(0.5)
    assert lr_at(50, 100, OptimConfig(lr=2.0, schedule="constant", warmup_steps=0), 0.5) == 2.0


def judged(losses, every=10, **settings):
    """Steps at which the rate is reduced."""
    config = OptimConfig(lr=1.0, schedule="plateau", warmup_steps=0, plateau_patience=30, **settings)
    plateau = Plateau()
    steps = [every * (i + 1) for i in range(len(losses))]
    found = [s for s, loss in zip(steps, losses, strict=True) if plateau.judge(s, "loss", loss, config)]
    return found, plateau


def test_the_rate_is_reduced_when_the_best_loss_is_too_old():
    # the best is that of step 20; patience ends at 50, and is counted anew from there
    assert judged([2.0, 1.0, 1.0, 0.995, 1.2, 1.0, 1.0, 1.0])[0] == [50, 80]
    assert judged([2.0, 1.0, 1.0, 0.98, 1.2, 1.0, 1.0])[0] == [70]  # two percent less is a new best
    assert judged([2.0, 1.0, 1.0, 0.98, 1.2, 1.0], plateau_threshold=0.05)[0] == [50]
    small = [1e-3 * loss for loss in (2.0, 1.0, 1.0, 0.98, 1.2, 1.0, 1.0)]
    assert judged(small)[0] == [70]  # the threshold is a share of the loss, however small that is
    assert judged([1.0, 1.0, float("nan"), float("nan"), 1.0])[0] == [50]  # what is no number tells nothing
    assert judged([-1.0, -1.02, -1.1, -1.1])[0] == []


def test_reductions_multiply_and_end_at_the_floor():
    steps, plateau = judged([1.0] * 100, plateau_factor=0.1, plateau_min_lr=2e-3)
    assert steps == [40, 70, 100]
    assert plateau.reduction == pytest.approx(1e-3)
    config = OptimConfig(lr=1.0, schedule="plateau", warmup_steps=0, plateau_min_lr=2e-3)
    assert lr_at(500, 1000, config, plateau.reduction) == 2e-3


def test_the_warm_up_is_no_plateau_and_another_measure_begins_anew():
    config = OptimConfig(lr=1.0, schedule="plateau", warmup_steps=100, plateau_patience=30)
    plateau = Plateau()
    assert [s for s in range(10, 160, 10) if plateau.judge(s, "loss", 1.0, config)] == [130]
    assert not plateau.judge(170, "valid_loss", 5.0, config)
    assert (plateau.best, plateau.best_step, plateau.reduction) == (5.0, 170, 0.5)


def test_average_of_a_line_follows_its_closed_form():
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    ema = Ema(module, decay=0.5)
    expected = 0.0
    for step in range(1, 30):
        with torch.no_grad():
            module.weight.fill_(step)
        ema.set_step(step)
        ema.update(torch.tensor(0.0))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert ema.average["weight"].item() == pytest.approx(expected, rel=1e-5)


def test_the_average_does_not_move_where_an_update_was_skipped_whatever_the_weights_are():
    module = nn.Linear(2, 3)
    ema = Ema(module, decay=0.9)
    with torch.no_grad():
        ema.average["bias"].copy_(torch.tensor([-0.0, 0.0, 1e-40]))
        module.weight.fill_(float("nan"))
        module.bias.fill_(5.0)
    before = {name: tensor.clone().view(torch.int32) for name, tensor in ema.average.items()}
    ema.set_step(7)
    ema.update(torch.tensor(1.0))
    assert all(torch.equal(tensor.view(torch.int32), before[name]) for name, tensor in ema.average.items())
    assert torch.equal(module.bias, torch.full((3,), 5.0))


def test_swapping_in_the_average_gives_back_the_weights():
    module = nn.Linear(2, 2)
    ema = Ema(module, decay=0.9)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        module.weight.add_(1.0)
    with ema.swapped_in():
        assert torch.equal(module.weight, before["weight"])
        with pytest.raises(ZeroDivisionError), ema.swapped_in():
            raise ZeroDivisionError
    assert torch.equal(module.weight, before["weight"] + 1.0)
