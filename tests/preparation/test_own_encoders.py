"""Encoders of the user's: objects, functions and `module:name`, checked and found again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import EncoderUnavailableError, import_encoder, open_encoder
from tests import warm

TEXTS = ["a coil of rope", "the open sea", "a small harbour", "wind from the north", "a calm night at sea"]
MODULE = """
import numpy as np
from tests import warm

class Letters:
    def __init__(self, letters="abcde"):
        self.letters = letters

    def encode(self, texts):
        return np.array([[text.count(letter) for letter in self.letters] for text in texts], np.float32)

def letters(texts):
    return Letters().encode(texts)

sea = Letters("sea")
number = 3
"""


class Halves:
    """Two vectors per text: of its first half and of its second."""

    def encode(self, texts: list[str]) -> np.ndarray:
        halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]
        return np.array(
            [[[half.count(letter) for letter in "aeo"] for half in pair] for pair in halves], float
        )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, with a name that no other test has imported."""
    name = f"letters_{abs(hash(tmp_path)) % 10**9}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "text.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_an_object_with_several_vectors_per_text(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    store = mmldlm.prepare(
        TEXTS, tmp_path / "s", encoder=Halves(), batch_size=2, progress=lambda *at: done.append(at)
    )
    assert isinstance(Halves(), mmldlm.Encoder)
    assert done[-1] == (5, 5)
    assert store.latents.shape == (5, 2, 3)
    assert np.array_equal(store.latents, Halves().encode([str(text) for text in store.texts]))
    assert sorted(map(str, store.texts)) == sorted(TEXTS)
    assert "2 x 3" in repr(store)
    assert "Halves" in repr(store)


@pytest.mark.parametrize(
    ("encode", "expected"),
    [
        (lambda texts: np.full((len(texts), 4), 0.1), "4 of 4 channels"),
        (lambda texts: [[[1.0] * 8, [2.0] * 8]] * len(texts), "16 of 16 channels"),
        (lambda texts: [[len(text) / 7.0] + [0.3] * 9 for text in texts], "9 of 10 channels"),
        (lambda texts: [[len(text) / 7.0, 0.3] for text in texts], None),
    ],
)
def test_latents_that_are_all_the_same_are_reported(
    tmp_path: Path, encode: Any, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[str] = []
    mmldlm.prepare(TEXTS, tmp_path / "s", encoder=encode, note=notes.append)
    assert [expected in note for note in notes if "the same for all" in note] == [True] * bool(expected)
    assert not caplog.messages
    mmldlm.prepare(TEXTS, tmp_path / "t", encoder=encode)
    assert [str(expected) in message for message in caplog.messages] == [True] * bool(expected)


def test_a_function_and_a_tensor_serve_too(tmp_path: Path) -> None:
    store = mmldlm.prepare(
        TEXTS, tmp_path / "s", encoder=lambda texts: torch.tensor([[float(len(text))] for text in texts])
    )
    assert store.latents[:, 0, 0].tolist() == [len(str(text)) for text in store.texts]
    unit = mmldlm.prepare(TEXTS, tmp_path / "u", encoder=Halves(), normalize=True, dimension=2)
    assert unit.latents.shape == (5, 2, 2)
    assert np.isin(np.linalg.norm(unit.latents, axis=-1).round(2), (0, 1)).all()


def test_the_prompt_reaches_an_own_encoder(tmp_path: Path) -> None:
    seen: list[str] = []

    def lengths(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.array([[len(text)] for text in texts], np.float32)

    store = mmldlm.prepare(TEXTS, tmp_path / "s", encoder=lengths, prompt="query: ")
    assert set(seen) == {f"query: {text}" for text in TEXTS}
    assert store.manifest.encoder is not None
    assert store.manifest.encoder["prompt"] == "query: "


@pytest.mark.parametrize(
    ("encode", "expected"),
    [
        (lambda texts: np.zeros((len(texts) + 1, 3)), "2 latents for 1 text"),
        (lambda texts: np.zeros(len(texts)), "an array of shape (1,); (texts, channels) or"),
        (lambda texts: np.zeros((len(texts), 1, 2, 3)), "an array of shape (1, 1, 2, 3)"),
        (lambda texts: np.zeros((len(texts), 0)), "at least one channel"),
        (lambda texts: np.full((len(texts), 3), np.nan), "NaN or infinite values for 1 of 1 text"),
        (lambda texts: [["1.5"]] * len(texts), "values; an array of numbers is needed"),
        (lambda texts: [[[1.0], [1.0, 2.0]]] * len(texts), "rows of different lengths"),
        (lambda texts: None, "object values; an array of numbers"),
        (
            lambda texts: [torch.ones(3, requires_grad=True)] * len(texts),
            "returned what is no array (Can't call numpy() on Tensor that requires grad",
        ),
        (lambda texts: torch.ones(len(texts), 3).to_sparse(), "returned what is no array (can't convert Sparse"),
        (lambda texts: np.zeros((len(texts), 3 if len(texts) == 1 else 4)), "shape (1, 4) (slots, channels), before"),
        (lambda texts: 1 / 0, "encode() raised ZeroDivisionError: division by zero"),
        (Halves, "is a class; pass an object of it"),
        (object(), "has no encode(texts) and is no function"),
    ],
)  # fmt: skip
def test_what_it_returns_is_checked(tmp_path: Path, encode: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        mmldlm.prepare(TEXTS, tmp_path / "s", encoder=encode)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["letters", "Letters", "sea"])
def test_module_and_name_on_the_command_line_and_back(tmp_path: Path, module: str, name: str) -> None:
    words = ["prepare", "text.jsonl", "--out", "s", "--encoder", f"{module}:{name}"]
    done = warm.run([sys.executable, "-m", "mmldlm", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    store = mmldlm.PairStore.open("s")
    letters = "sea" if name == "sea" else "abcde"
    expected = [[str(text).count(letter) for letter in letters] for text in store.texts]
    assert store.latents[:, 0].tolist() == expected
    encoder = open_encoder(store.manifest.encoder)
    assert np.array_equal(encoder.encode([str(text) for text in store.texts]), store.latents)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere:letters", "cannot be imported (ModuleNotFoundError"),
        ("MODULE:nothing", "has no 'nothing'; check the spelling"),
        ("MODULE:number", "has no encode(texts) and is no function"),
    ],
)
def test_mistakes_with_a_module_are_one_line(module: str, name: str, expected: str) -> None:
    words = ["prepare", "text.jsonl", "--out", "s", "--encoder", name.replace("MODULE", module)]
    done = warm.run([sys.executable, "-m", "mmldlm", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_an_encoder_that_changed_since_is_rejected(module: str) -> None:
    encoder = import_encoder(f"{module}:sea").__class__
    store = mmldlm.prepare(TEXTS, "s", encoder=encoder("stuv"))  # found again, but with other arguments
    with pytest.raises(UserError, match="gives other latents"):
        open_encoder(store.manifest.encoder)
    again = open_encoder(store.manifest.encoder, encoder=encoder("stuv"))
    assert np.array_equal(again.encode([str(text) for text in store.texts]), store.latents)


def _lambda() -> Callable[[list[str]], Any]:
    return lambda texts: [[float(len(text))] for text in texts]


def test_what_cannot_be_found_again_says_what_is_needed(tmp_path: Path) -> None:
    store = mmldlm.prepare(TEXTS, tmp_path / "s", encoder=_lambda())
    with pytest.raises(EncoderUnavailableError, match="pass the encoder in Python"):
        open_encoder(store.manifest.encoder)
    assert open_encoder(store.manifest.encoder, encoder=_lambda()).num_channels == 1
    with pytest.raises(EncoderUnavailableError, match="no encoder is known"):
        open_encoder(None)


@pytest.mark.parametrize("name", ["subprocess:call", "pip:main", "MODULE:np.load", "os:system"])
def test_a_description_of_a_stranger_runs_no_code(module: str, name: str) -> None:
    Path("proof").unlink(missing_ok=True)
    description = {
        "name": name.replace("MODULE", module),
        "kind": "python",
        "prompt": "",
        "normalize": False,
        "dimension": 1,
        "probe": {"text": "touch proof", "latent": [0.0]},
    }
    with pytest.raises(EncoderUnavailableError, match="pass the encoder in Python"):
        open_encoder(description)
    assert not Path("proof").exists()
