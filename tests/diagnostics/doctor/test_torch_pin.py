"""A project that pins an old PyTorch gets no fix that its version cannot run."""

from pathlib import Path

import pytest

from mmldlm.diagnostics.doctor.engine import audit
from mmldlm.diagnostics.doctor.options import load_options
from mmldlm.diagnostics.doctor.torch_pin import read_pin

CODE = """import torch
scaler = torch.cuda.amp.GradScaler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
"""


@pytest.mark.parametrize(
    ("name", "text", "pin"),
    [
        ("requirements.txt", "numpy\ntorch==1.9.0+cu111\n", (1, 9)),
        ("requirements-dev.txt", "torch>=1.13,<2.1\n", (2, 0)),
        ("requirements.txt", "torch<2\n", (1, 99)),
        ("requirements.txt", "torch~=2.0.1\n", (2, 0)),
        (
            "environment.yml",
            "dependencies:\n  - pytorch=2.0.1=py3.10_cuda11.8\n  - pip:\n    - tqdm\n",
            (2, 0),
        ),
        ("environment.yml", "dependencies:\n  - pytorch >= 1.13\n  - pytorch-cuda=11.7\n", None),
        ("pyproject.toml", '[project]\ndependencies = ["torch>=2.1", "torchvision==0.15"]\n', None),
        ("setup.py", 'install_requires=["torch==2.2"]\n', (2, 2)),
        ("requirements.txt", "# torch==1.9\ntorch\n", None),
    ],
)
def test_reads_the_upper_bound(tmp_path: Path, name: str, text: str, pin: tuple[int, int] | None) -> None:
    (tmp_path / name).write_text(text)
    assert read_pin(tmp_path) == pin


def test_pin_withholds_fix_and_deprecation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    options = load_options(tmp_path, external=False)
    free = {f.code: f for f in audit(tmp_path, options).findings}
    assert free["AMP001"].fix is not None
    assert free["OPT001"].fix is not None
    (tmp_path / "requirements.txt").write_text("torch==2.0.1\n")
    pinned = {f.code: f for f in audit(tmp_path, options).findings}
    assert "AMP001" not in pinned
    assert pinned["OPT001"].fix is None
    assert "2.4" in pinned["OPT001"].message
