"""Programs that a careless "safe" fix would break: each keeps its label unsafe, or gets no fix at all."""

from pathlib import Path

import pytest
from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options
from traindoctor.types import Finding

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(Net())\n"
LOOP = "for batch in loader:\n    loss = model(batch)\n    loss.backward()\n"

UNSAFE = {
    "sparse gradients in another file": (
        "OPT001",
        {
            "net.py": "import torch\nembed = torch.nn.Embedding(10, 4, sparse=True)\n",
            "train.py": "import torch\nfrom net import embed\nopt = torch.optim.SGD(embed.parameters(), lr=1e-3)\n"
            "if __name__ == '__main__':\n    opt.step()\n",
        },
    ),
    "a sum kept on self is differentiated later": (
        "MEM003",
        {
            "train.py": "import torch\nclass Trainer:\n    def fit(self, loader, model):\n"
            "        for batch in loader:\n"
            "            loss = model(batch)\n            loss.backward(retain_graph=True)\n"
            "            self.total = self.total + loss\n    def finish(self):\n        self.total.backward()\n",
        },
    ),
    "a history whose variance is trained": (
        "MEM003",
        {
            "train.py": "import torch\nhistory = []\n"
            + LOOP
            + "    history.append(loss)\ntorch.stack(history).var().backward()\n",
        },
    ),
    "a total in autograd.grad": (
        "MEM003",
        {
            "train.py": "import torch\ntotal = 0\n"
            + LOOP
            + "    total += loss\ngrads = torch.autograd.grad(total, list(model.parameters()))\n",
        },
    ),
    "a total that is returned": (
        "MEM003",
        {
            "train.py": "import torch\ndef epoch(loader, model):\n    total = 0\n    for batch in loader:\n"
            "        loss = model(batch)\n        loss.backward()\n        total += loss\n    return total\n",
        },
    ),
    "a total that a closure reads": (
        "MEM003",
        {
            "train.py": "import torch\ndef epoch(loader, model):\n    total = 0\n    def report():\n"
            "        return total\n    for batch in loader:\n        loss = model(batch)\n        loss.backward()\n"
            "        total += loss\n    report().backward()\n",
        },
    ),
    "a gradient detached in place through a name": (
        "DDP002",
        {
            "train.py": "from steps import clear\n" + DDP,
            "steps.py": "def clear(model):\n    for p in model.parameters():\n        g = p.grad\n"
            "        g.detach_()\n        g.zero_()\n",
        },
    ),
    "gradients that are kept for the next step": (
        "DDP002",
        {
            "train.py": "from steps import remember\n" + DDP,
            "steps.py": "def remember(model):\n    return [p.grad for p in model.parameters()]\n",
        },
    ),
    "one port for two jobs of a script": (
        "SHL003",
        {
            "run.sh": "export MASTER_PORT=29500\ntorchrun train.py &\nexport MASTER_PORT=29501\ntorchrun eval.py\n",
        },
    ),
    "checkpointing where no input needs a gradient": (
        "MEM001",
        {"model.py": "from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, tokens)\n"},
    ),
    "a number typed as text that names a folder": (
        "CFG005",
        {
            "config.yaml": "lr: 1e-4\n",
            "train.py": "import yaml\nc = yaml.safe_load(open('config.yaml'))\nout = 'runs/lr' + c['lr']\n",
        },
    ),
    "an error that blocking wait lets the program catch": (
        "NCC006",
        {"run.sh": "export TORCH_NCCL_BLOCKING_WAIT=1\ntorchrun train.py\n"},
    ),
    "an abort instead of an error": (
        "NCC007",
        {"run.sh": "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0\ntorchrun train.py\n"},
    ),
    "parameters frozen inside forward": (
        "DDP001",
        {
            "train.py": "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            "class Net:\n    def forward(self, x):\n        self.head.requires_grad_(self.step > 10)\n"
            "model = DDP(Net(), find_unused_parameters=True, gradient_as_bucket_view=True)\n",
        },
    ),
    "a scaler that is handed on": (
        "AMP001",
        {"train.py": "import torch\nscaler = torch.cuda.amp.GradScaler()\nplugin = MixedPrecision(scaler)\n"},
    ),
    "autocast whose defaults are changed": (
        "AMP001",
        {
            "train.py": "import torch\ntorch.set_autocast_cache_enabled(False)\n"
            "with torch.cuda.amp.autocast():\n    y = model(x)\n"
        },
    ),
    "a pinned copy that is changed on the way": (
        "DAT010",
        {
            "train.py": "from torch.utils.data import DataLoader\nloader = DataLoader(d, pin_memory=True)\n"
            "for x in loader:\n    y = x.cuda()\n    x += 1\n    model(y).backward()\n"
        },
    ),
    "an exit code that others rely on": (
        "SHL001",
        {"run.sh": "torchrun train.py | tee log\ntorchrun eval.py\n"},
    ),
    "attention weights that are not needed, but round otherwise": (
        "ATT003",
        {
            "m.py": "import torch\nattn = torch.nn.MultiheadAttention(8, 2)\n"
            "def f(x):\n    y, _ = attn(x, x, x)\n    return y\n"
        },
    ),
}
SAFE = {
    "a sum that is only printed": (
        "MEM003",
        {"train.py": "import torch\ntotal = 0\n" + LOOP + '    total += loss\nprint(f"{total / 10:.3f}")\n'},
    ),
    "a list whose mean becomes a number": (
        "MEM003",
        {
            "train.py": "import torch\nkept = []\n"
            + LOOP
            + "    kept.append(loss)\nx = torch.stack(kept).mean().item()\n"
        },
    ),
    "DDP where nobody touches gradients": ("DDP002", {"train.py": DDP}),
    "DDP beside another program that touches gradients": (
        "DDP002",
        {
            "train.py": DDP + "if __name__ == '__main__':\n    pass\n",
            "other.py": "def f(p):\n    p.grad.detach_()\nif __name__ == '__main__':\n    f(1)\n",
        },
    ),
    "autocast as a context": (
        "AMP001",
        {"train.py": "import torch\nwith torch.cuda.amp.autocast():\n    y = model(x)\n"},
    ),
    "a scaler of which only methods are called": (
        "AMP001",
        {
            "train.py": "from torch.cuda.amp import GradScaler\nscaler = GradScaler()\nscaler.scale(loss).backward()\n"
        },
    ),
    "a copy that replaces its source": (
        "DAT010",
        {
            "train.py": "from torch.utils.data import DataLoader\nloader = DataLoader(d, pin_memory=True)\n"
            "for x in loader:\n    x = x.cuda()\n    model(x).backward()\n"
        },
    ),
    "the old launcher with --use_env": (
        "SHL007",
        {"run.sh": "python -m torch.distributed.launch --use_env train.py\n"},
    ),
}


