"""Builds every package as wheel and sdist, installs each in a clean environment with the smallest extras, and runs it.

    python scripts/release_check.py [--only runwatch] [--keep FOLDER]

Prints the size of each environment and the time of each step; the first failure ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "runwatch": "packages/runwatch", "traindoctor": "packages/traindoctor", "mmldlm": ".",
    "mmldlm-wordnet": "packages/mmldlm-wordnet",
}  # fmt: skip

SHELL = """
ends_with() { local want=$1 code=0; shift; "$@" || code=$?; test $code -eq $want; }
"""
RUNWATCH = """
printf 'step %s loss %s\\n' 1 3.0 2 2.5 3 nan > train.log
ends_with 1 runwatch --once train.log > out.txt
grep -q M101 out.txt
"""
TRAINDOCTOR = """
printf 'import torch\\noptimizer = torch.optim.AdamW(model.parameters())\\nstate = torch.load("a.pt")\\n' > train.py
ends_with 1 traindoctor check train.py > out.txt
grep -q CKP001 out.txt
"""
MMLDLM = """
mmldlm --version
mmldlm --help > /dev/null
python smallest.py
mmldlm decode saved/smallest --latents latents.npy --length 3
mmldlm export saved/smallest --out export > /dev/null
ends_with 2 mmldlm prepare builtin:sotu --out data/none
"""
SMALLEST = """
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

import mmldlm

words = ["[UNK]", *"the a river lake was is long deep wide cold".split()]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save("tokenizer.json")
texts = [f"{a} {b} {c} {d}" for a in words[1:3] for b in words[3:5] for c in words[5:7] for d in words[7:]]
latents = np.random.default_rng(0).normal(size=(len(texts), 4)).astype("float32")
np.save("latents.npy", latents[:2])
store = mmldlm.prepare((texts, latents), "data/smallest", tokenizer="tokenizer.json")
small = {"train.steps": 2, "model.preset": "tiny", "model.depth": 1, "batch.tokens_per_step": 64, "train.trackers": []}
mmldlm.train("laptop", store=store, run="saved/smallest", overrides=small)
"""
BOX = """
mmldlm decode builtin:wordnet --text "a coil of rope" --encode-with model
"""
CHECKS = {"runwatch": RUNWATCH, "traindoctor": TRAINDOCTOR, "mmldlm": MMLDLM, "mmldlm-wordnet": BOX}


def main() -> None:
    """Build all, then check one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="check these packages alone")
    parser.add_argument("--keep", type=Path, help="build and install here, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        dist = build_all(place)
        for name in options.only or CHECKS:
            check(name, dist, place)


def build_all(place: Path) -> Path:
    """Wheels and sdists of all packages in one folder."""
    dist, tools = place / "dist", environment(place / "tools")
    run([tools, "-m", "pip", "install", "--quiet", "build"], place)
    for name, folder in PACKAGES.items():
        began = time.monotonic()
        run([tools, "-m", "build", "--outdir", str(dist), str(ROOT / folder)], place)
        print(f"{name}: wheel and sdist built in {time.monotonic() - began:.0f} s", flush=True)
    for wheel in dist.glob("*.whl"):
        same_modules(wheel, next(dist.glob(f"{wheel.name.split('-py3')[0]}*.tar.gz")))
    return dist


def same_modules(wheel: Path, sdist: Path) -> None:
    """What the wheel installs is in the sdist too, so that building from source gives the same."""
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name for member in archive.getmembers()}
    missing = {name for name in installed if not any(path.endswith(f"/src/{name}") for path in source)}
    if missing:
        raise SystemExit(f"{sdist.name}: lacks {sorted(missing)[:5]}")


def check(name: str, dist: Path, place: Path) -> None:
    """Install one package from its wheel, without extras, and run it."""
    python = environment(place / f"env-{name}")
    folder = place / f"work-{name}"
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    run([python, "-m", "pip", "install", "--quiet", "--find-links", str(dist), name], place)
    installed = time.monotonic()
    (folder / "smallest.py").write_text(SMALLEST)
    run(["bash", "-euc", SHELL + CHECKS[name]], folder, python)
    files = [path for path in (place / f"env-{name}").rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    seconds = f"installed in {installed - began:.0f} s, ran in {time.monotonic() - installed:.0f} s"
    print(f"{name}: {seconds}, environment of {size / 1e6:,.0f} MB", flush=True)


def environment(folder: Path) -> str:
    """The Python of a new environment."""
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def run(words: list[str], folder: Path, python: str | None = None) -> None:
    """Run a command with nothing of this repository on the path; show its output if it fails."""
    world = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if python:
        world["PATH"] = f"{Path(python).parent}{os.pathsep}{world['PATH']}"
    done = subprocess.run(words, cwd=folder, env=world, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)[:300]}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
