"""What only a GPU can show: kernels agree, a compiled step neither waits for the host nor compiles again."""

import contextlib
import itertools
import warnings

import numpy as np
import pytest
import torch

from mmldlm.data.loader import plan_steps
from mmldlm.layout import Caps
from mmldlm.model.layers import Kernels
from mmldlm.types import to_device
from tests.batches import batch_of, small_corruption, small_denoiser, small_documents
from tests.runs import make_trainer
from tests.stores import write_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SHAPE = {"width": 256, "latent_width": 128, "num_heads": 4, "head_width": 64, "time_width": 64}
WIDE = [
    "train.device=cuda",
    "speed.chunk_rows=64",
    *[f"model.{name}={value}" for name, value in SHAPE.items()],
]


def outputs(denoiser, noisy, kernels, *, bf16):
    """Outputs and gradient of one pass."""
    denoiser.kernels = kernels
    denoiser.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        out = denoiser(
            noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout
        )
    text, latent = (
        out.token_hidden[noisy.layout.real].float(),
        out.latent_prediction[noisy.layout.lengths > 0],
    )
    (text.square().mean() + text[:, :7].mean() + latent.square().mean()).backward()
    grads = torch.cat([p.grad.flatten() for p in denoiser.parameters() if p.grad is not None])
    return torch.cat([text.flatten(), latent.flatten()]).detach(), grads


def assert_close(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["tiles", "varlen", "sdpa", "split", "rows", "reference"])
def test_every_way_to_compute_is_near_the_plain_one_in_fp32(backend, fused):
    lengths = tuple(int(length) for length in np.random.default_rng(0).integers(1, 13, 40))
    batch = batch_of(small_documents(lengths=lengths), caps=Caps(320, 48, 12))
    noisy = to_device(small_corruption().corrupt(batch), "cuda")
    denoiser = small_denoiser(**SHAPE).cuda()
    expected = outputs(denoiser, noisy, Kernels("reference"), bf16=False)
    if backend in ("rows", "reference"):
        assert_close(outputs(denoiser, noisy, Kernels(backend, fused), bf16=False), expected, 2e-3)
    assert_close(outputs(denoiser, noisy, Kernels(backend, fused), bf16=True), expected, 0.02)
    assert_close(
        outputs(denoiser, noisy, Kernels(backend, fused, keep="products"), bf16=True), expected, 0.02
    )


@pytest.mark.parametrize("backend", ["tiles", "varlen", "sdpa", "split"])
def test_documents_of_equal_length_need_no_mask(backend):
    batch = batch_of(small_documents(lengths=(12,) * 7), caps=Caps(96, 8, 12), layout="padded")
    noisy = to_device(small_corruption().corrupt(batch), "cuda")
    assert noisy.layout.full
    denoiser = small_denoiser(**SHAPE).cuda()
    expected = outputs(denoiser, noisy, Kernels("reference"), bf16=False)
    assert_close(outputs(denoiser, noisy, Kernels(backend, True), bf16=True), expected, 0.02)


