"""Settings that nobody would write by mistake: each is one clear line, and nothing of it is carried out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.config import CorruptionConfig
from mmldlm.config.recipe import config_from_dict, load_recipe
from mmldlm.errors import UserError
from tests.runs import make_trainer
from tests.stores import write_store

LONG = "9" * 5000
WORDS = [
    "train.steps=1e400", "train.steps=.inf", "train.steps=.nan", f"train.steps={LONG}", f"optim.lr={LONG}",
    "optim.lr=1e308", "optim.lr=.nan", "name=${name}", "name=${nope}", "name=${oc.env:NOPE}", "name=${oc.nope:x}",
    "name=${", "train.init=${oc.create:{a:1}}", "batch.schedule=[[1]]", "batch.schedule=[[[]]]",
    "batch.schedule=" + "[" * 3000, "batch.schedule=[{a: [[1]]}]", "evaluation.step_counts=[[1, 2]]",
    "evaluation.step_counts=[1, [2, [3]]]", f"evaluation.step_counts=[{LONG}]", "evaluation.guidances=[[1]]",
    "corruption.mode_weights={l2t: [1]}", "corruption.mode_weights={1: 2}", "model.width={a: 1}", "model=[[1]]",
    "model..width=3", "=1", "model.width=!!python/object:os.system", 
    f"model.preset={'x' * 9999}", f"train.device={'x' * 9999}", f"speed.attention={'x' * 9999}",
    "train.seed=99999999999999999999",
]  # fmt: skip
FILES = {
    "tag": "!!python/object/apply:os.system ['touch executed']",
    "tag of a value": "name: !!python/object/apply:os.system ['touch executed']",
    "unknown tag": "name: !foo bar",
    "set": "train: !!set {steps}",
    "list that contains itself": "a: &a [*a]",
    "mapping that contains itself": "a: &a {b: *a}",
    "aliases of aliases": "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(
        f"{y}: &{y} [{', '.join([f'*{x}'] * 10)}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "deep lists": "[" * 5000,
    "deep mappings": "{a: " * 5000,
    "long number": f"train: {{steps: {LONG}}}",
    "list as key": "? [a, b]\n: 1",
    "list of lists": "model: [[[1]]]",
    "two documents": "--- a\n--- b",
    "zero byte": "name: a\0b",
    "other version": "%YAML 9.9\n---\nname: x",
    "too long": f"name: {'x' * 2**21}",
    "misspelt section": f"cor{'r' * 50}uption: {{{', '.join(f'{name}: 1' for name in vars(CorruptionConfig()))}}}",
}


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word[:30])
def test_words(word: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe("laptop", ["data.store=x", word])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("name", FILES)
def test_recipes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(FILES[name])
    with pytest.raises(UserError, match=r"recipe\.yaml|unknown setting|a section") as error:
        load_recipe(str(path), ["data.store=x"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000
    assert not Path("executed").exists()


@pytest.mark.parametrize("values", [
    {"data": {"store": "${oc.env:SECRET}"}}, {"name": "${oc.env:SECRET}"}, {"name": "a-${oc.decode:${oc.env:SECRET}}"},
    {"evaluation": {"text_samplers": ["${oc.env:SECRET}"]}},
])  # fmt: skip
def test_saved_settings_read_no_environment(values: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "the password")
    with pytest.raises(UserError, match=r"saved settings hold plain values") as error:
        config_from_dict({"data": {"store": "x"}} | values)
    assert "password" not in str(error.value)
    assert load_recipe("laptop", ["data.store=${oc.env:SECRET}"]).data.store == "the password"


@pytest.mark.parametrize(
    "values", [{"objective": 5}, {"objective": None}, {"data": [1]}, {"train": {"steps": {}}}]
)
def test_saved_settings_of_a_wrong_type(values: dict) -> None:
    with pytest.raises(UserError, match="the saved settings"):
        config_from_dict({"data": {"store": "x"}} | values)


@pytest.mark.parametrize(
    "word", ["model.width=1e12", "model.depth=1e9", "model.latent_width=1e12", "model.mlp_ratio=1e12"]
)
def test_a_network_that_no_machine_holds_is_rejected_before_it_is_made(word: str, tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    with pytest.raises(UserError, match="the weights need"):
        make_trainer(tmp_path / "run", tmp_path / "store", word)
