"""Weights and optimizers go into named tensors and back without the loss of a bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mmldlm.checkpoint.state import (
    load_optimizer_tensors,
    load_weights,
    optimizer_tensors,
    plain_name,
)
from mmldlm.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_going_on_equals_never_having_stopped(kind: str) -> None:
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, names_of(net)).items()}
    weights = copy.deepcopy(net.state_dict())
    train(net, optimizer, range(3, 6))

    resumed = OPTIMIZERS[kind](other.parameters())
    train(other, resumed, range(7, 9))  # it even had a life of its own
    load_weights(other, weights, source="test")
    load_optimizer_tensors(resumed, names_of(other), saved)
    train(other, resumed, range(3, 6))
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    after = optimizer_tensors(resumed, names_of(other))
    for name, value in optimizer_tensors(optimizer, names_of(net)).items():
        assert torch.equal(value, after[name]), name
        assert value.dtype == after[name].dtype


def test_a_parameter_without_gradient_has_no_state() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    saved = optimizer_tensors(optimizer, names_of(net))
    assert {"exp_avg.body.weight", "exp_avg_sq.body.weight", "step.body.weight"} <= saved.keys()
    assert not [name for name in saved if "idle" in name]
    optimizer.state[net.idle.bias] = {"step": torch.tensor(1.0)}
    load_optimizer_tensors(optimizer, names_of(net), saved)
    assert net.idle.bias not in optimizer.state


def test_moments_keep_their_type_whatever_the_weights_have() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    saved = {
        "exp_avg.w": torch.tensor([1.0, 1e-9, 1 / 3]),
        "exp_avg_sq.w": torch.ones(3),
        "step.w": torch.tensor(5.0),
    }
    load_optimizer_tensors(optimizer, {parameter: "w"}, saved)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], saved["exp_avg.w"])
    assert optimizer.state[parameter]["exp_avg"].data_ptr() != saved["exp_avg.w"].data_ptr()


def test_all_that_does_not_fit_the_optimizer_is_named_at_once() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    saved = optimizer_tensors(optimizer, names_of(net))
    del saved["exp_avg_sq.body.bias"]
    saved["exp_avg.norm.bias"] = torch.zeros(9)
    saved["exp_avg.stranger"] = torch.zeros(1)
    before = optimizer_tensors(optimizer, names_of(net))["exp_avg.body.weight"].clone()
    with pytest.raises(UserError) as caught:
        load_optimizer_tensors(optimizer, names_of(net), saved)
    for word in (
        "missing: exp_avg_sq.body.bias",
        "unexpected: exp_avg.stranger",
        "exp_avg.norm.bias (9,) instead of (4,)",
    ):
        assert word in str(caught.value)
    assert torch.equal(optimizer.state[net.body.weight]["exp_avg"], before)


def test_wrapper_prefixes_are_stripped_anywhere() -> None:
    assert plain_name("module._orig_mod.blocks.0._orig_mod.mlp.weight") == "blocks.0.mlp.weight"
    source, target = Net(), Net()
    wrapped = {
        f"module.{name.replace('body', 'body._orig_mod')}": t for name, t in source.state_dict().items()
    }
    load_weights(target, wrapped, source="old.safetensors")
    assert torch.equal(source.body.weight, target.body.weight)


def test_weights_load_into_a_compiled_module_and_optimizer_names_ignore_it() -> None:
    source, target = Net(), Net()
    compiled = torch.compile(target, backend="eager")
    load_weights(compiled, source.state_dict(), source="x")  # type: ignore[arg-type]
    assert torch.equal(source.norm.weight, target.norm.weight)
    optimizer = torch.optim.SGD(target.parameters(), momentum=0.9, lr=1.0)
    train(target, optimizer, range(1))
    names = {p: f"_orig_mod.{n}" for n, p in target.named_parameters()}
    assert "momentum_buffer.body.weight" in optimizer_tensors(optimizer, names)


def test_all_that_does_not_fit_the_model_is_named_at_once() -> None:
    net, weights = Net(), dict(Net().state_dict())
    before = net.norm.weight.detach().clone()
    del weights["idle.bias"]
    weights["stranger"] = torch.zeros(1)
    weights["idle.weight"] = torch.zeros(5, 4)
    weights["norm.weight"] = torch.full((4,), 7.0)
    with pytest.raises(UserError) as caught:
        load_weights(net, weights, source="a/model.safetensors")
    for word in (
        "a/model.safetensors",
        "missing: idle.bias",
        "unexpected: stranger",
        "idle.weight (5, 4) instead of (4, 4)",
    ):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(net.norm.weight, before)


def test_two_names_that_become_one_are_refused() -> None:
    net = nn.Linear(2, 2)
    weights = {"weight": torch.ones(2, 2), "module.weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    with pytest.raises(UserError, match="both weight"):
        load_weights(net, weights, source="x")
