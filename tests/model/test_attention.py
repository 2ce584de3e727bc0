"""The choice of attention: measured once per shape, then remembered; trouble with the file is no trouble."""

import json

import numpy as np
import pytest
import torch

from mmldlm.layout import Caps, packed_layout, padded_layout
from mmldlm.model import attention
from mmldlm.model.attention import candidates, measure_attention, remembered_attention

LAYOUT = packed_layout(np.array([3, 5]), 1, Caps(16, 4, 8))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    calls = []
    times = {"varlen": 2.0, "tiles": 1.0, "sdpa": 3.0, "rows": float("inf")}

    def measure(qkv, layout, name):
        calls.append(name)
        return times[name]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attention, "_measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "some GPU")
    return calls


def choose(*names, heads=8, layout=LAYOUT):
    problem = (layout, heads, 64, torch.bfloat16, list(names))
    return remembered_attention(*problem) or measure_attention(*problem)


def test_the_fastest_is_chosen_and_remembered(measured, tmp_path):
    assert choose("varlen", "tiles", "sdpa") == "tiles"
    assert choose("varlen", "tiles", "sdpa") == "tiles"
    assert measured == ["varlen", "tiles", "sdpa"]
    file = tmp_path / "mmldlm" / "attention.json"
    code, entry = json.loads(file.read_text()).values()
    assert entry == {"varlen": 2.0, "tiles": 1.0, "sdpa": 3.0}
    file.write_text(file.read_text().replace(code, "other code"))
    assert choose("varlen", "tiles", "sdpa") == "tiles"
    assert len(measured) == 6


def test_another_shape_or_more_candidates_are_measured_anew(measured):
    choose("varlen", "tiles")
    choose("varlen", "tiles", heads=16)
    choose("varlen", "tiles", "sdpa")
    assert len(measured) == 7


def test_nothing_is_timed_before_the_device_is_free(measured):
    problem = (LAYOUT, 8, 64, torch.bfloat16, ["varlen", "tiles"])
    measure_attention(*problem, lambda: measured.append("ready"))
    assert measured == ["ready", "varlen", "tiles"]


def test_beside_split_the_way_into_attention_and_back_is_measured_too(monkeypatch, measured):
    full, seen = padded_layout(np.array([8, 8]), 2, 8), []
    monkeypatch.setattr(attention, "_measure", lambda given, layout, name: seen.append(given) or len(seen))
    assert choose("split", "sdpa", layout=full) == "split"
    text, latent, *weights, cosine, _ = seen[1]
    assert (text.shape, latent.shape, cosine.shape) == ((16, 1536), (4, 1536), (16, 32))
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in (text, latent, *weights))


def test_one_candidate_needs_no_measurement(measured):
    assert choose("varlen") == "varlen"
    assert not measured


def test_what_failed_once_is_tried_again(measured):
    assert choose("rows", "varlen") == "varlen"
    choose("rows", "varlen")
    assert measured == ["rows", "varlen"] * 2


@pytest.mark.parametrize("rubbish", ["{not json", "[]", '{"k": 3}', '{"k": {"varlen": "x"}}', "null"])
def test_rubbish_in_the_file_and_a_folder_that_cannot_be_written(measured, tmp_path, monkeypatch, rubbish):
    file = tmp_path / "mmldlm" / "attention.json"
    file.parent.mkdir()
    file.write_text(rubbish)
    assert choose("varlen", "tiles") == "tiles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mmldlm" / "attention.json"))
    assert choose("varlen", "tiles") == "tiles"


def test_what_can_serve_a_layout():
    full = padded_layout(np.array([8, 8, 0]), 1, 8)
    assert full.full
    assert set(candidates(full, 64, kernels=True, fused=True)) == {"varlen", "tiles", "sdpa", "split"}
    assert set(candidates(full, 64, kernels=True, fused=False)) == {"varlen", "tiles", "sdpa"}
    assert set(candidates(full, 64, kernels=False, fused=False)) == {"varlen", "sdpa"}
    assert set(candidates(full, 48, kernels=True, fused=True)) == {"varlen", "sdpa"}
    assert "split" not in candidates(padded_layout(np.array([8, 8]), 17, 8), 64, kernels=True, fused=True)
    assert set(candidates(LAYOUT, 48, kernels=True, fused=True)) == {"varlen"}
    assert set(candidates(LAYOUT, 64, kernels=False, fused=False)) == {"varlen"}