@pytest.mark.parametrize("keep", [False, True])
def test_the_feed_forward_half_of_many_rows_is_that_of_plain_pytorch(keep, tmp_path, monkeypatch):
    """With so many rows products of cuBLASLt apply GELU: the fastest is measured here."""
    from mmldlm.model import products
    from mmldlm.model.kernels import epilogue

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(epilogue, "_plans", {})
    torch.manual_seed(0)
    first, second = torch.nn.Linear(256, 1024).cuda(), torch.nn.Linear(1024, 256).cuda()
    x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(2048, 256, device="cuda")

    def answer(out, leaves):
        return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    found = answer(products.mlp(first, second, x, keep=keep), [x, *first.parameters(), *second.parameters()])
    wide = [
        part.detach().double().requires_grad_() for part in (x, *first.parameters(), *second.parameters())
    ]
    hidden = torch.nn.functional.linear(wide[0], wide[1], wide[2])
    active = torch.nn.functional.gelu(hidden, approximate="tanh")
    expected = answer(torch.nn.functional.linear(active, wide[3], wide[4]), wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_the_fused_kernels_give_the_same_answer_every_time():
    batch = batch_of(small_documents(lengths=(3, 12, 1, 7, 5, 9) * 9), caps=Caps(400, 60, 12))
    noisy = to_device(small_corruption().corrupt(batch), "cuda")
    denoiser = small_denoiser(**SHAPE).cuda()
    first = outputs(denoiser, noisy, Kernels("tiles", True), bf16=True)
    for _ in range(3):
        for ours, theirs in zip(
            outputs(denoiser, noisy, Kernels("tiles", True), bf16=True), first, strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=400).path


def run_steps(trainer, count):
    setup = trainer.setup
    steps = plan_steps(
        setup.order, setup.train_split.lengths, setup.plan, trainer.progress.position, trainer.step
    )
    device = setup.runtime.device
    batches = [setup.reader()[where].pin_memory().to(device) for where in itertools.islice(steps, count)]
    torch.cuda.synchronize()
    return batches


def losses(trainer, count):
    found = []
    for batch in run_steps(trainer, count):
        trainer.train_step(batch, 0.0)
        found.append(trainer.window.fields()["loss"])
    return found


def test_micro_batches_are_recorded_while_the_loader_works(store, tmp_path):
    words = ["speed.cuda_graphs=true", "data.num_workers=2", "train.steps=40", "train.log_every=5"]
    trainer = make_trainer(tmp_path, store, *WIDE, *words)
    trainer.fit()
    assert trainer.stepper.graphs.recordings
    assert not trainer.stepper.graphs.broken


@contextlib.contextmanager
def host_waits():
    """A list that holds, after the block, for what the host waited for the device in it."""
    waits = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    waits += [text for text in messages if "synchroniz" in text.lower() and "prototype" not in text]


BALANCES = {
    "fixed": ["objective.balance=fixed"],
    "gradient_norm": ["objective.balance=gradient_norm", "objective.balance_every=2"],
    "fp8": ["speed.precision=fp8"],
}


@pytest.mark.parametrize("balance", list(BALANCES))
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_step_does_not_wait_for_the_device_and_is_compiled_once(store, tmp_path, graphs, balance):
    trainer = make_trainer(tmp_path, store, *WIDE, f"speed.cuda_graphs={graphs}", *BALANCES[balance])
    for batch in run_steps(trainer, 8):
        trainer.train_step(batch, 0.0)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    batches = run_steps(trainer, 8)
    with host_waits() as waits:
        for batch in batches:
            trainer.train_step(batch, 0.0)
    assert waits == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    if graphs == "true":
        assert trainer.stepper.graphs.recordings
        assert not trainer.stepper.graphs.broken


PLAIN = ["speed.precision=fp32", "speed.compile=false", "speed.attention=rows", "speed.scored_rows=false"]
PLAIN += [
    "speed.fused_kernels=false",
    "speed.cuda_graphs=false",
    "speed.fused_optimizer=false",
    "speed.tf32=false",
]


@pytest.fixture(scope="module")
def plain_losses(store, tmp_path_factory):
    return losses(make_trainer(tmp_path_factory.mktemp("plain"), store, *WIDE, *PLAIN), 10)


@pytest.mark.parametrize("words", [
    [], ["speed.cuda_graphs=true"], ["speed.activation_checkpointing=selective"],
    ["speed.activation_checkpointing=block", "speed.cuda_graphs=true"], ["speed.activation_checkpointing=budget"],
    ["batch.micro_tokens=80", "speed.cuda_graphs=true"], ["speed.precision=fp16"], ["speed.overlap_copies=false"],
    ["speed.residual=bf16"], ["speed.layout=padded", "speed.cuda_graphs=true"],
    ["speed.compile=false", "speed.cuda_graphs=true"],
])  # fmt: skip
def test_every_fast_path_has_the_loss_of_the_plain_one(store, tmp_path, words, plain_losses):
    found = losses(make_trainer(tmp_path, store, *WIDE, *words), 10)
    np.testing.assert_allclose(found, plain_losses, rtol=0.01)


FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no fp8"
)


