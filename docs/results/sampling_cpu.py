"""Sampling on a CPU, docs/benchmarks.md: python docs/results/sampling_cpu.py small|wordnet [N [PRECISION [FILE]]]

A network of the shape of recipe `small` with random weights, or the model of package mmldlm-wordnet; N texts with
lengths as those of WordNet sentences. Also runs with commit ac606be on PYTHONPATH, to compare with. Decoded tokens
are written to FILE (.npy), or compared with it where it exists. One thread; seconds of the CPU measure a CPU that
others use too; the first of three calls is not counted.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from mmldlm.checkpoint.export import read_export
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import Config, CorruptionConfig, ModelConfig, ModeWeights
from mmldlm.corruption.joint import Corruption
from mmldlm.latents import Normalizer
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.layers import Kernels
from mmldlm.sampling.decode import decode_latents, encode_tokens, generate
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys

SHAPES = {
    "small": ModelConfig(preset="small"),
    "wordnet": ModelConfig(
        preset="tiny", depth=5, width=320, latent_width=256, num_heads=5, head_width=64, tied_embedding=True
    ),
}
name, count, precision = (*sys.argv[1:4], *("small", "64", "fp32")[len(sys.argv) - 1 :])[:3]
num = int(count)
torch.set_num_threads(1)
random = np.random.default_rng(0)
config = Config(
    model=SHAPES[name], corruption=CorruptionConfig(mode_weights=ModeWeights(l2t=3, t2l=1, joint=1))
)
exported = read_export(Path(__file__).parents[2] / "packages/mmldlm-wordnet/src/mmldlm_wordnet/export")
shape = DataShape(
    *(exported.data[size] for size in ("vocab_size", "num_slots", "num_channels", "max_length"))
)
denoiser, generator = Denoiser(config.model, shape), torch.Generator().manual_seed(0)
with torch.no_grad():
    if name == "wordnet":
        denoiser.load_state_dict(exported.weights)
    for parameter in denoiser.parameters() if name == "small" else ():  # gates start at zero
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
denoiser.kernels = Kernels("sdpa")
model = LoadedModel(
    denoiser.eval().requires_grad_(False), config, Corruption(config.corruption, vocab_size=30522, seed=0),
    torch.device("cpu"), "", Normalizer(np.zeros(1, np.float32), np.ones(1, np.float32)), None, None, None,
    precision,
)  # fmt: skip
lengths = random.gamma(4.0, 3.9, num).astype(np.int64).clip(2, 58)  # 15 on average
latents = random.normal(size=(num, 1, 384)).astype(np.float32)
texts = [random.integers(1000, 30000, length) for length in lengths]
keys, options = document_keys(0, num), SamplingOptions(text_sampler="margin", joint_order="text_first")
drawn = SamplingOptions(text_sampler="ancestral", joint_order="text_first", temperature=1.0)
CALLS = {
    "latents to texts, 16 steps": lambda: decode_latents(model, latents, options, lengths=lengths, keys=keys),
    "texts to latents, 1 step": lambda: encode_tokens(model, texts, options, keys=keys),
    "both from nothing, 16 + 16 steps": lambda: generate(model, num, drawn, lengths=lengths, keys=keys)[0],
}
first = next(iter(CALLS))
for what, call in CALLS.items():
    clock, busy = [], []
    for _ in range(3):
        began, used = time.perf_counter(), time.process_time()
        result = call()
        clock.append(time.perf_counter() - began)
        busy.append(time.process_time() - used)
    row: dict[str, object] = {
        "what": what, "per CPU second": round(num / statistics.median(busy[1:]), 2),
        "per second": round(num / statistics.median(clock[1:]), 2),
    }  # fmt: skip
    if what == first and len(sys.argv) > 4:
        known, tokens = Path(sys.argv[4]), np.concatenate(result)
        if known.exists():
            ends = np.cumsum(lengths)[:-1]
            pairs = zip(np.split(tokens, ends), np.split(np.load(known), ends), strict=True)
            row["texts as in the file"] = sum(np.array_equal(*pair) for pair in pairs)
        else:
            np.save(known, tokens)
    print(json.dumps({"shape": name, "precision": precision, **row}), flush=True)
