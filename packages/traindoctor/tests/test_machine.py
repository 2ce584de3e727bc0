"""Preflight, environment block, settings and probe."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from traindoctor.cli import app
from traindoctor.environment import describe_environment, redact
from traindoctor.errors import UserError
from traindoctor.preflight import run_preflight
from traindoctor.probe import load_target, probe
from typer.testing import CliRunner


def test_preflight_looks_at_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "0")
    checks = run_preflight(tmp_path / "not" / "yet")
    names = {check.name for check in checks}
    assert {
        "python",
        "torch",
        "disk",
        "shared memory",
        "open files",
        "cpus",
        "master port",
        "environment",
    } <= names
    assert any(check.status == "fail" and "NCC005" in check.detail for check in checks)


def test_environment_block_tells_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TORCH_API_KEY", "key_secret")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"{Path.home()}/x")
    block = describe_environment()
    assert "NCCL_DEBUG=WARN" in block
    assert "secret" not in block
    assert str(Path.home()) + "/" not in block
    assert redact("node 10.1.2.3") == "node <address>"


def test_probe_finds_what_reading_cannot() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(4, 4)
            self.unused = torch.nn.Linear(4, 4)
            self.low = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().max().item()
            return (self.used(x) * self.low.float()).sum() / scale

    net, x = Net(), torch.randn(2, 4)
    report = probe("net", net, lambda: net(x))
    assert report.without_gradient == ["unused.weight", "unused.bias"]
    assert len(report.syncs) == 1
    assert "test_machine.py" in next(iter(report.syncs))
    assert any("bfloat16" in line for line in report.dtypes)
    assert report.graph_breaks
    assert all(parameter.grad is None for parameter in net.parameters())


def test_probe_sees_masks_as_indices_and_other_waits() -> None:
    weight = torch.nn.Parameter(torch.ones(6))
    net = torch.nn.ParameterList([weight])
    mask, counts = torch.tensor([True, False] * 3), torch.tensor([1, 2])

    def loss() -> torch.Tensor:
        filled = weight.clone()
        filled[mask] = 0.0  # one number: done without a count
        picked = weight[mask].sum()
        spread = torch.repeat_interleave(torch.arange(2), counts, output_size=3)
        free = torch.repeat_interleave(torch.arange(2), counts)
        return filled.sum() + picked + weight[spread].sum() + weight[free].sum()

    waits = Counter(place.split(": ", 1)[1] for place in probe("masks", net, loss, graph_breaks=False).syncs)
    # The gradient of a mask as an index is another one.
    assert waits == {"a boolean index": 2, "repeat_interleave without output_size": 1}


def test_errors_of_the_probed_code_are_one_line() -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"net: RuntimeError at .*py:\d+: mat1 and mat2"):
        probe("net", net, lambda: net(torch.ones(1, 3)).sum())
    with pytest.raises(UserError, match="one element, not Tensor"):
        probe("net", net, lambda: net(torch.ones(1, 2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_waits_are_found() -> None:
    net = torch.nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda")

    def loss() -> torch.Tensor:
        y = net(x)
        y.detach().cpu()
        return y.sum() / y.abs().max().item()

    assert sum(probe("net", net, loss, graph_breaks=False).syncs.values()) >= 2
    assert {check.status for check in run_preflight(Path()) if check.name == "gpu"} <= {"ok", "warn"}


def test_probe_compares_a_declaration_with_what_it_sees() -> None:
    net = torch.nn.ModuleDict(
        {"used": torch.nn.Linear(2, 1, bias=False), "idle": torch.nn.Linear(2, 1, bias=False)}
    )
    loss = lambda: net["used"](torch.ones(1, 2)).sum()  # noqa: E731
    right = probe("net", net, loss, graph_breaks=False, unused=frozenset({"idle.weight"}))
    assert (right.unused, right.problems) == (["idle.weight"], 0)
    wrong = probe("net", net, loss, graph_breaks=False, unused=frozenset({"used.weight"}))
    assert (wrong.without_gradient, wrong.wrongly_declared) == (["idle.weight"], ["used.weight"])


def test_probe_of_a_callable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Linear(3, 1)\n"
        "    return net, lambda: net(torch.ones(2, 3)).mean()\n"
        "def wrong():\n"
        "    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["probe", "given:make", "--no-graph-breaks"])
    assert result.exit_code == 0, result.output
    assert "without gradient: none" in result.output
    for target, message in (
        ("given", "module:function"),
        ("given:wrong", "must return"),
        ("nope:f", "cannot be imported"),
    ):
        with pytest.raises(UserError, match=message):
            load_target(target)
    sys.modules.pop("given", None)