@FP8
@pytest.mark.parametrize("words", [
    [], ["speed.cuda_graphs=true", "batch.micro_tokens=80"], ["speed.activation_checkpointing=selective"],
    ["speed.activation_checkpointing=block", "speed.cuda_graphs=true"],
    ["speed.compile=false", "speed.fused_kernels=false"],
])  # fmt: skip
def test_fp8_has_nearly_the_loss_of_the_plain_path(store, tmp_path, words, plain_losses):
    trainer = make_trainer(tmp_path, store, *WIDE, "speed.precision=fp8", *words)
    assert trainer.setup.denoiser.kernels.fp8
    np.testing.assert_allclose(losses(trainer, 10), plain_losses, rtol=0.02)
    if "speed.cuda_graphs=true" in words:
        assert trainer.stepper.graphs.recordings
        assert not trainer.stepper.graphs.broken


@FP8
@pytest.mark.parametrize("way", ["plain", "gelu", "slope"])
@pytest.mark.parametrize("shape", [(1000, 512), (77, 1536), (130, 8192)])
def test_rows_in_eight_bits_and_their_transposes_are_those_of_plain_pytorch(way, shape, monkeypatch):
    from mmldlm.model import fp8

    torch.manual_seed(0)
    x, inner = (3 * torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    x[5], x[6], x[7] = 0.0, x[6] * 1e6, x[7] * 1e-6
    options = {"inner": inner if way == "slope" else None, "gelu": way == "gelu", "sums": True}
    answers = []
    for runs in (True, False):
        monkeypatch.setattr(fp8, "_kernels_run", lambda x, runs=runs: runs)
        q, scale, sums = fp8.quantize_rows(x, **options)
        factor = torch.exp2(-(torch.arange(shape[0], device="cuda") % 12).float())[:, None]
        answers.append([q, scale, sums, fp8.transpose(q), fp8.transpose(q, factor)])
    q, scale, sums, back, shared = answers[0]
    assert (scale == answers[1][1]).float().mean() > 0.99
    torch.testing.assert_close(sums, answers[1][2], rtol=1e-3, atol=1e-2 * float(answers[1][2].abs().max()))
    same = (q.float() == answers[1][0].float()).float().mean()
    assert same == 1.0 if way == "plain" else same > 0.98
    assert torch.equal(back[:, : shape[0]].float(), q.float().t())
    assert torch.equal(shared[:, : shape[0]].float(), (q.float() * factor).to(fp8.FP8).float().t())
    assert not back[:, shape[0] :].float().any()


def test_recorded_graphs_read_the_newest_factors(store, tmp_path):
    """In fp32, so that only the recording differs."""
    words = [*WIDE, "speed.precision=fp32", "speed.tf32=false", *BALANCES["gradient_norm"]]
    fast = make_trainer(tmp_path / "fast", store, *words, "speed.cuda_graphs=true")
    slow = make_trainer(tmp_path / "slow", store, *words, "speed.cuda_graphs=false")
    np.testing.assert_allclose(losses(fast, 12), losses(slow, 12), rtol=1e-3)
    assert fast.stepper.graphs.recordings
    assert fast.stepper.graphs.fresh
    assert set(fast.stepper.graphs._updates) == set(fast.stepper.graphs.recordings)
    ours, theirs = (
        torch.cat([p.detach().flatten() for p in trainer.setup.denoiser.parameters()])
        for trainer in (fast, slow)
    )
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    factors = fast.stepper.balance.fields()
    assert factors["text_factor"] != 1.0
    assert factors["text_factor"] == pytest.approx(slow.stepper.balance.fields()["text_factor"], rel=1e-2)


def test_a_step_that_does_not_fit_is_done_in_smaller_pieces(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *WIDE, "speed.cuda_graphs=false", "batch.grow_after=3")
    expected = losses(make_trainer(tmp_path / "other", store, *WIDE, "speed.cuda_graphs=false"), 8)
    run, hog = trainer.stepper.pass_over, []

    def too_large(micro_batch):
        if len(micro_batch.noisy.tokens) > 200 and trainer.step in (2, 3):
            hog.append(torch.empty(2**50, dtype=torch.uint8, device="cuda"))
        return run(micro_batch)

    trainer.stepper.pass_over = too_large
    batches, found = trainer.batches, []
    for _ in range(8):
        trainer.train_step(next(batches), 0.0)
        found.append(trainer.window.fields()["loss"])
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert trainer.resizing.halvings == 0
    assert '"out_of_memory"' in trainer.run.events.read_text()
    assert '"grown"' in trainer.run.events.read_text()


def test_muon_trains_and_skips_on_the_device(store, tmp_path):
    trainer = make_trainer(tmp_path, store, *WIDE, "optim.name=muon", "optim.lr=1e-3")
    found = losses(trainer, 30)
    assert np.mean(found[-5:]) < np.mean(found[:5])


def test_recorded_passes_sample_as_plain_ones_do(tmp_path):
    """What is recorded gives what the plain pass gives."""
    from mmldlm.api.model import load
    from mmldlm.sampling import predictor
    from tests.tiny_models import make_run, make_store

    model = load(make_run(tmp_path / "run", make_store(tmp_path / "store")), "cuda")
    latents = np.random.default_rng(0).normal(3.0, 1.0, (40, 1, 4)).astype(np.float32)
    first = [str(text) for text in model.decode(latents, lengths=9, temperature=0, candidates=1)]
    again = [str(text) for text in model.decode(latents, lengths=9, temperature=0, candidates=1)]
    recordings = predictor._RECORDINGS[model.loaded.denoiser]
    assert recordings.recordings
    assert not recordings.broken
    predictor._RECORDINGS[model.loaded.denoiser] = predictor.Recordings(broken="not wanted")
    plain = [str(text) for text in model.decode(latents, lengths=9, temperature=0, candidates=1)]
    assert first == again == plain


def test_a_chain_does_not_wait_for_the_device(tmp_path, monkeypatch):
    """The third call of its kind, in which nothing is compiled or recorded any more; documents leave their packs."""
    from mmldlm.api.model import load
    from mmldlm.sampling import decode
    from tests.tiny_models import make_run, make_store

    model = load(make_run(tmp_path / "run", make_store(tmp_path / "store")), "cuda")
    generator, run_chain, found, parts = np.random.default_rng(0), decode.run_chain, [], []
    latents = generator.normal(3.0, 1.0, (48, 1, 4)).astype(np.float32)
    lengths = generator.integers(1, 10, 48)

    def watched(predictor, pack, *arguments):
        with host_waits() as waits:
            end = run_chain(predictor, pack, *arguments)
        found.append(waits)
        parts.append(len(pack.places.parts))
        return end

    def calls():
        texts = model.decode(latents, lengths=lengths, steps=16, temperature=0, candidates=1)
        drawn = model.decode(latents, lengths=lengths, steps=16, temperature=1, order="ancestral")
        return [str(text) for text in [*texts, *drawn]], model.encode(texts, steps=4)

    calls()
    recorded, _ = calls()
    monkeypatch.setattr(decode, "run_chain", watched)
    replayed, _ = calls()
    assert recorded == replayed
    assert max(parts) > 0
    assert found == [[]] * len(found)
    assert len(found) == 3


def test_the_host_waits_for_the_end_of_a_chain_alone():
    """What is launched behind it goes on meanwhile."""
    from mmldlm.sampling.pack import Fetched, Indices

    device = torch.device("cuda")
    documents, tokens = torch.arange(5, device=device), torch.arange(9, device=device)
    Fetched(Indices(documents, tokens), device).wait()  # which page-locks memory
    fetched = Fetched(Indices(documents, tokens), device)
    torch.cuda._sleep(4_000_000_000)  # cycles: more than a second
    there = fetched.wait()
    assert not torch.cuda.current_stream().query(), "the host waited for what came later"
    assert there.documents.tolist() == list(range(5))
    assert there.tokens.tolist() == list(range(9))
    assert there.tokens.is_pinned()
    torch.cuda.synchronize()
