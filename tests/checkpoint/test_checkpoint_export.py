"""An export is enough by itself, exact, and honest about damage."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mmldlm.checkpoint.export import Export, read_export, write_export
from mmldlm.errors import UserError


@pytest.fixture
def export(tmp_path: Path) -> Export:
    tokenizer = tmp_path / "encoder"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"version": "1.0"}')
    (tokenizer / "vocab.txt").write_text("a\nb\n")
    (tokenizer / "pytorch_model.bin").write_bytes(b"heavy and pickled")
    weight = torch.randn(5, 3)
    data = {
        "fingerprint": "abc",
        "vocab_size": 5,
        "normalizer": {"mean": torch.randn(1, 3), "scale": np.float32([[0.1, 0.2, 0.3]])},
        "tokenizer": {"name": "t"},
        "encoder": {"name": "e", "prompt": None},
    }
    weights = {"embed.weight": weight, "head.weight": weight, "bias": torch.randn(3).bfloat16()}
    return Export(weights, {"model": {"width": 3}, "optim": {"lr": 1e-4}}, data, tokenizer)


def test_round_trip_after_moving_the_folder(tmp_path: Path, export: Export) -> None:
    write_export(tmp_path / "out" / "export", export)
    shutil.move(tmp_path / "out" / "export", tmp_path / "elsewhere")
    found = read_export(tmp_path / "elsewhere")
    assert found.weights.keys() == export.weights.keys()
    for name, tensor in export.weights.items():
        assert torch.equal(found.weights[name], tensor)
        assert found.weights[name].dtype == tensor.dtype
    assert found.config == export.config
    assert found.data["encoder"] == export.data["encoder"]
    assert np.array_equal(found.data["normalizer"]["mean"], export.data["normalizer"]["mean"].numpy())
    assert np.array_equal(found.data["normalizer"]["scale"], export.data["normalizer"]["scale"])
    assert found.versions["torch"] == str(torch.__version__)
    assert found.tokenizer_path == tmp_path / "elsewhere" / "tokenizer"
    assert sorted(os.listdir(found.tokenizer_path)) == ["tokenizer.json", "vocab.txt"]


@pytest.mark.parametrize(("precision", "share"), [("fp16", 2**-11), ("int8", 1 / 254)])
def test_smaller_precisions_come_back_as_fp32_within_their_error(
    tmp_path: Path, export: Export, precision: str, share: float
) -> None:
    weights = {"m.weight": torch.randn(40, 30), "m.bias": torch.randn(40), "zero": torch.zeros(3, 2)}
    export.weights = weights
    write_export(tmp_path / "export", export, precision)
    write_export(tmp_path / "whole", export)
    small, whole = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("export", "whole"))
    assert small < whole
    read = read_export(tmp_path / "export").weights
    assert read.keys() == weights.keys()
    for name, tensor in weights.items():
        assert read[name].dtype == torch.float32
        bound = tensor.abs().amax(-1, keepdim=True) * share * 1.01
        assert ((read[name] - tensor).abs() <= bound).all(), name


def test_a_precision_that_cannot_hold_the_weights_is_rejected(tmp_path: Path, export: Export) -> None:
    export.weights = {"m.weight": torch.full((2, 2), 1e9)}
    for precision, word in (("fp16", "m.weight"), ("int8", "m.weight"), ("int4", "fp32, fp16, int8")):
        with pytest.raises(UserError, match=word):
            write_export(tmp_path / "export", export, precision)
    assert not (tmp_path / "export").exists()


def test_the_weights_file_is_enough_and_tells_other_tools(tmp_path: Path, export: Export) -> None:
    write_export(tmp_path / "export", export)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "export" / "model.safetensors", alone)
    assert read_export(alone).config == export.config
    assert read_export(alone).tokenizer_path is None
    with safe_open(alone / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["data"])["fingerprint"] == "abc"
        assert json.loads(file.metadata()["config"]) == export.config
        assert "mmldlm" in json.loads(file.metadata()["versions"])


def test_exporting_again_replaces_and_a_foreign_folder_is_refused(tmp_path: Path, export: Export) -> None:
    target = tmp_path / "export"
    write_export(target, export)
    export.config["model"]["width"] = 4
    write_export(target, export)
    assert read_export(target).config["model"]["width"] == 4
    assert sorted(os.listdir(tmp_path)) == ["encoder", "export"]
    with pytest.raises(UserError, match="is not an export"):
        write_export(tmp_path / "encoder", export)
    assert (tmp_path / "encoder" / "vocab.txt").exists()


def test_a_failed_export_leaves_the_old_one(tmp_path: Path, export: Export) -> None:
    write_export(tmp_path / "export", export)
    export.data["encoder"] = object()
    with pytest.raises(TypeError, match=r"value\.encoder"):
        write_export(tmp_path / "export", export)
    assert read_export(tmp_path / "export").data["fingerprint"] == "abc"
    assert sorted(os.listdir(tmp_path)) == ["encoder", "export"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer/vocab.txt", "manifest.json", "config.json"])
def test_damage_is_named(tmp_path: Path, export: Export, name: str) -> None:
    write_export(tmp_path / "export", export)
    path = tmp_path / "export" / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_export(tmp_path / "export")


def test_an_edited_config_is_refused_and_a_deleted_one_is_fine(tmp_path: Path, export: Export) -> None:
    write_export(tmp_path / "export", export)
    path = tmp_path / "export" / "config.json"
    path.write_text(path.read_text().replace('"width": 3', '"width": 9'))
    with pytest.raises(UserError, match=r"config\.json: differs"):
        read_export(tmp_path / "export")
    path.unlink()
    assert read_export(tmp_path / "export").config["model"]["width"] == 3


def test_what_is_not_an_export_says_so(tmp_path: Path, export: Export) -> None:
    with pytest.raises(UserError, match="is not an export"):
        read_export(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        read_export(tmp_path)
    export.tokenizer_path = tmp_path / "nowhere"
    with pytest.raises(UserError, match="holds no tokenizer"):
        write_export(tmp_path / "new", export)
    assert not (tmp_path / "new").exists()
