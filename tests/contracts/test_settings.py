"""Every setting is read somewhere, every recipe loads, and mistakes are told clearly and all at once."""

import ast
import math
import pickle
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from mmldlm.config import (
    PARTS,
    Config,
    ObjectiveConfig,
    OptimConfig,
    find_problems,
    leaves_condition_out,
)
from mmldlm.config.recipe import (
    config_from_dict,
    config_to_dict,
    list_recipes,
    load_recipe,
    setting_names,
)
from mmldlm.errors import UserError
from mmldlm.objective.losses import slot_errors
from mmldlm.sampling.orders import ORDERS
from mmldlm.sampling.solvers import LATENT_STEPS
from mmldlm.training.optim import build_optimizers
from tests.batches import small_denoiser

SOURCE = Path(__file__).parents[2] / "src" / "mmldlm"
MODES_PAGE = Path(__file__).parents[2] / "docs" / "modes.md"


def stages(text: str) -> list[str]:
    return [f"corruption.mode_schedule=[{text}]"]


@cache
def attributes_read() -> set[str]:
    """Names of attributes that are read, and strings given to getattr, outside the settings themselves."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name == "recipe.py" or {"config", "doctor", "migrate"} & set(path.relative_to(SOURCE).parts):
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
    assert load_recipe("demo", ["corruption.mode_weights={t2l: 2}"]).corruption.mode_weights == weights


@pytest.mark.parametrize(("words", "told"), [
    (["optim.lrr=1"], "unknown setting optim.lrr; did you mean optim.lr?"),
    (["lr=1"], "unknown setting lr; did you mean optim.lr?"),
    (["restart_period=9"], "did you mean optim.restart_period? 'mmldlm migrate' translates settings"),
    (["optim.lr=fast"], "optim.lr=fast: a number is needed"),
    (["data.num_workers=two"], "data.num_workers=two: a whole number is needed, or null"),
    (["train.frozen=text"], "train.frozen=text: a list of words is needed"),
    (["optim.lr=inf"], "optim.lr=inf: allowed is more than 0 and finite"),
    (["optim.lr=-1"], "optim.lr=-1.0: allowed is more than 0"),
    (["optim.lr=nan"], "optim.lr=nan"),
    (["train.seed=-1"], "train.seed=-1: allowed is at least 0 and at most 4611686018427387904"),
    (["train.steps=1.5"], "train.steps=1.5: a whole number is needed"),
    (["corruption.mode_weights={l2t: 1"], "mode_weights={l2t: 1: no list or mapping; is a bracket not closed"),
    (["corruption.condition_dropout=1.5"], "allowed is at least 0 and at most 1"),
    (["corruption.condition_dropout=1"], "needs l2t as the only mode"),
    (["model.preset=huge"], "model.preset=huge: allowed are tiny, small, base, large, xlarge, reference"),
    (["model.head_width=7"], "model.head_width=7: an even number is needed"),
    (["model=tiny"], "model is a section; set its keys, such as model.preset"),
    (["train.steps"], "'train.steps': settings are written section.key=value"),
    ([f"corruption.mode_weights.{mode}=0" for mode in ("l2t", "t2l", "joint")], "at least one mode"),
    (["speed.layout=padded", "speed.attention=varlen"], "needs speed.layout=packed"),
    (["objective.latent_loss=cosine", "corruption.prediction_type=noise"], "needs corruption.prediction_type=clean"),
    (["objective.latent_loss=normalized_mse", "corruption.prediction_type=velocity"], "no sampler's formula"),
    (["objective.balance=uncertainty"], "objective.balance=uncertainty: allowed are gradient_norm, fixed"),
    (["sampling.guidance=2", "corruption.condition_dropout=0", "corruption.mode_weights={l2t: 1, t2l: 1}"],
     "sampling.guidance=2.0: compares with the prediction without the condition, which this run never trains"),
    (["name=../x"], "a plain folder name is needed"),
    ([f"objective.{part}_weight=0" for part in ("text", "latent", "length")], "nothing would be trained"),
    (["train.frozen=[txt]"], "train.frozen: 'txt' is no part; allowed are text, latent, shared"),
    ([f"train.frozen=[{', '.join(PARTS)}]"], "no loss reaches any other part; nothing would be trained"),
    (["corruption.mode_choice=step"], "corruption.mode_choice=step: allowed are document, batch"),
    (["corruption.mode_repeat=true"], "corruption.mode_repeat=True: there are no stages to repeat"),
    (stages("{mode_weights: {l2t: 1}}"), "every stage needs an end, either all 'until'"),
    (stages("{until: 1, until_epoch: 1, mode_weights: {l2t: 1}}"), "every stage needs an end"),
    (stages("{until: 1, mode_weights: {l2t: 1}}, {until_epoch: 2, mode_weights: {l2t: 1}}"), "needs an end"),
    (stages("{until: 5, mode_weights: {l2t: 1}}, {until: 5, mode_weights: {t2l: 1}}"), "end at [5, 5]; each must"),
    (stages("{until: 5}"), "corruption.mode_schedule[0].mode_weights: at least one mode"),
    (stages("{until: 5, mode_weights: {l2x: 1}}"), "l2x"),
    (stages("{until: 5, mode_weights: {l2t: -1}}"), "corruption.mode_schedule[0].mode_weights.l2t=-1"),
    (stages("{until: 5, mode_weights: {l2t: 1}, frozen: [head]}"), "corruption.mode_schedule[0].frozen: 'head'"),
    ([*stages("{until: 5, mode_weights: {t2l: 1}}"), "objective.latent_weight=0"],
     "corruption.mode_schedule[0]: no loss of its modes reaches a part that is not frozen"),
    ([*stages("{until: 5, mode_weights: {t2l: 1}, frozen: [text, latent, shared]}"), "train.frozen=[latent_head]"],
     "corruption.mode_schedule[0]: no loss of its modes reaches a part"),
])  # fmt: skip
def test_a_wrong_setting_is_named_with_what_is_allowed(words, told):
    with pytest.raises(UserError) as error:
        load_recipe("demo", words)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_trains_all_modes_in_one_checkpoint(name):
    weights = load_recipe(name).corruption.mode_weights
    shares = (weights.l2t, weights.t2l, weights.joint)
    if name == "qwen-english":  # as the launch script of the research code
        assert shares == (1, 0, 0)
    else:
        assert min(shares) > 0


def test_whole_numbers_may_be_written_with_an_exponent():
    assert load_recipe("demo", ["train.steps=2e3"]).train.steps == 2000


def test_a_folder_may_begin_with_a_bracket():
    assert load_recipe("demo", ["data.store=[v2]/x"]).data.store == "[v2]/x"


@pytest.mark.parametrize(("words", "is_left_out"), [
    (["corruption.condition_dropout=0.1", "corruption.mode_weights={l2t: 1}"], True),
    (["corruption.condition_dropout=0", "corruption.mode_weights={l2t: 1}"], False),
    (["corruption.condition_dropout=0", "corruption.mode_weights={joint: 1}"], True),
    (["corruption.condition_dropout=0", "corruption.mode_weights={joint: 1}",
      *stages("{until: 5, mode_weights: {l2t: 1}}"), "corruption.mode_repeat=true"], False),
    (["corruption.condition_dropout=0", "corruption.mode_weights={l2t: 1}",
      *stages("{until: 5, mode_weights: {joint: 1}}")], True),
])  # fmt: skip
def test_weights_that_no_step_has_do_not_count(words, is_left_out):
    assert leaves_condition_out(load_recipe("demo", words).corruption) == is_left_out


def test_text_alone_goes_with_stages_that_repeat():
    repeating = [*stages("{until: 5, mode_weights: {l2t: 1}}"), "corruption.mode_repeat=true"]
    assert load_recipe("demo", ["corruption.condition_dropout=1", *repeating]).corruption.mode_repeat


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


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", MODES_PAGE.read_text(), flags=re.DOTALL))
def test_examples_of_the_page_on_modes_load(tmp_path, text):
    path = tmp_path / "example.yaml"
    path.write_text(f"data: {{store: x}}\n{text}")
    config = load_recipe(str(path))
    assert config_from_dict(config_to_dict(config)) == config
    assert config != Config()


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
    with pytest.raises(UserError, match=r"recipe dmo: no such file.*did you mean demo\? recipes are demo"):
        load_recipe("dmo")


def test_a_value_that_is_missing_or_refers_to_nothing_is_one_clear_line(tmp_path, monkeypatch):
    path = tmp_path / "open.yaml"
    path.write_text(
        'data: {store: "${oc.env:MMLDLM_NO_STORE}"}\noptim: {lr: "???"}\n'
        'train: {frozen: ["${oc.env:MMLDLM_PART}"], steps: "${oc.env:MMLDLM_STEPS,12}", seed: "${nowhere}"}\n'
    )
    with pytest.raises(UserError) as error:
        load_recipe(str(path), ["train.log_every=0"])
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "data.store=${oc.env:MMLDLM_NO_STORE}: the environment variable MMLDLM_NO_STORE is not set",
        "optim.lr=???: a value is needed",
        "train.frozen=['${oc.env:MMLDLM_PART}']: the environment variable MMLDLM_PART is not set",
        "train.seed=${nowhere}: Interpolation key 'nowhere' not found",
    ):
        assert part in message
    monkeypatch.setenv("MMLDLM_NO_STORE", "data/mine")
    monkeypatch.setenv("MMLDLM_PART", "text")
    config = load_recipe(str(path), ["optim.lr=1e-3", "train.seed=3"])
    assert (config.data.store, config.train.frozen, config.train.steps) == ("data/mine", ["text"], 12)


def test_defaults_are_valid_but_for_the_store():
    problems = find_problems(Config())
    assert len(problems) == 1
    assert "data.store" in problems[0]
    assert math.isfinite(Config().optim.lr)


def allowed(name: str) -> tuple[str, ...]:
    """The words that a setting takes."""
    section, key = name.split(".")
    return tuple(type(getattr(Config(), section)).__dataclass_fields__[key].metadata["allowed"])


def test_every_allowed_word_has_code_of_its_own():
    """A word in the settings alone would silently do what another one does."""
    assert set(allowed("sampling.text_sampler")) == set(allowed("sampling.joint_sampler")) == set(ORDERS)
    assert set(allowed("sampling.latent_sampler")) == set(LATENT_STEPS)
    prediction, target = torch.randn(2, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    words = [ObjectiveConfig(latent_loss=word) for word in allowed("objective.latent_loss")]
    assert len({slot_errors(prediction, target, word).sum().item() for word in words}) == len(words)
    optimizers = {
        tuple(map(type, build_optimizers(small_denoiser(), OptimConfig(name=word), fused=False).parts))
        for word in allowed("optim.name")
    }
    assert len(optimizers) == len(allowed("optim.name"))


def test_the_mistakes_in_settings_survive_the_way_to_another_process():
    with pytest.raises(UserError) as caught:
        load_recipe("demo", ["optim.lrr=1", "optim.lr=fast"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
    assert str(again) == "; ".join(again.problems)
    assert len(again.problems) == 2
