"""Old settings, command lines and data become ours, and everything that was lost is said."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import mmldlm
from mmldlm.cli.data import app as data_app
from mmldlm.cli.migrate import app
from mmldlm.config.old_settings import KNOWN, explain_old, is_old
from mmldlm.config.recipe import load_recipe, setting_names
from mmldlm.errors import UserError
from mmldlm.migrate.report import report_text, write_migration
from mmldlm.migrate.repository import examine_repository, expand
from mmldlm.migrate.translation import check_recipe, translate

OLD = """
defaults: [logging: default]
data:
  num_workers: 128
  data_files: {train: "x.jsonl", validation: "x.jsonl"}
model: {type: multimodal_mmdit, hidden_size: 1024, n_blocks: 24, n_heads: 24, cond_dim: 1024, max_seq_len: 512,
        latent_parameterization: epsilon, qk_rmsnorm: true, latent_dim: 32, odd_key: 1}
training: {seed: 42, train_batch_size: 4, gradient_accumulation_steps: 2, num_train_steps: 1000, dtype: bf16,
           compile_model: false, warmup_steps: 2000, loss_type: l2t, lr_schedule: cosine}
loss: {loss_type: multimodal, latent_loss_weight: 0.1, text_loss_weight: 1.0}
optimizer: {name: adamw, lr: 5e-5, betas: [0.9, 0.95], grad_clip_norm: 0.5, use_fused: true}
logging: {run_name: old-run, log_freq: 100, save_freq: 500, eval_freq: 100}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mmdit.yaml").write_text(OLD)
    (tmp_path / "train.sh").write_text(
        "export TORCH_NCCL_ENABLE_MONITORING=0\n"
        "torchrun --nproc_per_node=2 train_mmdit.py --config-name mmdit optimizer.lr=1e-4 optimizer.use_fused=true "
        "training.train_batch_size=16 training.loss_type=t2l model.dropout=0.1\n"
    )
    for folder in ("tokens", "latents"):
        (tmp_path / "data" / folder / "train").mkdir(parents=True)
    return tmp_path


def test_settings_are_translated_and_our_loader_takes_them() -> None:
    result = translate(
        yaml.safe_load(OLD) | {"optimizer": yaml.safe_load(OLD)["optimizer"] | {"lr": 5e-5}}, "old.yaml"
    )
    recipe = result.recipe
    assert recipe["model"]["width"] == 1024
    assert recipe["model"]["depth"] == 24
    assert recipe["batch"] == {"documents_per_step": 8, "tokens_per_step": 4096, "micro_tokens": 2048}
    assert any("gradient_accumulation_steps=2 was never read" in line for line in result.notes)
    assert recipe["corruption"] == {"mode_weights": {"l2t": 1.0}, "prediction_type": "noise"}
    assert recipe["optim"]["beta2"] == 0.95
    assert recipe["data"]["num_workers"] is None
    assert check_recipe(recipe) == []


@pytest.mark.parametrize(("word", "shares", "note"), [
    ("unconditional", {"joint": 1.0}, "corruption.mode_weights: {joint: 1}"),
    ("mixed", {"l2t": 1.0, "t2l": 1.0, "joint": 1.0}, "{l2t: 1, t2l: 1, joint: 1}"),
    ("random", {"joint": 2.0, "l2t": 1.0, "t2l": 0.5}, "with corruption.mode_choice: batch"),
    ("sequential", {"l2t": 1.0, "t2l": 1.0, "joint": 1.0}, "corruption.mode_repeat=true"),
])  # fmt: skip
def test_old_words_for_modes_are_shown_in_the_new_spelling(word: str, shares: dict, note: str) -> None:
    old = yaml.safe_load(OLD)
    old["loss"]["loss_type"] = word
    old["training"] |= {"mode_weights": [2, 1, 0.5], "sequential_schedule": ["l2t", "unconditional"]}
    result = translate(old, "old.yaml")
    assert any(note in line for line in result.notes)
    assert check_recipe(result.recipe) == []
    found = result.recipe["corruption"]
    assert found["mode_weights"] == shares
    assert found.get("mode_choice") == ("batch" if word == "random" else None)
    turns = [stage["mode_weights"] for stage in found.get("mode_schedule", [])]
    assert turns == ([{"l2t": 1.0}, {"joint": 1.0}] if word == "sequential" else [])


