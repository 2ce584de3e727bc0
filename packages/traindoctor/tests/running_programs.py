"""Small training programs that run on a CPU, each with something that a safe fix changes.

Each prints its losses to the last bit and ends with an exit code; `test_programs` runs them before and after the fixes.
"""

from __future__ import annotations

SETUP = """import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [torch.randn(4, 8) for _ in range(6)]
"""
STEP = """    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOP = "for x in batches:\n" + STEP


def _sum(before: str, keep: str, after: str) -> dict[str, str]:
    return {"train.py": f"{SETUP}{before}\n{LOOP}    {keep}\n{after}\n"}


def _in_function(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _ddp(body: str, wrap: str = "DDP(net)", imports: str = "", extra: str = "") -> str:
    return f"""import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
{imports}

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = {wrap}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(rank)
    batches = [torch.randn(4, 8) for _ in range(5)]
    losses = []
{_in_function(body)}
    shown = [None, None]
    dist.all_gather_object(shown, [float(loss).hex() for loss in losses])
    if rank == 0:
        print(shown)
    dist.destroy_process_group()
{extra}

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)
"""


DDP_STEP = (
    "for x in batches:\n    loss = model(x).square().mean()\n    loss.backward()\n    optimizer.step()\n"
    "    optimizer.zero_grad()\n    losses.append(loss.item())\n"
)
DDP_ACCUMULATE = (
    "for number, x in enumerate(batches):\n    last = number % 2 == 1\n"
    "    with torch.enable_grad() if last else model.no_sync():\n"
    "        loss = model(x).square().mean() / 2\n        loss.backward()\n"
    "    if last:\n        optimizer.step()\n        optimizer.zero_grad()\n    losses.append(loss.item())\n"
)
DDP_CLIP = DDP_STEP.replace(
    "    optimizer.step()\n",
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step()\n",
)

LIGHTNING = """import lightning as L
import torch
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        with torch.cpu.amp.autocast(dtype=torch.bfloat16):
            loss = self.layer(batch).square().mean()
        print(loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    torch.manual_seed(1)
    data = [torch.randn(8) for _ in range(16)]
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5)
    trainer.fit(Net(), DataLoader(data, batch_size=4))
"""
ACCELERATE = f"""from accelerate import Accelerator
{SETUP}
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
total = 0
for x in batches:
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    total += loss
print(total.item().hex())
"""

PROGRAMS: dict[str, dict[str, str]] = {
    "sum-printed": _sum("total = 0", "total += loss", "print(float(total).hex())"),
    "sum-item": _sum("total = 0.0", "total = total + loss", "print(total.item().hex())"),
    "sum-formatted": _sum("total = 0", "total += loss", 'print(f"{total / 6:.17g}")'),
    "sum-swapped": _sum("total = 0", "total = loss + total", "print((total / 6).item().hex())"),
    "list-stacked": _sum("kept = []", "kept.append(loss)", "print(torch.stack(kept).mean().item().hex())"),
    "list-summed": _sum("kept = []", "kept.append(loss)", "print(float(sum(kept) / len(kept)).hex())"),
    "list-last": _sum("kept = []", "kept.append(loss)", "print(kept[-1].item().hex(), len(kept))"),
    "list-std": _sum("kept = []", "kept.append(loss)", "print(torch.stack(kept).std().item().hex())"),
    "sum-in-function": {
        "train.py": f"{SETUP}\ndef epoch():\n    total = 0\n{_in_function(LOOP)}        total += loss\n"
        "    return total.item()\nfor _ in range(3):\n    print(epoch().hex())\n"
    },
    "sum-reset-each-epoch": {
        "train.py": f"{SETUP}\nfor epoch in range(3):\n    total = 0\n{_in_function(LOOP)}        total += loss\n"
        "    print(total.item().hex())\n"
    },
    "sum-and-exit-code": _sum("total = 0", "total += loss", "raise SystemExit(3 if float(total) > 0 else 0)"),
    "autocast-context": {
        "train.py": SETUP
        + "for x in batches:\n    with torch.cpu.amp.autocast():\n        loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n    print(loss.item().hex())\n"
    },
    "autocast-bfloat16": {
        "train.py": SETUP
        + "for x in batches:\n    with torch.cpu.amp.autocast(dtype=torch.bfloat16, enabled=True):\n"
        "        loss = model(x).square().mean()\n    loss.backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n    print(loss.item().hex())\n"
    },
    "autocast-imported": {
        "train.py": "from torch.cpu.amp import autocast\n"
        + SETUP
        + "for x in batches:\n    with autocast(cache_enabled=False):\n        loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n    print(loss.item().hex())\n"
    },
    "autocast-decorator": {
        "train.py": SETUP
        + "@torch.cpu.amp.autocast()\ndef forward(x):\n    return model(x).square().mean()\n"
        "for x in batches:\n    loss = forward(x)\n    loss.backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n    print(loss.item().hex())\n"
    },
    "scaler-without-gpu": {
        "train.py": SETUP
        + "scaler = torch.cuda.amp.GradScaler()\nfor x in batches:\n    loss = model(x).square().mean()\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
        "    optimizer.zero_grad()\n    print(loss.item().hex(), scaler.get_scale())\n"
    },
    "scaler-imported": {
        "train.py": "from torch.cuda.amp import GradScaler\n"
        + SETUP
        + "scaler = GradScaler(enabled=False)\nfor x in batches:\n    loss = model(x).square().mean()\n"
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()\n    print(loss.item().hex())\nprint(scaler.state_dict())\n"
    },
    "copy-to-device": {
        "train.py": "import torch\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\n"
        'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
        "model = torch.nn.Linear(8, 1).to(device)\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-2)\n"
        "loader = DataLoader([torch.randn(8) for _ in range(16)], batch_size=4, pin_memory=True)\n"
        "for x in loader:\n    x = x.to(device)\n    loss = model(x).square().mean()\n    loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n    print(loss.item().hex())\n"
    },
    "ddp-plain": {"train.py": _ddp(DDP_STEP)},
    "ddp-accumulation": {"train.py": _ddp(DDP_ACCUMULATE)},
    "ddp-clipping": {"train.py": _ddp(DDP_CLIP)},
    "ddp-static-graph": {"train.py": _ddp(DDP_STEP, "DDP(net, static_graph=True)")},
    "ddp-no-buffers": {"train.py": _ddp(DDP_STEP, "DDP(net, broadcast_buffers=False, bucket_cap_mb=1)")},
    "ddp-beside-another-program": {
        "train.py": _ddp(DDP_STEP),
        "other.py": "def clear(p):\n    p.grad.detach_()\nif __name__ == '__main__':\n    clear(None)\n",
    },
    "ddp-model-in-a-module": {
        "train.py": _ddp(DDP_STEP, "DDP(build(net))", "from parts import build"),
        "parts.py": "import torch\ndef build(net):\n    return torch.nn.Sequential(net, torch.nn.Tanh())\n",
    },
    "old-launcher": {
        "run.sh": '"$PYTHON" -m torch.distributed.launch --use_env --nproc_per_node=2 --master_port=$PORT work.py\n',
        "work.py": "import torch.distributed as dist\nimport torch\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\ndist.all_reduce(x)\nif dist.get_rank() == 0:\n    print(x.item())\n"
        "dist.destroy_process_group()\n",
    },
    "lightning": {"train.py": LIGHTNING},
    "accelerate": {"train.py": ACCELERATE},
}
"""Name -> files; the program is `run.sh` where there is one, else `train.py`."""