def _findings(root: Path, code: str, files: dict[str, str]) -> list[Finding]:
    for name, text in files.items():
        (root / name).write_text(text)
    options = load_options(root, select=[code], external=False)
    report = audit(root, options)
    applied = [change for change in plan(report, options, unsafe=False) if change.after != change.before]
    safe = [finding for finding in report.findings if finding.fix is not None and finding.fix.safe]
    assert bool(applied) == bool(safe)
    assert report.findings, "the rule must still speak"
    return report.findings


@pytest.mark.parametrize("name", UNSAFE)
def test_no_safe_fix_where_the_program_could_change(name: str, tmp_path: Path) -> None:
    code, files = UNSAFE[name]
    findings = _findings(tmp_path, code, files)
    assert not [finding for finding in findings if finding.fix is not None and finding.fix.safe]


@pytest.mark.parametrize("name", SAFE)
def test_safe_fix_where_it_is_proven(name: str, tmp_path: Path) -> None:
    code, files = SAFE[name]
    findings = _findings(tmp_path, code, files)
    assert len(findings) == 1
    assert findings[0].fix is not None
    assert findings[0].fix.safe


def test_no_fix_at_all_where_it_would_raise(tmp_path: Path) -> None:
    code, files = UNSAFE["sparse gradients in another file"]
    assert all(finding.fix is None for finding in _findings(tmp_path, code, files))


def test_same_change_has_the_same_label_in_every_kind_of_file(tmp_path: Path) -> None:
    value = "TORCH_NCCL_BLOCKING_WAIT"
    (tmp_path / "run.sh").write_text(f"export {value}=1\n")
    (tmp_path / "train.py").write_text(f"import os\nos.environ['{value}'] = '1'\n")
    (tmp_path / "job.yaml").write_text(f"env:\n  {value}: '1'\n")
    (tmp_path / "Dockerfile").write_text(f"FROM a:1\nENV {value}=1\n")
    (tmp_path / ".env").write_text(f"{value}=1\n")
    options = load_options(tmp_path, select=["NCC006"], external=False)
    labels = [finding.fix.safe for finding in audit(tmp_path, options).findings if finding.fix]
    assert labels == [False] * 5
