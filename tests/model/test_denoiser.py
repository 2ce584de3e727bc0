import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.config import PARTS, PRESETS, ModelConfig
from mmldlm.layout import Caps
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.layers import Kernels
from mmldlm.model.ops import Chosen, RowsOf
from mmldlm.model.weights import init_weights, parameter_groups
from tests.batches import (
    LENGTHS,
    SHAPE,
    batch_of,
    small_config,
    small_corruption,
    small_denoiser,
    small_documents,
)

DOCUMENTS = small_documents()
KEYS_FILE = Path(__file__).parent / "state_dict_keys.json"


def run(denoiser, batch, backend="rows"):
    """Outputs of the real tokens and documents, and the gradient of a fixed random projection of them."""
    denoiser.kernels = denoiser.kernels._replace(attention=backend)
    denoiser.zero_grad()
    noisy = small_corruption().corrupt(batch)
    out = denoiser(noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
    exists = noisy.layout.lengths > 0
    text, latent, length = (
        out.token_hidden[noisy.layout.real],
        out.latent_prediction[exists],
        out.length_logits[exists],
    )
    weight = torch.linspace(-1, 1, text.shape[1])
    ((text * weight).square().sum() + latent.square().sum() + length.square().sum()).backward()
    grads = torch.cat(
        [parameter.grad.flatten() for parameter in denoiser.parameters() if parameter.grad is not None]
    )
    return torch.cat([text.flatten(), latent.flatten(), length.flatten()]).detach(), grads


@pytest.mark.parametrize("backend", ["rows", "reference"])
@pytest.mark.parametrize(("layout", "caps"), [
    ("packed", None), ("packed", Caps(64, 9, 12)), ("packed", Caps(37, 6, 12)),
    ("padded", Caps(72, 6, 12)), ("padded", Caps(96, 8, 12)),
])  # fmt: skip
def test_every_layout_and_backend_gives_the_same_output_and_gradient(backend, layout, caps):
    denoiser = small_denoiser()
    expected = run(denoiser, batch_of(DOCUMENTS), "reference")
    found = run(denoiser, batch_of(DOCUMENTS, caps=caps, layout=layout), backend)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("repeats", [0, 5])
def test_the_last_block_may_end_with_some_rows(repeats):
    """Hidden states and gradients are those of all rows; the last row may fill up what is missing."""
    denoiser, noisy = small_denoiser(), small_corruption().corrupt(batch_of(DOCUMENTS, caps=Caps(64, 9, 12)))
    inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
    last = noisy.layout.num_tokens - 1
    for rows in (torch.tensor([0, 3, 4, 17, last]), torch.tensor([2]), torch.tensor([last])):
        filled = torch.cat([rows, torch.full((repeats,), last)])
        where = Chosen.of(filled, RowsOf(noisy.layout.document, noisy.layout.starts)).where
        counts = where.starts.diff()  # of each document; only the fused kernels read them
        assert torch.equal(where.document, torch.arange(9).repeat_interleave(counts))
        weight = torch.linspace(-1, 2, len(rows))[:, None]
        answers = []
        for hidden in (
            denoiser(*inputs).token_hidden[rows],
            denoiser(*inputs, filled).token_hidden[: len(rows)],
        ):
            denoiser.zero_grad()
            (hidden * weight).square().sum().backward()
            grads = [p.grad.flatten() for p in denoiser.parameters() if p.grad is not None]
            answers.append(torch.cat([hidden.detach().flatten(), *grads]))
        torch.testing.assert_close(*answers, atol=2e-5, rtol=2e-5)


def test_one_long_document_does_not_widen_the_rows_of_all():
    from mmldlm.layout import packed_layout

    layout = packed_layout(np.array([200, *[4] * 99]), 1, Caps(620, 120, 200))
    assert layout.rows.places.numel() < 3 * (620 + 120)


def test_a_document_alone_gives_what_it_gives_among_others():
    denoiser = small_denoiser()
    together, _ = run(denoiser, batch_of(DOCUMENTS))
    width, starts = denoiser.config.width, np.cumsum(LENGTHS) - LENGTHS
    for document in range(len(LENGTHS)):
        alone, _ = run(denoiser, batch_of(DOCUMENTS, np.array([document])))
        size = LENGTHS[document] * width
        torch.testing.assert_close(
            alone[:size], together[starts[document] * width :][:size], atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize(
    "how", [{"recomputed": {0, 1}}, {"recomputed": {1}}, {"kernels": Kernels(keep="products")}]
)
def test_recomputing_changes_nothing(how):
    denoiser = small_denoiser()
    expected = run(denoiser, batch_of(DOCUMENTS))
    for name, value in how.items():
        setattr(denoiser, name, value)
    for ours, theirs in zip(run(denoiser, batch_of(DOCUMENTS)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_blocks_share_one_graph_without_breaks_and_agree(backend):
    """`inductor` is what runs; its C++ compiler takes half a minute on the CPU (on a GPU see test_gpu)."""
    denoiser = small_denoiser(depth=3)
    batch = batch_of(DOCUMENTS, caps=Caps(64, 9, 12))
    expected = run(denoiser, batch)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for block in denoiser.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    for ours, theirs in zip(run(denoiser, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_length_head_does_not_see_the_text():
    denoiser, batch = small_denoiser(), batch_of(DOCUMENTS)
    noisy = small_corruption().corrupt(batch)
    other = (noisy.noisy_tokens + 1) % SHAPE.vocab_size
    logits = [
        denoiser(tokens, noisy.noisy_latents, time, noisy.latent_time, noisy.layout).length_logits
        for tokens, time in ((noisy.noisy_tokens, noisy.text_time), (other, 1 - noisy.text_time))
    ]
    assert torch.equal(*logits)


def test_text_order_matters_and_both_times_reach_both_outputs():
    denoiser, noisy = small_denoiser(), small_corruption().corrupt(batch_of(DOCUMENTS))

    def outputs(tokens=noisy.noisy_tokens, text_time=noisy.text_time, latent_time=noisy.latent_time):
        out = denoiser(tokens, noisy.noisy_latents, text_time, latent_time, noisy.layout)
        return out.token_hidden, out.latent_prediction

    base = outputs()
    swapped = noisy.noisy_tokens.clone()
    swapped[3:15] = swapped[3:15].flip(0)
    for changed in (
        outputs(tokens=swapped),
        outputs(text_time=noisy.text_time + 0.1),
        outputs(latent_time=noisy.latent_time + 0.1),
    ):
        assert all((a - b).abs().max() > 1e-4 for a, b in zip(base, changed, strict=True))


@pytest.mark.parametrize("change", [
    {"depth": 3}, {"width": 48}, {"latent_width": 24}, {"num_heads": 4}, {"head_width": 12}, {"mlp_ratio": 3.0},
    {"time_width": 20}, {"qk_norm": False}, {"rope_base": 100.0}, {"length": "given"},
])  # fmt: skip
def test_every_setting_reaches_the_network(change):
    torch.manual_seed(0)
    plain, changed = small_denoiser(), small_denoiser(**change)
    same_keys = {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        name: tuple(p.shape) for name, p in changed.named_parameters()
    }
    if same_keys:
        assert not torch.allclose(
            run(plain, batch_of(DOCUMENTS))[0], run(changed, batch_of(DOCUMENTS))[0], atol=1e-4
        )
    assert getattr(changed.config, next(iter(change))) == next(iter(change.values()))


def test_the_latent_stream_of_the_reference_shape_is_a_small_part():
    with torch.device("meta"):
        denoiser = Denoiser(ModelConfig(preset="reference"), DataShape(30522, 1, 384, 2048))
    by_part = dict.fromkeys(PARTS, 0)
    for group in parameter_groups(denoiser):
        by_part[group.part] += sum(parameter.numel() for parameter in group.parameters.values())
    assert by_part["latent"] < 0.2 * sum(by_part.values())
    assert denoiser.blocks[0].text.qkv.weight.shape == (3 * 8 * 64, 1024)


def test_groups_hold_every_parameter_once_and_decay_matrices_only():
    denoiser = small_denoiser()
    names = [name for group in parameter_groups(denoiser) for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in denoiser.named_parameters())
    for group in parameter_groups(denoiser):
        assert group.part in PARTS
        for name, parameter in group.parameters.items():
            assert group.decay == (parameter.ndim == 2 and name not in ("token_embed.weight", "slot_embed"))


def test_first_weights_predict_the_frequency_of_tokens():
    denoiser = Denoiser(small_config(), SHAPE)
    counts = np.arange(SHAPE.vocab_size) * 10
    init_weights(denoiser, 0, counts)
    with torch.no_grad():
        denoiser.token_head.weight.zero_()
        probability = denoiser.token_logits(torch.zeros(1, 32)).softmax(-1)[0].double().numpy()
    np.testing.assert_allclose(probability, (counts + 0.5) / (counts + 0.5).sum(), rtol=1e-4)


def test_first_weights_are_a_function_of_the_seed():
    first, second, third = (
        Denoiser(small_config(), SHAPE),
        Denoiser(small_config(), SHAPE),
        Denoiser(small_config(), SHAPE),
    )
    for denoiser, seed in ((first, 1), (second, 1), (third, 2)):
        init_weights(denoiser, seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.token_embed.weight, third.token_embed.weight)


@pytest.mark.parametrize("preset", PRESETS)
def test_state_dict_keys_are_frozen(preset):
    """Checkpoints live longer than code: a change here needs a migration of old weights."""
    with torch.device("meta"):
        denoiser = Denoiser(ModelConfig(preset=preset, depth=1), DataShape(100, 2, 7, 30))
    keys = {name: list(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    assert keys == json.loads(KEYS_FILE.read_text())[preset]


def test_a_tied_head_uses_the_embedding_and_adds_up_both_gradients():
    tied, plain = small_denoiser(tied_embedding=True), small_denoiser()
    assert "token_head.weight" not in tied.state_dict()
    weights = tied.state_dict() | {"token_head.weight": tied.token_embed.weight.detach().clone()}
    rows = {name: tensor.shape[0] for name, tensor in plain.state_dict().items() if name.startswith("token_")}
    plain.load_state_dict({k: v[: rows[k]] if k in rows else v for k, v in weights.items()}, strict=True)
    noisy = small_corruption().corrupt(batch_of(DOCUMENTS))
    for denoiser in (tied, plain):
        inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
        denoiser.token_logits(denoiser(*inputs).token_hidden).square().sum().backward()
    count = SHAPE.vocab_size
    both = plain.token_embed.weight.grad[:count] + plain.token_head.weight.grad[:count]
    torch.testing.assert_close(tied.token_embed.weight.grad[:count], both)
