"""Our Triton kernels are compiled for a GPU that need not be there: the interpreter takes what the compiler rejects."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", int: "i32", float: "fp32",
}  # fmt: skip


def compile_instead(kernel, *args, num_warps=4, num_stages=3, maxnreg=None, **constants):
    """What a launch would compile; pointers are aligned, as PyTorch allocates them, and sizes as they are."""
    names = kernel.arg_names
    constants |= {name: None for name, value in zip(names, args, strict=False) if value is None}
    signature = {
        name: "constexpr" if name in constants
        else f"*{KINDS[args[place].dtype]}" if isinstance(args[place], torch.Tensor)
        else KINDS[type(args[place])]
        for place, name in enumerate(names)
    }  # fmt: skip
    aligned = {
        (n,): [["tt.divisibility", 16]] for n, name in enumerate(names)
        if signature[name][0] == "*"
        or (signature[name] == "i32" and args[n] % 16 == 0 and not kernel.params[n].do_not_specialize)
    }  # fmt: skip
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages} | ({"maxnreg": maxnreg} if maxnreg else {})
    done = triton.compile(source, target=HOPPER, options=options)
    assert done.asm["cubin"]
    assert done.metadata.shared <= 101376  # what Ada has


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def packed():
    from mmldlm.layout import Caps, packed_layout

    return packed_layout(np.array([3, 40, 7]), 1, Caps(64, 4, 40), with_rows=False)


def add_norm(rounded):
    from mmldlm.model.kernels.add_norm import add_norm

    layout, modulation = packed(), bf16(4, 6 * 256)
    x = torch.zeros(64, 256).requires_grad_()
    out, y = add_norm(x, bf16(64, 256), *modulation.chunk(6, 1)[:3], layout.document, layout.starts, rounded)[
        :2
    ]
    (out.sum() + y.float().sum()).backward()


def gather_qkv(apart):
    from mmldlm.model.kernels.gather_qkv import gather_qkv

    layout, weight = packed(), torch.zeros(2, 64)
    angles = torch.zeros(64, 32)
    text, latent = bf16(64, 3 * 8 * 64), bf16(4, 3 * 8 * 64)
    places = (layout.to_stream, layout.from_stream)
    parts = gather_qkv(text, latent, weight, weight, angles, angles, *places, 8, True, apart)
    torch.cat([part.flatten() for part in parts]).float().sum().backward()


def gelu(_):
    from mmldlm.model.kernels.gelu import gelu, gelu_backward

    h = bf16(40, 300).detach()
    for again in (True, False):
        gelu_backward(gelu(h), h, again=again)


def tiles(width):
    from mmldlm.model.kernels.tiles import attend_tiles

    layout = packed()
    qkv = bf16(len(layout.segment), 3, 2, width)
    attend_tiles(qkv, layout.segment, layout.bounds)[0].float().sum().backward()


def split(slots):
    from mmldlm.model.kernels.split import attend_split

    angles, weight = torch.zeros(80, 32), torch.zeros(2, 64).requires_grad_()
    text, latent = bf16(80, 3 * 8 * 64), bf16(2 * slots, 3 * 8 * 64)
    for keep in (True, False):
        of_text, of_latent = attend_split(text, latent, weight, weight, angles, angles, 8, slots, True, keep)[
            :2
        ]
        (of_text.float().sum() + of_latent.float().sum()).backward()


def quantize(width):
    from mmldlm.model.kernels.quantize import quantize_rows, transpose

    x = bf16(40, width).detach()
    quantize_rows(x, None, gelu=True, sums=False)
    q, scale, _ = quantize_rows(x, x, gelu=False, sums=True)
    transpose(q, scale)


def update(averaged):
    from mmldlm.model.kernels.update import COLUMNS, update_tensors

    number, places = torch.tensor(0.1), torch.zeros(1, dtype=torch.int64)
    update_tensors(
        torch.zeros(1, COLUMNS, dtype=torch.int64), places.int(), places, number, number, number if averaged else None,
        number, number if averaged else None, betas=(0.9, 0.99), eps=1e-8, wide=averaged,
    )  # fmt: skip


def scoring(_):
    from mmldlm.model.kernels.best import best_values
    from mmldlm.model.kernels.score import score

    logits = bf16(8, 5000).detach()
    best_values(logits)
    score(logits, torch.zeros(5000), torch.zeros(8, dtype=torch.int64), torch.ones(8))


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(("use", "way"), [
    (add_norm, False), (add_norm, True), (gather_qkv, False), (gather_qkv, True), (gelu, None),
    (tiles, 64), (split, 1), pytest.param(split, 3, marks=pytest.mark.soak), (quantize, 512), (quantize, 16384),
    (update, True), (update, False), (scoring, None),
])  # fmt: skip
def test_kernels_compile_for_a_gpu(use, way, monkeypatch, tmp_path):
    compiled = []

    def run(kernel, *args, grid, warmup, **options):
        compile_instead(kernel, *args, **options)
        compiled.append(kernel)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", run)
    use(way)
    assert compiled
