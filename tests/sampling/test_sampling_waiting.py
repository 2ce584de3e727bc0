"""Nothing in a chain makes the host wait: it runs on a device that has no values to wait for.

Tensors of PyTorch's device `meta` have shapes alone: whatever asks for a value fails. Copies to it are noted.
Shapes: N documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.errors import UserError
from mmldlm.sampling import pack as pack_module
from mmldlm.sampling.chain import (
    encode_steps,
    fetch,
    joint_steps,
    run_chain,
    sample_text,
    start_pack,
    text_steps,
)
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.pack import Fetched, Indices, Watch, document_keys, reject_bad, send_tensor
from mmldlm.sampling.predictor import ModelPredictor
from tests.sampling.sampling_oracles import MASK_SAMPLERS, drawing, random_model

META = torch.device("meta")
LENGTHS = np.array([1, 2, 3, 5, 8, 12, 12, 4])
"""So different that a pack loses documents on its way."""


class Copies(TorchDispatchMode):
    """Notes copies between devices for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_all, self.waits = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [value for value in (*args, result) if isinstance(value, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1 and "copy" in str(func):
            self.num_all += 1
            if not (
                kwargs.get("non_blocking") or (str(func) == "aten.copy_.default" and args[2:] == (True,))
            ):
                self.waits.append(str(func))
        return result


@pytest.fixture
def copies() -> Iterator[Copies]:
    with Copies() as noted:
        yield noted


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> ModelPredictor:
    """A network without values, in fp32: autocast does not know the device."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    model = random_model()
    return ModelPredictor(copy.deepcopy(model.denoiser).to(META), model.corruption, META)


def start(predictor: ModelPredictor, *, latents: bool, tokens: bool, **options: Any) -> Any:
    """A pack on the device without values."""
    shape, keys = (2, 3), document_keys(0, len(LENGTHS))
    texts = [np.full(length, 1) for length in LENGTHS]
    clean = torch.zeros(len(LENGTHS), *shape)
    return start_pack(
        predictor.corruption, LENGTHS, keys, clean if latents else None, shape,
        tokens=texts if tokens else None, device=META, arrange=predictor.arrange, **options,
    )  # fmt: skip


def test_a_wait_is_noticed(copies: Copies) -> None:
    torch.zeros(3).to(META)
    assert len(copies.waits) == 1
    torch.zeros(3).to(META, non_blocking=True)
    send_tensor(torch.zeros(3), META)
    assert (copies.num_all, len(copies.waits)) == (3, 1)
    for ask in (Tensor.item, Tensor.cpu, bool, Tensor.nonzero, lambda value: value[value > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask(torch.zeros(1, device=META))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
def test_text(
    predictor: ModelPredictor, copies: Copies, sampler: str, temperature: float, guidance: float
) -> None:
    options = drawing(
        text_sampler=sampler, num_sampling_steps=6, temperature=temperature, guidance=guidance,
        top_p=0.9, block_length=4,
    )  # fmt: skip
    pack = start(predictor, latents=True, tokens=False, with_noise=guidance != 1.0)
    places = pack.places
    end = run_chain(predictor, pack, text_steps(options), predictor.corruption, options)
    assert end.noisy_tokens.device == META
    assert places.parts, "no document was left out"
    assert copies.num_all >= 2 + len(places.parts)
    assert copies.waits == []


@pytest.mark.parametrize("solver", ["ddim", "dpmpp_2m", "heun"])
def test_latents_and_pairs(predictor: ModelPredictor, copies: Copies, solver: str) -> None:
    options = drawing(latent_sampler=solver, num_encode_steps=3, num_latent_steps=3, num_sampling_steps=3)
    corruption = predictor.corruption
    pack = start(predictor, latents=False, tokens=True)
    run_chain(predictor, pack, encode_steps(options, corruption), corruption, options)
    pack = start(predictor, latents=False, tokens=False)
    run_chain(predictor, pack, joint_steps(options, corruption), corruption, options)
    assert copies.num_all
    assert copies.waits == []


def test_guidance_without_noise_of_the_call_sends_its_own(predictor: ModelPredictor, copies: Copies) -> None:
    options = drawing(num_sampling_steps=2, guidance=2.0)
    pack = start(predictor, latents=True, tokens=False)
    assert pack.noise is None
    run_chain(predictor, pack, text_steps(options), predictor.corruption, options)
    assert copies.waits == []


def test_the_shortest_way_is_guided_as_a_call_is() -> None:
    model = random_model()
    options = drawing(num_sampling_steps=3, guidance=2.0)
    latents, lengths = np.zeros((3, 2, 3), np.float32), np.array([3, 5, 4])
    texts = sample_text(model.denoiser, model.corruption, torch.from_numpy(latents), lengths, options)
    called = decode_latents(model, latents, options, lengths=lengths, keys=document_keys(0, 3))
    assert all(map(np.array_equal, texts, called))


def test_what_a_gpu_sends_is_page_locked_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, with stand-ins for those of CUDA."""
    calls, device = [], torch.device("cuda")

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: object) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    def copied(value: Any, where: object) -> Any:
        calls.append(f"copy to {where}")
        return value

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: None)
    monkeypatch.setattr(pack_module, "to_device", copied)
    both = Indices(torch.arange(3), torch.arange(4))
    fetched = Fetched(both, device)
    assert calls == ["copy to cpu", "record"]
    assert fetched.wait() is both
    assert calls[2:] == ["synchronize"]
    monkeypatch.setattr(Tensor, "pin_memory", lambda value: calls.append("page-lock") or value)
    monkeypatch.setattr(Tensor, "to", lambda value, where, non_blocking: calls.append(non_blocking) or value)
    send_tensor(torch.arange(3), device)
    assert calls[3:] == ["page-lock", True]


def test_what_a_chain_ends_with_is_fetched(predictor: ModelPredictor) -> None:
    model = random_model()
    pack = start_pack(
        model.corruption, LENGTHS, document_keys(0, len(LENGTHS)), None, (2, 3), tokens=None, device="cpu"
    )
    pack.watch.see(torch.ones(3))
    sampled = fetch(pack).wait()
    assert torch.equal(sampled.tokens, pack.noisy_tokens)
    assert torch.equal(sampled.latents, pack.noisy_latents)
    reject_bad(sampled.bad)
    pack.watch.see(torch.tensor([1.0, torch.nan]))
    with pytest.raises(UserError, match="NaN or infinity"):
        reject_bad(fetch(pack).wait().bad)
    reject_bad(Watch().flags())
    both = Indices(torch.arange(3), torch.arange(4))
    assert torch.equal(Fetched(both, torch.device("cpu")).wait().tokens, both.tokens)
