"""Speed on many GPUs: a model of it, and the same quantities measured between the ranks at hand.

A step of one GPU is a third forward and two thirds backward, cut into micro-batches. A ring over n ranks sends
2(n-1)/n of the bytes for a sum (all-reduce), (n-1)/n for a gather or a scattered sum. What is sent while something is
computed costs nothing but a share of the device's units; the rest is exposed. docs/scaling.md has the formulas, every
assumption, and the tables.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mmldlm.config import ModelConfig, resolve_model
from mmldlm.model.denoiser import DataShape, Denoiser, step_flops
from mmldlm.reports import Table
from mmldlm.training.setup import Setup

KINDS = ("ddp", "fsdp", "hybrid")
NODES = (1, 2, 4, 8)
ADAM_BYTES = 20
"""Of a parameter: weight, gradient, two moments and average in fp32."""
PEAK, MEMORY = 989e12, 100e9
"""Of an H200: bf16 operations a second; bytes left for weights and moments beside the activations."""
LAUNCH = 0.122 / 24
"""Seconds of the host for a block of a micro-batch, without recorded graphs (docs/log.md: 122 ms for 24 blocks)."""


AGREEMENTS = 3
"""Between the hosts, a step: all have documents, all have come to its end, nobody was asked to stop."""
HALF = 0.5
"""Share of what could be hidden that ddp hid over gloo at least (docs/scaling.md)."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs; bandwidths are those that collectives reach, taken as 80 % of the line."""

    gpus: int = 8
    """Of a node."""
    inside: float = 0.8 * 450e9
    """Bytes a second that a GPU sends inside its node: NVLink 4."""
    between: float = 0.8 * 50e9
    """Bytes a second that a node sends to the others, with all its cards: one of 400 Gb/s."""
    hop: float = 5e-6
    """Seconds of a message in a ring of devices."""
    host_hop: float = 30e-6
    """Seconds of a message in a ring of hosts, by which ranks agree."""
    contention: float = 8 / 132
    """Share of a GPU's multiprocessors that move data while others compute."""
    hides: float = 1.0
    """Share of the exchanges that could be hidden and are: 1 at best, 0.5 was measured (`HALF`)."""
    scatter_passes: int = 1
    """Of a ring for a scattered sum; gloo sums everything first, which takes 2."""


