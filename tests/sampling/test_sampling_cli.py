"""`mmldlm sample` from end to end with a small random model, and everything a user may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from mmldlm.checkpoint.export import Export, write_export
from mmldlm.checkpoint.loaded import load_model
from mmldlm.cli.sample import sample
from mmldlm.config import Config, CorruptionConfig, DataConfig, ModelConfig, ModeWeights
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.data.writer import StoreWriter
from mmldlm.errors import UserError
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.preparation.encoders import SentenceEncoder
from mmldlm.sampling.decode import decode_latents, document_keys
from mmldlm.sampling.options import SamplingOptions

VOCAB_SIZE, NUM_CHANNELS, LONGEST = 20, 4, 9
app = typer.Typer()
app.command()(sample)


def make_store(path: Path, seed: int, encoder_name: str = "synthetic") -> PairStore:
    rng = np.random.default_rng(seed)
    encoder = {"name": encoder_name}
    writer = StoreWriter(
        path,
        vocab_size=VOCAB_SIZE,
        num_slots=1,
        num_channels=NUM_CHANNELS,
        latent_dtype="float32",
        encoder=encoder,
    )
    for split, count in (("train", 30), ("validation", 6)):
        tokens = [rng.integers(0, VOCAB_SIZE, length) for length in rng.integers(2, LONGEST + 1, count)]
        texts = [" ".join(f"w{token}" for token in text) for text in tokens]
        latents = 3.0 + rng.normal(size=(count, 1, NUM_CHANNELS))
        writer.add(split, tokens, latents.astype(np.float32), texts, rng.integers(0, 2**62, count))
    return writer.finish()


def make_run(
    path: Path, store: PairStore, *, length: str = "modelled", modes: ModeWeights | None = None
) -> Path:
    shape = ModelConfig(
        depth=1,
        width=16,
        latent_width=16,
        num_heads=2,
        head_width=8,
        mlp_ratio=2.0,
        time_width=8,
        length=length,
    )
    corruption = CorruptionConfig(mode_weights=modes or ModeWeights())
    config = Config(model=shape, data=DataConfig(store=str(store.path)), corruption=corruption)
    denoiser = Denoiser(shape, DataShape(VOCAB_SIZE, 1, NUM_CHANNELS, LONGEST))
    init_weights(denoiser, 0)
    with torch.no_grad():
        denoiser.token_head.weight.mul_(20.0)  # sure enough of its tokens for the latent to matter
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    data = {
        "vocab_size": VOCAB_SIZE,
        "num_slots": 1,
        "num_channels": NUM_CHANNELS,
        "max_length": LONGEST,
        "fingerprint": store.fingerprint,
        "normalizer": {"mean": store.normalizer.mean.tolist(), "scale": store.normalizer.scale.tolist()},
        "encoder": {"name": "synthetic"},
        "step": 7,
    }
    weights = {name: tensor.detach() for name, tensor in denoiser.state_dict().items()}
    write_export(path / "export", Export(weights, config_to_dict(config), data, path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PairStore:
    return make_store(tmp_path_factory.mktemp("sampling") / "store", 0)


@pytest.fixture(scope="module")
def run(store: PairStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sampling") / "run", store)


class FakeEncoder:
    """Latents that depend on the text alone."""

    def encode(self, texts: list[str]) -> np.ndarray:
        sizes = np.array([[len(text) % 5, len(text) % 3, 1.0, -1.0] for text in texts], np.float32)
        return 3.0 + sizes[:, None, :]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SentenceEncoder, "reopen", classmethod(lambda cls, spec, device="auto": FakeEncoder())
    )


def call(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def call_json(*words: Any) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout.splitlines()[-1])


def test_texts_are_paraphrased_beside_the_original(run: Path, encoder: None) -> None:
    result = call(run, "--mode", "l2t", "--text", "w1 w2 w3", "--text", "w4 [bold]", "--length", "original")
    assert result.exit_code == 0, result.exception
    assert "original" in result.stdout
    assert "decoded" in result.stdout
    assert "w1 w2 w3" in result.stdout
    assert "w4 [bold]" in result.stdout
    report = call_json(
        run, "--mode", "l2t", "--text", "w1 w2 w3", "--length", "original", "--temperature", 0.5
    )
    assert report["options"]["temperature"] == 0.5
    assert report["step"] == 7
    assert [len(record["tokens"]) for record in report["samples"]] == [3]
    assert report["samples"][0]["original"] == "w1 w2 w3"


def test_a_text_is_decoded_the_same_alone_and_among_others(run: Path, encoder: None) -> None:
    alone = call_json(run, "--mode", "l2t", "--text", "w1 w2")["samples"]
    among = call_json(run, "--mode", "l2t", "--text", "w5", "--text", "w3 w4 w5", "--text", "w1 w2")[
        "samples"
    ]
    other = call_json(run, "--mode", "l2t", "--text", "w1 w2", "--seed", 1, "--length", 9)["samples"]
    assert alone[0] == among[2]
    assert other[0]["tokens"] != alone[0]["tokens"]


def test_export_folder_is_as_good_as_the_run(run: Path) -> None:
    words = ("--mode", "joint", "-n", 3)
    assert call_json(run, *words)["samples"] == call_json(run / "export", *words)["samples"]


def test_latents_from_a_file(run: Path, store: PairStore, tmp_path: Path) -> None:
    latents = store.split("validation").read(np.arange(4)).latents
    np.save(tmp_path / "three.npy", latents)
    np.save(tmp_path / "two.npy", latents[:, 0].astype(np.float64))
    first = call_json(run, "--mode", "l2t", "--latents", tmp_path / "three.npy", "--length", 5)["samples"]
    assert (
        first == call_json(run, "--mode", "l2t", "--latents", tmp_path / "two.npy", "--length", 5)["samples"]
    )
    assert [len(record["tokens"]) for record in first] == [5] * 4
    assert "original" not in first[0]


def test_pairs_of_a_split(run: Path, store: PairStore, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 100, "--length", "original", "--out", out)
    samples = call_json(run, *words)["samples"]
    lengths = store.split("validation").lengths
    assert [len(record["tokens"]) for record in samples] == lengths.tolist()
    assert [record["original"] for record in samples] == store.split("validation").read_texts(np.arange(6))
    assert [json.loads(line) for line in out.read_text().splitlines()] == samples
    again = call_json(run, "--mode", "l2t", "--from-split", "validation", "-n", 2, "--length", "original")[
        "samples"
    ]
    assert again == samples[:2]


def test_command_gives_what_the_library_gives_for_normalised_latents(run: Path, store: PairStore) -> None:
    documents = store.split("validation").read(np.arange(6))
    model = load_model(run, torch.device("cpu"))
    options, keys = (
        SamplingOptions.from_config(model.config.sampling, seed=2),
        document_keys(2, documents.ids),
    )
    expected = decode_latents(
        model, model.normalizer.normalize(documents.latents), options, lengths=np.full(6, 9), keys=keys
    )
    raw = decode_latents(model, documents.latents, options, lengths=np.full(6, 9), keys=keys)
    words = ("--mode", "l2t", "--from-split", "validation", "--length", 9, "--seed", 2)
    found = [record["tokens"] for record in call_json(run, *words)["samples"]]
    assert found == [tokens.tolist() for tokens in expected]
    assert found != [tokens.tolist() for tokens in raw]  # the scale of the latents matters to this model


def test_text_to_latents_writes_raw_latents(run: Path, encoder: None, tmp_path: Path) -> None:
    out = tmp_path / "latents.npy"
    report = call_json(run, "--mode", "t2l", "--text", "w1 w2", "--text", "w9", "--out", out)
    latents = np.load(out)
    assert latents.shape == (2, 1, NUM_CHANNELS)
    assert np.abs(latents - 3.0).max() < 2.0  # the untrained latent head says 0: the mean of the data
    real = FakeEncoder().encode(["w1 w2", "w9"]).reshape(2, -1)
    made = latents.reshape(2, -1)
    expected = (real * made).sum(1) / np.linalg.norm(real, axis=1) / np.linalg.norm(made, axis=1)
    assert [record["cosine"] for record in report["samples"]] == pytest.approx(expected.tolist(), abs=1e-5)
    shown = call(run, "--mode", "t2l", "--text", "w1 w2").stdout
    assert "cosine" in shown
    assert f"{expected[0]:.4f}" in shown


def test_text_to_latents_without_the_encoder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cls: type, spec: dict[str, Any], device: str = "auto") -> None:
        raise UserError("encoder 'synthetic': cannot be loaded")

    monkeypatch.setattr(SentenceEncoder, "reopen", classmethod(fail))
    result = call(run, "--mode", "t2l", "--text", "w1 w2")
    assert result.exit_code == 0, result.exception
    assert "cannot be loaded" in result.stderr
    assert "cosine" not in result.stdout
    refused = call(run, "--mode", "l2t", "--text", "w1 w2")
    assert isinstance(refused.exception, UserError)


def test_split_to_latents_compares_with_the_store(run: Path) -> None:
    samples = call_json(run, "--mode", "t2l", "--from-split", "validation", "-n", 3)["samples"]
    assert all(0.5 < record["cosine"] <= 1.0 for record in samples)


def test_joint_makes_as_many_as_asked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.npy"
    samples = call_json(run, "--mode", "joint", "-n", 5, "--out", out)["samples"]
    assert len(samples) == len(np.load(out)) == 5
    assert all(1 <= len(record["tokens"]) <= LONGEST for record in samples)
    assert call_json(run, "--mode", "joint", "-n", 2)["samples"] == samples[:2]
    assert len(call_json(run, "--mode", "joint")["samples"]) == 8
    assert call(run, "--mode", "joint", "-n", 2).exit_code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mode l2x --text a", "--mode l2x: allowed are l2t, t2l, joint"),
        ("--mode l2t", "--mode l2t: needs one of"),
        ("--mode l2t --text a --from-split train", "--mode l2t: needs only one of"),
        ("--mode t2l --latents a.npy", "--latents: has no effect"),
        ("--mode joint --text a", "--text: has no effect"),
        ("--mode t2l --text w1 --top-p 0.5", "--top-p: has no effect"),
        ("--mode l2t --from-split train --num-latent-steps 3", "--num-latent-steps: has no effect"),
        ("--mode t2l --text w1 --length 3", "--length: has no effect"),
        ("--mode l2t --text w1 -n 3", "-n: has an effect only"),
        ("--mode joint -n 0", "-n 0: allowed is at least 1"),
        ("--mode joint --data x", "--data: has an effect only"),
        ("--mode joint --length 10", "--length 10: allowed are 'original' and 1 to 9"),
        ("--mode joint --length x", "--length x: allowed"),
        ("--mode joint --length original", "--length original: there is no original"),
        ("--mode joint --temperature -1", "temperature=-1.0: allowed is at least 0"),
        ("--mode joint --text-sampler best", "text_sampler=best: allowed are"),
        ("--mode joint --num-sampling-steps 0", "num_sampling_steps=0: allowed"),
        ("--mode joint --seed -3", "seed=-3: allowed"),
        ("--mode joint --device tpu", "--device tpu: allowed are"),
        ("--mode joint --out made.txt", "--out made.txt: with --mode joint the name of the file ends in .npy"),
        ("--mode l2t --from-split train --out made.npy", "--out made.npy: with --mode l2t"),
        ("--mode joint --out nowhere/made.npy", "--out nowhere/made.npy: the folder nowhere does not exist"),
        ("--mode l2t --latents missing.npy", "--latents missing.npy: there is no such file"),
        ("--mode l2t --from-split test", "no split 'test'"),
        ("--mode l2t --from-split train --data missing", "missing"),
        ("--mode t2l --text=", "--text '': is empty"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(run: Path, words: str, told: str) -> None:
    result = call(run, *words.split(" "))
    assert isinstance(result.exception, UserError), result.output
    assert told in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((2, 1, 5)), "latents of shape (2, 1, 5)"),
        (np.zeros(4), "latents of shape (4,)"),
        (np.full((3, 4), np.nan), "3 of 3 hold NaN"),
        (np.array(["a", "b"]), "latents of shape"),
        (b"not an array", "cannot be read as an array"),
    ],
)
def test_bad_files_of_latents(run: Path, tmp_path: Path, array: Any, told: str) -> None:
    path = tmp_path / "bad.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    result = call(run, "--mode", "l2t", "--latents", path)
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"--latents {path}: ")
    assert told in str(result.exception)


def test_other_texts_of_the_same_encoder_are_fine(run: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", 1)
    result = call(run, "--mode", "l2t", "--from-split", "train", "--data", other.path)
    assert result.exception is None


def test_store_of_another_encoder_is_refused(run: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", 1, "another")
    result = call(run, "--mode", "l2t", "--from-split", "train", "--data", other.path)
    assert isinstance(result.exception, UserError)
    assert "was made with another tokenizer or encoder" in str(result.exception)


def test_model_of_given_lengths_asks_for_them(store: PairStore, tmp_path: Path) -> None:
    run = make_run(tmp_path / "given", store, length="given")
    result = call(run, "--mode", "joint")
    assert isinstance(result.exception, UserError)
    assert "--length" in str(result.exception)
    assert len(call_json(run, "--mode", "joint", "-n", 2, "--length", 4)["samples"][1]["tokens"]) == 4


def test_missing_run(tmp_path: Path) -> None:
    result = call(tmp_path / "nothing", "--mode", "joint")
    assert isinstance(result.exception, UserError)
    assert "no such run or export" in str(result.exception)
