"""What the rule pages call 'checked' is checked here."""

import pickle
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, Dataset, RandomSampler


def _bash(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "options",
    [{"prefetch_factor": 2}, {"persistent_workers": True}, {"shuffle": True, "sampler": RandomSampler([1])}],
)
def test_loader_refuses(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        DataLoader([1, 2, 3], **options)  # type: ignore[arg-type]


class Draws(Dataset[tuple[int, float, float]]):
    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, torch.rand(1, generator=self.rng).item(), torch.rand(1).item()


def test_stored_generator_repeats_in_every_worker() -> None:
    rows = sorted(tuple(part.item() for part in batch) for batch in DataLoader(Draws(), num_workers=2))
    assert rows[0][1] == rows[1][1]
    assert rows[0][2] != rows[1][2]


def test_gradient_of_a_clamped_loss_is_zero() -> None:
    x = torch.tensor(20.0, requires_grad=True)
    torch.clamp(x, max=10.0).backward()
    assert x.grad == 0


def test_log_of_softmax_underflows() -> None:
    x = torch.tensor([0.0, 200.0])
    assert torch.log(torch.softmax(x, -1))[0] == -torch.inf
    assert torch.log_softmax(x, -1)[0] == -200


def test_cross_entropy_of_probabilities_has_a_floor() -> None:
    best = torch.nn.functional.one_hot(torch.tensor([0]), 30_522).float()
    assert torch.nn.functional.cross_entropy(best, torch.tensor([0])) > 9.3


def test_pickled_module_is_rejected(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False).in_features == 2


def test_lax_loading_accepts_nothing_at_all() -> None:
    answer = torch.nn.Linear(2, 2).load_state_dict({}, strict=False)
    assert answer.missing_keys == ["weight", "bias"]


def test_compiled_module_prefixes_its_keys() -> None:
    assert all(key.startswith("_orig_mod.") for key in torch.compile(torch.nn.Linear(2, 2)).state_dict())


def test_sum_of_losses_keeps_growing_its_graph() -> None:
    weight, total = torch.ones(1, requires_grad=True), torch.zeros(1)
    depths = []
    for _ in range(3):
        total = total + (weight * 2).sum()
        node, depth = total.grad_fn, 0
        while node is not None:
            node, depth = (node.next_functions[0][0] if node.next_functions else None), depth + 1
        depths.append(depth)
    assert depths[0] < depths[1] < depths[2]


def test_shell_facts() -> None:
    assert _bash("false | cat").returncode == 0
    assert _bash("set -o pipefail; false | cat").returncode == 1
    assert _bash("false; echo x; exit $?").returncode == 0
    assert _bash("echo $((0.5 * 2))").returncode == 1
    assert "integer expression expected" in _bash("[ 0.5 -gt 0 ]").stderr
    assert _bash("L=a\ncat << 'E'\n${L}\nE").stdout == "${L}\n"


def test_yaml_reads_scientific_numbers_as_text() -> None:
    assert yaml.safe_load("lr: 1e-4") == {"lr": "1e-4"}
    assert yaml.safe_load("lr: 1.0e-4") == {"lr": 1e-4}


def test_cosine_in_epochs_is_back_at_its_start_after_twice_its_period() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    rates = []
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[9] < 1e-12
    assert rates[19] == pytest.approx(1.0)


def test_plateau_cuts_at_the_twelfth_call() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    calls = 0
    while optimizer.param_groups[0]["lr"] == 1.0:
        plateau.step(1.0)
        calls += 1
    assert calls == 12


def test_a_schedule_without_its_state_counts_from_the_start() -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.CosineAnnealingLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    optimizer, scheduler = make()
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    resumed, restarted = make()
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    restarted.step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.0239, abs=1e-4)


def test_direction_alone_leaves_the_length_free_and_a_clamp_has_no_gradient() -> None:
    a, b = torch.randn(2, 4, 8)
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(cosine(a, b, dim=-1), cosine(10 * a, b, dim=-1))
    x = torch.tensor(11.0, requires_grad=True)
    x.clamp(-10, 10).backward()
    assert x.grad == 0


def test_fused_and_attention_without_weights_round_otherwise() -> None:
    """Why these fixes are not safe."""

    def train(**choice: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **choice)
        losses = []
        for _ in range(20):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train() == train()
    assert train(fused=True) != train()
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 9, 16)
    assert not torch.equal(attention(x, x, x)[0], attention(x, x, x, need_weights=False)[0])
