"""Preflight, environment block, settings and probe."""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mmldlm.cli.doctor import app
from mmldlm.config import MODES
from mmldlm.diagnostics.doctor.environment import describe_environment, redact
from mmldlm.diagnostics.doctor.preflight import run_preflight
from mmldlm.diagnostics.doctor.probe import load_target, probe
from mmldlm.diagnostics.doctor.probe_own import own_target
from mmldlm.errors import UserError


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


@pytest.mark.parametrize("mode", MODES)
def test_own_model_has_neither_syncs_nor_odd_types(mode: str) -> None:
    report = probe(mode, *own_target(mode), graph_breaks=False)
    assert not report.syncs
    assert not report.dtypes
    assert not report.nonfinite_gradient
    assert bool(report.without_gradient) == (mode != "joint")