def test_losses_are_said() -> None:
    result = translate(yaml.safe_load(OLD), "old.yaml")
    assert any("n_heads" in line for line in result.ignored)
    assert any("use_fused" in line for line in result.ignored)
    assert any("text_loss_weight" in line for line in result.ignored)
    assert result.unknown == ["model.odd_key=1"]
    contradictions = "\n".join(result.contradictions)
    assert "cannot be split" in contradictions
    assert "validation reads the training file" in contradictions
    assert "not below" in contradictions


def test_whole_checkout(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file()}
    migration = examine_repository(checkout)
    (command,) = migration.commands
    assert command.new.startswith("mmldlm launch --nproc-per-node 2 -- train --recipe recipes/mmdit.yaml ")
    assert "optim.lr=0.0001" in command.new
    assert "batch.documents_per_step=64" in command.new  # 16 x 2 micro-batches x 2 ranks
    assert "corruption.mode_weights.l2t=0" in command.new  # that of the recipe
    assert "corruption.mode_weights.t2l=1.0" in command.new
    assert any("use_fused" in line for line in command.ignored)
    assert any("model.dropout" in line for line in command.dropped)
    assert migration.data[0][0] == "data"
    assert [f.code for f in migration.environment] == ["NCC005"]
    out = tmp_path_factory.mktemp("out")
    written = {path.name for path in write_migration(migration, out)}
    assert written == {"migration.md", "mmdit.yaml"}
    assert "What behaves differently" in report_text(migration)
    assert {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file()} == before


def test_a_file_without_the_section_training_is_found_in_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "train.yaml"
    path.write_text("optimizer: {lr: 1e-4}\nmodel: {type: multimodal_mmdit}\ndata: {num_workers: 2}\n")
    (translation,) = examine_repository(tmp_path).translations
    assert translation.recipe["optim"] == examine_repository(path).translations[0].recipe["optim"]


def test_a_mode_at_the_top_level_gets_its_place() -> None:
    old = yaml.safe_load(OLD) | {"loss_type": "mixed"}
    old["training"].pop("loss_type")
    old["loss"].pop("loss_type")
    result = translate(old, "old.yaml")
    assert "loss_type=mixed; did you mean loss.loss_type?" in result.unknown
    assert any(
        "loss_type=mixed has no effect at the top level; move it to loss" in note for note in result.notes
    )


