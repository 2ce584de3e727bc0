import math

import pytest
import torch
from torch import nn

from mmldlm.config import OptimConfig
from mmldlm.train.ema import Ema
from mmldlm.train.lr import lr_at


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


def test_average_of_a_line_follows_its_closed_form():
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    ema = Ema(module, decay=0.5)
    expected = 0.0
    for step in range(1, 30):
        with torch.no_grad():
            module.weight.fill_(step)
        ema.update(step, torch.tensor(0.0))
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
    ema.update(7, torch.tensor(1.0))
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
