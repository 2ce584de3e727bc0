"""Old settings, command lines and data become ours, and everything that was lost is said."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mmldlm.cli.doctor import app
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError
from mmldlm.migrate.repository import examine_repository, report_text, write_migration
from mmldlm.migrate.translation import check_recipe, is_old, translate

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
    assert recipe["batch"]["documents_per_step"] == 4, (
        "the old trainer never read gradient_accumulation_steps"
    )
    assert any("gradient_accumulation_steps=2" in line for line in result.ignored)
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
    assert "optim.lr=1e-4" in command.new
    assert "batch.documents_per_step=16" in command.new
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
    with pytest.raises(UserError, match=r"^[^\n]*data\.store=\?\?\?: a value is needed[^\n]*$"):
        load_recipe(str(recipe))
    recipe.write_text(recipe.read_text().replace("???", "store"))
    again = CliRunner().invoke(app, ["config", str(recipe)])
    assert again.exit_code == 0, again.output
    recipe.write_text("data: {store: x}\noptim: {lr: -1}\n")
    wrong = CliRunner().invoke(app, ["config", str(recipe)])
    assert wrong.exit_code == 1
    assert "optim.lr" in wrong.output