def test_wrong_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no settings of the MM-LDLM research code"):
        examine_repository(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        examine_repository(tmp_path / "x")


def test_doctor_config_tells_both_kinds_apart(checkout: Path, tmp_path: Path) -> None:
    assert is_old(yaml.safe_load(OLD))
    recipe = tmp_path / "new.yaml"
    result = CliRunner().invoke(
        app, ["config", str(checkout / "configs" / "mmdit.yaml"), "--write", str(recipe)]
    )
    assert result.exit_code == 1
    assert "Ignored by the old code" in result.output
    assert load_recipe(str(recipe)).data.store == "data/mmdit"
    again = CliRunner().invoke(app, ["config", str(recipe)])
    assert again.exit_code == 0, again.output
    recipe.write_text("data: {store: x}\noptim: {lr: -1}\n")
    wrong = CliRunner().invoke(app, ["config", str(recipe)])
    assert wrong.exit_code == 1
    assert "optim.lr" in wrong.output
    recipe.write_text(
        "data: {store: x}\noptim: {lr: -1, wd: 3}\nsuch: 1\n"
    )  # a problem, with its hint, is a line
    assert CliRunner().invoke(app, ["config", str(recipe)]).output.splitlines() == [
        f"{recipe}: unknown setting optim.wd; did you mean optim.lr?",
        f"{recipe}: unknown setting such; sections are data, batch, model, corruption, objective, optim, train, speed, "
        "distributed, sampling, evaluation",
        f"{recipe}: optim.lr=-1.0: allowed is more than 0",
    ]


PLAN = """
model: {type: multimodal_mmdit, hidden_size: 512, use_gradient_checkpointing: true}
training: {train_batch_size: 4, num_train_steps: 100, warmup_steps: 10, restart_period: 50, min_lr_ratio: 0.2,
           enable_profiling: true, profile_steps: 7, loss_type: l2t}
loss: {loss_type: l2t, latent_loss_weight: 0.1}
optimizer: {beta1: 0.8, beta2: 0.95}
"""


def test_every_key_of_the_plan_is_translated() -> None:
    result = translate(yaml.safe_load(PLAN), "plan.yaml")
    assert result.unknown == []
    assert check_recipe(result.recipe) == []
    assert result.recipe["speed"]["activation_checkpointing"] == "block"
    assert result.recipe["optim"] == {
        "warmup_steps": 10, "min_lr_ratio": 0.2, "schedule": "restarts", "restart_period": 50,
        "beta1": 0.8, "beta2": 0.95,
    }  # fmt: skip
    assert result.recipe["train"] == {"steps": 100, "profile": True, "profile_steps": 7}


def test_what_old_settings_become_exists() -> None:
    names = set(setting_names()) | {"corruption.mode_weights"}
    for key in KNOWN:
        words = (explain_old(key) or "").split("now ", 1)
        assert (
            len(words) == 1
            or words[1].split("=")[0].split(":")[0].split(",")[0].split()[0].rstrip(";") in names
        ), key


@pytest.mark.parametrize(("word", "reported"), [
    ("training.train_batch_size=16", "now batch.documents_per_step"),
    ("training.num_train_steps=100", "now train.steps"),
    ("train_batch_size=16", "now batch.documents_per_step"),
    ("use_gradient_checkpointing=true", "now speed.activation_checkpointing=block"),
    ("training.restart_period=10", "now optim.schedule=restarts"),
    ("loss.loss_type=l2t", "now corruption.mode_weights"),
    ("model.dropout=0.1", "without a counterpart"),
])  # fmt: skip
def test_train_names_what_an_old_key_became(word: str, reported: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        load_recipe("small", [word])
    assert reported in str(error.value)
    assert "'mmldlm migrate' translates" in str(error.value)


def test_a_misspelled_old_key_gets_the_old_name_and_the_new_one() -> None:
    with pytest.raises(UserError, match=r"did you mean training\.train_batch_size") as error:
        load_recipe("small", ["training.train_batch_siz=16"])
    assert "now batch.documents_per_step" in str(error.value)
    old = yaml.safe_load(PLAN)
    old["optimizer"]["weigth_decay"] = 0.1
    assert translate(old, "plan.yaml").unknown == [
        "optimizer.weigth_decay=0.1; did you mean optimizer.weight_decay?"
    ]


def test_train_with_an_old_file_names_migrate_and_the_new_names(checkout: Path) -> None:
    path = checkout / "configs" / "mmdit.yaml"
    with pytest.raises(
        UserError, match=rf"^[^\n]*'mmldlm migrate {path} --out new' writes a recipe[^\n]*$"
    ) as error:
        load_recipe(str(path))
    assert "training.num_train_steps is now train.steps" in str(error.value)
    assert "training.train_batch_size is now batch.documents_per_step" in str(error.value)
    assert "training.loss_type is now corruption.mode_weights" in str(error.value)
    assert examine_repository(path).translations[0].recipe["train"]["steps"] == 1000


@pytest.mark.parametrize("change", [
    {"model": {"type": "autoregressive"}}, {"loss": {"loss_type": "ar"}}, {"model": {"cluster_size": 64}},
    {"model": {"p_uniform": 0.1}},
])  # fmt: skip
def test_other_kinds_of_model_are_rejected(checkout: Path, change: dict) -> None:
    old = yaml.safe_load(OLD)
    for section, values in change.items():
        old[section] |= values
    (checkout / "configs" / "other.yaml").write_text(yaml.safe_dump(old))
    migration = examine_repository(checkout)
    assert [translation.source for translation in migration.translations] == ["configs/mmdit.yaml"]
    assert "only masked diffusion is trained here" in migration.rejected[0]
    assert "not translated: configs/other.yaml" in report_text(migration)
    with pytest.raises(UserError, match=r"research code for an? .*only masked diffusion is trained here$"):
        load_recipe(str(checkout / "configs" / "other.yaml"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"p_uniform": "${model.share}"}}, "model.p_uniform: '${model.share}' is not a number"),
        ({"optimizer": {"betas": ["high", 0.9]}}, "optimizer.betas: 'high' is not a number"),
        (
            {"loss": {"loss_type": "random"}, "training": {"mode_weights": [1, 1, None]}},
            "training.mode_weights: None is not a number",
        ),
    ],
)
def test_a_word_in_the_place_of_a_number_is_one_clear_line(change: dict, named: str) -> None:
    values = yaml.safe_load(OLD)
    for section, own in change.items():
        values.setdefault(section, {}).update(own)
    with pytest.raises(UserError, match=f"^old.yaml: {re.escape(named)}; write"):
        translate(values, "old.yaml")