ONE_CARD = Cluster()
CARD_PER_GPU = Cluster(between=8 * 0.8 * 50e9, contention=16 / 132)
LINKS = {"one card of 400 Gb/s a node": ONE_CARD, "a card of 400 Gb/s a GPU": CARD_PER_GPU}


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step."""

    compute: float
    """Seconds of the device, forward and backward of all micro-batches."""
    launch: float
    """Seconds of the host for the same."""
    micro_batches: int
    depth: int
    block: int
    """Parameters of a block."""
    rest: int
    """Parameters outside of the blocks: embeddings and heads."""
    last: int
    """Those whose gradient comes last, when nothing is left to hide it behind: the embedding of the tokens."""
    gradient_bytes: int = 4
    """Of a number when gradients are summed; 2 with `distributed.compression`."""
    weight_bytes: int = 2
    """Of a number when shards of a block are gathered."""
    rest_bytes: int = 4
    """The same for what lies outside of the blocks."""
    bucket: float = 100 * 2**20
    """Bytes that ddp sums at a time: `distributed.bucket_mb`."""

    @property
    def parameters(self) -> int:
        return self.depth * self.block + self.rest

    @property
    def gradients(self) -> int:
        """Bytes of all gradients, as they are summed."""
        return self.gradient_bytes * self.parameters


@dataclass(frozen=True)
class Prediction:
    """A step of many GPUs, by the model."""

    kind: str
    nodes: int
    gpus: int
    seconds: float
    efficiency: float
    """Speed of a GPU among the others over its speed alone."""
    half_hidden: float
    """The same if only half of what could be hidden is: the lower end of the prediction."""
    no_overlap: float
    """The same if nothing were hidden: what is left when overlap fails."""
    sent_gpu: float
    """Bytes that a GPU sends in a step."""
    sent_node: float
    """Bytes that a node sends to others in a step."""
    communication: float
    """Seconds of all exchanges of a step, one after the other."""
    exposed: float
    """Seconds of them that the device waits for."""
    limit: str
    """device, or host where launching and agreeing take longer."""
    fits: bool
    """Whether weights and moments leave room on the GPU."""

    @property
    def overlap(self) -> float:
        """Share of the exchanges that is hidden."""
        return 1.0 - self.exposed / self.communication if self.communication else 1.0


def ring_bytes(payload: float, ranks: int, passes: int = 1) -> float:
    """What each rank sends for a payload: 2 passes for a sum, 1 for a gather or a scattered sum."""
    return passes * (ranks - 1) / ranks * payload


def ring_seconds(payload: float, ranks: int, bandwidth: float, hop: float = 0.0, passes: int = 1) -> float:
    """Time of a ring whose slowest link has this bandwidth."""
    return ring_bytes(payload, ranks, passes) / bandwidth + passes * (ranks - 1) * hop


def exposed_sum(total: float, pieces: int, backward: float, last: float) -> float:
    """Seconds of a sum in pieces that outlast the backward pass, whose pieces of work make them ready one by one."""
    return max(last, total - backward * (1.0 - 1.0 / pieces))


def exposed_layers(first: float, each: float, work: float, layers: int) -> float:
    """Seconds that layers wait for exchanges, each of which can be hidden behind the work of the layer before."""
    return first + (layers - 1) * max(0.0, each - work)


def predict(kind: str, work: Work, nodes: int, cluster: Cluster = ONE_CARD) -> Prediction:
    """A step of `nodes` nodes under a kind of parallelism; one GPU alone has efficiency 1."""
    ranks = nodes * cluster.gpus
    total, least, sent_gpu, sent_node = (_ddp if kind == "ddp" else _sharded)(kind, work, nodes, cluster)
    host = work.launch + AGREEMENTS * 2 * (ranks - 1) * cluster.host_hop

    def exposed(hides: float) -> float:
        return least + (1.0 - hides) * max(0.0, total - least)

    def device(hides: float) -> float:
        hidden = max(0.0, total - exposed(hides))
        return work.compute + exposed(hides) + cluster.contention * min(hidden, work.compute)

    seconds = max(device(cluster.hides), host)
    shards = {"ddp": 1, "fsdp": ranks, "hybrid": cluster.gpus}[kind]
    return Prediction(
        kind, nodes, ranks, seconds, work.compute / seconds, work.compute / max(device(HALF * cluster.hides), host),
        work.compute / max(work.compute + total, host), sent_gpu, sent_node, total, exposed(cluster.hides),
        "host" if host > device(cluster.hides) else "device", ADAM_BYTES * work.parameters / shards < MEMORY,
    )  # fmt: skip


def _ddp(kind: str, work: Work, nodes: int, cluster: Cluster) -> tuple[float, float, float, float]:
    """One ring through all GPUs; each link carries the same bytes, that of a node's cards too."""
    ranks, payload = nodes * cluster.gpus, work.gradients
    bandwidth = cluster.inside if nodes == 1 else min(cluster.inside, cluster.between)
    pieces = max(1, math.ceil(payload / work.bucket))
    total = ring_seconds(payload, ranks, bandwidth, pieces * cluster.hop, 2)
    tail = min(payload, max(work.bucket, work.gradient_bytes * work.last))
    last = ring_seconds(tail, ranks, bandwidth, cluster.hop, 2)
    backward = work.compute / work.micro_batches * 2 / 3
    sent = ring_bytes(payload, ranks, 2)
    return total, exposed_sum(total, pieces, backward, last), sent, sent if nodes > 1 else 0.0


def _sharded(kind: str, work: Work, nodes: int, cluster: Cluster) -> tuple[float, float, float, float]:
    """Weights are gathered block by block, forward and again backward, in every micro-batch; gradients are scattered
    once. hybrid does this inside a node, and sums the shards over nodes beside it."""
    ranks = cluster.gpus if kind == "hybrid" else nodes * cluster.gpus
    bandwidth = cluster.inside if ranks == cluster.gpus else min(cluster.inside, cluster.between)
    across = nodes if kind == "hybrid" else 1

    def gather(size: float) -> float:
        return ring_seconds(size, ranks, bandwidth, cluster.hop)

    def scatter(count: int) -> float:
        return ring_seconds(
            work.gradient_bytes * count, ranks, bandwidth, cluster.hop, cluster.scatter_passes
        )

    def replicate(count: int) -> float:
        return ring_seconds(work.gradient_bytes * count, across, cluster.between, cluster.hop, 2)

    micro, depth = work.micro_batches, work.depth
    forward, backward = (share * work.compute / micro / depth for share in (1 / 3, 2 / 3))
    block = gather(work.weight_bytes * work.block)
    begin = gather(work.rest_bytes * work.rest) + block
    last = max(block + scatter(work.block), replicate(work.block))
    exposed = micro * exposed_layers(begin, block, forward, depth)
    exposed += (micro - 1) * exposed_layers(block, block, backward, depth)
    exposed += exposed_layers(block, last, backward, depth)
    exposed += scatter(work.block + work.rest) + replicate(work.block + work.rest)
    total = micro * (begin + (2 * depth - 1) * block)
    total += sum(depth * each(work.block) + each(work.rest) for each in (scatter, replicate))
    gathered = micro * (work.weight_bytes * 2 * depth * work.block + work.rest_bytes * work.rest)
    inside = ring_bytes(gathered + work.gradients, ranks)
    outside = ring_bytes(work.gradients / ranks, across, 2)
    node = outside * cluster.gpus if kind == "hybrid" else inside if nodes > 1 else 0.0
    return total, min(exposed, total), inside + outside, node


