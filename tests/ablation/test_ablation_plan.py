"""Plans are read strictly, and every mistake is told before anything runs."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from mmldlm.ablation.plan import default_names, list_plans, load_plan
from mmldlm.ablation.report import Report
from mmldlm.ablation.summary import summarise
from mmldlm.ablation.work import Work
from mmldlm.errors import UserError
from mmldlm.runtime import settle_runtime

PAGE = Path(__file__).parents[2] / "docs" / "ablations.md"
GOOD = {"recipe": "demo", "arms": {"base": [], "fast": ["optim.lr=0.01"]}}
BLIND = ["corruption.condition_dropout=0", "corruption.mode_weights={l2t: 1, t2l: 1}"]

TEXT_ALONE = ["corruption.condition_dropout=1", "corruption.mode_weights={l2t: 1}"]
L2T_ALONE = ["corruption.mode_weights={l2t: 1}"]


def write(folder, **changes):
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes, sort_keys=False))
    return str(path)


@pytest.mark.parametrize(("changes", "told"), [
    ({"arm": {}}, "unknown key 'arm'; allowed are recipe, base, eval, quantities, arms"),
    ({"recipe": "nothing"}, "nothing: no such file, and no recipe of that name"),
    ({"recipe": None}, "recipe: the name or file of a recipe"),
    ({"base": "optim.lr=1"}, "base: a list of settings"),
    ({"base": ["train.seed=3"]}, "train.seed=3: the seeds are 0 to --seeds minus 1"),
    ({"arms": {"base": []}}, "two arms or more"),
    ({"arms": {"base": [], "b": ["name=x"]}}, "name=x: a run has the name of its arm"),
    ({"arms": {"base": [], "b": ["train.device=cpu"]}}, "choose it with --device"),
    ({"arms": {"base": [], "b": ["optim.lrr=1"]}}, "arm 'b': its settings: unknown setting optim.lrr; did you mean"),
    ({"arms": {"base": [], "b": ["objective.latent_loss=cosine", "corruption.prediction_type=noise"]}}, "arm 'b': obj"),
    ({"arms": {"base": [], "b": ["data.store=elsewhere"]}}, "arm 'b': data.store=elsewhere, but data/demo in 'base'"),
    ({"arms": {"base": [], "a b": [], "a-b": []}}, "'a b' and 'a-b' would have the same folder"),
    ({"arms": {"base": [], "../x": []}}, "begins with a letter or digit"),
    ({"arms": {"base": [], 3: []}}, "arm 3: a name"),
    ({"arms": {"base": [], "b": "optim.lr=1"}}, "arm 'b': a list of settings is needed, or {of: ARM"),
    ({"arms": {"base": [], "b": {"of": "base", "train": []}}}, "arm 'b': unknown key 'train'; allowed are of"),
    ({"arms": {"base": [], "b": {"of": "bass", "weights": "last"}}}, "of: bass: an arm that trains is needed: base"),
    ({"arms": {"base": [], "b": {"of": "base"}}}, "arm 'b': is the same as 'base'"),
    ({"arms": {"base": [], "b": {"of": "base", "weights": "raw"}}}, "weights: raw: allowed are averaged, last"),
    ({"arms": {"base": [], "b": {"of": "base", "sampling": {"guidence": 2}}}}, "unknown setting sampling.guidence"),
    ({"arms": {"base": ["optim.ema_decay=0"], "b": {"of": "base", "weights": "last"}}}, "keeps no average"),
    ({"arms": {"base": BLIND, "b": {"of": "base", "sampling": {"guidance": 2}}}}, "which this run never trains"),
    ({"arms": {"base": [], "b": BLIND}, "base": ["evaluation.guidances=[1,2]"]}, "guidance compares with a text"),
    ({"arms": {"base": [], "b": TEXT_ALONE}, "base": ["evaluation.guidances=[2]"]}, "arm 'b': evaluation.cand"),
    ({"arms": {"base": [], "b": TEXT_ALONE}, "base": ["evaluation.candidates=[4]"]}, "this run never saw a latent"),
    ({"arms": {"base": [], "b": L2T_ALONE}, "base": ["evaluation.candidates=[4]"]}, "this run has no loss on latents"),
    ({"arms": {"base": [], "b": [*L2T_ALONE, "evaluation.check=model"]}, "base": ["evaluation.refine=1"],
      "eval": {"encoder": True}}, "evaluation.check=model needs a run with a loss on latents"),
    ({"base": ["evaluation.refine=1", "evaluation.check=encoder"]}, "evaluation.check=encoder needs the encoder"),
    ({"eval": {"num_document": 3}}, "eval: unknown key 'num_document'"),
    ({"eval": {"num_documents": "many"}}, "evaluation.num_documents=many: a whole number"),
    ({"eval": {"steps": 16}}, "eval.steps is 16, a list is needed; write it as in eval: {steps: [16]"),
    ({"eval": {"steps": [0]}}, "evaluation.step_counts=[0]"),
    ({"base": ["evaluation.text_samplers=[fast]"]}, "'fast' is no text sampler"),
    ({"eval": {"steps": []}}, "eval.steps: is empty"),
    ({"eval": {"seed": -1}}, "eval.seed: -1"),
    ({"eval": {"encoder": "yes"}}, "eval.encoder is 'yes', a truth value is needed"),
    ({"quantities": ["t2l/cosin"]}, "t2l/cosin: nothing of this name is measured; did you mean t2l/cosine?"),
    ({"quantities": ["decode/given/8/exact_match"]}, "nothing of this name is measured; did you mean decode/given/16"),
    ({"quantities": ["t2l/cosine", "t2l/cosine"]}, "is there twice"),
])  # fmt: skip
def test_a_wrong_plan_is_one_line(tmp_path, changes, told):
    with pytest.raises(UserError) as error:
        load_plan(write(tmp_path, **changes))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_ways_that_the_settings_ask_for_may_be_columns(tmp_path):
    names = [f"checked/16/confidence/1/{way}/exact_match" for way in ("4/0", "1/2")]
    settings = ["evaluation.candidates=[1,4]", "evaluation.refine=2"]
    assert list(load_plan(write(tmp_path, base=settings, quantities=names)).quantities) == names
    with_encoder = {"base": [], "b": L2T_ALONE}
    load_plan(write(tmp_path, base=settings, arms=with_encoder, eval={"encoder": True}))


def test_an_arm_that_is_named_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("recipe: demo\narms:\n  a: []\n  b: []\n  a: [optim.lr=1]\n")
    with pytest.raises(UserError, match="duplicate key"):
        load_plan(str(path))
    with pytest.raises(
        UserError, match="no such file, and no plan of that name; plans are losses, schedules, sotu, wordnet"
    ):
        load_plan(str(tmp_path / "none.yaml"))


def test_settings_of_base_command_line_and_arm_win_in_this_order(tmp_path):
    base = ["optim.lr=0.1", "train.steps=7", "optim.beta1=0.5"]
    path = write(tmp_path, base=base, eval={"steps": [4], "split": "test"})
    plan = load_plan(path, ["train.steps=9", "optim.lr=0.2"])
    first, fast = (plan.config(arm, 5) for arm in plan.arms)
    assert (first.optim.lr, first.optim.beta1, first.train.steps) == (0.2, 0.5, 9)
    assert (fast.optim.lr, fast.optim.beta1, fast.train.steps) == (0.01, 0.5, 9)
    assert (first.train.seed, first.name, fast.name) == (5, "base", "fast")
    assert first.evaluation == fast.evaluation
    assert first.evaluation.step_counts == [4]


def test_a_recipe_beside_the_plan_is_found(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: mine\ndata: {store: x}\n")
    assert load_plan(write(tmp_path, recipe="mine.yaml")).recipe == str(tmp_path / "mine.yaml")


def test_the_report_says_which_arm_never_saw_a_latent(tmp_path):
    plan = load_plan(write(tmp_path, arms={"base": [], "text alone": TEXT_ALONE}))
    notes = Report(Work(plan, tmp_path, range(2), ""), {}, 1).notes(summarise(plan, []))
    assert [note for note in notes if "condition_dropout=1): text alone; of their text bounds only" in note]


@pytest.mark.parametrize("name", list_plans())
def test_every_plan_that_comes_with_the_package_loads_and_runs_without_a_gpu(name):
    plan = load_plan(name)
    assert len(plan.configs) == len(plan.arms)
    for config in plan.configs.values():
        settle_runtime(config, torch.device("cpu"))  # nobody needs a GPU to try it


def test_single_modes_at_a_third_see_as_many_documents_of_their_mode():
    plan = load_plan("wordnet")
    steps = {arm.name: plan.config(arm, 0).train.steps for arm in plan.arms}
    assert {steps[f"{mode} alone, a third"] for mode in ("l2t", "t2l", "joint")} == {steps["base"] // 3}
    weights = plan.config(plan.arms[0], 0).corruption.mode_weights
    assert weights.l2t == weights.t2l == weights.joint


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
def test_plans_of_the_page_load(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    plan = load_plan(str(path), ["data.store=x"])
    assert {config.data.store for config in plan.configs.values()} == {"x"}


def test_default_columns_are_what_there_is():
    found = default_names(["t2l/cosine", "decode/given/4/exact_match", "decode/given/8/exact_match"], [4, 8])
    assert found == ["decode/given/8/exact_match", "t2l/cosine"]