@pytest.mark.parametrize("loss", ["cosine", "normalized_mse"])
def test_a_loss_that_ignores_length_gets_a_prediction_that_it_can_use(loss: str) -> None:
    result = translate(
        yaml.safe_load(OLD.replace("latent_loss_weight", f"latent_loss_type: {loss}, latent_loss_weight")),
        "x",
    )
    assert result.recipe["corruption"]["prediction_type"] == "clean"
    assert any("prediction_type=clean instead of noise" in line for line in result.notes)
    assert check_recipe(result.recipe) == []


def test_an_effective_batch_is_not_called_a_product() -> None:
    result = translate(yaml.safe_load(OLD.replace("seed: 42", "effective_batch_size: 128")), "x")
    assert result.recipe["batch"]["documents_per_step"] == 128
    assert any("=128 is training.effective_batch_size" in line for line in result.notes)


def test_commands_of_a_migration_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and files whose names hold spaces, and a checkout that is the current folder."""
    (tmp_path / "my code").mkdir()
    monkeypatch.chdir(tmp_path / "my code")
    Path("my mmdit.yaml").write_text(
        OLD.replace("data:", "data:\n  token_dir: /a b/tokens\n  latent_dir: /a b/latents")
    )
    Path("run.sh").write_text(
        'torchrun train_mmdit.py --config-name "my mmdit" data.token_dir=/t data.latent_dir=/l\n'
    )
    migration = examine_repository(Path())
    assert report_text(migration).startswith("# Migration of my code\n")
    (translation,), (command,) = migration.translations, migration.commands
    words = shlex.split(translation.make_store)
    assert words[:6] == ["mmldlm", "data", "import", "/a b", "--out", "data/my mmdit"]
    assert shlex.split(command.new)[:4] == ["mmldlm", "train", "--recipe", "recipes/my mmdit.yaml"]
    assert command.make_store.startswith("mmldlm data import FOLDER --out data/run ")


def test_group_files_count_as_hydra_composes_them(checkout: Path) -> None:
    (checkout / "configs" / "optimizer").mkdir()
    (checkout / "configs" / "optimizer" / "adam.yaml").write_text("betas: [0.9, 0.99]\neps: 1e-9\n")
    path = checkout / "configs" / "mmdit.yaml"
    text = OLD.replace("[logging: default]", "[optimizer: adam, _self_]").replace(
        "betas: [0.9, 0.95], ", "beta1: 0.5, "
    )
    path.write_text(text)
    (translation,) = examine_repository(path).translations
    assert translation.recipe["optim"]["beta1"] == 0.9  # what the old code really used
    assert translation.recipe["optim"]["beta2"] == 0.99
    assert translation.recipe["optim"]["eps"] == 1e-9
    assert any(
        line.startswith("optimizer.beta1=0.5: the code read optimizer.betas") for line in translation.ignored
    )


STABLE = """
NNODES="${NNODES:-${WORLD_SIZE:-1}}"
NPROC_PER_NODE="${NPROC_PER_NODE:-2}"
L2T_TRAIN_BS="${L2T_TRAIN_BS:-4}"
GRAD_ACCUM_STEPS="${GRAD_ACCUM_STEPS:-2}"
L2T_BASE_STEPS="${L2T_BASE_STEPS:-1000000}"
L2T_STEPS=$(scale_value "${L2T_BASE_STEPS}")
LEARNING_RATE=$(python -c "print(1)")
torchrun --nnodes="${NNODES}" --nproc_per_node="${NPROC_PER_NODE}" latentDLM_mmdit/train_mmdit_stable.py \\
  --config-name "${L2T_CONFIG:-mmdit}" logging.run_name="${L2T_RUN_NAME:-qwen}" \\
  logging.save_dir="${L2T_SAVE_DIR:-/big}" optimizer.lr="${LEARNING_RATE}" \\
  training.train_batch_size="${L2T_TRAIN_BS}" training.gradient_accumulation_steps="${GRAD_ACCUM_STEPS}" \\
  training.num_train_steps="${L2T_STEPS}" loss.loss_type="l2t" training.dtype="${DTYPE:-fp16}" \\
  data.token_dir="${TOKEN_DIR:-/d/qwen/tokens/train}" data.latent_dir="${LATENT_DIR:-/d/qwen/latents/train}"
