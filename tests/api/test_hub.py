"""A published folder: what it holds, that it loads without a network, and what the Hub is asked for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import mmldlm
from mmldlm.api.model import Model
from mmldlm.errors import UserError
from tests.tiny_models import make_run, make_store


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return mmldlm.load(make_run(tmp_path / "run", make_store(tmp_path / "store")))


def test_a_published_folder_is_whole_and_loads_from_anywhere(model: Model, tmp_path: Path) -> None:
    model.loaded.config.sampling.num_sampling_steps = 5
    mmldlm.evaluate(
        model, num=4, num_decoded=2, num_generated=0, steps=[1], encoder=False, out=tmp_path / "report"
    )
    folder = tmp_path / "published"
    for _ in range(2):  # again into the same folder
        model.save_pretrained(folder, name="me/words", report=tmp_path / "report", license="mit")
    names = {path.name for path in folder.iterdir()}
    files = {"model.safetensors", "config.json", "generation_config.json", "README.md", "manifest.json"}
    assert names == files | {"tokenizer", "figures"}
    card = (folder / "README.md").read_text("utf-8")
    for words in ("license: mit", "library_name: mmldlm", 'mmldlm.load("me/words")', "95 %"):
        assert words in card
    for picture in (folder / "figures").iterdir():
        assert f"(figures/{picture.name})" in card
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in written  # nobody reads who trained it where
    again = Model.from_pretrained(folder)
    assert again.loaded.config.sampling.num_sampling_steps == 5
    latents = model.encode(["w3 w1"])
    assert again.decode(latents, lengths=2) == model.decode(latents, lengths=2)


def test_generation_config_has_transformers_names_and_an_effect(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    model.save_pretrained(folder)
    path = folder / "generation_config.json"
    values = json.loads(path.read_text())
    assert {"max_denoising_steps", "top_p", "guidance_scale", "do_sample"} <= values.keys()
    for sample, temperature in ((True, 0.7), (False, 0.0)):
        path.write_text(json.dumps({"max_denoising_steps": 3, "temperature": 0.7, "do_sample": sample}))
        sampling = mmldlm.load(folder).loaded.config.sampling
        assert (sampling.num_sampling_steps, sampling.temperature) == (3, temperature)
    path.write_text(json.dumps({"do_sample": True}))
    assert mmldlm.load(folder).loaded.config.sampling.temperature == 1.0
    for wrong, word in (
        ({"num_beams": 4}, "num_beams"),
        ({"top_p": "x"}, "top_p"),
        ([], "read"),
        ("{", "read"),
    ):
        path.write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
        with pytest.raises(UserError, match=word):
            mmldlm.load(folder)


def test_a_model_in_the_layout_of_the_hub_cache_loads_by_its_name(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "models--me--words"
    model.save_pretrained(cache / "snapshots" / "abc123", precision="fp16")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123")
    download = functools.partial(
        huggingface_hub.snapshot_download, cache_dir=tmp_path / "cache", local_files_only=True
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert mmldlm.load("me/words").step == model.step


def test_publishing_creates_the_repository_and_sends_the_folder(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            asked["token"] = token

        def create_repo(self, name: str, **options: Any) -> Any:
            asked["repo"] = name, options
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
            asked["files"] = sorted(path.name for path in folder_path.iterdir())
            return f"uploaded {repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert model.push_to_hub("me/words", private=True, token="t") == "uploaded me/words"
    assert asked["repo"] == ("me/words", {"private": True, "exist_ok": True})
    assert "README.md" in asked["files"]
    assert asked["token"] == "t"
    with pytest.raises(UserError, match="name="):
        model.push_to_hub("not a name")


def test_no_network_and_no_token_are_one_clear_line(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(UserError, match=r"me/words: could not be published on the Hub \(no route\)"):
        model.push_to_hub("me/words")


def test_a_package_of_data_is_loaded_by_its_name(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "mmldlm_toy").mkdir(parents=True)
    (tmp_path / "site" / "mmldlm_toy" / "__init__.py").write_text("")
    model.save(tmp_path / "site" / "mmldlm_toy" / "export", precision="int8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert mmldlm.load("builtin:toy").step == model.step
    with pytest.raises(UserError, match="no package mmldlm_nothing is installed"):
        mmldlm.load("builtin:nothing")
