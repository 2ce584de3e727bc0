"""A project that pins an old PyTorch gets no fix that its version cannot run."""

from pathlib import Path

import pytest
from traindoctor.engine import audit
from traindoctor.options import load_options
from traindoctor.torch_pin import read_pins

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
        ("requirements/base.txt", "torch==2.1.0\n", (2, 1)),
        ("docker/Dockerfile", "FROM pytorch/pytorch:2.3.1-cuda12.1-cudnn8-devel\n", (2, 3)),
        ("Dockerfile", "FROM ubuntu:22.04\nRUN pip install torch==2.0.1 numpy\n", (2, 0)),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^1.13.1"\n', (1, 99)),
        (
            "pyproject.toml",
            '[tool.poetry.dependencies]\ntorch = { version = "2.2.0", source = "x" }\n',
            (2, 2),
        ),
        ("Pipfile", '[packages]\ntorch = ">=2.0"\n', None),
    ],
)
def test_reads_the_upper_bound(tmp_path: Path, name: str, text: str, pin: tuple[int, int] | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert read_pins(tmp_path).get("") == pin


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


def _unfixed(path: Path) -> dict[str, bool]:
    found = audit(path, load_options(path, external=False, select=["OPT001"])).findings
    return {finding.path: finding.fix is None for finding in found}


def test_the_nearest_requirements_hold(tmp_path: Path) -> None:
    for folder, requirement in (("", "torch>=2.4"), ("old", "torch==2.1"), ("old/port", "torch==2.6")):
        (tmp_path / folder / "train").mkdir(parents=True)
        (tmp_path / folder / "requirements.txt").write_text(f"{requirement}\n")
        (tmp_path / folder / "train" / "main.py").write_text(CODE)
    expected = {"train/main.py": False, "old/train/main.py": True, "old/port/train/main.py": False}
    assert _unfixed(tmp_path) == expected


def test_requirements_above_the_audited_path_hold(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text("torch==2.1\n")
    (tmp_path / "src" / "train").mkdir(parents=True)
    (tmp_path / "src" / "train" / "main.py").write_text(CODE)
    assert _unfixed(tmp_path / "src" / "train") == {"main.py": True}
    assert _unfixed(tmp_path / "src" / "train" / "main.py") == {"main.py": True}
    (tmp_path / "src" / "pyproject.toml").write_text("")  # another project begins here
    assert _unfixed(tmp_path / "src" / "train") == {"main.py": False}


def test_nothing_is_said_where_the_pinned_version_has_no_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "requirements.txt").write_text("torch==1.6.0\n")
    assert audit(tmp_path, load_options(tmp_path, external=False)).findings == []