@dataclass(frozen=True)
class Shape:
    """A model whose speed on one H200 was measured, or follows from a share of its peak that a similar one reached."""

    name: str
    model: dict[str, Any]
    vocabulary: int
    channels: int
    length: int
    """Tokens of a document."""
    micro_batches: int
    """Of a step of `STEP_TOKENS` tokens."""
    source: str
    tokens_per_second: float | None = None
    mfu: float | None = None

    def work(self, tokens: int) -> Work:
        """A step of so many tokens a GPU."""
        config, data = ModelConfig(**self.model), DataShape(self.vocabulary, 1, self.channels, self.length)
        model, documents = resolve_model(config), tokens / self.length
        operations = step_flops(
            model, data, tokens=tokens, documents=documents, squares=documents * (self.length + 1) ** 2,
            scored=tokens / 2,
        )  # fmt: skip
        seconds = (
            tokens / self.tokens_per_second
            if self.tokens_per_second
            else operations / PEAK / (self.mfu or 1.0)
        )
        micro = max(1, self.micro_batches * tokens // STEP_TOKENS)
        with torch.device("meta"):
            denoiser = Denoiser(config, data, seed=None)
        return replace(
            _count(denoiser), compute=seconds, launch=LAUNCH * model.depth * micro, micro_batches=micro
        )


def _count(denoiser: Denoiser) -> Work:
    """The parameters of a network, without any times."""
    every = sum(parameter.numel() for parameter in denoiser.parameters())
    block = sum(parameter.numel() for parameter in denoiser.blocks[0].parameters())
    depth = len(denoiser.blocks)
    return Work(0.0, 0.0, 1, depth, block, every - depth * block, denoiser.token_embed.weight.numel())


STEP_TOKENS = 65536
"""Of a GPU, in the tables."""
_LARGE = "no run of this size was measured; the 50.8 % of its peak that `xlarge` reached (docs/benchmarks.md)"
SHAPES = (
    Shape("base", {"preset": "base"}, 30522, 384, 12, 1, "444,000 tokens/s, docs/scaling.md", 444_000),
    Shape("reference", {"preset": "reference"}, 30522, 384, 14, 1, "251,813 tokens/s, docs/benchmarks.md", 251_813),
    Shape(
        "3 B", {"preset": "xlarge", "width": 2560, "num_heads": 20}, 151936, 1024, 2048, 4, _LARGE, mfu=0.508,
    ),
    Shape(
        "13 B", {"preset": "xlarge", "width": 5120, "depth": 32, "num_heads": 40, "latent_width": 1024}, 151936, 1024,
        2048, 8, _LARGE, mfu=0.508,
    ),
)  # fmt: skip


def predict_all() -> list[dict[str, Any]]:
    """Every shape, kind, network and number of nodes, as plain values."""
    rows = []
    for shape in SHAPES:
        works = {2**power: shape.work(2**power) for power in range(12, 21)}
        usual = works[STEP_TOKENS]
        for link, cluster in LINKS.items():
            for kind in KINDS:
                nodes = [predict(kind, usual, count, cluster) for count in NODES]
                enough = [count for count, work in works.items() if two_nodes(kind, work, cluster) > 1.9]
                rows.append({
                    "shape": shape.name, "parameters": usual.parameters, "tokens": STEP_TOKENS, "link": link,
                    "kind": kind, "two_nodes": two_nodes(kind, usual, cluster),
                    "two_nodes_half_hidden": 2 * nodes[1].half_hidden / nodes[0].half_hidden,
                    "two_nodes_no_overlap": 2 * nodes[1].no_overlap / nodes[0].no_overlap,
                    "enough": min(enough, default=None), "nodes": [asdict(one) for one in nodes],
                })  # fmt: skip
    return rows


def two_nodes(kind: str, work: Work, cluster: Cluster) -> float:
    """How many times as fast two nodes are as one; 0 where hosts launch too slowly, which no network changes."""
    one, two = (predict(kind, work, nodes, cluster) for nodes in (1, 2))
    return 0.0 if two.limit == "host" else 2 * two.efficiency / one.efficiency


@dataclass(frozen=True)
class Measured:
    """Steps of the ranks at hand, with the prediction for them."""

    kind: str
    ranks: int
    nodes: int
    tokens_per_second: float
    seconds: float
    """Of a step."""
    seconds_alone: float
    """Of the same step on a rank that exchanges nothing; mean over ranks."""
    slowest_alone: float
    """The same on the slowest rank: the others wait for it."""
    efficiency: float
    exchanges: dict[str, int]
    sent: float
    """Bytes that a rank sends in a step."""
    communication: float
    """Seconds of the same exchanges, one after the other, with nothing beside them."""
    overlap: float
    """Share of that time which the step does not show."""
    agreements: int
    agreement_seconds: float
    """Of one."""
    bandwidth: float
    """Bytes a second that a rank sends in a plain sum of 16 MiB."""
    predicted: Prediction


def predict_here(setup: Setup, compute: float, between: float, inside: float, agreement: float) -> Prediction:
    """By the model, from the speed of a rank alone and the bandwidth of a sum; on a CPU the host is the device."""
    ranks, on_gpu = setup.ranks, setup.runtime.device.type == "cuda"
    work = replace(
        _count(setup.denoiser), compute=compute, launch=0.0 if on_gpu else compute,
        micro_batches=max(1, setup.shape.num_micro // ranks.world_size),
        gradient_bytes=4 if setup.config.distributed.compression == "none" else 2,
        weight_bytes=4 if setup.runtime.precision == "fp32" else 2,
        bucket=setup.config.distributed.bucket_mb * 2**20,
    )  # fmt: skip
    kind, hop = setup.config.distributed.parallel, agreement / 2 / (ranks.world_size - 1)
    cluster = Cluster(ranks.local_world_size, inside, between, host_hop=hop)
    if (
        not on_gpu
    ):  # sending takes the time of the same cores; FSDP2 overlaps by CUDA streams, which a CPU has not
        hides = HALF if kind == "ddp" else 0.0
        cluster = replace(cluster, hop=hop, contention=0.0, hides=hides, scatter_passes=2)
    return predict(kind, work, ranks.world_size // ranks.local_world_size, cluster)


def prediction_table(rows: list[dict[str, Any]], link: str) -> Table:
    """Efficiency by shape, kind and nodes over one kind of network."""
    cells = [
        [
            row["shape"], f"{row['parameters'] / 1e9:.2f}", row["kind"],
            f"{row['nodes'][1]['sent_node'] / 1e9:.2f}", *(_share(one) for one in row["nodes"]),
            f"{row['two_nodes_half_hidden']:.2f} to {row['two_nodes']:.2f}", f"{row['two_nodes_no_overlap']:.2f}",
            f"{row['enough']:,}" if row["enough"] else "over a million",
        ]
        for row in rows if row["link"] == link
    ]  # fmt: skip
    head = ["shape", "parameters, 10^9", "kind", "GB from each of 2 nodes"]
    head += [f"{nodes} x 8 GPUs" for nodes in NODES] + [
        "2 nodes against 1",
        "nothing hidden",
        "tokens a GPU for 1.9",
    ]
    note = "Speed of a GPU among the others over its speed alone, if half and if all of what can be hidden is hidden."
    return Table(f"Predicted: {link}", note, head, cells)


def _share(one: dict[str, Any]) -> str:
    if not one["fits"]:
        return "does not fit"
    host = " (host)" if one["limit"] == "host" else ""
    return f"{100 * one['half_hidden']:.0f} to {one['efficiency']:.0%}{host}"


def measured_table(measured: Measured) -> Table:
    """What was measured beside what the model says."""
    guess = measured.predicted
    rows = [
        ["tokens/s of all ranks", f"{measured.tokens_per_second:,.0f}", ""],
        ["seconds a step", f"{measured.seconds:.4f}", f"{guess.seconds:.4f}"],
        ["the same without exchanges", f"{measured.seconds_alone:.4f} (slowest rank {measured.slowest_alone:.4f})", ""],
        ["efficiency", f"{measured.efficiency:.1%}", f"{guess.efficiency:.1%}"],
        ["MB that a rank sends in a step", f"{measured.sent / 1e6:.2f}", f"{guess.sent_gpu / 1e6:.2f}"],
        ["seconds of exchanges alone", f"{measured.communication:.4f}", f"{guess.communication:.4f}"],
        ["GB/s that a rank sends in a plain sum", f"{measured.bandwidth / 1e9:.3f}", ""],
        ["share of exchanges that is hidden", f"{measured.overlap:.0%}", f"{guess.overlap:.0%}"],
        ["agreements between hosts", f"{measured.agreements} of {measured.agreement_seconds * 1e3:.2f} ms", ""],
    ]  # fmt: skip
    many = ", ".join(f"{count} {name}" for name, count in measured.exchanges.items())
    title = (
        f"{measured.kind}, {measured.ranks} ranks on {measured.nodes} nodes: {many or 'no exchange'} a step"
    )
    return Table(title, "", ["", "measured", "by the model"], rows)
