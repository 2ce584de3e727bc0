"""The original research repository: its trainer takes the same steps after the fixes.

Runs where TRAINDOCTOR_ORIGINAL names a checkout of MM-LDLM whose `train_mmdit.py` parses (revision 3a4980e), and
TRAINDOCTOR_ORIGINAL_PYTHON an interpreter with torch, hydra-core, mmdit, numpy and tqdm. What else it needs (wandb,
heavyball, transformers' tokenizer, the data) is stood in for here.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from traindoctor import transactions
from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options

CHECKOUT = os.environ.get("TRAINDOCTOR_ORIGINAL", "")
PYTHON = os.environ.get("TRAINDOCTOR_ORIGINAL_PYTHON", "")
DRIVER = """
import sys, types

def module(name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    sys.modules[name] = made
    return made

class Config(dict):
    def update(self, *a, **k): pass

module("wandb", init=lambda *a, **k: None, log=lambda *a, **k: None, config=Config())
module("heavyball")

class Tokenizer:
    mask_token_id = 3
    def __len__(self): return 64

module("transformers", AutoTokenizer=Tokenizer)
sys.path.insert(0, ".")
import torch
import latentDLM_mmdit.modeling_mmdit as modeling
import latentDLM_mmdit.data_simple as data
modeling.get_tokenizer = lambda config: Tokenizer()

class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(4, 64, (12,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones(12, dtype=torch.bool),
                "latent": torch.randn(1, 16, generator=generator)}

def loaders(config, tokenizer):
    made = torch.utils.data.DataLoader(Pairs(), batch_size=4)
    return made, made

data.get_simple_dataloaders = loaders
sys.argv = ["latentDLM_mmdit/train_mmdit.py", "model.hidden_size=32", "model.n_blocks=2", "model.n_heads=2",
            "model.cond_dim=32",
            "model.max_seq_len=12", "model.latent_dim=16", "training.num_train_steps=5", "training.warmup_steps=2",
            "training.dtype=fp32", "logging.save_dir=out", "hydra.run.dir=.", "hydra.output_subdir=null"]
import runpy
runpy.run_path("latentDLM_mmdit/train_mmdit.py", run_name="__main__")
"""


def _steps(root: Path) -> tuple[int, list[str], str]:
    (root / "drive.py").write_text(DRIVER)
    shutil.rmtree(root / "out", ignore_errors=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    done = subprocess.run(
        [PYTHON, "drive.py"],
        cwd=root,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    logs = list(root.glob("out/**/training_log.jsonl"))
    return done.returncode, logs[0].read_text().splitlines() if logs else [], done.stderr[-2000:]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not CHECKOUT or not PYTHON, reason="TRAINDOCTOR_ORIGINAL and its interpreter are not given"
)
def test_its_trainer_takes_the_same_steps_after_the_fixes(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, root, ignore=shutil.ignore_patterns("*.pt", ".git"))
    before = _steps(root)
    assert before[0] == 0, before[2]
    assert len(before[1]) == 5
    options = load_options(root, external=False)
    for unsafe in (False, True):
        changes = plan(audit(root, options), options, unsafe=unsafe)
        assert changes
        transactions.apply(root, [change for change in changes if change.after != change.before])
        after = _steps(root)
        assert after[0] == 0, after[2]
        if not unsafe:
            assert after[1] == before[1], "safe fixes leave every loss as it was"
        assert len(after[1]) == 5