"""


def test_the_variables_of_a_launch_script_are_carried_over(checkout: Path) -> None:
    (checkout / "train.sh").write_text(STABLE)
    (command,) = examine_repository(checkout).commands
    assert command.new.startswith(
        "mmldlm launch --nproc-per-node 2 -- train --recipe recipes/mmdit.yaml --run /big/qwen "
    )
    for word in ("name=qwen", "batch.documents_per_step=16", "train.steps=1000000", "speed.precision=fp16"):
        assert f" {word}" in command.new
    assert command.make_store.startswith("mmldlm data import /d/qwen --out data/train --tokenizer ")
    assert any(
        line.startswith("optimizer.lr: its value is computed by the script") for line in command.dropped
    )
    assert expand("${A:-${B:-3}}/$C", {"C": "x"}) == "3/x"


def test_a_migrated_recipe_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = yaml.safe_load(OLD)
    old["model"] |= {"hidden_size": 32, "n_blocks": 1, "cond_dim": 16, "max_seq_len": 8}
    old["training"] |= {"num_train_steps": 2, "train_batch_size": 2, "warmup_steps": 1}
    old["data"] |= {"num_workers": 0, "token_dir": "d/tokens/train", "latent_dir": "d/latents/train"}
    old["tokenizer"] = {"name": "bert-base-uncased"}
    old["optimizer"]["lr"] = 5e-5
    for folder in ("tokens", "latents"):
        (tmp_path / "d" / folder / "train").mkdir(parents=True)
    for number in range(40):
        ids = np.array([2000 + number, 2001, 2002])
        np.savez(f"d/tokens/train/{number}.npz", input_ids=ids, attention_mask=ids > 0)
        np.save(f"d/latents/train/{number}.npy", np.sin(np.arange(8.0) * number))
    Path("old.yaml").write_text(yaml.safe_dump(old))
    migration = examine_repository(Path("old.yaml"))
    recipe = write_migration(migration, tmp_path / "new")[1]
    words = migration.translations[0].make_store.replace("0.01", "0.1").split()
    assert words[:3] == ["mmldlm", "data", "import"]
    assert CliRunner().invoke(data_app, words[2:]).exit_code == 0
    run = mmldlm.train(recipe)
    assert run.finished
    assert run.step == 2


@pytest.mark.parametrize(("key", "value"), [
    ("training.dtype", "bf16-mixed"), ("training.lr_schedule", "polynomial"), ("optimizer.type", "lion"),
    ("loss.latent_loss_type", "huber"), ("model.latent_beta_schedule", "sigmoid"), ("optimizer.lr", "${oc.env:LR}"),
    ("training.train_batch_size", "${oc.env:BS}"),
])  # fmt: skip
def test_a_value_that_is_not_known_here_is_reported_not_lost(key: str, value: str) -> None:
    old, (section, name) = yaml.safe_load(OLD), key.split(".")
    old[section][name] = value
    result = translate(old, "old.yaml")
    assert [line for line in result.dropped if line.startswith(f"{key}={value}: ")]
    assert check_recipe(result.recipe) == []


def test_numbers_count_however_yaml_reads_them() -> None:
    old = yaml.safe_load(OLD)
    old["training"] |= {"num_train_steps": 1e5, "train_batch_size": "8", "lr_schedule": "plateau"}
    old["optimizer"] |= {"grad_clip_norm": None, "type": "muon"}
    result = translate(old, "old.yaml")
    assert result.recipe["batch"]["documents_per_step"] == 16
    assert not any("num_train_steps is not set" in note for note in result.notes)
    assert (
        result.recipe["optim"] | {"clip_norm": 0.0, "name": "muon", "schedule": "plateau"}
        == result.recipe["optim"]
    )
    assert check_recipe(result.recipe) == []


def test_a_recipe_that_has_to_be_corrected_is_named(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD.replace("warmup_steps: 2000", "warmup_steps: 0.02"))
    from mmldlm.cli.main import app as commands

    result = CliRunner().invoke(
        commands, ["migrate", str(tmp_path / "old.yaml"), "--out", str(tmp_path / "out")]
    )
    assert "recipes/old.yaml: has to be corrected first: " in result.output
    assert "optim.warmup_steps=0.02: a whole number is needed" in result.output


BASELINE = """
defaults: [logging: default, data: owt, optimizer: adam, _self_]
model: {type: diffusion, diffusion_process: mdlm, hidden_size: 64, n_blocks: 2, n_heads: 4, p_uniform: 0.0}
training: {train_batch_size: 4, num_train_steps: 100, warmup_steps: 10, lr_schedule: cosine, dtype: bf16}
loss: {loss_type: gidd, loss_weighting: dynamic, min_loss_weight: 0.0, max_loss_weight: 2.0, reduction: tokenmean}
"""


@pytest.fixture
def baselines(tmp_path: Path) -> Path:
    """Files that build on others, as those of GIDD and of the baselines do."""
    files = {
        "mdlm.yaml": BASELINE,
        "data/owt.yaml": "defaults: [defaults]\ndataset_name: openwebtext\n",
        "data/defaults.yaml": "num_workers: 4\ntokenizer_name: gpt2\n",
        "optimizer/adam.yaml": "{type: adam, lr: 5e-4, betas: [0.9, 0.99]}\n",
        "latent.yaml": "defaults: [mdlm, _self_]\nmodel: {use_latent_conditioning: true}\n",
        "cross.yaml": "defaults: [latent, cross, _self_]\ntraining: {train_batch_size: 8}\nmodel: {n_blocks: 3}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_a_file_takes_over_from_others_counts(baselines: Path) -> None:
    (translation,) = examine_repository(baselines / "cross.yaml").translations
    recipe = translation.recipe
    assert recipe["optim"] == {"lr": 5e-4, "warmup_steps": 10, "beta1": 0.9, "beta2": 0.99}
    assert (recipe["batch"]["documents_per_step"], recipe["model"]["depth"], recipe["train"]["steps"]) == (
        8,
        3,
        100,
    )
    assert recipe["data"]["num_workers"] == 4
    assert "--tokenizer builtin:gpt2" in translation.make_store
    assert check_recipe(recipe) == []


def test_what_the_baselines_read_is_not_called_ignored_or_unknown(baselines: Path) -> None:
    for name in ("mdlm", "cross"):
        (translation,) = examine_repository(baselines / f"{name}.yaml").translations
        assert translation.ignored == translation.unknown == []
        assert "loss.reduction=tokenmean: the loss is always a mean over tokens" in translation.dropped
        assert ("condition_dropout" in translation.recipe["corruption"]) == (name == "mdlm")
    (baselines / "run.sh").write_text(
        "torchrun train.py --config-name mdlm data.tokenizer_name=gpt2 loss.reduction=tokenmean model.n_heads=8\n"
    )
    (command,) = examine_repository(baselines).commands
    assert command.ignored == []
    assert "model.num_heads=8" in command.new


def test_what_a_script_chooses_while_it_runs_is_not_guessed(checkout: Path) -> None:
    """The batch by the memory of the GPU, and a process for each GPU."""
    (checkout / "train.sh").write_text(
        'if [ "${MEMORY}" -ge 70 ]; then BATCH=4; else BATCH=1; fi\n'
        'LR="5e-5"\nLR="5e-5"\nGPUS=$(nvidia-smi -L | wc -l)\n'
        'torchrun --nproc_per_node="${GPUS}" train_mmdit.py --config-name mmdit '
        'training.train_batch_size="${BATCH}" optimizer.lr="${LR}" training.seed=7\n'
    )
    (command,) = examine_repository(checkout).commands
    assert "batch." not in command.new
    assert "train.seed=7" in command.new
    assert [line.split(";")[0] for line in command.dropped] == [
        "training.train_batch_size: its value is computed by the script (${BATCH})",
        "--nproc-per-node: its value is computed by the script ($(nvidia-smi -L | wc -l))",
    ]


def test_the_share_that_was_held_out_stays() -> None:
    old = yaml.safe_load(OLD)
    assert translate(old, "x").make_store.endswith(" --validation 0.01")
    old["data"]["val_ratio"] = 0.05
    assert translate(old, "x").make_store.endswith(" --validation 0.05")
