"""What the rule pages call 'checked' is checked here."""

import subprocess

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
