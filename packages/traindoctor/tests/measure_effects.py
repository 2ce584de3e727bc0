"""The measured effects in docs/accuracy.md: `python -m tests.measure_effects` prints the table."""

import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

Work = Callable[[], object]


class Slow(Dataset[torch.Tensor]):
    """Half a millisecond of waiting for a disk per item."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        return torch.full((64,), float(index))


def seconds(work: Work, repeats: int = 7) -> float:
    """Median time after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def row(code: str, what: str, bad: Work, good: Work, repeats: int = 7) -> str:
    """Both arms, one after the other, and their ratio."""
    slow, fast = seconds(bad, repeats), seconds(good, repeats)
    return f"| {code} | {what} | {slow * 1e3:.1f} ms | {fast * 1e3:.1f} ms | {slow / fast:.2f}x |"


def epochs(loader: DataLoader[torch.Tensor], work: float) -> None:
    """Two passes with some work per batch."""
    for _ in range(2):
        for _ in loader:
            time.sleep(work)


def optimizer_step(fused: bool) -> Work:
    """AdamW over 60 matrices."""
    parameters = [torch.nn.Parameter(torch.randn(256, 256)) for _ in range(60)]
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return optimizer.step


def lost_updates() -> str:
    """Share of weights that an AdamW step of 1e-5 leaves unchanged in bfloat16 and in float32."""
    start = torch.randn(512, 512) * 0.02
    shares = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.nn.Parameter(start.to(dtype))
        before = weight.detach().clone()
        optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        shares.append((weight == before).float().mean().item())
    found = f"{shares[0]:.1%} (bf16) | {shares[1]:.1%} (fp32)"
    return f"| AMP005 | weights unchanged by an AdamW step of 1e-5 | {found} | |"


def saved_bytes(work: Work) -> int:
    """Bytes that autograd keeps for backward."""
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return total


def attention_memory() -> str:
    """Hand-written attention against SDPA, what is kept for backward."""
    q, k, v = (torch.randn(1, 4, 1024, 32, requires_grad=True) for _ in range(3))

    def written() -> object:
        return (q @ k.transpose(-2, -1) / 32**0.5).softmax(-1) @ v

    bad = saved_bytes(written)
    good = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v))
    found = f"{bad / 2**20:.1f} MiB | {good / 2**20:.1f} MiB | {bad / good:.1f}x"
    return f"| ATT001 | kept for backward, length 1024 | {found} |"


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| rule | what | as found | fixed | ratio |\n|---|---|---|---|---|")
    plain, two = DataLoader(Slow(), 32), DataLoader(Slow(), 32, num_workers=2, persistent_workers=True)
    print(
        row(
            "DAT001",
            "two epochs, 0 or 2 workers",
            lambda: epochs(plain, 0.016),
            lambda: epochs(two, 0.016),
            3,
        )
    )
    fresh = DataLoader(Slow(), 32, num_workers=2)
    print(
        row(
            "DAT003",
            "two epochs, new or persistent workers",
            lambda: epochs(fresh, 0),
            lambda: epochs(two, 0),
            3,
        )
    )
    many = DataLoader(Slow(), 32, num_workers=34)
    print(row("DAT005", "two epochs, 34 or 2 workers", lambda: epochs(many, 0), lambda: epochs(two, 0), 3))
    print(
        row("OPT001", "AdamW step, 60 matrices of 256x256", optimizer_step(False), optimizer_step(True), 30)
    )
    print(lost_updates())
    print(attention_memory())
    attention = torch.nn.MultiheadAttention(256, 8, batch_first=True)
    x = torch.randn(4, 512, 256)
    print(
        row(
            "ATT003",
            "MultiheadAttention, weights unused",
            lambda: attention(x, x, x),
            lambda: attention(x, x, x, need_weights=False),
        )
    )
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(20))
    )
    other, y = copy.deepcopy(net), torch.randn(32, 64)

    def checked() -> None:
        with torch.autograd.set_detect_anomaly(True):
            net(y).sum().backward()

    print(row("SYN005", "forward and backward, 20 layers", checked, lambda: other(y).sum().backward(), 20))


if __name__ == "__main__":
    main()
