"""Every setting is read somewhere, every recipe loads, and mistakes are told clearly and all at once."""

import ast
import math
from pathlib import Path

import pytest

from mmldlm.config import Config, find_problems
from mmldlm.errors import UserError
from mmldlm.recipe import config_from_dict, config_to_dict, list_recipes, load_recipe, setting_names

SOURCE = Path(__file__).parents[2] / "src" / "mmldlm"


def attributes_read() -> set[str]:
    """Names of attributes that are read, and strings given to getattr, outside the settings themselves."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name in ("config.py", "recipe.py") or "doctor" in path.parts or "migrate" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_is_read_somewhere(name):
    assert name.rsplit(".", 1)[-1] in attributes_read()


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads(name):
    config = load_recipe(name)
    assert config.name == name
    assert find_problems(config) == []


def test_a_config_survives_the_way_through_a_checkpoint():
    config = load_recipe(
        "demo", ["optim.lr=0.001", "batch.micro_tokens=512", "corruption.mode_weights.l2t=3"]
    )
    assert config_from_dict(config_to_dict(config)) == config


def test_a_recipe_that_names_one_mode_means_that_one_alone(tmp_path):
    path = tmp_path / "only.yaml"
    path.write_text("data: {store: x}\ncorruption: {mode_weights: {t2l: 2}}\n")
    weights = load_recipe(str(path)).corruption.mode_weights
    assert (weights.l2t, weights.t2l, weights.joint) == (0, 2, 0)


@pytest.mark.parametrize(("words", "told"), [
    (["optim.lrr=1"], "unknown setting optim.lrr; did you mean optim.lr?"),
    (["lr=1"], "unknown setting lr; did you mean optim.lr?"),
    (["optim.lr=fast"], "optim.lr=fast"),
    (["optim.lr=-1"], "optim.lr=-1.0: allowed is more than 0"),
    (["optim.lr=nan"], "optim.lr=nan"),
    (["corruption.condition_dropout=1"], "allowed is at least 0 and less than 1"),
    (["model.preset=huge"], "model.preset=huge: allowed are tiny, small, base, large, xlarge, reference"),
    (["model.head_width=7"], "model.head_width=7: an even number is needed"),
    (["model=tiny"], "model is a section; set its keys, such as model.preset"),
    (["train.steps"], "'train.steps': settings are written section.key=value"),
    ([f"corruption.mode_weights.{mode}=0" for mode in ("l2t", "t2l", "joint")], "at least one mode"),
    (["speed.layout=padded", "speed.attention=varlen"], "needs speed.layout=packed"),
    (["objective.latent_loss=cosine", "corruption.prediction_type=noise"], "needs corruption.prediction_type=clean"),
    (["objective.latent_loss=normalized_mse", "corruption.prediction_type=velocity"], "no sampler's formula"),
    (["corruption.text_noise=hybrid"], "needs sampling.text_sampler=hybrid"),
    (["corruption.uniform_share=0"], "allowed is more than 0 and less than 1"),
    (["name=../x"], "a plain folder name is needed"),
    ([f"objective.{part}_weight=0" for part in ("text", "latent", "length")], "nothing would be trained"),
])  # fmt: skip
def test_a_wrong_setting_is_named_with_what_is_allowed(words, told):
    with pytest.raises(UserError) as error:
        load_recipe("demo", words)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_off_is_a_word_and_no_truth_value(tmp_path):
    assert load_recipe("demo", ["speed.activation_checkpointing=off"]).speed.activation_checkpointing == "off"
    path = tmp_path / "off.yaml"
    path.write_text("data: {store: x}\nspeed: {activation_checkpointing: off, compile: off}\n")
    speed = load_recipe(str(path)).speed
    assert (speed.activation_checkpointing, speed.compile) == ("off", False)


def test_stages_of_the_batch_come_from_recipes_and_the_command_line(tmp_path):
    path = tmp_path / "stages.yaml"
    path.write_text("data: {store: x}\nbatch: {schedule: [{until: 5, tokens_per_step: 64}]}\n")
    config = load_recipe(str(path))
    assert [(stage.until, stage.tokens_per_step) for stage in config.batch.schedule] == [(5, 64)]
    assert config_from_dict(config_to_dict(config)) == config
    with pytest.raises(UserError, match="unti"):
        load_recipe("demo", ["batch.schedule=[{unti: 5}]"])


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as error:
        load_recipe("demo", ["optim.lrr=1", "train.stepz=3", "optim.lr=fast"])
    for part in ("optim.lrr", "train.stepz", "optim.lr=fast"):
        assert part in str(error.value)
    with pytest.raises(UserError) as error:
        load_recipe("demo", ["optim.lr=-1", "train.steps=0", "model.depth=0"])
    for part in ("optim.lr", "train.steps", "model.depth"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: [1\n", "\x00\x01", "optim: 3\n", "optim: {lr: {x: 1}}\n", "data: null\n"]
)
def test_a_broken_recipe_is_one_clear_line(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_recipe(str(path))
    assert "\n" not in str(error.value)


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(UserError, match=r"--recipe dmo: no such file.*demo"):
        load_recipe("dmo")


def test_defaults_are_valid_but_for_the_store():
    problems = find_problems(Config())
    assert len(problems) == 1
    assert "data.store" in problems[0]
    assert math.isfinite(Config().optim.lr)
